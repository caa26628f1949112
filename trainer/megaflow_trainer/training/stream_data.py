"""The data of a run that reads text as it is: Parquet, Arrow or JSON lines, tokenized while it trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow import Loader, StreamingDataset, Tokenizer, resolve_prefix
from megaflow.errors import ConfigError, MissingFileError, NoDocumentsError
from megaflow_trainer.config.sections import DataConfig, TrainConfig

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")


def is_text(named: str) -> bool:
    """Whether `--data-path` names text and no pair: a URL, a folder, or a file that is no part of a pair."""
    if _URL.match(named):
        return True
    try:
        resolve_prefix(named)
    except MissingFileError:
        return Path(named).exists() or named.startswith("@") or any(mark in named for mark in "*?[")
    return False


@dataclass(frozen=True, slots=True)
class TextData:
    """Streams over the train and valid parts of text, with notes for the log; None where a part is empty."""

    train: StreamingDataset
    valid: StreamingDataset | None
    notes: list[str]


def is_text_run(data: DataConfig) -> bool:
    """Whether the first thing that the flags name is text."""
    named = data.path or data.train_path
    return bool(named) and is_text(named[0])


def open_text(config: TrainConfig, tokenizer: Tokenizer) -> TextData:
    """The streams over what the flags name: parts of --data-path by --split, or a path for each part.

    Raises:
        ConfigError: if weights or pairs stand among the names, or the vocabulary is too small for the tokenizer.
    """
    own = config.data
    for flag, names in (("--data-path", own.path), ("--train-data-path", own.train_path)):
        _refuse_strangers(flag, names)
    _refuse_strangers("--valid-data-path", own.valid_path)
    asked = config.model.vocab_size
    if asked is not None and asked < tokenizer.vocab_size:
        raise ConfigError(f"--vocab-size {asked} is less than the {tokenizer.vocab_size} tokens of the tokenizer")

    def open_part(names: Sequence[str], split_name: str) -> StreamingDataset:
        return StreamingDataset(
            names,
            seq_len=own.seq_len,
            tokenizer=tokenizer,
            seed=config.seed,
            num_threads=max(own.num_threads, 1),
            split=own.split if own.path else None,
            split_name=split_name,
        )

    names = own.path or own.train_path
    train = open_part(names, "train")
    notes = [f"{', '.join(names[:3])}: text, tokenized while it trains ({tokenizer.type})", *train.warnings]
    if not config.eval.every:
        return TextData(train, None, notes)
    valid, reason = None, "no data are named for it"
    if own.path:
        reason = f"no document of the text falls into the valid part of --split {own.split}"
    if _has_valid(own):
        valid = open_part(own.path or own.valid_path, "valid")
        valid = valid if has_sample(valid) else None
    return TextData(train, valid, notes if valid else [*notes, f"no validation: {reason}"])


def _has_valid(data: DataConfig) -> bool:
    weights = [float(part) for part in data.split.split(",")]
    return len(weights) > 1 and weights[1] > 0 if data.path else bool(data.valid_path)


def has_sample(dataset: StreamingDataset) -> bool:
    """Whether a stream holds any document. Reads up to the first sample."""
    try:
        with Loader(dataset, 1, num_threads=0) as loader:
            next(loader)
    except NoDocumentsError:
        return False
    return True


def _refuse_strangers(flag: str, names: Sequence[str]) -> None:
    strangers = [name for name in names if not is_text(name)]
    if strangers:
        raise ConfigError(
            f"{flag}: {strangers[0]} is neither text nor a URL, and other data of this run are text: text is streamed, "
            "and is not blended with tokens by this flag; preprocess it to blend it"
        )


def describe_batches(
    phases: list[tuple[int, int]], dataset: Any, *, consumed: int, last_step: int, sampler: dict[str, Any]
) -> dict[str, Any]:
    """What a manifest says of the data, so that the samples of an iteration can be found again without the trainer.

    Args:
        phases: size of the global batch from each number of consumed samples on.
        dataset: the train set.
        consumed: samples consumed when this start begins.
        last_step: of the run.
        sampler: the loader's arguments that decide in which order the samples are drawn.
    """
    from megaflow.origin import recipe_of

    try:
        recipe = recipe_of(dataset)
    except ConfigError as error:
        recipe = {"kind": None, "reason": str(error)}
    return {
        "dataset": recipe,
        "fingerprint": dataset.fingerprint,
        "consumed_samples": consumed,
        "last_iteration": last_step,
        "batches": [list(phase) for phase in phases],
        "sampler": sampler,
    }
