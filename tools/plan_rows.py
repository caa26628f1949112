"""The layouts that well-known guides recommend, held against memory: which fit, and by how much others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megaflow_trainer.config.arithmetic import count_expert_parameters, count_parameters
from megaflow_trainer.config.hardware import Gpu, find_gpu
from megaflow_trainer.config.planner import (
    Choice,
    Cluster,
    count_checkpoint_bytes,
    find_remedy,
    plan,
    recommend,
)
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.sections import ModelConfig

GLOBAL_BATCH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A recommendation: model, GPUs, and the layout if the guide names one."""

    name: str
    preset: str
    num_gpus: int
    memory_gb: float = 80
    gpu: str = "H100"
    gpus_per_node: int = 8
    tp: int | None = None
    pp: int = 1
    dp: int = 1
    cp: int = 1
    seq_len: int = 4096

    @property
    def product(self) -> int:
        """GPUs that the layout multiplies to."""
        return (self.tp or 1) * self.pp * self.dp * self.cp


ROWS = (
    Row(name="7B on 8", preset="llama2_7b", num_gpus=8, tp=1, dp=8),
    Row(name="13B on 8", preset="llama2_13b", num_gpus=8, tp=2, dp=4),
    Row(name="70B on 64", preset="llama2_70b", num_gpus=64, tp=4, pp=4, dp=4),
    Row(name="405B on 128", preset="llama3_405b", num_gpus=128, tp=8, pp=8, dp=2, cp=2),
    Row(
        name="0.8B on 4 x 24 GB",
        preset="gpt2_large",
        num_gpus=4,
        memory_gb=24,
        gpu="RTX 4090",
        gpus_per_node=4,
        seq_len=1024,
    ),
    Row(
        name="1.5B on 4 x 24 GB",
        preset="gpt2_xl",
        num_gpus=4,
        memory_gb=24,
        gpu="RTX 4090",
        gpus_per_node=4,
        seq_len=1024,
    ),
    Row(name="1.3B with tp 8", preset="gpt3_1.3b", num_gpus=8, tp=8, seq_len=2048),
    Row(name="13B on 128", preset="llama2_13b", num_gpus=128, tp=8, dp=16),
    Row(name="175B on 64", preset="gpt3_175b", num_gpus=64, seq_len=2048),
)


def base_flags(row: Row) -> list[str]:
    """The trainer's flags of a row's model."""
    own = ["--preset", row.preset, "--seq-length", str(row.seq_len), "--bf16", "--global-batch-size", str(GLOBAL_BATCH)]
    return [*own, "--train-iters", "1000", "--data-path", "DATA"]


def make_cluster(row: Row, num_gpus: int, reserve_gb: float = 4.0) -> Cluster:
    """The GPUs of a row."""
    gpu: Gpu = find_gpu(row.gpu)
    return Cluster(
        gpu=gpu,
        num_gpus=num_gpus,
        memory_gb=row.memory_gb,
        reserve_gb=reserve_gb,
        gpus_per_node=row.gpus_per_node,
    )


def judge_named(row: Row) -> tuple[Choice | None, Cluster]:
    """The named layout with the fastest remedy under which it fits, on the GPUs that it multiplies to."""
    cluster = make_cluster(row, row.product)
    flags = [*base_flags(row), "--micro-batch-size", "1"]
    flags += ["--tensor-model-parallel-size", str(row.tp), "--sequence-parallel"] if (row.tp or 1) > 1 else []
    flags += ["--pipeline-model-parallel-size", str(row.pp)] if row.pp > 1 else []
    flags += ["--context-parallel-size", str(row.cp)] if row.cp > 1 else []
    return find_remedy(flags, cluster, is_divided=row.dp * row.cp > 1), cluster


def describe_fit(choice: Choice, cluster: Cluster) -> str:
    """Whether a layout fits, or by how much not."""
    need, usable = choice.total_bytes / 1e9, cluster.usable_bytes / 1e9
    if need <= usable:
        return f"fits: {need:.1f} of {usable:.0f} GB"
    return f"does not fit: {need:.1f} of {usable:.0f} GB, {need - usable:.1f} GB too much"


def judge_rows(progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[dict[str, Any]]:
    """Every row: the named layout, the planner's, and why; `progress` is called with rows done and in all."""
    for number, row in enumerate(ROWS):
        progress(number, len(ROWS) + 1)
        entry: dict[str, Any] = {"name": row.name, "gpus": row.num_gpus, "memory_gb": row.memory_gb, "notes": []}
        named = None
        if row.tp is not None:
            named, cluster = judge_named(row)
            entry["named"] = {"layout": f"tp{row.tp}.cp{row.cp}.pp{row.pp}.dp{row.dp}", "gpus": row.product}
            if row.product != row.num_gpus:
                entry["notes"].append(f"the named layout multiplies to {row.product} GPUs, not {row.num_gpus}")
            if named is not None:
                entry["named"] |= summarise(named, cluster)
        entry |= judge_best(row, named)
        yield entry
    yield judge_mixtral()


def judge_best(row: Row, named: Choice | None) -> dict[str, Any]:
    """What the planner would take on the GPUs of the row; what comes nearest where nothing fits."""
    cluster = make_cluster(row, row.num_gpus)
    choices = plan(base_flags(row), cluster)
    best = recommend(choices)
    if best is None:
        return {"best": None}
    found: dict[str, Any] = {"best": {"layout": str(best.layout)} | summarise(best, cluster)}
    found["checkpoint_gb"] = count_checkpoint_bytes(best.config) / 1e9
    if named is not None and named.layout.size == row.num_gpus and named.total_bytes <= cluster.usable_bytes:
        ratio = best.time.tokens_per_s / named.time.tokens_per_s
        found["reason"] = (
            "the named layout is the planner's, or as fast"
            if ratio <= 1.0
            else f"{ratio - 1:.0%} more tokens/s than the named one is predicted: less communication or recompute"
        )
    elif named is not None:
        found["reason"] = "the named layout does not run on these GPUs; this one does"
    return found


def summarise(choice: Choice, cluster: Cluster) -> dict[str, Any]:
    """What a table shows of a layout."""
    own = choice.config.parallel
    return {
        "fits": choice.total_bytes <= cluster.usable_bytes,
        "fit": describe_fit(choice, cluster),
        "total_gb": choice.total_bytes / 1e9,
        "memory_gb": {name: size / 1e9 for name, size in choice.device.items()},
        "zero": own.zero,
        "recompute": choice.config.recompute.granularity,
        "tokens_per_s": choice.time.tokens_per_s,
        "mfu": choice.time.mfu,
    }


def judge_mixtral() -> dict[str, Any]:
    """Mixtral 8x7B at tp 2, ep 4, dp 4, in both ways of counting GPUs.

    Where ep folds into dp, as in this trainer, the layout needs 8 GPUs; counted beside dp it needs 32, which folded are
    dp 16. Experts are cut by tp as well, so that experts of 8 x 4 ranks have 1 and 4 copies.
    """
    row = Row(name="Mixtral 8x7B", preset="mixtral_8x7b", num_gpus=8, tp=2, dp=4)
    shape = ModelConfig(**PRESETS[row.preset])
    whole, part = count_expert_parameters(shape), count_expert_parameters(shape, ep=4)
    entry: dict[str, Any] = {
        "name": row.name,
        "gpus": row.num_gpus,
        "memory_gb": row.memory_gb,
        "parameters": count_parameters(shape),
        "notes": [
            "tp 2 x pp 1 x dp 4 is 8 GPUs where ep 4 folds into dp, as here; a guide that multiplies ep too says 32",
            f"experts are {whole / 1e9:.1f} B parameters, {whole / 5e8:.1f} GB in bf16, {part / 5e8:.1f} GB at ep 4",
        ],
    }
    axes = ["--micro-batch-size", "1", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    for name, num_gpus in (("named", 8), ("best", 32)):
        cluster = make_cluster(row, num_gpus)
        choice = find_remedy([*base_flags(row), *axes, "--expert-model-parallel-size", "4"], cluster)
        assert choice is not None, "the trainer takes it"
        entry[name] = {"layout": str(choice.layout), "gpus": num_gpus} | summarise(choice, cluster)
    return entry


def format_rows(entries: Iterable[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']} ({entry['memory_gb']:g} GB each)")
        for key, title in (("named", "named  "), ("best", "planner")):
            part = entry.get(key)
            if part is not None:
                gpus = f" on {part['gpus']} GPUs" if "gpus" in part else ""
                extra = ""
                if "zero" in part:
                    extra = (
                        f"; ZeRO {part['zero']}, recompute {part['recompute']}, {part['tokens_per_s']:,.0f} tokens/s"
                    )
                lines.append(f"  {title} {part['layout']}{gpus}: {part['fit']}{extra}")
            elif key == "best":
                lines.append("  planner: nothing fits on these GPUs")
        if "reason" in entry:
            lines.append(f"          {entry['reason']}")
        if "checkpoint_gb" in entry:
            lines.append(f"          a checkpoint takes {entry['checkpoint_gb']:,.0f} GB")
        lines += [f"  note: {note}" for note in entry["notes"]]
    return "\n".join(lines)
