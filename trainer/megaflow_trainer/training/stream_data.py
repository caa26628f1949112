"""The data of a run that reads text as it is: Parquet, Arrow or JSON lines, tokenized while it trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megaflow import StreamingDataset, Tokenizer, resolve_prefix
from megaflow.errors import ConfigError, MissingFileError
from megaflow_trainer.config.sections import TrainConfig

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


def open_text(config: TrainConfig, tokenizer: Tokenizer) -> tuple[StreamingDataset, list[str]]:
    """The stream over what `--data-path` names, with notes for the log.

    Raises:
        ConfigError: if weights stand among the names, or the vocabulary is too small for the tokenizer.
    """
    names, notes = list(config.data.path), []
    strangers = [name for name in names if not is_text(name)]
    if strangers:
        raise ConfigError(
            f"--data-path: {strangers[0]} is neither text nor a URL, and {names[0]} is text: text is streamed, and is "
            "not blended with tokens by this flag; preprocess it to blend it"
        )
    asked = config.model.vocab_size
    if asked is not None and asked < tokenizer.vocab_size:
        raise ConfigError(f"--vocab-size {asked} is less than the {tokenizer.vocab_size} tokens of the tokenizer")
    dataset = StreamingDataset(
        names,
        seq_len=config.data.seq_len,
        tokenizer=tokenizer,
        seed=config.seed,
        num_threads=max(config.data.num_threads, 1),
    )
    notes.append(f"{', '.join(names[:3])}: text, tokenized while it trains ({tokenizer.type})")
    if config.eval.every:
        notes.append("no validation: a stream has no valid part")
    return dataset, notes


def describe_batches(phases: list[tuple[int, int]], dataset: Any, *, consumed: int, last_step: int) -> dict[str, Any]:
    """What a manifest says of the data, so that the samples of an iteration can be found again without the trainer.

    Args:
        phases: size of the global batch from each number of consumed samples on.
        dataset: the train set.
        consumed: samples consumed when this start begins.
        last_step: of the run.
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
    }
