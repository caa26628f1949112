"""Rules that recognise what is wrong with a run from what it wrote down; `tools/diagnose.py` is their command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megaflow_trainer.config import exit_codes, fields
from megaflow_trainer.config.memory import estimate_memory
from megaflow_trainer.config.remedies import list_remedies
from megaflow_trainer.config.sections import TrainConfig
from report import ReportError, read_manifest, read_rows

LEAST_STEPS = 8
"""Log lines that must be there before speed or loss are judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A symptom with its likely cause and what to change."""

    symptom: str
    rank: int
    """0: the run cannot go on; 1: it learns nothing or wrongly; 2: it is slow; 3: worth a look."""
    title: str
    seen: str
    cause: str
    remedies: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a run wrote down."""

    folder: Path
    rows: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    """Lines of training steps."""
    start: dict[str, Any]
    """The last start."""
    config: TrainConfig | None

    @property
    def end(self) -> Mapping[str, Any]:
        """How the last start ended; empty if it did not say."""
        return self.start.get("end") or {}

    def describe_end(self) -> str:
        """The end in words."""
        return f"ended: {self.end['reason']}" if self.end else "no end written: running, or killed"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind of event."""
        return [row for row in self.rows if row.get("event") == kind]

    def usual(self, name: str) -> float:
        """Median of a value over the settled part of the run."""
        values = [row[name] for row in self.settled if isinstance(row.get(name), int | float)]
        return float(median(values)) if values else 0.0

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The lines without those in which a run warms up."""
        return self.steps[max(1, len(self.steps) // 4) :]

    @property
    def losses(self) -> list[float]:
        """Losses that are finite."""
        return [row["lm_loss"] for row in self.steps if isinstance(row.get("lm_loss"), int | float)]

    @property
    def is_on_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return bool(self.start) and not str(self.start.get("device", "")).startswith("cpu")


def read_record(folder: Path) -> Record:
    """What is in a run folder.

    Raises:
        ReportError: if it is none, or what it holds cannot be read: nothing may be concluded from that.
    """
    metrics, manifest = folder / "metrics.jsonl", folder / "run.json"
    if not metrics.is_file() and not manifest.is_file():
        raise ReportError(f"{folder}: not a run folder: there is neither metrics.jsonl nor run.json in it")
    rows = read_rows(metrics) if metrics.is_file() else []
    starts = read_manifest(manifest).get("starts") or [{}]
    if manifest.is_file() and not (isinstance(starts, list) and isinstance(starts[-1], dict) and starts[-1]):
        raise ReportError(f"{manifest}: no start of a run can be read in it; is the file whole?")
    if not rows and metrics.is_file() and b"\n" in metrics.read_bytes():  # a first line may have been cut off
        raise ReportError(f"{metrics}: not one line of a run can be read in it; is the file whole?")
    return Record(
        folder=folder,
        rows=rows,
        steps=[row for row in rows if "lm_loss" in row],
        start=starts[-1],
        config=_read_config(starts[-1].get("config")),
    )


def _read_config(content: Any) -> TrainConfig | None:
    if not isinstance(content, dict):
        return None
    known = fields.list_fields()
    values = {}
    for name in known:
        section, _, leaf = name.rpartition(".")
        owner = content.get(section, {}) if section else content
        if isinstance(owner, dict) and leaf in owner:
            values[name] = tuple(owner[leaf]) if isinstance(owner[leaf], list) else owner[leaf]
    return fields.build(values)[0]


def find_out_of_memory(record: Record) -> Iterator[Finding]:
    """The run ended because memory ran out."""
    if record.end.get("exit_code") != exit_codes.OUT_OF_MEMORY and "out of memory" not in str(record.end.get("reason")):
        return
    parts, remedies = "", ["--micro-batch-size, then --recompute-granularity full, then --use-distributed-optimizer"]
    if record.config is not None:
        device, _ = estimate_memory(record.config)
        parts = "by formula (GiB): " + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in device.items())
        remedies = list_remedies(record.config)
    yield Finding(
        symptom="out-of-memory",
        rank=0,
        title="out of memory",
        seen=f"{record.end.get('reason')}; {parts}",
        cause="weights, gradients, optimizer and activations of a rank are more than its device has",
        remedies=(*remedies, "python tools/plan.py with the same flags shows which layouts fit"),
    )


def find_nonfinite(record: Record) -> Iterator[Finding]:
    """Losses or gradients that were not finite."""
    events = record.events("nonfinite")
    if not events:
        return
    first = events[0]
    guilty = [item for item in first.get("samples", []) if item.get("loss") is None]
    cause = "the rate is too high for this model, or activations overflow in this precision"
    if 0 < len(guilty) < len(first.get("samples", [])):
        cause = f"documents: only {len(guilty)} of {len(first['samples'])} samples of the step had no finite loss"
    yield Finding(
        symptom="nan",
        rank=0 if record.end.get("exit_code") == exit_codes.DIVERGED else 1,
        title="NaN or infinity in loss or gradient",
        seen=f"{len(events)} iterations from {first['iteration']} on, first the {first.get('kind')}; "
        f"learning rate {_lr_at(record, first['iteration'])}",
        cause=cause,
        remedies=(
            *_calm(record),
            f"megaflow inspect --run {record.folder} --iteration {first['iteration']}: the documents of that step",
        ),
    )


def _lr_at(record: Record, iteration: int) -> str:
    near = [row for row in record.steps if row["iteration"] <= iteration and "lr" in row]
    return f"{near[-1]['lr']:.3g}" if near else "not logged yet"


def _calm(record: Record) -> list[str]:
    """Flags that make training calmer, with the values of this run."""
    found = []
    config = record.config
    if config is None:
        return ["a lower --lr, a longer --lr-warmup-iters, --clip-grad 1.0, --bf16"]
    found.append(f"--lr {config.optim.lr / 3:.2g}: a third of {config.optim.lr:.2g}")
    schedule = config.schedule
    if not (schedule.warmup_steps or schedule.warmup_samples or schedule.warmup_fraction):
        found.append("--lr-warmup-fraction 0.01: there is no warm-up")
    if config.optim.clip_grad == 0 or config.optim.clip_grad > 1:
        found.append(f"--clip-grad 1.0: it is {config.optim.clip_grad:g}")
    if config.model.init_std > 0.02:
        found.append(f"--init-method-std 0.02: it is {config.model.init_std:g}")
    if config.model.hidden_dropout > 0 or config.model.attention_dropout > 0:
        found.append("--hidden-dropout 0 --attention-dropout 0: dropout adds noise that large data do not need")
    if config.step.dtype == "fp16":
        found.append("--bf16 instead of --fp16: the range of fp32, no loss scale")
    return found


def find_overflow(record: Record) -> Iterator[Finding]:
    """fp16 steps that overflow again and again."""
    scaled = [row for row in record.steps if "loss_scale" in row]
    skipped = sum(row.get("skipped_steps") or 0 for row in scaled)
    total = sum(row.get("num_steps") or 1 for row in scaled)
    if not scaled or skipped <= max(3, 0.05 * total):
        return
    late = sum(row.get("skipped_steps") or 0 for row in scaled[len(scaled) // 2 :])
    first, last = scaled[0]["loss_scale"], scaled[-1]["loss_scale"]
    cause = "the loss scale starts far too high and is still coming down: no update is made until it fits"
    remedies = ["--initial-loss-scale 65536"]
    static = record.config is not None and record.config.step.loss_scale is not None
    if static:
        cause, remedies = "the static loss scale is too high for these gradients", ["drop --loss-scale: a dynamic one"]
    elif first == last or late == 0:
        cause = "gradients overflow although the scale is low: the run diverges, or activations overflow"
        remedies = _calm(record)
    if not any("--bf16" in remedy for remedy in remedies):
        remedies = [*remedies, "--bf16 instead of --fp16 where the device has it: no loss scale at all"]
    yield Finding(
        symptom="overflow",
        rank=1,
        title="overflow again and again",
        seen=f"{skipped} of {total} steps skipped; loss scale {first:.4g} at first, {last:.4g} at last",
        cause=cause,
        remedies=tuple(remedies),
    )


def find_spikes(record: Record) -> Iterator[Finding]:
    """Losses far above the usual."""
    events = record.events("spike")
    if not events:
        return
    worst = max(events, key=lambda event: event.get("deviations") or 0)
    named = [_name(document) for item in worst.get("samples", [])[:2] for document in item.get("documents", [])[:2]]
    yield Finding(
        symptom="loss-spikes",
        rank=1 if len(events) > 3 else 3,
        title="loss spikes",
        seen=f"{len(events)}, the highest at iteration {worst['iteration']}: loss {worst.get('loss')}, "
        f"{worst.get('deviations', 0):.0f} deviations above the usual"
        + (f"; its worst samples hold {', '.join(named)}" if named else ""),
        cause="unusual documents, or a rate that is too high for the batch",
        remedies=(
            f"megaflow inspect --run {record.folder} --iteration {worst['iteration']}: the documents of that step",
            "leave bad documents out and preprocess again",
            *_calm(record),
        ),
    )


def _name(document: Mapping[str, Any]) -> str:
    return str(document.get("origin") or f"document {document.get('document')}")


def find_divergence(record: Record) -> Iterator[Finding]:
    """A loss that was lower and has risen for good."""
    losses = record.losses
    if len(losses) < LEAST_STEPS or record.events("nonfinite"):
        return
    recent, best = median(losses[-max(3, len(losses) // 10) :]), min(losses)
    if recent <= best + max(0.5, 0.15 * best) or recent <= median(losses[: len(losses) // 2]):
        return
    yield Finding(
        symptom="divergence",
        rank=1,
        title="the loss diverges",
        seen=f"loss {losses[0]:.2f} at first, {best:.2f} at best, {recent:.2f} at last",
        cause="the learning rate is too high for this model and batch",
        remedies=tuple(_calm(record)),
    )


def find_flat(record: Record) -> Iterator[Finding]:
    """A loss that does not fall."""
    losses, config = record.losses, record.config
    if len(losses) < LEAST_STEPS or record.events("nonfinite"):
        return
    edge = max(3, len(losses) // 8)
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    if abs(first - last) > max(0.02 * first, 0.05) or max(losses) - min(losses) > 0.5 * first:
        return
    skipped = sum(row.get("skipped_steps") or 0 for row in record.steps)
    if skipped > len(losses) / 2:
        return  # the overflow is the cause, and is told
    vocabulary = config.model.vocab_size if config else None
    guess = math.log(vocabulary) if vocabulary else None
    rate = max(row.get("lr") or 0.0 for row in record.steps)
    if rate < 1e-5:
        cause, do = f"the learning rate is next to nothing: {rate:.2g} at most", "--lr 3e-4, and check the warm-up"
    elif guess is not None and abs(last - guess) < 0.35:
        cause = f"the model guesses among all tokens (ln {vocabulary} = {guess:.2f}): the data may be noise to it"
        do = "check that --tokenizer-type and files are those of preprocessing: megaflow inspect PREFIX shows the text"
    else:
        cause, do = "the rate is too low, or the data are the same few samples", "--lr three times as high"
    yield Finding(
        symptom="flat-loss",
        rank=1,
        title="the loss does not fall",
        seen=f"{first:.3f} at first, {last:.3f} at last, over {len(losses)} lines",
        cause=cause,
        remedies=(do, "megaflow inspect PREFIX and megaflow stats PREFIX: is it the text that you expect?"),
    )


def find_slow_loader(record: Record) -> Iterator[Finding]:
    """The device waits for its data."""
    step = record.usual("step_time_s")
    share = record.usual("loader_bound_s") / step if step else 0.0
    if len(record.steps) < LEAST_STEPS or share < 0.05 or record.usual("loader_bound_s") < 0.005:
        return
    threads, depth = (record.config.data.num_threads, record.config.data.prefetch) if record.config else (1, 4)
    waits = record.settled[-1].get("loader_bound_by_rank_s") or []
    uneven = len(waits) > 1 and max(waits) > 3 * max(median(waits), 1e-4)
    cause = "reading and gathering samples is slower than a step"
    if uneven:
        cause = f"rank {waits.index(max(waits))} alone waits for data: the disk of its machine"
    yield Finding(
        symptom="slow-loader",
        rank=2,
        title="the device waits for data",
        seen=f"loader bound {share:.0%} of a step ({record.usual('loader_bound_s') * 1e3:.1f} ms)",
        cause=cause,
        remedies=(
            f"--num-workers {max(4, 2 * threads)} (it is {threads})",
            f"--prefetch {max(16, 2 * depth)} (it is {depth})",
            "put the .bin file on a local disk; python tools/doctor.py --data-path PREFIX measures it",
        ),
    )


def find_low_use(record: Record) -> Iterator[Finding]:
    """A GPU that computes far less than it could."""
    config, mfu = record.config, record.usual("mfu")
    if len(record.steps) < LEAST_STEPS or not record.is_on_gpu or config is None:
        return
    if config.step.dtype == "fp32":
        how = "TF32 at best; --tf32 is off" if not config.step.allows_tf32 else "TF32"
        yield _slow(record, f"fp32 products ({how})", ("--bf16: several times the rate of fp32",))
        return
    if not 0 < mfu < 0.30:
        return
    causes, remedies = [], []
    hosts = {rank.get("host") for rank in record.start.get("ranks", [])}
    per_host = len(record.start.get("ranks", [])) / max(1, len(hosts))
    own = config.parallel
    if own.tp > max(8, 1) or (len(hosts) > 1 and own.tp > per_host):
        causes.append(f"tp {own.tp} reaches over machines ({per_host:.0f} GPUs each)")
        remedies.append(f"--tensor-model-parallel-size {min(8, int(per_host))}: inside a machine, the rest by pp or dp")
    if own.tp > 1 and not own.sequence_parallel:
        causes.append("norms and dropouts are computed by every tensor-parallel rank")
        remedies.append("--sequence-parallel")
    if config.model.attention == "math":
        causes.append("attention is written out")
        remedies.append("--use-flash-attn, or --attention-backend auto")
    if config.step.sizes.micro_batch_size <= 2 and config.model.hidden_dim <= 4096:
        causes.append(f"micro-batches of {config.step.sizes.micro_batch_size} make small products")
        remedies.append(f"--micro-batch-size {4 * config.step.sizes.micro_batch_size}, as far as memory goes")
    if config.recompute.granularity == "full":
        causes.append("every block is computed twice")
        remedies.append("--recompute-granularity selective, if memory allows")
    yield _slow(
        record, "; ".join(causes) or "nothing in the configuration", remedies or ["--profile shows which kernels"]
    )


def _slow(record: Record, cause: str, remedies: Any) -> Finding:
    mfu = record.usual("mfu")
    return Finding(
        symptom="low-gpu-use",
        rank=2,
        title="the GPU is used little",
        seen=(f"MFU {mfu:.0%}, " if mfu else "") + f"device idle {record.usual('device_idle_share'):.0%} of a step",
        cause=cause,
        remedies=(*remedies, "--profile --profile-step-start 10 --profile-step-end 12: where the time goes"),
    )


def find_communication(record: Record) -> Iterator[Finding]:
    """Ranks wait for each other's messages."""
    step = record.usual("step_time_s")
    share = record.usual("communication_s") / step if step else 0.0
    if len(record.steps) < LEAST_STEPS or share < 0.2:
        return
    variables = record.start.get("environment", {})
    backend = record.start.get("backend")
    cause = "gradients, or tensor-parallel sums, travel over slow links: no NVLink, or no InfiniBand between machines"
    remedies = ["NCCL_DEBUG=INFO: which transport is used; python tools/doctor.py: which links there are"]
    if backend == "gloo" and record.is_on_gpu:
        cause = "gloo sends through the CPU's memory"
        remedies.insert(0, "--distributed-backend nccl")
    elif variables.get("NCCL_IB_DISABLE") == "1" or variables.get("NCCL_P2P_DISABLE") == "1":
        cause = "fast links are turned off: NCCL_IB_DISABLE or NCCL_P2P_DISABLE is 1"
        remedies.insert(0, "unset NCCL_IB_DISABLE NCCL_P2P_DISABLE")
    yield Finding(
        symptom="slow-communication",
        rank=2,
        title="ranks wait for each other",
        seen=f"exposed communication {share:.0%} of a step, backend {backend}",
        cause=cause,
        remedies=(*remedies, "a larger --global-batch-size sends less often; fewer tensor-parallel ranks send less"),
    )


def find_slowdown(record: Record) -> Iterator[Finding]:
    """Throughput that was several times higher."""
    speeds = [row["tokens_per_s_per_gpu"] for row in record.steps[1:] if row.get("tokens_per_s_per_gpu")]
    if len(speeds) < LEAST_STEPS:
        return
    usual, now = median(speeds[: len(speeds) // 2]), median(speeds[-max(3, len(speeds) // 8) :])
    if now > usual / 2:
        return
    last = record.steps[-1]
    phases = {name: last.get(f"{name}_s", 0.0) for name in ("loader_bound", "forward", "backward", "communication")}
    largest = max(phases, key=lambda name: phases[name])
    cause = {
        "loader_bound": "the data come slower: the disk, or another job on it",
        "communication": "a link or a rank has become slow",
    }.get(largest, "the device computes slower: heat, another process on it, or memory that is swapped")
    yield Finding(
        symptom="slowdown",
        rank=2,
        title="throughput fell to a fraction",
        seen=f"{usual:,.0f} tokens/s/GPU before, {now:,.0f} now; most of a step is {largest.replace('_', ' ')}",
        cause=cause,
        remedies=(
            "nvidia-smi: clocks, temperature, other processes; python tools/doctor.py on that machine",
            "--straggler-ratio 1.3 names a rank that is slower than the others",
        ),
    )


def find_stragglers(record: Record) -> Iterator[Finding]:
    """A rank that works longer than the others."""
    works = [row["work_by_rank_s"] for row in record.settled if len(row.get("work_by_rank_s") or ()) > 1]
    if len(works) < 3:
        return
    means = [sum(column) / len(works) for column in zip(*works, strict=True)]
    worst = means.index(max(means))
    if means[worst] < 1.3 * median(means):
        return
    ranks = record.start.get("ranks", [])
    host = f" on {ranks[worst].get('host')}" if worst < len(ranks) else ""
    yield Finding(
        symptom="straggler",
        rank=2,
        title="one rank is slower than the others",
        seen=f"rank {worst}{host}: {means[worst] * 1e3:.0f} ms of its own work a step, the median is "
        f"{median(means) * 1e3:.0f}",
        cause="that GPU is throttled or shared, or its stage holds more layers",
        remedies=("python tools/doctor.py on that machine", "--pipeline-model-parallel-layout for an uneven pipeline"),
    )


def find_bubble(record: Record) -> Iterator[Finding]:
    """Stages of a pipeline that wait."""
    share, config = record.usual("pipeline_bubble"), record.config
    if config is None or share < 0.25:
        return
    count, own = config.step.sizes.num_micro_batches, config.parallel
    yield Finding(
        symptom="pipeline-bubble",
        rank=2,
        title="pipeline stages wait",
        seen=f"{share:.0%} of a step idle, {count} micro-batches on {own.pp} stages",
        cause=f"(p - 1) / (m + p - 1) = {(own.pp - 1) / (count + own.pp - 1):.0%} with so few micro-batches",
        remedies=(
            f"--global-batch-size so that there are {4 * own.pp} micro-batches or more",
            "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        ),
    )


def find_end(record: Record) -> Iterator[Finding]:
    """An end that needs somebody to look."""
    code = record.end.get("exit_code")
    advice = {
        exit_codes.HUNG: "look into stacks/rank_N.txt of the run folder, then start the same command again",
        exit_codes.RANK_LOST: "the message of the rank that died says why, or the system's log (dmesg: out of memory)",
        exit_codes.STOPPED: "start the same command again",
        exit_codes.OUT_OF_TIME: "start the same command again",
    }
    if code in advice:
        yield Finding(
            symptom="stopped",
            rank=0 if code in (exit_codes.HUNG, exit_codes.RANK_LOST) else 3,
            title=f"the run ended with code {code}",
            seen=str(record.end.get("reason")),
            cause=exit_codes.MEANINGS[code],
            remedies=(advice[code],),
        )


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    find_out_of_memory,
    find_nonfinite,
    find_overflow,
    find_spikes,
    find_divergence,
    find_flat,
    find_slow_loader,
    find_low_use,
    find_communication,
    find_slowdown,
    find_stragglers,
    find_bubble,
    find_end,
)
