"""Selective recompute by cost: which parts of the blocks are computed again, by bytes saved per FLOP spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaflow_trainer.config.activations import GPU, Half, Kernels, describe_attention, describe_mlp
from megaflow_trainer.config.arithmetic import count_block_parameters, count_seen
from megaflow_trainer.config.sections import ModelConfig, TrainConfig

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A row of the table: from computing `before` again to computing `after` again, in one block, per token."""

    half: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    saved_bytes: float
    flops: float

    @property
    def value(self) -> float:
        """Bytes saved per FLOP."""
        return self.saved_bytes / self.flops


def list_costs(model: ModelConfig, *, seq_len: int, item_bytes: int, kernels: Kernels = GPU) -> list[Cost]:
    """The cost table of one block, best first. A half's rows build on each other; a choice that another beats both in
    bytes and in value is not in it.
    """
    halves = {
        "attention": describe_attention(model, seq_len=seq_len, item_bytes=item_bytes, kernels=kernels),
        "mlp": describe_mlp(model, item_bytes=item_bytes, kernels=kernels),
    }
    rows = [row for name, half in halves.items() for row in _list_rows(name, half)]
    return sorted(rows, key=lambda row: -row.value)


def _list_rows(name: str, half: Half) -> list[Cost]:
    """Steps from nothing to everything along the upper edge of (FLOPs, bytes), so that values fall from row to row."""
    core, whole, norm = half.parts
    choices: list[tuple[str, ...]] = [(core,), (whole,), (whole, norm)]
    rows: list[Cost] = []
    now: tuple[str, ...] = ()
    while choices:
        steps = [
            Cost(
                half=name,
                before=now,
                after=choice,
                saved_bytes=half.count_kept(now) - half.count_kept(choice),
                flops=half.count_flops(choice) - half.count_flops(now),
            )
            for choice in choices
        ]
        best = max(steps, key=lambda step: (step.value, step.saved_bytes))
        if best.saved_bytes <= 0:
            break
        rows.append(best)
        now, choices = best.after, choices[choices.index(best.after) + 1 :]
    return rows


def plan_recompute(
    model: ModelConfig, *, seq_len: int, item_bytes: int, budget: float, kernels: Kernels = GPU
) -> list[tuple[str, ...]]:
    """What each block computes again so that at most `budget` of the blocks' forward FLOPs are spent.

    Rows of the cost table are taken best first, each for as many blocks as the budget still pays.
    """
    left = budget * model.num_layers * count_block_flops(model, seq_len=seq_len)
    taken = [{"attention": (), "mlp": ()} for _ in range(model.num_layers)]  # type: list[dict[str, tuple[str, ...]]]
    for row in list_costs(model, seq_len=seq_len, item_bytes=item_bytes, kernels=kernels):
        for block in taken:
            if block[row.half] == row.before and row.flops <= left:
                block[row.half] = row.after
                left -= row.flops
    return [block["attention"] + block["mlp"] for block in taken]


def count_block_flops(model: ModelConfig, *, seq_len: int, has_experts: bool = False) -> float:
    """Forward FLOPs of one block a token: matrices that it passes, and attention over what is seen."""
    v = model.v_dim if model.is_latent else model.head_width
    qk = model.qk_dim + model.qk_rotary_dim if model.is_latent else model.head_width
    seen = count_seen(seq_len, min(seq_len, model.window or seq_len))
    matrices = count_block_parameters(model, has_experts=has_experts, is_active=True)
    return 2.0 * matrices + 2.0 * seen * model.num_heads * (qk + v)


def choose_parts(config: TrainConfig) -> list[tuple[str, ...]]:
    """For each block the parts that selective recompute computes again, by budget or by name; none otherwise."""
    own, model = config.recompute, config.model
    if own.granularity != "selective":
        return [()] * model.num_layers
    if own.budget is None:
        return [own.modules] * model.num_layers
    return plan_recompute(
        model, seq_len=config.data.seq_len, item_bytes=ITEM_BYTES[config.step.dtype], budget=own.budget
    )


def describe_plan(config: TrainConfig) -> str:
    """One line about a plan by budget: parts, how many blocks, and the FLOPs they take."""
    model, seq_len = config.model, config.data.seq_len
    parts = choose_parts(config)
    counts = {name: sum(name in block for block in parts) for block in parts for name in block}
    item = ITEM_BYTES[config.step.dtype]
    halves = (
        describe_attention(model, seq_len=seq_len, item_bytes=item, kernels=GPU),
        describe_mlp(model, item_bytes=item, kernels=GPU),
    )
    spent = _sum_flops(halves, parts) / model.num_layers / count_block_flops(model, seq_len=seq_len)
    kept = sum(half.count_kept(block) for block in parts for half in halves)
    whole = model.num_layers * sum(half.count_kept(()) for half in halves)
    chosen = ", ".join(f"{name} in {count} of {model.num_layers} blocks" for name, count in counts.items()) or "nothing"
    return f"computed again: {chosen}; {spent:.1%} of the forward's FLOPs, {1 - kept / whole:.0%} of the bytes saved"


def _sum_flops(halves: Sequence[Half], parts: Sequence[tuple[str, ...]]) -> float:
    return sum(half.count_flops(block) for block in parts for half in halves)
