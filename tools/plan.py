#!/usr/bin/env python3
"""Which layouts of a model fit on which GPUs, ranked by predicted speed.

    python tools/plan.py --gpus 64 --preset llama2_70b

Every flag that is not the planner's own goes to the trainer: model, sequence length, precision, optimizer. Memory is
the trainer's own formula; speed is a prediction for comparing layouts. Nothing is started, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python"), str(ROOT / "tools")]

from doors import DeskParser, guard_start, run_door, say_error  # noqa: E402

if __name__ == "__main__":
    guard_start()

from megaflow.cli.options import show_counts  # noqa: E402
from megaflow.errors import ConfigError, MegaflowError  # noqa: E402
from megaflow_trainer.config.arithmetic import count_parameters  # noqa: E402
from megaflow_trainer.config.command import parse_flags, read_command  # noqa: E402
from megaflow_trainer.config.hardware import GPUS, find_gpu  # noqa: E402
from megaflow_trainer.config.planner import (  # noqa: E402
    Choice,
    Cluster,
    count_checkpoint_bytes,
    recommend,
    search,
)
from megaflow_trainer.config.step_time import LINK_RATE, PASSES, PRODUCT_RATE, bubble_share  # noqa: E402
from plan_rows import format_rows, judge_rows, summarise  # noqa: E402

MOST_SIZES = 16
LIMITS = (
    ("gpus", 1_000_000, "no cluster has more"),
    ("gpus_per_node", 1024, "give the GPUs of one machine, or of one NVLink domain"),
    ("top", 1_000_000, "there are fewer layouts"),
)
"""The planner's own counts, the most that each may be, and what to do about more."""
ASSUMPTION = (
    f"Speed is predicted: matrix products at {PRODUCT_RATE:.0%} of the dense bf16 peak, {PASSES:.0f} bytes moved\n"
    f"for each byte that forward keeps, links at {LINK_RATE:.0%} of their stated rate. The first two describe\n"
    "seven runs of this trainer on one H200 within 12 %; communication was not measured. Memory is exact for\n"
    "states; on those runs the sum was within 0.5 % of the measured peak."
)
OTHERS = (
    "Other tools: a model that fits with ZeRO 3 alone and is fine-tuned from a Hugging Face folder is less work in\n"
    "Accelerate or plain FSDP2, which wrap any model; DeepSpeed also offloads states to NVMe, megaflow does not.\n"
    "This trainer is for pretraining GPTs where tp, pp or cp are needed, or where one wants every layout to give\n"
    "the same numbers and the loader's time told apart."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 if nothing fits, 2 if the flags are at fault."""
    parser = make_parser()
    options, flags = parser.parse_known_args(argv)
    try:
        if options.rows:
            refuse_with_rows(parser, options, flags)
            with show_counts("planning", "rows") as progress:
                entries = list(judge_rows(progress))
            print(json.dumps(entries, indent=1) if options.json else format_rows(entries))
            return 0
        return show_plan(options, flags)
    except MegaflowError as error:
        say_error(str(error), as_json=options.json)
        return 2


def refuse_with_rows(parser: DeskParser, options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Refuse flags that `--rows`, whose models and GPUs are its own, would not look at.

    Raises:
        ConfigError: naming them.
    """
    own = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    named = [f"--{name.replace('_', '-')}" for name in own if name not in ("rows", "json")]
    if named or flags:
        raise ConfigError(f"--rows has models and GPUs of its own; drop {' '.join([*named, *flags])}, or --rows")


def make_parser() -> DeskParser:
    """The planner's own flags."""
    known = ", ".join(gpu.name for gpu in GPUS)
    parser = DeskParser(__doc__)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs in all (default: 8)")
    parser.add_argument("--gpu", default="H100", help=f"their kind: {known} (default: H100)")
    parser.add_argument("--memory-gb", type=float, help="10^9 bytes of memory a GPU (that of the kind if not given)")
    parser.add_argument("--reserve-gb", type=float, default=4.0, help="what is left free of it (default: 4)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs that NVLink joins (default: 8)")
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        nargs="+",
        default=[1],
        help="sizes that are tried, several are allowed (default: 1)",
    )
    parser.add_argument("--top", type=int, default=8, help="layouts that are shown (default: 8)")
    parser.add_argument("--rows", action="store_true", help="show the layouts that well-known guides recommend instead")
    parser.add_json()
    return parser


def fill_in(flags: Sequence[str]) -> list[str]:
    """The trainer's flags, with defaults for what a plan needs and neither they nor their recipe say.

    Raises:
        ConfigError, MissingFileError, FileAccessError: of the recipe.
    """
    values = parse_flags(flags).values
    seq_len = min(4096, values.get("model.max_positions") or 4096)
    base = list(flags)
    for fields, words in (
        (("data.seq_len",), ["--seq-length", str(seq_len)]),
        (("step.dtype",), ["--bf16"]),
        (("step.global_batch_size",), ["--global-batch-size", "1024"]),
        (("num_steps", "num_samples"), ["--train-iters", "1000"]),
        (("data.path", "data.is_mock", "data.train_path"), ["--data-path", "DATA"]),
    ):
        if not set(fields) & set(values):
            base += words
    if values.get("model.vocab_size") is None and "--config" not in flags:  # a recipe's tokenizer decides it
        base += ["--vocab-size", "50257"]
    return base


def show_plan(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """The ranked layouts of one model.

    Raises:
        ConfigError: naming the flag.
    """
    check_counts(options)
    check_sizes(options.micro_batch_size)
    gpu = find_gpu(options.gpu)
    memory_gb = gpu.memory_gb if options.memory_gb is None else options.memory_gb
    if not (0 <= options.reserve_gb < memory_gb <= 1e6):
        raise ConfigError(
            f"--memory-gb {memory_gb:g} less --reserve-gb {options.reserve_gb:g} leaves nothing to plan with; "
            "both are counted in GB of one GPU, more than 0 and at most 1,000,000 must be left"
        )
    cluster = Cluster(
        gpu=gpu,
        num_gpus=options.gpus,
        memory_gb=memory_gb,
        reserve_gb=options.reserve_gb,
        gpus_per_node=min(options.gpus_per_node, options.gpus),
    )
    base = fill_in(flags)
    with show_counts("planning", "layouts") as progress:
        found = search(base, cluster, options.micro_batch_size, progress)
    choices, best = found.choices, recommend(found.choices)
    if options.json:
        content = describe_json(choices[: options.top], best, cluster, flags)
        if best is None:
            content["error"] = explain_nothing(found.nearest, cluster)
        print(json.dumps(content, indent=1))
    if best is None:
        say_error(explain_nothing(found.nearest, cluster), as_json=False)
        return 1
    if options.json:
        return 0
    print(format_head(best, cluster))
    print(format_table(choices[: options.top]))
    print(format_choice(best, cluster, flags))
    print(f"\n{ASSUMPTION}\n{describe_rules(best)}\n{OTHERS}")
    return 0


def check_counts(options: argparse.Namespace) -> None:
    """Refuse counts that are none, beyond any cluster, or GPUs that do not make whole machines.

    Raises:
        ConfigError: naming the flag.
    """
    for name, most, remedy in LIMITS:
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value < 1:
            raise ConfigError(f"{flag} must be >= 1, got {value}")
        if value > most:
            raise ConfigError(f"{flag} must be <= {most:,}, got {value:,}; {remedy}")
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        sizes = (size for size in range(options.gpus_per_node, 0, -1) if options.gpus % size == 0)
        whole = options.gpus // options.gpus_per_node * options.gpus_per_node
        raise ConfigError(
            f"--gpus {options.gpus} is no multiple of --gpus-per-node {options.gpus_per_node}, and all machines start "
            f"as many ranks; give --gpus {whole} or {whole + options.gpus_per_node}, or --gpus-per-node {next(sizes)}"
        )


def check_sizes(sizes: Sequence[int]) -> None:
    """Refuse sizes of micro-batches that are none, or too many to try.

    Raises:
        ConfigError: naming the flag.
    """
    if min(sizes) < 1:
        raise ConfigError(f"--micro-batch-size must be >= 1, got {min(sizes)}")
    if len(sizes) > MOST_SIZES:
        raise ConfigError(f"--micro-batch-size takes up to {MOST_SIZES} sizes, got {len(sizes)}; drop some")


def explain_nothing(nearest: Choice | None, cluster: Cluster) -> str:
    """The layout that needs least, by how much it does not fit, and what could be changed."""
    if nearest is None:
        return "the trainer takes no layout of this model on these GPUs"
    short = (nearest.total_bytes - cluster.usable_bytes) / 1e9
    needed = math.ceil(cluster.num_gpus * nearest.total_bytes / cluster.usable_bytes)
    return (
        f"nothing fits on {cluster.num_gpus} GPUs with {cluster.memory_gb:g} GB: the layout that needs least, "
        f"{nearest.layout} with ZeRO {nearest.config.parallel.zero} and recompute "
        f"{nearest.config.recompute.granularity}, takes {nearest.total_bytes / 1e9:.1f} GB a GPU, {short:.1f} too much"
        f"; try about {needed} GPUs, a shorter --seq-length, --optimizer-cpu-offload or --all-bf16"
    )


def format_head(best: Choice, cluster: Cluster) -> str:
    """What is planned, in one line."""
    config = best.config
    return (
        f"{count_parameters(config.model) / 1e9:.2f} B parameters, sequences of {config.data.seq_len}, global batch "
        f"{config.step.global_batch_size}, {config.step.dtype}; {cluster.num_gpus} x {cluster.gpu.name} with "
        f"{cluster.memory_gb:g} GB, of which {cluster.usable_bytes / 1e9:g} may be used\n"
    )


def format_table(choices: Sequence[Choice]) -> str:
    """The layouts, the fastest first."""
    lines = [
        f"{'layout':<20} ZeRO micro recompute  schedule      GB/GPU  bubble  comm.    MFU    tokens/s",
    ]
    for choice in choices:
        config, time = choice.config, choice.time
        schedule = config.parallel.schedule if config.parallel.pp > 1 else "-"
        lines.append(
            f"{choice.layout!s:<20} {config.parallel.zero:>4} {config.step.sizes.micro_batch_size:>5} "
            f"{config.recompute.granularity:<10} {schedule:<12} {choice.total_bytes / 1e9:>7.1f} "
            f"{bubble_share(config.parallel, config.step.sizes.num_micro_batches):>7.1%} "
            f"{time.communication_s / time.total_s:>6.1%} {time.mfu:>6.1%} {time.tokens_per_s:>11,.0f}"
        )
    return "\n".join(lines)


def format_choice(choice: Choice, cluster: Cluster, flags: Sequence[str]) -> str:
    """The recommended layout in full."""
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in choice.device.items())
    host = "".join(f", {name} {size / 1e9:.1f} in the CPU's memory" for name, size in choice.host.items())
    time = choice.time
    names = ("compute", "tensor", "context", "expert", "pipeline", "data", "bubble", "optimizer")
    seconds = ", ".join(f"{name} {getattr(time, f'{name}_s'):.2f}" for name in names)
    stage = f" on pipeline stage {choice.stage}, the fullest" if choice.config.parallel.pp > 1 else ""
    return "\n".join(
        [
            f"\nrecommended: {choice.layout} (the simplest within 10 % of the fastest)",
            f"  memory of a GPU{stage} (GB): {parts}{host} = {choice.total_bytes / 1e9:.1f}",
            f"  a checkpoint takes {count_checkpoint_bytes(choice.config) / 1e9:,.0f} GB",
            f"  a step (s): {seconds} = {time.total_s:.2f}",
            f"  MFU {time.mfu:.1%} with all of attention counted, {time.mfu_causal:.1%} with what a causal mask leaves",
            f"\n{format_command(choice, cluster, flags)}",
        ]
    )


def format_command(choice: Choice, cluster: Cluster, flags: Sequence[str]) -> str:
    """The command line to paste; DATA is the prefix of the data."""
    nodes = math.ceil(cluster.num_gpus / cluster.gpus_per_node)
    launch = ["torchrun"]
    if nodes > 1:
        launch += ["--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_endpoint", "FIRST_HOST:29500"]
    launch += ["--nproc_per_node", str(cluster.num_gpus // nodes), "trainer/pretrain.py"]
    words = [*launch, *choice.flags, *save_flags(choice, cluster)]
    lines = [""]
    for word in map(shlex.quote, words):
        if word.startswith("--") and len(lines[-1]) + len(word) > 90:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def save_flags(choice: Choice, cluster: Cluster) -> list[str]:
    """Checkpoints, where the trainer has them for this layout."""
    try:
        read_command([*choice.flags, "--save", "CHECKPOINTS"], world_size=cluster.num_gpus)
    except MegaflowError:
        return []
    return ["--save", "CHECKPOINTS", "--save-interval", "500"]


def describe_rules(best: Choice) -> str:
    """Rules of thumb that the ranking can be held against."""
    notes = [
        "Rules of thumb: tp at most the GPUs that NVLink joins; pp where a model does not fit otherwise (above 70B);",
        "cp above 8k tokens; the rest to dp; micro batch 4-8 at 7B, 1-2 at 70B, 1 at 405B.",
    ]
    if count_checkpoint_bytes(best.config) > 1e12:
        notes.append("Checkpoints: keep room for two of them, several TB.")
    return "\n".join(notes)


def describe_json(
    choices: Sequence[Choice], best: Choice | None, cluster: Cluster, flags: Sequence[str]
) -> dict[str, Any]:
    """Everything for scripts."""
    rows = [
        summarise(choice, cluster)
        | {
            "layout": str(choice.layout),
            "flags": list(choice.flags),
            "bubble": bubble_share(choice.config.parallel, choice.config.step.sizes.num_micro_batches),
            "communication": choice.time.communication_s / choice.time.total_s,
            "mfu_causal": choice.time.mfu_causal,
        }
        for choice in choices
    ]
    found: dict[str, Any] = {"gpus": cluster.num_gpus, "usable_gb": cluster.usable_bytes / 1e9, "layouts": rows}
    if best is not None:
        found["recommended"] = {"layout": str(best.layout), "command": format_command(best, cluster, flags)}
        found["checkpoint_gb"] = count_checkpoint_bytes(best.config) / 1e9
    return found


if __name__ == "__main__":
    sys.exit(run_door(main))
