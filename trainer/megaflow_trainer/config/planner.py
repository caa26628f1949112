"""Which layouts of a model fit on GPUs, ranked by predicted speed; each is a command line that the trainer reads.

For each legal (tp, pp, cp), with experts (tp, pp, cp, ep), and size of micro-batch ZeRO 1, 2 and 3 are tried, each with
the least recompute that makes it fit (none, what is cheap, everything), and the fastest is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megaflow.errors import ConfigError
from megaflow_trainer.config.arithmetic import count_parameters, count_state_bytes
from megaflow_trainer.config.command import check_words, parse_flags, read_command
from megaflow_trainer.config.hardware import Gpu
from megaflow_trainer.config.layout import Layout, list_divisors
from megaflow_trainer.config.memory import estimate_memory, find_fullest, find_layout
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.config.step_time import StepTime, predict_step

RECOMPUTE = (
    (),
    ("--recompute-granularity", "selective", "--recompute-modules", "mlp_activation", "attention_norm", "mlp_norm"),
    ("--recompute-granularity", "full"),
)
LONGEST_PLAIN = 8192
"""Tokens of a sample up to which more than two context-parallel ranks are not tried."""

MOST_STAGES = 256
"""Pipeline stages above which none are tried, unless they are given: the longest pipelines in use have a tenth."""

MOST_LAYOUTS = 10_000
"""Layouts that a search compares, in seconds to a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs and what may be used of them."""

    gpu: Gpu
    num_gpus: int
    memory_gb: float
    """10^9 bytes a GPU."""
    reserve_gb: float = 4.0
    """Left free: CUDA's context, buffers of collectives, the allocator's slack."""
    gpus_per_node: int = 8

    @property
    def usable_bytes(self) -> float:
        """What states and activations may take."""
        return (self.memory_gb - self.reserve_gb) * 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """One layout and what it needs."""

    flags: tuple[str, ...]
    config: TrainConfig
    device: dict[str, int]
    host: dict[str, int]
    stage: int
    """The pipeline stage that needs most; `device` and `host` are about its ranks."""

    @property
    def total_bytes(self) -> int:
        """On the device of the fullest rank."""
        return sum(self.device.values())

    @property
    def layout(self) -> Layout:
        """Ranks on every axis."""
        return find_layout(self.config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Need):
    """One layout, what it needs and how fast it would be."""

    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found."""

    choices: list[Choice]
    """Layouts that fit, the fastest first."""
    nearest: Choice | None
    """Of those that do not fit the one that needs least."""


def evaluate(flags: Sequence[str], cluster: Cluster) -> Choice:
    """Memory and speed of a command line.

    Raises:
        ConfigError: if the trainer would refuse it.
    """
    return _predict(_measure(flags, cluster), cluster)


def _measure(flags: Sequence[str], cluster: Cluster) -> Need:
    config, _ = read_command(flags, world_size=cluster.num_gpus)
    if config.model.vocab_size is None:
        raise ConfigError("the vocabulary is not known yet: give --vocab-size, or a --preset")
    stage = find_fullest(config)
    device, host = estimate_memory(config, pp_rank=stage)
    return Need(flags=tuple(flags), config=config, device=device, host=host, stage=stage)


def _predict(need: Need, cluster: Cluster) -> Choice:
    return Choice(
        flags=need.flags,
        config=need.config,
        device=need.device,
        host=need.host,
        stage=need.stage,
        time=predict_step(need.config, cluster.gpu, gpus_per_node=cluster.gpus_per_node),
    )


def list_axes(
    cluster: Cluster, *, seq_len: int, given: Mapping[str, int] = MappingProxyType({})
) -> Iterator[tuple[int, int, int]]:
    """Sizes (tp, pp, cp) that divide the GPUs, and are those that were given; a tp of ours stays inside a machine."""
    longest = 2 if seq_len <= LONGEST_PLAIN else 64
    num_gpus = cluster.num_gpus
    for tp in _divisors(num_gpus, given.get("tp", cluster.gpus_per_node)):
        for cp in _divisors(num_gpus // tp, given.get("cp", longest)):
            for pp in _divisors(num_gpus // tp // cp, given.get("pp", MOST_STAGES)):
                if all(given.get(axis, size) == size for axis, size in (("tp", tp), ("cp", cp), ("pp", pp))):
                    yield tp, pp, cp


def _divisors(total: int, most: int) -> list[int]:
    return [size for size in list_divisors(total) if size <= most]


def plan(base: Sequence[str], cluster: Cluster, micro_batches: Sequence[int] = (1,)) -> list[Choice]:
    """Layouts that fit, the fastest first; arguments and errors are those of `search`."""
    return search(base, cluster, micro_batches).choices


def search(
    base: Sequence[str],
    cluster: Cluster,
    micro_batches: Sequence[int] = (1,),
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Every layout of a model on GPUs.

    Args:
        base: the trainer's flags for model, precision, length and global batch.
        cluster: the GPUs.
        micro_batches: sizes that are tried.
        progress: called with layouts done and in all.

    Raises:
        ConfigError: if a setting is wrong by itself, or no layout is legal; with what the trainer says of one rank.
    """
    check_words(base)
    layouts = list(itertools.islice(list_flags(base, cluster, micro_batches), MOST_LAYOUTS + 1))
    if len(layouts) > MOST_LAYOUTS:
        raise ConfigError(
            f"{cluster.num_gpus} GPUs give more than {MOST_LAYOUTS:,} layouts, which take minutes to compare; fix one "
            "of the axes, such as --tensor-model-parallel-size 8, or try fewer sizes of --micro-batch-size"
        )
    fitting: list[Choice] = []
    nearest: Choice | None = None
    for number, (flags, is_divided) in enumerate(layouts, start=1):
        choice = find_remedy(flags, cluster, is_divided=is_divided)
        if choice is not None and choice.total_bytes <= cluster.usable_bytes:
            fitting.append(choice)
        elif choice is not None and (nearest is None or choice.total_bytes < nearest.total_bytes):
            nearest = choice
        if progress is not None:
            progress(number, len(layouts))
    if not fitting and nearest is None:
        evaluate([*base, "--micro-batch-size", str(micro_batches[0])], cluster)
    return Found(choices=sorted(fitting, key=lambda choice: -choice.time.tokens_per_s), nearest=nearest)


def list_flags(
    base: Sequence[str], cluster: Cluster, micro_batches: Sequence[int] = (1,)
) -> Iterator[tuple[list[str], bool]]:
    """Command lines of all layouts, before ZeRO and recompute, and whether ranks hold equal parts of a model."""
    values = parse_flags(base).values
    given = {axis: values[f"parallel.{axis}"] for axis in ("tp", "cp", "pp") if f"parallel.{axis}" in values}
    for tp, pp, cp in list_axes(cluster, seq_len=values.get("data.seq_len", 1024), given=given):
        for ep in _list_expert_ranks(values, cluster.num_gpus // pp // tp):
            for micro in micro_batches:
                if not _divides_batch(values, cluster.num_gpus // pp // tp // cp * micro):
                    continue
                for axes in _spell(tp, pp, cp, micro):
                    experts = ["--expert-model-parallel-size", str(ep)] if ep > 1 else []
                    yield [*base, *axes, *experts], tp * pp < cluster.num_gpus


def _divides_batch(values: Mapping[str, Any], num_samples: int) -> bool:
    """Whether steps of `num_samples` samples make the global batch; the trainer refuses others, less quickly."""
    total = values.get("step.global_batch_size")
    return total is None or (num_samples > 0 and total % num_samples == 0)


def _list_expert_ranks(values: Mapping[str, Any], num_ranks: int) -> list[int]:
    """Ranks that may divide the experts, where `num_ranks` hold the same of other layers; 1 where it is given."""
    if "parallel.ep" in values:
        return [1]
    return _divisors(math.gcd(values.get("model.num_experts") or 1, num_ranks), num_ranks)


def _spell(tp: int, pp: int, cp: int, micro: int) -> Iterator[list[str]]:
    flags = ["--micro-batch-size", str(micro)]
    flags += ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"] if tp > 1 else []
    flags += ["--context-parallel-size", str(cp)] if cp > 1 else []
    flags += ["--pipeline-model-parallel-size", str(pp)] if pp > 1 else []
    yield flags
    if pp > 1:
        yield [*flags, "--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "2"]


def find_remedy(flags: Sequence[str], cluster: Cluster, *, is_divided: bool = True) -> Choice | None:
    """The fastest combination of recompute and ZeRO under which a layout fits, or the one that needs least; none if the
    trainer takes none.
    """
    fitting: list[Choice] = []
    nearest: Need | None = None
    for zero in (1, 2, 3) if is_divided else (1,):
        shares = ["--use-distributed-optimizer"] if zero == 1 else ["--zero-stage", str(zero)]
        for recompute in RECOMPUTE:
            try:
                need = _measure([*flags, *shares, *recompute], cluster)
            except ConfigError:
                continue
            if need.total_bytes <= cluster.usable_bytes:
                fitting.append(_predict(need, cluster))
                break  # more recompute would only be slower
            if nearest is None or need.total_bytes < nearest.total_bytes:
                nearest = need
    if fitting:
        return max(fitting, key=lambda choice: choice.time.tokens_per_s)
    return None if nearest is None else _predict(nearest, cluster)


def recommend(choices: Sequence[Choice], *, within: float = 0.10) -> Choice | None:
    """The simplest of the layouts that are at most `within` slower than the fastest, about what predictions err:
    the fewest ranks that share a model, then the least ZeRO, then the fastest.
    """
    if not choices:
        return None
    best = max(choice.time.tokens_per_s for choice in choices)
    near = [choice for choice in choices if choice.time.tokens_per_s >= (1 - within) * best]
    return min(near, key=_complexity)


def _complexity(choice: Choice) -> tuple[int, int, int, float]:
    own = choice.config.parallel
    return own.tp * own.pp * own.cp * own.ep, own.zero, own.virtual_stages, -choice.time.tokens_per_s


def count_checkpoint_bytes(config: TrainConfig) -> int:
    """Bytes of a checkpoint: weights, masters and states of the whole model."""
    sizes = count_state_bytes(config.model, config.step, config.optim, num_parameters=count_parameters(config.model))
    return sizes["weights"] + sizes["optimizer"]
