"""The part of the model's section that says which MLPs are mixtures of experts, how tokens choose, and what keeps the
choice even.
"""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass

from megaflow_trainer.config.limits import MOST_EXPERTS, MOST_WIDTH, at_least, at_most, fraction, one_of

BALANCE_KINDS = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """Mixtures of experts; off without `num_experts`."""

    num_experts: int | None = None
    """Experts of a layer (every MLP is dense if not given)."""
    expert_layers: str = "1"
    """Which layers have experts: n for every n-th layer, the first one included, or a list such as ([0]*3+[1]*58)."""
    expert_dim: int | None = None
    """Width inside an expert (that of the MLP if not given)."""
    shared_dim: int | None = None
    """Width inside the expert that every token passes beside those it chooses (none if not given)."""
    router_top_k: int = 2
    """Experts that a token chooses."""
    router_score: str = "softmax"
    """What a score becomes: softmax over experts, or sigmoid of each, of which the chosen ones are divided by their
    sum."""
    router_pre_softmax: bool = False
    """Whether softmax is taken over all experts before the choice instead of over the chosen ones after it."""
    router_groups: int | None = None
    """Equal groups of neighbouring experts, of which a token chooses some before it chooses experts (no groups if not
    given)."""
    router_group_top_k: int | None = None
    """Groups that a token chooses, by the sum of the best scores in each."""
    router_scale: float = 1.0
    """What the weights of the chosen experts are multiplied by."""
    router_jitter: float = 0.0
    """The router's input is multiplied by random numbers in 1 +- this, in training."""
    is_router_random: bool = False
    """Whether random numbers take the place of scores, so that load is even, in evaluation too: for benchmarks, since
    nothing is learnt of routing."""
    has_expert_bias: bool = False
    """Whether a bias for each expert, which takes part in the choice alone, is moved against its load after each
    step."""
    expert_bias_rate: float = 1e-3
    """How far the bias moves in a step."""
    balance_kind: str = "aux_loss"
    """Over which tokens the balance loss takes its means: aux_loss those of a micro-batch of one data-parallel rank,
    seq_aux_loss those of a sample, global_aux_loss those of a micro-batch of all ranks; or none."""
    aux_loss_scale: float = 0.0
    """Weight of the balance loss of each layer; 0 turns it off."""
    z_loss_scale: float = 0.0
    """Weight of the mean squared logarithm of the sum of exponents of a layer's scores; 0 turns it off."""
    capacity_factor: float | None = None
    """Tokens that an expert takes of a rank's micro-batch, as a multiple of an even share; the others are dropped
    (none is if not given)."""
    drop_policy: str = "probs"
    """Which tokens are dropped: those with the lowest weight (probs), or the last ones (position)."""
    pads_to_capacity: bool = False
    """Whether each expert gets as many rows as it may take, so that sizes are the same in every step."""
    expert_kernel: str = "auto"
    """Products of the experts: loop (one expert after the other), grouped (one call), or auto (on GPUs in bf16 grouped
    where experts get few rows)."""

    def count_capacity(self, num_tokens: int) -> int:
        """Rows that an expert takes of `num_tokens` tokens, not more than them: a token chooses an expert once."""
        assert self.capacity_factor is not None, "asked where there is one"
        assert self.num_experts is not None, "asked where there are experts"
        return math.ceil(min(num_tokens, num_tokens * self.router_top_k / self.num_experts * self.capacity_factor))


def list_expert_faults(own: ExpertConfig) -> list[str]:
    """What the fields of the section break by themselves."""
    return (
        at_least("model", 1, num_experts=own.num_experts, expert_dim=own.expert_dim, shared_dim=own.shared_dim)
        + at_most("model", MOST_EXPERTS, "lower it", num_experts=own.num_experts)
        + at_most("model", MOST_WIDTH, "lower it", expert_dim=own.expert_dim, shared_dim=own.shared_dim)
        + at_least("model", 1, router_top_k=own.router_top_k, router_groups=own.router_groups)
        + at_least("model", 1, router_group_top_k=own.router_group_top_k)
        + at_least("model", 0, router_scale=own.router_scale, expert_bias_rate=own.expert_bias_rate)
        + at_least("model", 0, aux_loss_scale=own.aux_loss_scale, z_loss_scale=own.z_loss_scale)
        + at_least("model", 0, capacity_factor=own.capacity_factor)
        + fraction("model", router_jitter=own.router_jitter)
        + one_of("model", ("softmax", "sigmoid"), router_score=own.router_score)
        + one_of("model", BALANCE_KINDS, balance_kind=own.balance_kind)
        + one_of("model", ("probs", "position"), drop_policy=own.drop_policy)
        + one_of("model", ("auto", "loop", "grouped"), expert_kernel=own.expert_kernel)
    )


@functools.lru_cache(maxsize=64)
def read_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which of `num_layers` layers have experts.

    Raises:
        ValueError: if the text is neither a number nor a list of zeros and ones, made with + and *.
    """
    value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"every {value}-th layer")
        return tuple(number % value == 0 for number in range(num_layers))
    if len(value) != num_layers or any(item not in (0, 1) for item in value):
        raise ValueError(f"{len(value)} entries for {num_layers} layers")
    return tuple(item == 1 for item in value)


_LONGEST = 100_000


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=items):
            found = [_evaluate(item) for item in items]
            if all(isinstance(item, int) for item in found):
                return [item for item in found if isinstance(item, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _evaluate(left), _evaluate(right)
            if isinstance(other, list):
                one, other = other, one
            if isinstance(one, list) and isinstance(other, int) and len(one) * other <= _LONGEST:
                return one * other
    raise ValueError("neither a number nor a list of zeros and ones")


def check_experts(model: ExpertConfig, *, num_layers: int) -> list[str]:
    """What the fields ask of each other in a model of `num_layers` layers."""
    if model.num_experts is None:
        return []
    faults = _check_layers(model.expert_layers, num_layers) + _check_groups(model, model.num_experts)
    if model.router_top_k > model.num_experts:
        faults.append(
            f"model.router_top_k {model.router_top_k} is above model.num_experts {model.num_experts}; lower it"
        )
    is_after = model.router_score == "softmax" and not model.router_pre_softmax
    if model.router_top_k == 1 < model.num_experts and is_after:
        faults.append(
            "model.router_top_k 1 with softmax over the chosen experts gives every token the weight 1, from which the "
            "router learns nothing; give model.router_pre_softmax"
        )
    if model.router_scale == 0:
        faults.append("model.router_scale 0 takes the experts out of every layer; give a factor above 0")
    if model.router_pre_softmax and model.router_score != "softmax":
        faults.append("model.router_pre_softmax is for model.router_score softmax; drop it")
    if model.pads_to_capacity and not model.capacity_factor:
        faults.append("model.pads_to_capacity needs a capacity; give model.capacity_factor")
    if model.capacity_factor == 0:
        faults.append("model.capacity_factor 0 drops every token; give one above 0, or leave it out to drop none")
    return faults


def _check_layers(pattern: str, num_layers: int) -> list[str]:
    try:
        if any(read_pattern(pattern, num_layers)):
            return []
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        text = (
            f"model.expert_layers {pattern!r} ({error}) must be a number n (every n-th layer) or a list of "
            f"model.num_layers {num_layers} zeros and ones such as ([0]*3+[1]*58)"
        )
        return [text]
    text = (
        f"model.expert_layers {pattern!r} leaves no layer of the {num_layers} with experts; name one, or drop "
        "model.num_experts"
    )
    return [text]


def _check_groups(model: ExpertConfig, experts: int) -> list[str]:
    groups, chosen = model.router_groups, model.router_group_top_k
    if (groups is None) != (chosen is None):
        return ["model.router_groups and model.router_group_top_k are given together; give the other one too"]
    if groups is None or chosen is None:
        return []
    if experts % groups or chosen > groups:
        text = (
            f"model.router_groups {groups} must divide model.num_experts {experts}, and be at least "
            f"model.router_group_top_k {chosen}"
        )
        return [text]
    if chosen * (experts // groups) < model.router_top_k or model.router_top_k % chosen:
        text = (
            f"model.router_group_top_k {chosen} groups of {experts // groups} experts: model.router_top_k "
            f"{model.router_top_k} must be a multiple of the groups and not above their experts"
        )
        return [text]
    return []
