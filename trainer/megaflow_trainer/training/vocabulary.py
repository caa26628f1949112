"""The vocabulary of a run: what the data say of their tokenizer, what the flags say, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import megaflow
from megaflow import IndexedDataset
from megaflow.errors import ConfigError, DataFormatError, FileAccessError, TokenizerError
from megaflow.indexed import describe_missing_ends
from megaflow_trainer.config.sections import DataConfig, TrainConfig

_REMAKE = "preprocess the text again, or move the sidecar away and name the tokenizer by flags"
_BLOCK_TOKENS, _NUM_BLOCKS = 1 << 20, 64


def read_vocabulary(prefixes: Sequence[str], config: TrainConfig) -> tuple[int, int | None, list[str]]:
    """Vocabulary size, end-of-document id and notes of datasets that must agree.

    Raises:
        TokenizerError: if two of them were made with different tokenizers, or one with another than the flags name.
        ConfigError: if what the flags ask for does not go with the tokenizer.
        DataFormatError, FileAccessError: if a sidecar is damaged or cannot be read.
    """
    found = [(prefix, _read_tokenizer_entry(prefix)) for prefix in prefixes]
    told = [(prefix, entry) for prefix, entry in found if entry is not None]
    for prefix, entry in told[1:]:
        first, own = told[0][1]["fingerprint"], entry["fingerprint"]
        if own != first:
            raise TokenizerError(
                f"{told[0][0]} and {prefix} were made with different tokenizers (fingerprints {first} and {own}); "
                "a blend needs one: preprocess one of them again"
            )
    read = [_read_vocabulary(prefix, entry, config) for prefix, entry in told[:1] or found[:1]]
    size, eod_id, notes = read[0]
    if told and len(told) < len(found):
        silent = ", ".join(prefix for prefix, entry in found if entry is None)
        notes = [*notes, f"no sidecar says which tokenizer made {silent}: that of {told[0][0]} is assumed"]
    return size, eod_id, notes


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


def _read_vocabulary(
    prefix: str, sidecar: dict[str, Any] | None, config: TrainConfig
) -> tuple[int, int | None, list[str]]:
    """Vocabulary size, end-of-document id and notes, from --vocab-size, the sidecar and the tokenizer's files."""
    named = _names_tokenizer(config.data)
    tokenizer = open_tokenizer(config.data) if named or sidecar is None else None
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
    if found.get("eod_id") is None:
        refuse_without_end(config)
    return asked or known, found.get("eod_id"), notes


def refuse_without_end(config: TrainConfig) -> None:
    """What is to be done about flags that need an end-of-document token, where there is none.

    Raises:
        ConfigError: if one of them is given.
    """
    given = _flags_by_end(config)
    if given:
        needs = "needs" if len(given) == 1 else "need"
        raise ConfigError(
            f"{' and '.join(given)} {needs} an end-of-document token, and this tokenizer has none; drop the flag"
        )


def list_missing_ends(indexed: IndexedDataset, eod_id: int | None, config: TrainConfig) -> list[str]:
    """A warning where flags go by an end-of-document token that the documents of a pair do not end with."""
    given = _flags_by_end(config)
    if not given or eod_id is None:
        return []
    message = describe_missing_ends(indexed, eod_id, given)
    return [] if message is None else [f"warning: {message}"]


def _flags_by_end(config: TrainConfig) -> list[str]:
    """Flags given that go by the end-of-document token."""
    by_end = not config.data.keeps_documents_apart
    asked = {
        "--eod-mask-loss": config.data.eod_mask_loss,
        "--reset-position-ids": config.model.resets_positions and by_end,
        "--reset-attention-mask": config.model.resets_attention and by_end,
    }
    return [flag for flag, is_given in asked.items() if is_given]


def _names_tokenizer(data: DataConfig) -> bool:
    return any((data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file))


def open_tokenizer(data: DataConfig) -> Any:
    """The tokenizer that the flags name; GPT-2's if they name none."""
    return megaflow.Tokenizer.from_files(
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
    )
