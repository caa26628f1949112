"""Rules that recognise why a run is slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from findings import LEAST_STEPS, Finding
from megaflow_trainer.config.sections import TrainConfig
from run_record import Record


def find_slow_loader(record: Record) -> Iterator[Finding]:
    """The device waits for its data; often in bursts, so that a usual step shows nothing."""
    lines = [row for row in record.settled if row.get("step_time_s")]
    late = [row for row in lines if row.get("loader_bound_s", 0.0) > max(0.05 * row["step_time_s"], 0.005)]
    if len(record.steps) < LEAST_STEPS or len(late) < max(3, 0.05 * len(lines)):
        return
    share = record.total("loader_bound_s") / record.total("step_time_s")
    if share < 0.05:
        return
    threads, depth = (record.config.data.num_threads, record.config.data.prefetch) if record.config else (1, 4)
    waits = late[-1].get("loader_bound_by_rank_s") or []
    uneven = len(waits) > 1 and max(waits) > 3 * max(median(waits), 1e-4)
    cause = "reading and gathering samples is slower than a step"
    if uneven:
        cause = f"rank {waits.index(max(waits))} alone waits for data: the disk of its machine"
    place = "put the .bin file on a local disk; python tools/doctor.py --data-path PREFIX measures it"
    if _reads_text(record):
        cause = "text is read and tokenized more slowly than it is used"
        place = "megaflow preprocess, once: a .bin file on a local disk needs no tokenizing, and is read by position"
    yield Finding(
        symptom="slow-loader",
        rank=2,
        title="the device waits for data",
        seen=f"loader bound {share:.0%} of the time, {record.total('loader_bound_s') / len(lines) * 1e3:.1f} ms a "
        f"step; {len(late)} of {len(lines)} lines had to wait",
        cause=cause,
        remedies=(
            f"--num-workers {max(4, 2 * threads)} (it is {threads})",
            f"--prefetch {max(16, 2 * depth)} (it is {depth})",
            place,
        ),
    )


def _reads_text(record: Record) -> bool:
    dataset = record.start.get("data", {}).get("dataset")
    return isinstance(dataset, dict) and dataset.get("kind") == "StreamingDataset"


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
    hosts = {*record.hosts}
    per_host = len(record.hosts) / max(1, len(hosts))
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
    """Ranks wait for each other's messages, and not for a rank that is late."""
    timed = [row for row in record.settled if row.get("step_time_s")]
    shares = [_exposed_s(row) / row["step_time_s"] for row in timed]
    if len(record.steps) < LEAST_STEPS or not shares or median(shares) < 0.2:
        return
    backend = record.start.get("backend")
    off = [name for name in _LINKS if str(record.start.get("environment", {}).get(name)) == "1"]
    cause = "gradients, or tensor-parallel sums, travel over slow links: no NVLink, or no InfiniBand between machines"
    remedies = ["NCCL_DEBUG=INFO: which transport is used; python tools/doctor.py: which links there are"]
    if backend == "gloo":
        cause = "gloo sends through the memory and the network of the CPUs"
        remedies = ["--distributed-backend nccl"] if record.is_on_gpu else _send_less(record.config)
        remedies += [f"unset {' '.join(off)}: nothing to gloo, much to GPUs"] if off else []
    elif off:
        cause = f"fast links are turned off: {' and '.join(off)} is 1"
        remedies.insert(0, f"unset {' '.join(off)}")
    yield Finding(
        symptom="slow-communication",
        rank=2,
        title="ranks wait for each other",
        seen=f"exposed communication {median(shares):.0%} of a step, backend {backend or 'not known'}",
        cause=cause,
        remedies=tuple(dict.fromkeys([*remedies, *_send_less(record.config)])),
    )


_LINKS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")


def _exposed_s(row: Mapping[str, Any]) -> float:
    """Seconds of waiting for messages, less what the first rank waited until the last one came to the meeting."""
    works, waits = row.get("work_by_rank_s") or [0.0], row.get("loader_bound_by_rank_s") or [0.0]
    busy = [work + wait for work, wait in zip(works, waits, strict=False)] or [0.0]
    return float(row.get("communication_s", 0.0) - (max(busy) - busy[0]))


def _send_less(config: TrainConfig | None) -> list[str]:
    if config is None:
        return ["a larger --global-batch-size sends less often; fewer tensor-parallel ranks send less"]
    found = [f"--global-batch-size {4 * config.step.sizes.global_batch_size}: gradients are sent once a step"]
    if config.parallel.tp > 1:
        found.append(f"--tensor-model-parallel-size {config.parallel.tp // 2}: fewer sums inside each layer")
    return found


def find_slowdown(record: Record) -> Iterator[Finding]:
    """Throughput that was several times higher."""
    rows = [row for row in record.steps[1:] if row.get("tokens_per_s_per_gpu")]
    if len(rows) < LEAST_STEPS:
        return
    edge = max(3, len(rows) // 8)
    usual, now = (_median(part, "tokens_per_s_per_gpu") for part in (rows[: len(rows) // 2], rows[-edge:]))
    if now > usual / 2:
        return
    phases = {name: _median(rows[-edge:], f"{name}_s") for name in _PHASES}
    largest = max(phases, key=lambda name: phases[name])
    if largest == "loader_bound" and any(find_slow_loader(record)):
        return  # the data are the cause, and are told
    cause, do = _SLOWER.get(largest, ("the device computes slower: heat, another process on it, or memory swapped", ""))
    look = "nvidia-smi: clocks, temperature, other processes" if record.is_on_gpu else "top: other processes, swapping"
    yield Finding(
        symptom="slowdown",
        rank=2,
        title="throughput fell to a fraction",
        seen=f"{usual:,.0f} tokens/s/GPU before, {now:,.0f} now; most of a step is {largest.replace('_', ' ')}",
        cause=cause,
        remedies=(do or look, "python tools/doctor.py on that machine, and compare with one where it is fast"),
    )


_SLOWER = {
    "loader_bound": (
        "the data come slower: the disk, or another job on it",
        "python tools/doctor.py --data-path PREFIX: how fast the disk reads now",
    ),
    "communication": ("a link or a rank has become slow", "NCCL_DEBUG=INFO: which transport is used now"),
}
_PHASES = ("loader_bound", "forward", "backward", "communication")


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return float(median(row.get(name, 0.0) for row in rows))


def find_stragglers(record: Record) -> Iterator[Finding]:
    """A rank that works longer than the others."""
    size = len(record.settled[-1].get("work_by_rank_s", ())) if record.settled else 0
    if size < 2:
        return
    works = [row["work_by_rank_s"] for row in record.settled if len(row.get("work_by_rank_s", ())) == size]
    if len(works) < 3:
        return
    means = [median(column) for column in zip(*works, strict=True)]
    worst = means.index(max(means))
    others = median(means[:worst] + means[worst + 1 :])
    if means[worst] < 1.3 * others:
        return
    hosts = record.hosts
    yield Finding(
        symptom="straggler",
        rank=2,
        title="one rank is slower than the others",
        seen=f"rank {worst}{f' on {hosts[worst]}' if worst < len(hosts) else ''}: {means[worst] * 1e3:.0f} ms of its "
        f"own work a step, the median of the others is {others * 1e3:.0f}",
        cause="its device is throttled or shared, or its stage holds more layers",
        remedies=("python tools/doctor.py on that machine", "--pipeline-model-parallel-layout for an uneven pipeline"),
    )


def find_bubble(record: Record) -> Iterator[Finding]:
    """Stages of a pipeline that wait."""
    share, config = record.usual("pipeline_bubble"), record.config
    if share < 0.25:
        return
    seen, cause, wanted = "", "few micro-batches for so many stages", "so that there are four a stage or more"
    if config is not None:
        sizes, pp = config.step.sizes, config.parallel.pp
        count = sizes.num_micro_batches
        seen = f", {count} micro-batches on {pp} stages"
        cause = f"(p - 1) / (m + p - 1) = {(pp - 1) / (count + pp - 1):.0%} with so few micro-batches"
        wanted = f"{-(-4 * pp * sizes.global_batch_size // count)}: {4 * pp} micro-batches"
    yield Finding(
        symptom="pipeline-bubble",
        rank=2,
        title="pipeline stages wait",
        seen=f"{share:.0%} of a step idle{seen}",
        cause=cause,
        remedies=(
            f"--global-batch-size {wanted}",
            "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        ),
    )
