"""How the ranks of a run are laid out on the axes of parallelism, as plain arithmetic.

The order is Megatron's, from the fastest axis to the slowest: tensor, context, data, pipeline. Ranks that talk most are
neighbours: with tp 8 a layer is shared inside one machine. Data parallelism has two axes, `dp_shard` inside
`dp_replicate`: states are divided among the ranks of the first and copied along the second.

Experts fold into the same ranks: those of one pipeline stage are laid out a second time, from fast to slow as expert
tensor, expert and expert data, so that tp x cp x dp = etp x ep x edp. Where a replica has whole sets of experts, expert
data is `edp_shard` inside `edp_replicate`, as data is; else states of experts are divided over all of it.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from megaflow_trainer.config.sections import ModelConfig, ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the slowest to the fastest."""
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
_NAMES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp_replicate": "replica", "dp_shard": "shard"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks on every axis."""

    tp: int = 1
    cp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    kv_copies: int = 1
    """Neighbouring tensor-parallel ranks that hold the same key/value head, where there are fewer heads than ranks."""

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_shard * self.dp_replicate

    @property
    def edp(self) -> int:
        """Ranks of one pipeline stage that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def edp_replicate(self) -> int:
        """Of those the ranks with the same part of their states: one a replica where ep x etp divides its ranks."""
        return self.dp_replicate if self.edp % self.dp_replicate == 0 else 1

    @property
    def edp_shard(self) -> int:
        """Of those the ranks that divide states of experts."""
        return self.edp // self.edp_replicate

    @property
    def has_experts_apart(self) -> bool:
        """Whether experts lie on other ranks than the layers around them."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def sizes(self, axes: tuple[str, ...] = AXES) -> tuple[int, ...]:
        """Ranks on each of `axes`, from slow to fast."""
        return tuple(getattr(self, axis) for axis in axes)

    def place(self, rank: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
        """Where a rank is on each axis."""
        place = {}
        for axis in reversed(axes):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in axes}

    def peers(self, rank: int, along: tuple[str, ...], axes: tuple[str, ...] = AXES) -> list[int]:
        """The ranks that differ from `rank` on the axes `along` only, itself included, in ascending order."""
        own, ranks = self.place(rank, axes), [0]
        for axis in axes:
            size = getattr(self, axis)
            places = range(size) if axis in along else (own[axis],)
            ranks = [before * size + at for before in ranks for at in places]
        return ranks

    def __str__(self) -> str:
        """As `tp2.pp2.dp4`; axes of one rank are left out."""
        named = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "pp": self.pp, "dp": self.dp}
        if self.ep == 1 or self.etp == self.tp:
            del named["etp"]
        return ".".join(f"{axis}{size}" for axis, size in named.items() if size > 1 or axis == "etp") or "one rank"


def make_layout(parallel: ParallelConfig, *, world_size: int, num_kv_heads: int | None = None) -> Layout:
    """The layout of a configuration without faults; what tp, cp and pp leave is data parallel."""
    dp = world_size // (parallel.tp * parallel.cp * parallel.pp)
    replicas = dp if parallel.zero == 0 else parallel.dp_replicate
    return Layout(
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        dp_shard=dp // replicas,
        dp_replicate=replicas,
        ep=parallel.ep,
        etp=parallel.etp or parallel.tp,
        kv_copies=max(1, parallel.tp // (num_kv_heads or parallel.tp)),
    )


def check_ranks(parallel: ParallelConfig, *, world_size: int) -> list[str]:
    """The sizes of the axes divide the ranks of the run."""
    ranks = parallel.tp * parallel.cp * parallel.pp
    product = f"tp x cp x pp = {parallel.tp} x {parallel.cp} x {parallel.pp} = {ranks}"
    if world_size % ranks:
        below = world_size // ranks * ranks
        nearest = f"{below} or {below + ranks}" if below else f"{ranks}"
        number = "1 rank" if world_size == 1 else f"{world_size} ranks"
        return [f"{number} cannot be divided into replicas of {product} ranks; start {nearest}"]
    dp, faults = world_size // ranks, []
    if parallel.dp_replicate > 1 and parallel.zero == 0:
        faults.append(
            f"parallel.dp_replicate {parallel.dp_replicate} is for ZeRO, which divides states inside each replica; "
            "give parallel.zero 1, 2 or 3, or drop it"
        )
    elif dp % parallel.dp_replicate:
        faults.append(
            f"{dp} data-parallel ranks ({world_size} / ({product})) cannot be divided into parallel.dp_replicate "
            f"{parallel.dp_replicate} replicas; give a divisor of {dp}"
        )
    stage, etp = world_size // parallel.pp, parallel.etp or parallel.tp
    if stage % (parallel.ep * etp):
        faults.append(
            f"parallel.ep {parallel.ep} x etp {etp} = {parallel.ep * etp} ranks share the experts of a layer, and do "
            f"not divide the {stage} ranks of a pipeline stage (tp x cp x dp = {parallel.tp} x {parallel.cp} x {dp})"
        )
    return faults


def check_expert_ranks(model: ModelConfig, parallel: ParallelConfig, *, seq_len: int) -> list[str]:
    """Experts, their channels and the tokens of a sample are cut into equal parts; what goes with experts is there."""
    ep, etp, tp, faults = parallel.ep, parallel.etp or parallel.tp, parallel.tp, []
    if model.num_experts is None:
        if ep > 1:
            faults.append(
                f"parallel.ep {ep} divides experts, and the model has none; give model.num_experts or drop it"
            )
        return faults
    if model.num_experts % ep:
        faults.append(
            f"model.num_experts {model.num_experts} is not divisible by parallel.ep {ep}; choose parallel.ep "
            f"{_near(model.num_experts, ep)}"
        )
    if model.expert_width % etp:
        faults.append(
            f"model.expert_dim {model.expert_width} is not divisible by parallel.etp {etp}; choose parallel.etp "
            f"{_near(model.expert_width, etp)}"
        )
    if model.shared_dim is not None and model.shared_dim % tp:
        faults.append(_not_divisible("model.shared_dim", model.shared_dim, tp))
    if tp > 1 and (seq_len // parallel.cp) % tp:
        faults.append(
            f"data.seq_len {seq_len} is not divisible by parallel.tp {tp} x cp {parallel.cp}, whose ranks divide the "
            f"tokens that choose experts; use {max(1, seq_len // (tp * parallel.cp)) * tp * parallel.cp} tokens"
        )
    return faults


def check_tensor(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Heads and the width of the MLP are cut into equal parts; the vocabulary is cut at multiples of its padding."""
    tp, faults = parallel.tp, []
    if tp == 1:
        return []
    if model.num_heads % tp:
        faults.append(_not_divisible("model.num_heads", model.num_heads, tp))
    if model.ffn_width % tp:
        faults.append(_not_divisible("model.ffn_dim", model.ffn_width, tp))
    groups = model.kv_heads
    if not model.is_latent and groups != model.num_heads and groups % tp and tp % groups:
        faults.append(
            f"model.num_kv_heads {groups} and parallel.tp {tp}: neither is a multiple of the other, so that key/value "
            f"heads can be neither divided nor copied; choose parallel.tp {_near(groups, tp)}"
        )
    if model.vocab_size is not None and model.vocab_rows < tp:
        faults.append(f"a vocabulary of {model.vocab_rows} rows has less than one row for each of parallel.tp {tp}")
    return faults


def check_sequence(model: ModelConfig, parallel: ParallelConfig, *, seq_len: int) -> list[str]:
    """The tokens of a sample are cut into equal parts, and where all-to-all turns them into heads, those too."""
    faults = []
    unit = _count_pieces(parallel)
    if seq_len % unit:
        below = seq_len // unit * unit
        what = "parallel.sequence_parallel needs" if parallel.cp == 1 else f"parallel.cp {parallel.cp} needs"
        faults.append(
            f"data.seq_len {seq_len} is not divisible by {unit} pieces (parallel.tp {parallel.tp}, parallel.cp "
            f"{parallel.cp}), as {what}; use {below} or {below + unit} tokens"
        )
    if parallel.cp == 1:
        return faults
    heads, groups = model.num_heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    if parallel.cp_kind == "a2a" and (heads % parallel.cp or (groups % parallel.cp and parallel.cp % groups)):
        faults.append(
            f"parallel.cp_kind a2a gives each of parallel.cp {parallel.cp} ranks some of the {heads} query and "
            f"{groups} key/value heads of a tensor-parallel rank, which do not divide; use p2p or all_gather"
        )
    if parallel.cp_kind == "p2p" and model.attention_dropout > 0:
        faults.append(
            f"parallel.cp_kind p2p has no dropout inside attention, and model.attention_dropout is "
            f"{model.attention_dropout}; set it to 0, or use all_gather or a2a"
        )
    return faults


def _count_pieces(parallel: ParallelConfig) -> int:
    """Equal parts into which a sample's tokens must divide."""
    pieces = 1 if parallel.cp == 1 else parallel.cp * (1 if parallel.cp_kind == "a2a" else 2)
    per_rank = parallel.cp * (parallel.tp if parallel.sequence_parallel else 1)
    return math.lcm(pieces, per_rank)


def split_vocab(num_rows: int, size: int, *, multiple: int) -> list[range]:
    """Rows of the vocabulary on each of `size` ranks, as even as multiples of `multiple` allow if each rank gets one;
    the first ranks hold more.
    """
    unit = multiple if num_rows >= size * multiple else 1
    blocks, more = divmod(math.ceil(num_rows / unit), size)
    starts = [min((part * blocks + min(part, more)) * unit, num_rows) for part in range(size + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


@functools.lru_cache(maxsize=256)
def list_divisors(total: int) -> tuple[int, ...]:
    """Divisors in ascending order; of a number above 10^12 those alone that are small, or have a small other half."""
    small = [size for size in range(1, min(math.isqrt(total), 1_000_000) + 1) if total % size == 0]
    return tuple(sorted({*small, *(total // size for size in small)}))


def _not_divisible(name: str, value: int, tp: int) -> str:
    return f"{name} {value} is not divisible by parallel.tp {tp}; choose parallel.tp {_near(value, tp)}"


def _near(value: int, tp: int) -> str:
    """The divisors of `value` next below and above `tp`, in words."""
    fits = list_divisors(value)
    below = max(n for n in fits if n < tp or n == 1)
    above = min((n for n in fits if n > tp), default=None)
    return f"{below} or {above}" if above is not None else f"{below}"
