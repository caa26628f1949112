"""Which layers of a model are on which stage of the pipeline, as plain arithmetic.

A model is cut into chunks, one or several a rank. By rule they are even; where layers do not divide, those in the
middle get one more, since the first chunk has the embedding and the last one the output projection. Or a layout says
it, in Megatron's notation: chunks are divided by `|`, `E` is the embedding, `t` a layer, `t*3` three of them, `m` a
block of multi-token prediction, `L` the loss. No layer is lost: one that is missing or too many is an error.
"""

from __future__ import annotations

import functools
import itertools
import re

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig

_V_SHAPED = "zbv"
_PART = re.compile(r"(E?)((?:t(?:\*\d{1,9})?)*)((?:m(?:\*\d{1,9})?)*)(L?)")


def count_chunks(parallel: ParallelConfig) -> int:
    """Chunks of the whole model."""
    return parallel.pp * (2 if parallel.schedule == _V_SHAPED else parallel.virtual_stages)


def own_chunks(parallel: ParallelConfig, pp_rank: int) -> list[int]:
    """Chunks of a pipeline rank: every pp-th, or under zbv one on the way down and one on the way up."""
    if parallel.schedule == _V_SHAPED:
        return [pp_rank, 2 * parallel.pp - 1 - pp_rank]
    return list(range(pp_rank, count_chunks(parallel), parallel.pp))


@functools.lru_cache(maxsize=8)
def split_layers(model: ModelConfig, parallel: ParallelConfig) -> tuple[range, ...]:
    """Layers of each chunk.

    Raises:
        ConfigError: if there are fewer layers than chunks, or the layout does not hold each layer once.
    """
    num_chunks = count_chunks(parallel)
    if parallel.stage_layout is not None:
        lengths = _read_layout(parallel.stage_layout, model, num_chunks)
    elif model.num_layers < num_chunks:
        raise ConfigError(
            f"model.num_layers {model.num_layers} is less than the {num_chunks} chunks of parallel.pp {parallel.pp} "
            f"with {num_chunks // parallel.pp} a rank; use fewer stages or chunks"
        )
    else:
        lengths = _divide(model.num_layers, num_chunks)
    ends = list(itertools.accumulate(lengths))
    return tuple(range(end - length, end) for end, length in zip(ends, lengths, strict=True))


def describe_stages(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Which layers each chunk holds, and on which rank of the pipeline, in words."""
    rank_of = {chunk: rank for rank in range(parallel.pp) for chunk in own_chunks(parallel, rank)}
    runs = [f"{run.start}-{run.stop - 1}" if run else "none" for run in split_layers(model, parallel)]
    return ", ".join(f"{run} on {rank_of[chunk]}" for chunk, run in enumerate(runs))


def _divide(num_layers: int, num_chunks: int) -> list[int]:
    """Even lengths; what is left over goes to the middle, then to the first chunk."""
    length, more = divmod(num_layers, num_chunks)
    longer = {*[*range(1, num_chunks - 1), 0, num_chunks - 1][:more]}
    return [length + (chunk in longer) for chunk in range(num_chunks)]


def _read_layout(text: str, model: ModelConfig, num_chunks: int) -> list[int]:
    words = text.replace(" ", "").replace(",", "").split("|")
    if len(words) != num_chunks:
        raise ConfigError(f"parallel.stage_layout {text!r} has {len(words)} chunks, and the pipeline {num_chunks}")
    parts = [_PART.fullmatch(word) for word in words]
    for word, part in zip(words, parts, strict=True):
        if part is None:
            raise ConfigError(
                f"parallel.stage_layout {text!r}: {word!r} is not a chunk; write E, t, m and L in this order, t*3 for "
                "three layers, and | between chunks"
            )
    found = [part for part in parts if part is not None]
    lengths = [_count(part[2]) for part in found]
    if sum(lengths) != model.num_layers:
        raise ConfigError(
            f"parallel.stage_layout {text!r} holds {sum(lengths)} layers ({' + '.join(map(str, lengths))}), and "
            f"model.num_layers is {model.num_layers}"
        )
    ends = {"E": [bool(part[1]) for part in found], "L": [bool(part[4]) for part in found]}
    if any(ends["E"][1:]) or any(ends["L"][:-1]) or any(part[3] for part in found[:-1]):
        raise ConfigError(
            f"parallel.stage_layout {text!r}: the embedding E belongs to the first chunk, m and the loss L to the last"
        )
    return lengths


def _count(run: str) -> int:
    return sum(int(times or 1) for times in re.findall(r"[tm](?:\*(\d+))?", run))


def check_micro_batches(parallel: ParallelConfig, num_micro_batches: int) -> list[str]:
    """Schedules of several chunks a rank take micro-batches in equal rounds."""
    rounds = max(1, num_micro_batches // parallel.pp)
    if parallel.pp == 1 or parallel.schedule not in ("interleaved", "zero_bubble") or num_micro_batches % rounds == 0:
        return []
    fault = f"parallel.schedule {parallel.schedule} takes micro-batches in rounds of parallel.pp {parallel.pp}"
    return [f"{fault}, and there are {num_micro_batches}; use {num_micro_batches // parallel.pp * parallel.pp}"]


def check_stages(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """The layers can be cut as asked, and the schedule suits the chunks."""
    own = parallel
    if own.pp == 1:
        fits = own.virtual_stages == 1 and own.stage_layout is None
        return [] if fits else ["parallel.virtual_stages and stage_layout are for parallel.pp above 1; drop them"]
    faults = []
    if own.schedule in ("gpipe", "1f1b", _V_SHAPED) and own.virtual_stages > 1:
        faults.append(
            f"parallel.schedule {own.schedule} has its own number of chunks a rank, and parallel.virtual_stages is "
            f"{own.virtual_stages}; drop it or use interleaved"
        )
    if own.schedule == "interleaved" and own.virtual_stages == 1:
        faults.append("parallel.schedule interleaved needs several chunks a rank; give parallel.virtual_stages 2")
    try:
        split_layers(model, own)
    except ConfigError as error:
        faults.append(str(error))
    return faults
