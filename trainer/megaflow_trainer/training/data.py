"""The data of a run: the pair on disk, what it says of its tokenizer, its three parts, and loaders over them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import megaflow
from megaflow import GPTDataset, IndexedDataset, Loader
from megaflow.errors import ConfigError, DataFormatError, FileAccessError, MissingFileError, TokenizerError
from megaflow_trainer.config.sections import DataConfig, TrainConfig
from megaflow_trainer.parallel.mesh import Mesh

_REMAKE = "preprocess the text again, or move the sidecar away and name the tokenizer by flags"
_BLOCK_TOKENS, _NUM_BLOCKS = 1 << 20, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Datasets (None where a part is empty), the vocabulary, and the end-of-document token where it masks the loss."""

    train: GPTDataset
    valid: GPTDataset | None
    vocab_size: int
    eod_id: int | None
    notes: tuple[str, ...]


def open_data(config: TrainConfig) -> RunData:
    """Open the pair that the configuration names and check its tokenizer before anything is built.

    Raises:
        MissingFileError: if there is no such pair or tokenizer file.
        DataFormatError: if what is named is text, or the sidecar is damaged.
        TokenizerError: if the data were made with another tokenizer than the one the flags name.
        ConfigError: if the train part is empty.
    """
    prefix = _find_pair(config.data.path[0])
    vocab_size, eod_id, notes = _read_vocabulary(prefix, config)
    indexed = IndexedDataset(prefix)
    check_largest_id(indexed, prefix, vocab_size)
    train, valid = build_datasets(indexed, config)
    for name, part in (("train", train), ("valid", valid if config.eval.every else None)):
        if part is not None:
            check_part(indexed, part, name, prefix, config)
    if train is not None and train.num_epochs > 1:
        notes = [*notes, f"the train part of {prefix} is read {train.num_epochs} times"]
    if train is None:
        raise ConfigError(f"{prefix}: the train part of --split {config.data.split} is empty; give it more weight")
    if valid is None and config.eval.every:
        notes = [*notes, f"no validation: the valid part of --split {config.data.split} is empty"]
    masked = eod_id if config.data.eod_mask_loss else None
    return RunData(train=train, valid=valid, vocab_size=vocab_size, eod_id=masked, notes=tuple(notes))


def build_datasets(indexed: IndexedDataset, config: TrainConfig) -> tuple[GPTDataset | None, GPTDataset | None]:
    """The train and valid parts; None for one that is empty (a small corpus may have too few documents for a part).

    The numbers of samples are counted as Megatron counts them: they decide how often the documents are repeated.
    """
    common: dict[str, Any] = {"seq_len": config.data.seq_len, "split": config.data.split, "seed": config.seed}
    batch, steps = config.step.sizes.global_batch_size, config.last_step
    train, valid, _ = GPTDataset.build_splits(indexed, num_samples=(steps * batch, 0, 0), **common)
    if valid is None or not config.eval.every:
        return train, None
    wanted = (steps // config.eval.every + 1) * config.eval.steps * batch
    return train, GPTDataset(indexed, num_samples=wanted, split_name="valid", **common)


def check_largest_id(indexed: IndexedDataset, prefix: str, vocab_size: int) -> None:
    """Compare token ids with the vocabulary: all of a small pair, of a large one blocks evenly spread over it.

    Raises:
        ConfigError: if an id is outside; the rest of the ids is looked at when they are read.
    """
    tokens = np.memmap(f"{prefix}.bin", dtype=indexed.dtype, mode="r") if indexed.num_tokens else np.zeros(1)
    starts = np.linspace(0, max(len(tokens) - _BLOCK_TOKENS, 0), _NUM_BLOCKS).astype(np.int64)
    largest = max(int(tokens[start : start + _BLOCK_TOKENS].max()) for start in np.unique(starts))
    if largest >= vocab_size:
        raise ConfigError(
            f"{prefix}: token {largest} occurs in the data, and the vocabulary has {vocab_size} tokens (0 to "
            f"{vocab_size - 1}): the data were made with another tokenizer; name theirs, or raise --vocab-size"
        )


def check_part(indexed: IndexedDataset, part: GPTDataset, name: str, prefix: str, config: TrainConfig) -> None:
    """Whether a part of the split holds at least one sample.

    Raises:
        ConfigError: if it does not, with the numbers.
    """
    documents = np.asarray(part.document_index)  # numbers of the part's documents, which are neighbours
    first, last = int(documents.min()), int(documents.max())
    num_tokens = int(indexed.sequence_lengths[first : last + 1].sum())
    if num_tokens < config.data.seq_len + 1:
        raise ConfigError(
            f"{prefix}: the {name} part of --split {config.data.split} has {num_tokens} tokens, and one sample takes "
            f"--seq-length + 1 = {config.data.seq_len + 1}; give the part more weight or shorten the sequence"
        )


def build_loader(dataset: GPTDataset, config: TrainConfig, mesh: Mesh) -> Loader:
    """This rank's loader over a dataset, from its first sample on."""
    return Loader(
        dataset,
        config.step.sizes.micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_threads=config.data.num_threads,
        prefetch=config.data.prefetch,
    )


def with_vocabulary(config: TrainConfig, data: RunData) -> TrainConfig:
    """The configuration with the vocabulary size that the data decide."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=data.vocab_size))


def _find_pair(named: str) -> str:
    """The prefix of the pair; with the remedy if the text itself is named."""
    try:
        return megaflow.resolve_prefix(named)
    except MissingFileError:
        if not Path(named).is_file():
            raise
    raise DataFormatError(
        f"--data-path {named} is a file of text, not of tokens; preprocess it first: `megaflow-preprocess {named}`, "
        f"then --data-path {Path(named).parent / Path(named).name.split('.')[0]}"
    )


def _read_tokenizer_entry(prefix: str) -> dict[str, Any] | None:
    """What the sidecar says of the tokenizer; None without a sidecar or entry.

    Raises:
        DataFormatError: if it lacks what is needed of it, or holds something else.
    """
    path = f"{prefix}.json"
    try:
        entry = (megaflow.read_sidecar(prefix) or {}).get("tokenizer")
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{path}: expected a sidecar in UTF-8, byte {error.start} is not; {_REMAKE}") from None
    except OSError as error:
        raise FileAccessError(f"{path}: the sidecar cannot be read: {error.strerror}") from None
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise DataFormatError(f"{path}: expected an object as `tokenizer`, found {entry!r}; {_REMAKE}")
    for name, kind, what in (("type", str, "a text"), ("fingerprint", str, "a text"), ("vocab_size", int, "a number")):
        if not isinstance(entry.get(name), kind):
            raise DataFormatError(
                f"{path}: expected {what} as `tokenizer.{name}`, found {entry.get(name, 'nothing')!r}; {_REMAKE}"
            )
    if not isinstance(entry.get("eod_id"), int | None):
        raise DataFormatError(f"{path}: expected a number as `tokenizer.eod_id`, found {entry['eod_id']!r}; {_REMAKE}")
    return entry


def _read_vocabulary(prefix: str, config: TrainConfig) -> tuple[int, int | None, list[str]]:
    """Vocabulary size, end-of-document id and notes, from --vocab-size, the sidecar and the tokenizer's files."""
    sidecar = _read_tokenizer_entry(prefix)
    named = _names_tokenizer(config.data)
    tokenizer = _open_tokenizer(config.data) if named or sidecar is None else None
    if sidecar is not None and tokenizer is not None and tokenizer.fingerprint != sidecar["fingerprint"]:
        raise TokenizerError(
            f"{prefix}: the data were made with tokenizer {sidecar['type']} (fingerprint {sidecar['fingerprint']}), "
            f"the flags name one with fingerprint {tokenizer.fingerprint}; drop the tokenizer flags or use the same"
        )
    found: dict[str, Any] = sidecar or {}
    if tokenizer is not None and sidecar is None:
        found = {"vocab_size": tokenizer.vocab_size, "eod_id": tokenizer.eod_id}
    notes = []
    if sidecar is None and not named and config.model.vocab_size is None:
        notes = [f"{prefix} has no sidecar and no tokenizer is named: GPT-2's {found['vocab_size']} tokens are assumed"]
    asked, known = config.model.vocab_size, found.get("vocab_size", 0)
    if asked is not None and asked < known and (sidecar is not None or named):
        raise ConfigError(
            f"--vocab-size {asked} is less than the {known} tokens of the data's tokenizer; drop the flag"
        )
    if config.data.eod_mask_loss and found.get("eod_id") is None:
        raise ConfigError("--eod-mask-loss needs an end-of-document token, and this tokenizer has none; drop the flag")
    return asked or known, found.get("eod_id"), notes


def _names_tokenizer(data: DataConfig) -> bool:
    return any((data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file))


def _open_tokenizer(data: DataConfig) -> Any:
    return megaflow.Tokenizer.from_files(
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
    )
