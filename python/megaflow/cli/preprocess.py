"""`megaflow-preprocess corpus.jsonl`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaflow.cli import exit_codes
from megaflow.cli.arguments import build_parser, notes_on, options_of
from megaflow.cli.progress import show_progress
from megaflow.errors import ConfigError
from megaflow.preprocessing import PreprocessOptions, PreprocessReport, Progress, default_prefix, preprocess
from megaflow.tokenizer import GPT2, Tokenizer


def main(
    arguments: Sequence[str] | None = None, *, prog: str = "megaflow-preprocess", megatron_defaults: bool = False
) -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """
    staging: list[Path] = []

    def command() -> None:
        parsed = build_parser(prog, megatron_defaults=megatron_defaults).parse(arguments)
        inputs, options = options_of(parsed)
        if parsed.shard is None and parsed.executor == "threads":
            staging.append(Path(f"{options.output_prefix or default_prefix(inputs)}.partial"))
        tokenizer = choose_tokenizer(parsed)
        if options.add_special_tokens and not tokenizer.added_special_tokens:
            # Megatron's default asks every Hugging Face tokenizer, also one that has nothing to add; nobody asked here.
            options = replace(options, add_special_tokens=False)
        for note in notes_on(parsed):
            print(f"{prog}: {note}", file=sys.stderr)
        with show_progress(parsed.log_interval) as progress:
            report = run(parsed, inputs, options, tokenizer, progress)
        for warning in report.warnings:
            print(f"{prog}: warning: {warning}", file=sys.stderr)
        print(summary(report, tokenizer, options))

    def on_stop(is_data_at_fault: bool) -> str:
        kept = next((folder for folder in staging if (folder / "journal.json").exists()), None)
        if kept is None:
            return ""
        how = "with --on-bad-record skip the job" if is_data_at_fault else "the same command"
        return f"what is done is kept in {kept}, and {how} goes on from there"

    return exit_codes.run(prog, command, on_stop=on_stop)


def run(
    arguments: argparse.Namespace,
    inputs: list[str],
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    progress: Progress,
) -> PreprocessReport:
    """Runs the job here, one shard of it, or all of it on a Ray cluster.

    Raises:
        ConfigError: if the arguments ask for two of these.
    """
    is_split = arguments.shard is not None or arguments.executor != "threads"
    if arguments.num_shards is not None and arguments.executor != "ray":
        raise ConfigError("--num-shards needs --executor ray; one shard of many is --shard I/N")
    if is_split and arguments.partitions > 1 and not arguments.keep_sequential_samples:
        raise ConfigError(
            "--partitions orders the lines of all inputs: it cannot be had with --shard or --executor ray"
        )
    if arguments.partitions > 1 and not arguments.keep_sequential_samples:
        from megaflow.partitions import run_partitions

        return run_partitions(inputs, options, arguments.partitions, tokenizer=tokenizer)
    if arguments.shard is None and arguments.executor == "threads":
        return preprocess(inputs, options, tokenizer=tokenizer, progress=progress)
    from megaflow import shards

    if arguments.executor == "ray":
        from megaflow.ray_executor import preprocess_on_ray

        if arguments.shard is not None:
            raise ConfigError("--shard and --executor ray contradict each other: ray runs all shards")
        return preprocess_on_ray(
            inputs,
            options,
            tokenizer=tokenizer,
            num_shards=arguments.num_shards,
            threads=arguments.workers,
            notify=lambda done, total, documents: print(
                f"{done} of {total} shards, {documents:,} documents", file=sys.stderr, flush=True
            ),
        )
    index, num_shards = shards.parse_shard(arguments.shard)
    return shards.preprocess_shard(inputs, options, index, num_shards, tokenizer=tokenizer, progress=progress)


def choose_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the arguments name.

    Raises:
        ConfigError: if they name two, or one that is not available.
    """
    named = {
        "tokenizer_type": arguments.tokenizer_type,
        "tokenizer_model": arguments.tokenizer_model,
        "vocab_file": arguments.vocab_file,
        "merge_file": arguments.merge_file,
    }
    if arguments.tokenizer is not None:
        second = next((name for name, value in named.items() if value is not None), None)
        if second is not None:
            raise ConfigError(f"--tokenizer and --{second.replace('_', '-')} name two tokenizers; give one of them")
        return Tokenizer.from_file(arguments.tokenizer)
    tokenizer = Tokenizer.from_files(**named)
    if arguments.tokenizer_type is None and arguments.vocab_file is not None:
        print(f"vocabulary and merges without --tokenizer-type: {GPT2}", file=sys.stderr)
    return tokenizer


def summary(report: PreprocessReport, tokenizer: Tokenizer, options: PreprocessOptions) -> str:
    """What a job did, for people."""
    end = "end of document appended" if options.append_eod else "end of document not appended"
    added = [name for name, is_added in (("BOS", options.add_bos), ("EOS", options.add_eos)) if is_added]
    end = f"{' and '.join(added)} added, {end}" if added else end
    lines = []
    for pair in report.pairs:
        size = sum(Path(f"{pair.prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx"))
        empty = f" ({pair.empty_documents:,} empty)" if pair.empty_documents else ""
        lines += [
            f"{pair.prefix}.bin .idx .json",
            f"  documents  {pair.documents:,}{empty}",
            f"  tokens     {pair.tokens:,} as {pair.dtype}, {end}",
            f"  size       {_megabytes(size)} from {_megabytes(report.input_bytes)}",
        ]
    used = tokenizer._core.eod(options.eod_token) if options.append_eod else None
    eod = "" if used is None else f", end of document {used[1]}"
    lines.append(f"tokenizer    {tokenizer.type}, {tokenizer.vocab_size:,} ids{eod}, by {tokenizer.engine}")
    wall_s = max(report.wall_s, 1e-9)
    rates = f"{report.text_bytes / 1e6 / wall_s:.1f} MB/s of text, {report.tokens / wall_s:,.0f} tokens/s"
    threads = f"{report.workers} thread{'s' if report.workers > 1 else ''}"
    lines.append(f"time         {report.wall_s:.2f} s, {report.cpu_s:.2f} CPU s on {threads}: {rates}")
    if report.resumed_documents:
        lines.append(f"resumed      {report.resumed_documents:,} documents were done before")
    if report.special_hits:
        policy = options.special_tokens_in_text
        became = {"text": "kept as text", "encode": "encoded as the token"}.get(policy, policy)
        lines.append(f"special      {report.special_hits:,} places spell a special token, {became}")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.rejected.items()))
    where = f" ({reasons}), see {report.rejects_path}" if report.rejected else ""
    lines.append(f"rejected     {report.num_rejected:,} of {report.records:,} records{where}")
    return "\n".join(lines)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


if __name__ == "__main__":
    raise SystemExit(main())
