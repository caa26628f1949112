"""`megaflow bench-loader PREFIX`."""

import resource
import time
from collections.abc import Sequence
from typing import Any

from megaflow.cli import exit_codes
from megaflow.cli.options import add_json, build_parser, print_json
from megaflow.dataset import GPTDataset
from megaflow.errors import ConfigError
from megaflow.loader import TOKEN_TYPES, Loader

_TEXT = "Measure how fast batches come from this disk, and whether that feeds a model."


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow bench-loader") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parsed = _parser(prog).parse(arguments)
        _check(parsed)
        content = measure(parsed)
        print_json(content) if parsed.json else print("\n".join(_words(content)))

    return exit_codes.run(prog, command, arguments=arguments)


def _parser(prog: str) -> Any:
    parser = build_parser(prog, _TEXT)
    parser.add_argument("prefix", metavar="PREFIX", help="a pair, or a file of text, Parquet or Arrow to be streamed")
    group = parser.add_argument_group("what is read")
    group.add_argument("--seq-length", type=int, default=2048, metavar="T", help="tokens of a sample (default: 2048)")
    group.add_argument("--micro-batch-size", type=int, default=8, metavar="B", help="samples of a batch (default: 8)")
    group.add_argument("--seconds", type=float, default=3.0, help="time to measure for (default: 3)")
    group.add_argument("--num-threads", type=int, default=1, metavar="N", help="threads that gather (default: 1)")
    group.add_argument("--prefetch", type=int, default=4, metavar="N", help="batches gathered ahead (default: 4)")
    group.add_argument("--dtype", choices=TOKEN_TYPES, default="int64", help="type of the tokens (default: int64)")
    group.add_argument("--seed", type=int, default=1234, help="of the order (default: 1234)")
    group = parser.add_argument_group("what it has to feed")
    group.add_argument(
        "--tokens-per-s-per-gpu", type=float, metavar="X", help="what the model trains, from the log of a run"
    )
    group.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that read this disk (default: 1)")
    add_json(parser)
    return parser


def _check(parsed: Any) -> None:
    if parsed.seconds <= 0:
        raise ConfigError(f"--seconds {parsed.seconds}: expected more than 0")
    if parsed.gpus < 1:
        raise ConfigError(f"--gpus {parsed.gpus}: expected 1 or more")
    if parsed.tokens_per_s_per_gpu is not None and parsed.tokens_per_s_per_gpu <= 0:
        raise ConfigError(f"--tokens-per-s-per-gpu {parsed.tokens_per_s_per_gpu}: expected more than 0")


def measure(parsed: Any) -> dict[str, Any]:
    """Reads batches for a while; what came, what it cost, and whether it is enough. Plain types."""
    started = time.perf_counter()
    dataset = _dataset(parsed)
    settings = {"num_threads": parsed.num_threads, "prefetch": parsed.prefetch, "dtype": parsed.dtype}
    with Loader(dataset, parsed.micro_batch_size, **settings) as loader:
        batches = iter(loader)
        if next(batches, None) is None:
            raise ConfigError(f"{parsed.prefix}: has fewer samples than one batch; lower --micro-batch-size")
        first_s = time.perf_counter() - started
        count, cpu, begin = 0, _cpu_seconds(), time.perf_counter()
        passed = 0.0
        is_whole = False
        while passed < parsed.seconds:
            if next(batches, None) is None:
                is_whole = True
                break
            count += 1
            passed = time.perf_counter() - begin
        passed, cpu = time.perf_counter() - begin, _cpu_seconds() - cpu
        stats = loader.stats()
    samples = count * parsed.micro_batch_size
    rate = samples * parsed.seq_length / max(passed, 1e-9)
    content = {
        "prefix": parsed.prefix,
        "kind": type(dataset).__name__,
        "seq_length": parsed.seq_length,
        "micro_batch_size": parsed.micro_batch_size,
        "num_threads": parsed.num_threads,
        "dtype": parsed.dtype,
        "samples": samples,
        "read_all": is_whole,
        "wall_s": passed,
        "cpu_s": cpu,
        "first_batch_s": first_s,
        "tokens_per_s": rate,
        "samples_per_s": samples / max(passed, 1e-9),
        "samples_per_cpu_s": samples / max(cpu, 1e-9),
        "disk_bytes_per_s": stats["disk_bytes"] / max(passed, 1e-9),
        "cache_misses": stats["cache_misses"],
        "cache_misses_per_sample": stats["cache_misses"] / max(samples, 1),
        "gpus": parsed.gpus,
        "tokens_per_s_per_gpu": parsed.tokens_per_s_per_gpu,
    }
    if parsed.tokens_per_s_per_gpu is not None:
        needed = parsed.tokens_per_s_per_gpu * parsed.gpus
        # Each rank of a stream makes the whole row of samples; the ranks of a pair read their own ones.
        is_stream = hasattr(dataset, "open_at")
        content |= {"needed_tokens_per_s": needed, "per_process": is_stream, "margin": rate / needed}
        content |= {"is_enough": rate >= needed}
    return content


def _dataset(parsed: Any) -> Any:
    from megaflow.errors import MissingFileError
    from megaflow.indexed import resolve_prefix

    try:
        prefix = resolve_prefix(parsed.prefix)
    except MissingFileError as missing:
        from pathlib import Path

        from megaflow.streaming import StreamingDataset

        if "://" not in parsed.prefix and not Path(parsed.prefix).exists():
            raise missing from None
        return StreamingDataset(
            parsed.prefix, seq_len=parsed.seq_length, seed=parsed.seed, num_threads=max(parsed.num_threads, 1)
        )
    return GPTDataset(prefix, seq_len=parsed.seq_length, seed=parsed.seed)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _words(content: dict[str, Any]) -> list[str]:
    what = "streamed and tokenized" if content["kind"] == "StreamingDataset" else "random order"
    size = f"{content['seq_length']} tokens a sample, batches of {content['micro_batch_size']} as {content['dtype']}"
    waits = content["cache_misses_per_sample"]
    lines = [
        f"{content['prefix']}: {size}, {content['num_threads']} threads, {what}",
        f"  first batch   {content['first_batch_s'] * 1e3:,.1f} ms after the start",
        f"  tokens/s      {content['tokens_per_s']:,.0f}",
        f"  samples/s     {content['samples_per_s']:,.0f} ({content['samples_per_cpu_s']:,.0f} per CPU second)",
        f"  from disk     {content['disk_bytes_per_s'] / 1e6:,.1f} MB/s, {waits:,.2f} waits for the disk a sample",
    ]
    if content["read_all"]:
        lines.append("  note          all samples were read before the time was up: a short measurement")
    if content["cache_misses"] == content["disk_bytes_per_s"] == 0 and content["kind"] != "StreamingDataset":
        lines.append("  note          the page cache held everything: a cold disk is slower")
    if content["tokens_per_s_per_gpu"] is None:
        lines.append("  (--tokens-per-s-per-gpu X --gpus N says whether that feeds a model)")
        return lines
    verdict = "enough" if content["is_enough"] else "NOT enough"
    needed = f"{content['gpus']} x {content['tokens_per_s_per_gpu']:,.0f} = {content['needed_tokens_per_s']:,.0f}"
    return [*lines, f"  needed        {needed} tokens/s: {verdict}, {content['margin']:,.2f} times that"]
