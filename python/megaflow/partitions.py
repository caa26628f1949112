"""Megatron-LM's `--partitions`: an order of documents, made without rewriting the input."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megaflow.errors import ConfigError
from megaflow.inputs import Input
from megaflow.merging import merge_pairs, sum_reports
from megaflow.preprocessing import PreprocessOptions, PreprocessReport, default_prefix, preprocess
from megaflow.tokenizer import Tokenizer


def run_partitions(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions,
    partitions: int,
    *,
    tokenizer: Tokenizer | None = None,
    keep_parts: bool = False,
) -> PreprocessReport:
    """Makes the pairs of `--partitions N`: lines 0, N, 2N ... come first, then lines 1, N + 1 and so on.

    The input is read once for each partition, and each reading tokenizes its own lines alone. Nothing is copied.
    `--keep-sequential-samples` needs none of this: its order is that of one job.

    Args:
        inputs: as `preprocess` takes them, but for streams, which can be read once only.
        options: of the job.
        partitions: at least 1.
        tokenizer: as `preprocess` takes it.
        keep_parts: leave the pairs of the partitions as `PREFIX_0_KEY_document` and so on, as Megatron-LM does; else
            they are made in a folder beside the output and removed.

    Returns:
        What was done, all partitions together.

    Raises:
        ConfigError: if `partitions` is less than 1, or an input is a stream.
        MegaflowError: as `preprocess` and `merge`.
    """
    if partitions < 1:
        raise ConfigError(f"--partitions must be at least 1, got {partitions}")
    several = [inputs] if isinstance(inputs, (str, os.PathLike)) or not isinstance(inputs, Sequence) else list(inputs)
    if any(not isinstance(item, (str, os.PathLike)) or os.fspath(item) == "-" for item in several):
        raise ConfigError("--partitions reads its inputs several times, which standard input and tables do not allow")
    prefix = Path(options.output_prefix or default_prefix(several))
    folder = prefix.with_name(f"{prefix.name}.partitions")
    parts = [
        prefix.with_name(f"{prefix.name}_{index}") if keep_parts else folder / str(index) for index in range(partitions)
    ]
    start_s = time.perf_counter()
    tokenizer = tokenizer or Tokenizer.gpt2()
    done = []
    for index, part in enumerate(parts):
        settings = dataclasses.replace(
            options, output_prefix=str(part), every=(index, partitions), allow_no_documents=True
        )
        done.append(preprocess(several, settings, tokenizer=tokenizer))
    total = sum_reports(done, time.perf_counter() - start_s)
    report = merge_pairs(str(prefix), done, total, options=options, keep_parts=keep_parts)
    if not keep_parts:
        shutil.rmtree(folder, ignore_errors=True)
    return report
