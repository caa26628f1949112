"""Megatron's ways of naming data: one prefix, weights and prefixes, one list a split, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from megaflow import _core
from megaflow.blend import Phase, check_weights
from megaflow.dataset import SPLIT_NAMES
from megaflow.errors import ConfigError, FileAccessError, MissingFileError

StrPath = str | PathLike[str]
_FORMS = "a prefix, several prefixes, or weight prefix weight prefix ..."


@dataclass(frozen=True, slots=True)
class BlendSpec:
    """Datasets by their prefixes, and their weights if there are any."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights, self.prefixes)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The data of a run: one blend that a split string divides, or one blend a split."""

    blend: BlendSpec | None = None
    per_split: tuple[BlendSpec | None, BlendSpec | None, BlendSpec | None] | None = None

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every prefix that is named, each once, in order."""
        blends = [self.blend] if self.blend is not None else list(self.per_split or ())
        return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> BlendSpec:
    """Reads a list as Megatron does: weights and prefixes in turn if every other word is a number, else prefixes only.

    Raises:
        ConfigError: if words are missing, only some of the weights are numbers, a weight means nothing, or a list of
            pairs might as well be a list of prefixes.
    """
    if not words:
        raise ConfigError(f"{flag} is empty; expected {_FORMS}")
    firsts = [_number(word) for word in words[::2]]
    weights = tuple(weight for weight in firsts if weight is not None)
    if len(words) % 2 or not weights:
        return BlendSpec(tuple(words))
    if len(weights) < len(firsts):
        odd = next(word for word, weight in zip(words[::2], firsts, strict=True) if weight is None)
        raise ConfigError(f"{flag}: {odd!r} stands where other entries have a weight; expected {_FORMS}")
    named = [word for word in words[::2] if _is_pair(word)]
    if named:
        raise ConfigError(
            f"{flag}: {named[0]!r} is a weight by its place, and also the prefix of a pair; write ./{named[0]} to name "
            "the pair"
        )
    return BlendSpec(tuple(words[1::2]), weights)


def read_data_arguments(
    *,
    data_path: Sequence[str] = (),
    per_split: tuple[Sequence[str], Sequence[str], Sequence[str]] = ((), (), ()),
    data_args_path: StrPath | None = None,
    per_split_data_args_path: StrPath | None = None,
) -> DataSpec:
    """The data that Megatron's flags name.

    Args:
        data_path: `--data-path`.
        per_split: `--train-data-path`, `--valid-data-path`, `--test-data-path`.
        data_args_path: `--data-args-path`, a file with what `--data-path` would hold.
        per_split_data_args_path: `--per-split-data-args-path`, a JSON object with `train`, `valid` and `test`, each a
            list or a text.

    Raises:
        ConfigError: if none or more than one of them is given, or as `parse_blend`.
        MissingFileError, FileAccessError: if a file cannot be read.
    """
    given = {
        "--data-path": bool(data_path),
        "--train-data-path, --valid-data-path, --test-data-path": any(per_split),
        "--data-args-path": data_args_path is not None,
        "--per-split-data-args-path": per_split_data_args_path is not None,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if len(named) != 1:
        found = "none of them is given" if not named else f"got {' and '.join(named)}"
        raise ConfigError(f"data are named by one of {'; '.join(given)}; {found}")
    if data_args_path is not None:
        return DataSpec(parse_blend(_read_text(data_args_path).split(), f"--data-args-path {data_args_path}"))
    if per_split_data_args_path is not None:
        return DataSpec(per_split=_read_per_split(per_split_data_args_path))
    if any(per_split):
        flags = [f"--{name}-data-path" for name in SPLIT_NAMES]
        train, valid, test = (
            parse_blend(words, flag) if words else None for words, flag in zip(per_split, flags, strict=True)
        )
        return DataSpec(per_split=(train, valid, test))
    return DataSpec(parse_blend(data_path))


def read_phases(path: StrPath, num_datasets: int) -> list[Phase]:
    """Weights that change on the way, from a JSON list of objects with `from_sample` and `weights`.

    Raises:
        ConfigError: if it holds something else.
        MissingFileError, FileAccessError: if it cannot be read.
    """
    shape = 'expected a JSON list of {"from_sample": 0, "weights": [...]}'
    entries = _read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: {shape}")
    phases: list[Phase] = []
    for number, entry in enumerate(entries):
        place = f"{path}: entry {number + 1}"
        if not isinstance(entry, dict) or set(entry) != {"from_sample", "weights"}:
            raise ConfigError(f"{place}: {shape}, found {entry!r}")
        first, weights = entry["from_sample"], entry["weights"]
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ConfigError(f"{place}: from_sample is {first!r}; expected a whole number of 0 or more")
        if not isinstance(weights, list) or len(weights) != num_datasets or not all(map(_is_number, weights)):
            raise ConfigError(f"{place}: weights are {weights!r}; expected {num_datasets} numbers, one a dataset")
        phases.append((first, [float(weight) for weight in weights]))
    return phases


def _read_per_split(path: StrPath) -> tuple[BlendSpec | None, BlendSpec | None, BlendSpec | None]:
    entries = _read_json(path)
    if not isinstance(entries, dict) or not entries or not set(entries) <= set(SPLIT_NAMES):
        raise ConfigError(f"{path}: expected a JSON object with {', '.join(SPLIT_NAMES)}")

    def read(name: str) -> BlendSpec | None:
        entry = entries.get(name)
        if entry is None or entry in ([], ""):
            return None
        words = entry.split() if isinstance(entry, str) else entry
        if not isinstance(words, list):
            raise ConfigError(f"{path}: {name} is {entry!r}; expected a list or a text of {_FORMS}")
        return parse_blend([str(word) for word in words], f"{path}: {name}")

    return read("train"), read("valid"), read("test")


def _read_json(path: StrPath) -> Any:
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None


def _read_text(path: StrPath) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, byte {error.start} is not") from None
    except OSError as error:
        raise FileAccessError(f"{path}: cannot be read: {error.strerror}") from None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(word: str) -> bool:
    try:
        _core.resolve_prefix(word)
    except MissingFileError:
        return False
    return True
