"""Which experts a token takes, with which weights, and the losses that keep the choice even.

All of it is in fp32 whatever the weights and activations are (fp64 in fp64). Ties go to the expert with the smaller
number, on every device. Where the configuration asks for it random numbers that follow from layer and token stand in
for the scores, which get their gradient.

Losses. A layer's balance loss over the tokens T of a unit (a sample, or a micro-batch) is e sum_i f_i p_i, where f_i is
the part of the choices of T that went to expert i and p_i the mean probability of expert i: 1 if all are alike, the
smallest value of even choices (Switch Transformer, eq. 4). Its z-loss is the mean squared log-sum-exp of the scores
(ST-MoE, eq. 5). The step divides sums over the global batch by the number of its tokens that count, so a unit's balance
loss enters once for each of its tokens that count, and the z-loss of a token with the token: how a batch is cut into
ranks and micro-batches changes the z-loss and the balance loss of samples not at all, and the other balance losses only
as far as it changes their units. Each layer adds both, times the configured weights.

Legend: b micro-batch, s sequence, t = b s tokens, h hidden, e experts, k chosen ones, u units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import Context
from megaflow_trainer.ops.dropout import draw_scores, jitter


class Routing(NamedTuple):
    """What a router says of t tokens; a tuple, so that what wraps modules finds the tensors in it."""

    chosen: Tensor
    """Experts of each token, int64 `[t, k]`."""
    weights: Tensor
    """What their results are multiplied by, fp32 `[t, k]`."""
    kept: Tensor | None
    """Which of the choices are served, bool `[t, k]`; None: all."""
    num_rows: int | None
    """Rows that every expert gets, if that is fixed."""
    loss: Tensor | None
    """Sum of the losses, scalar."""


class Router(nn.Module):
    """Scores, choice, losses and counts of a layer. Weight `[e, h]` and bias `[e]` stay in fp32 under `.to(bf16)`."""

    def __init__(self, config: ModelConfig, site: int) -> None:
        super().__init__()
        assert config.num_experts is not None, "asked where there are experts"
        self.config, self.site = config, site
        e = config.num_experts
        self.weight = nn.Parameter(torch.empty(e, config.hidden_dim))
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.zeros(e) if config.has_expert_bias else None)
        self.tally = Tally(e)
        self.share: Callable[[Tensor], Tensor] = lambda x: x
        """Sums numbers of units, `[u, ...]`, over the ranks that hold other tokens of the same units."""
        self.lift = 1.0
        """What the loss is multiplied by before backward."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        def keep(x: Tensor) -> Tensor:
            y = fn(x)
            return x.to(y.device) if y.is_floating_point() and y.dtype.itemsize < x.dtype.itemsize else y

        super()._apply(keep, recurse)
        return self

    def forward(self, x: Tensor, context: Context | None) -> Routing:
        """Routing of the tokens of `x`, `[b, s, h]`."""
        config, b = self.config, x.shape[0]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and config.router_jitter:
            wide = jitter(wide, _find_rows(context), self.site, config.router_jitter)
        logits = wide.flatten(0, -2) @ self.weight.to(wide.dtype).T  # [t, e]
        if config.is_router_random:
            drawn = draw_scores(_find_rows(context), self.site, logits.shape[1], logits.dtype)
            logits = drawn.flatten(0, -2) + (logits - logits.detach())  # a zero with their gradient: rounds nothing
        chosen, weights = choose(logits, config, None if config.is_router_random else self.expert_bias)
        kept, num_rows = self._limit(chosen, weights)
        if not self.training:
            return Routing(chosen, weights, kept, num_rows, None)
        masks = None if context is None else context.weights
        masks = torch.ones_like(logits[:, 0]) if masks is None else masks.flatten().to(logits.dtype)
        balance, z = self._measure(logits, chosen, masks.view(b, -1))
        self.tally.add(chosen, kept, balance, z)
        losses = [config.aux_loss_scale * balance] if balance is not None else []
        losses += [config.z_loss_scale * z] if z is not None else []
        return Routing(chosen, weights, kept, num_rows, sum(losses) if losses else None)  # type: ignore[arg-type]

    def _limit(self, chosen: Tensor, weights: Tensor) -> tuple[Tensor | None, int | None]:
        """What of the choices is served where experts take a limited number of rows."""
        config = self.config
        if config.capacity_factor is None:
            return None, None
        capacity = config.count_capacity(len(chosen))
        order = weights if config.drop_policy == "probs" else None
        kept = keep_first(chosen, order, num_experts=len(self.weight), capacity=capacity)
        return kept, capacity if config.pads_to_capacity else None

    def _measure(self, logits: Tensor, chosen: Tensor, masks: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Balance loss and z-loss as sums over this rank's tokens, weighed by `masks`, `[b, s]`; None if not asked."""
        config, balance, z = self.config, None, None
        if config.z_loss_scale:
            z = (logits.logsumexp(dim=1).square() * masks.flatten()).sum()
        if config.aux_loss_scale and config.balance_kind != "none":
            units = masks if config.balance_kind == "seq_aux_loss" else masks.view(1, -1)  # [u, t / u]
            probabilities = normalise(logits, config).view(len(units), -1, logits.shape[1])
            balance = sum_balance(probabilities, chosen.reshape(len(units), -1), units, self.share)
        return balance, z


def _find_rows(context: Context | None) -> Tensor:
    """Numbers of the tokens, `[b, s]`."""
    assert context is not None
    assert context.rows is not None, "made where the configuration has noise"
    return context.rows


class Tally:
    """Choices of each expert, drops and losses of the tokens since `clear`, exact in whole numbers; closed while
    backward computes a forward again, so that nothing counts twice.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts, self.is_open = num_experts, True
        self.clear(torch.device("cpu"))

    def clear(self, device: torch.device) -> None:
        """Begin anew."""
        self.counts = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=device)
        self.z_loss = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, chosen: Tensor, kept: Tensor | None, balance: Tensor | None, z: Tensor | None) -> None:
        """Take the choices of a micro-batch, `[t, k]`, and its losses."""
        if not self.is_open:
            return
        if self.counts.device != chosen.device:
            self.clear(chosen.device)
        self.counts.add_(count_chosen(chosen.flatten(), self.num_experts))
        if kept is not None:
            self.num_dropped.add_((~kept).sum())
        for total, loss in ((self.aux_loss, balance), (self.z_loss, z)):
            if loss is not None:
                total.add_(loss)


_MANY = 1 << 28  # comparisons that are held at once, a byte each


def count_chosen(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in int64 numbers `[n]`, or in rows of them `[u, n]`; int64 `[..., e]`."""
    if chosen.is_cuda and chosen.numel() * num_experts < _MANY:  # atomic sums into few places wait for each other
        return (chosen[..., None] == torch.arange(num_experts, device=chosen.device)).sum(dim=-2)
    zeros = torch.zeros((*chosen.shape[:-1], num_experts), dtype=torch.int64, device=chosen.device)
    return zeros.scatter_add_(-1, chosen, torch.ones_like(chosen))


def choose(logits: Tensor, config: ModelConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The k experts of each token by falling preference, int64 `[t, k]`, and their weights; from scores `[t, e]`."""
    is_sigmoid = config.router_score == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits
    if not is_sigmoid and (bias is not None or config.router_pre_softmax):
        scores = logits.softmax(dim=1)
    with torch.no_grad():
        preference = scores if bias is None else scores + bias
        if config.router_groups is not None:
            preference = _leave_groups(preference, config)
        chosen = take_best(preference, config.router_top_k)
    if is_sigmoid:
        weights = scores.gather(1, chosen)
        if config.router_top_k > 1:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    elif config.router_pre_softmax:
        weights = scores.gather(1, chosen)
    else:
        weights = logits.gather(1, chosen).softmax(dim=1)
    return chosen, weights * config.router_scale if config.router_scale != 1 else weights


def take_best(scores: Tensor, k: int) -> Tensor:
    """Places of the k largest of each row, the first of equal ones first; torch's topk leaves ties to the device."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


def _leave_groups(scores: Tensor, config: ModelConfig) -> Tensor:
    """Scores with those outside of the best groups at minus infinity (DeepSeek-V3, section 2.1.2)."""
    assert config.router_groups is not None
    assert config.router_group_top_k is not None, "checked with the configuration"
    grouped = scores.view(len(scores), config.router_groups, -1)
    per_group = config.router_top_k // config.router_group_top_k
    best = take_best(grouped.topk(per_group, dim=2).values.sum(dim=2), config.router_group_top_k)
    is_in = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return grouped.masked_fill(~is_in[..., None], float("-inf")).flatten(1)


def normalise(logits: Tensor, config: ModelConfig) -> Tensor:
    """Probabilities over all experts, `[t, e]`."""
    if config.router_score == "softmax":
        return logits.softmax(dim=1)
    scores = logits.sigmoid()
    return scores / (scores.sum(dim=1, keepdim=True) + 1e-20)


def sum_balance(probabilities: Tensor, chosen: Tensor, weights: Tensor, share: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's terms of the balance losses of all units, each times the tokens of its unit that count; scalar.

    Args:
        probabilities: `[u, n, e]` of this rank's n tokens of each unit.
        chosen: `[u, n k]`.
        weights: `[u, n]`, 1 for a token that counts.
        share: adds numbers of the units over the ranks that hold their other tokens.
    """
    e = probabilities.shape[2]
    counts = count_chosen(chosen, e).to(torch.float64)
    sizes = torch.stack([weights.sum(dim=1), torch.full_like(weights[:, 0], weights.shape[1])], dim=1)
    numbers = share(torch.cat([counts, sizes.to(torch.float64)], dim=1))  # [u, e + 2]
    counts, num_counted, num_tokens = numbers[:, :e], numbers[:, e], numbers[:, e + 1]
    parts = counts / counts.sum(dim=1, keepdim=True)  # f of each unit
    factors = (e * parts * (num_counted / num_tokens)[:, None]).to(probabilities.dtype)
    return (probabilities.sum(dim=1) * factors).sum()


def keep_first(chosen: Tensor, weights: Tensor | None, *, num_experts: int, capacity: int) -> Tensor:
    """Which choices, `[t, k]`, are among the first `capacity` of their expert: by weight, or by place."""
    flat = chosen.flatten()
    order = torch.arange(len(flat), device=flat.device)
    if weights is not None:
        order = weights.detach().flatten().sort(descending=True, stable=True).indices
    order = order[flat[order].sort(stable=True).indices]  # by expert, inside of it by weight or place
    counts = count_chosen(flat, num_experts)
    rank = order.new_empty(len(flat))
    rank[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    return (rank < capacity).view_as(chosen)


class AddLoss(torch.autograd.Function):
    """Hands `x` on and lets `loss` be part of what is minimised, `lift` times: wherever in the model it arises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, lift: float) -> Tensor:
        """`x` as it is."""
        ctx.lift, ctx.dtype, ctx.device = lift, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of `x` as it is, and that of the loss."""
        return grad, torch.full((), ctx.lift, dtype=ctx.dtype, device=ctx.device), None
