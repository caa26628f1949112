"""The shards of a job as tasks of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow.errors import ConfigError, MegaflowError, OutputBusyError, first_line, tell_break
from megaflow.inputs import CoreInput, Input, plan_shards, resolve_inputs
from megaflow.merging import merge_pairs, sum_reports
from megaflow.preprocessing import PreprocessOptions, PreprocessReport, check_tokenizer, default_prefix
from megaflow.shards import done_note, run_shard, shard_prefix
from megaflow.tokenizer import Tokenizer

SHARDS_PER_SLOT = 4
"""Shards for each task that can run at once: a lost node then costs little, and the last ones end together."""

THREADS_PER_TASK = 8
"""At most, unless it is said how many: one thread reads for all of a task."""

MAX_RETRIES = 8
"""Times that a shard may lose its node."""

LOCK_WAIT_S = 300.0
"""How long a shard that moved waits for the lock of its lost predecessor, which the file system may free late."""

Notify = Callable[[int, int, int], None]
"""Called with shards done, shards in all, documents done."""


def preprocess_on_ray(
    inputs: Input | Sequence[Input],
    options: PreprocessOptions,
    *,
    tokenizer: Tokenizer,
    num_shards: int | None = None,
    threads: int | None = None,
    notify: Notify | None = None,
) -> PreprocessReport:
    """Runs all shards as tasks of a Ray cluster and merges their results.

    It joins the cluster that `ray.init()` finds, and makes one of this machine if there is none. Inputs and output must
    be reachable under the same names from every node, and megaflow must be installed there. A shard whose node is lost
    is run again elsewhere and goes on from its journal; the same call, made again, does not repeat complete shards.

    Args:
        inputs: as `preprocess` takes them, but for streams, which other machines cannot read.
        options: of the job; its `workers` counts for nothing.
        tokenizer: its files must be at the same place on every node.
        num_shards: parts that the inputs are cut into; by default four for each task that can run at once.
        threads: of a task; by default the processors of the smallest node, at most eight.
        notify: called when a shard is done.

    Raises:
        ConfigError: if the package ray is missing, an input is a stream, or no node has as many processors as threads.
        TokenizerError: if the tokenizer lacks what is asked for, before the cluster is joined.
        Otherwise as `preprocess`; the first shard that fails stops the job.
    """
    try:
        import ray
    except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
        found = f"--executor ray needs the package ray{tell_break(error, 'ray')}"
        raise ConfigError(f"{found}: pip install 'megaflow[ray]'") from None
    check_tokenizer(options, tokenizer)
    start_s = time.perf_counter()
    notes: list[str] = []
    resolved = [_for_any_node(found) for found in resolve_inputs(inputs, takes_text=_takes_text(options), notes=notes)]
    prefix = str(Path(options.output_prefix or default_prefix(inputs)).absolute())
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    processors = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    threads = threads or max(1, min([THREADS_PER_TASK, *(count for count in processors if count > 0)]))
    if threads > max(processors, default=0):
        raise ConfigError(f"--workers {threads}: no node has as many processors; the largest has {max(processors)}")
    slots = sum(count // threads for count in processors)
    shards = plan_shards(resolved, options.input_format, num_shards or slots * SHARDS_PER_SLOT)
    task = ray.remote(num_cpus=threads, max_retries=MAX_RETRIES, retry_exceptions=False)(run_shard_anywhere)
    settings = replace(options, workers=threads)
    prefixes = [shard_prefix(prefix, index, len(shards)) for index in range(len(shards))]
    pending = [task.remote(shard, name, settings, tokenizer) for shard, name in zip(shards, prefixes, strict=True)]
    reports = _collect(ray, pending, notify)
    report = merge_pairs(prefix, reports, sum_reports(reports, time.perf_counter() - start_s), options=options)
    for name in prefixes:
        done_note(name).unlink(missing_ok=True)
    return replace(report, workers=slots * threads, warnings=[*notes, *report.warnings])


def run_shard_anywhere(
    shard: list[CoreInput], prefix: str, options: PreprocessOptions, tokenizer: Tokenizer
) -> PreprocessReport:
    """`run_shard` on whatever node: a predecessor on a lost node may hold its lock a while longer."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return run_shard(shard, prefix, options, tokenizer)
        except OutputBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _takes_text(options: PreprocessOptions) -> bool:
    return options.input_format.startswith("text")


def _for_any_node(found: CoreInput) -> CoreInput:
    kind, name, source, place = found
    if kind == "arrow" or name == "-":
        raise ConfigError("--executor ray: standard input and tables cannot be read from other machines; give files")
    return (kind, str(Path(name).absolute()), source, place) if kind == "file" else found


def _collect(ray: Any, pending: list[Any], notify: Notify | None) -> list[PreprocessReport]:
    """Reports of all tasks, in their order; at the first fault the others are stopped."""
    left, done_documents = list(pending), 0
    try:
        while left:
            ready, left = ray.wait(left, num_returns=1)
            for report in ray.get(ready):
                done_documents += sum(pair.documents for pair in report.pairs[:1])
            if notify is not None:
                notify(len(pending) - len(left), len(pending), done_documents)
        return list(ray.get(pending))
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, MegaflowError):
            raise cause from None
        raise
    except ray.exceptions.RayError as error:
        raise MegaflowError(
            f"the cluster lost a shard {MAX_RETRIES + 1} times, or itself ({type(error).__name__}: "
            f"{first_line(error)}); the same command goes on with what is done"
        ) from None
    finally:
        for task in left:
            ray.cancel(task, force=True)
