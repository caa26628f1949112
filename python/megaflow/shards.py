"""One job on many machines: shards by byte range or row group, each with a result of its own, joined by a merge.

A shard is a run of the inputs in reading order, so the merged result is that of one machine, byte for byte.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from megaflow.errors import ConfigError
from megaflow.inputs import CoreInput, Input, plan_shards, resolve_inputs
from megaflow.preprocessing import PreprocessOptions, PreprocessReport, Progress, default_prefix, run_job
from megaflow.tokenizer import Tokenizer

SHARDS_PER_NODE_CPU = 2
"""Shards for each processor of a Ray cluster: a lost node then costs little, and each is worth its start."""


def parse_shard(text: str) -> tuple[int, int]:
    """`I/N` as numbers, I from 0.

    Raises:
        ConfigError: if it is something else.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--shard must be I/N with I from 0 to N-1, for example 0/8, got {text!r}")
    return int(found[1]), int(found[2])


def shard_prefix(prefix: str, index: int, num_shards: int) -> str:
    """Output prefix of a shard; the names of all shards sort in their order."""
    return f"{prefix}_shard_{index:05d}-of-{num_shards:05d}"


def preprocess_shard(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions,
    index: int,
    num_shards: int,
    *,
    tokenizer: Tokenizer,
    progress: Progress | None = None,
) -> PreprocessReport:
    """Does shard `index` of `num_shards`; every node of a job array calls it with its own index.

    A shard that gets nothing (fewer pieces of input than shards) writes an empty pair.

    Raises:
        As `preprocess`.
    """
    resolved = resolve_inputs(inputs, takes_text=options.input_format.startswith("text"))
    prefix = shard_prefix(options.output_prefix or default_prefix(inputs), index, num_shards)
    shard = plan_shards(resolved, options.input_format, num_shards)[index]
    return run_job(shard, prefix, replace(options, allow_no_documents=True), tokenizer, progress)


def preprocess_on_ray(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions,
    *,
    tokenizer: Tokenizer,
    num_shards: int | None = None,
) -> PreprocessReport:
    """Runs all shards as tasks of a Ray cluster and merges their results.

    The inputs and the output must be reachable under the same names from every node. A task whose node is lost is run
    again elsewhere and goes on from its journal.

    Raises:
        ConfigError: if the package ray is missing.
        Otherwise as `preprocess`; the first shard that fails stops the job.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--executor ray needs the package ray: pip install 'megaflow[ray]'") from None
    from megaflow.merging import merge_pairs, sum_reports

    start_s = time.perf_counter()
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    resolved = resolve_inputs(inputs, takes_text=options.input_format.startswith("text"))
    prefix = options.output_prefix or default_prefix(inputs)
    if num_shards is None:
        num_shards = max(1, int(ray.cluster_resources().get("CPU", 1)) * SHARDS_PER_NODE_CPU)
    shards = plan_shards(resolved, options.input_format, num_shards)
    task = ray.remote(num_cpus=options.workers, max_retries=8, retry_exceptions=False)(_run_shard)
    settings = replace(options, allow_no_documents=True)
    pending = [
        task.remote(shard, shard_prefix(prefix, index, num_shards), settings, tokenizer)
        for index, shard in enumerate(shards)
    ]
    reports: list[PreprocessReport] = ray.get(pending)
    total = sum_reports(reports, time.perf_counter() - start_s)
    return merge_pairs(prefix, reports, total, keys=options.json_keys)


def _run_shard(
    shard: list[CoreInput], prefix: str, options: PreprocessOptions, tokenizer: Tokenizer
) -> PreprocessReport:
    return run_job(shard, prefix, options, tokenizer)
