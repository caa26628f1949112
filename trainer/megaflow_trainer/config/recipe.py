"""YAML recipes: the same fields as the flags, grouped by section."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from megaflow.errors import ConfigError, FileAccessError, MissingFileError
from megaflow_trainer.config.fields import Field, convert


def read_recipe(path: str, known: dict[str, Field], values: dict[str, Any], faults: list[str]) -> None:
    """Add the fields that a recipe sets to `values`, and what is wrong with it to `faults`.

    Raises:
        MissingFileError: if there is no such file.
        FileAccessError: if it cannot be read, or is a folder.
        ConfigError: if it is not YAML, or not a mapping.
    """
    for name, value in _flatten(_load(path)).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            faults.append(f"{path}: {name} is not a field" + (f"; the nearest known one is {near[0]}" if near else ""))
            continue
        try:
            values[name] = convert(known[name], value, f"{path}: {name}")
        except ConfigError as error:
            faults.append(str(error))


def _load(path: str) -> dict[str, Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except FileNotFoundError:
        raise MissingFileError(f"--config {path}: no such recipe") from None
    except OSError as error:
        raise FileAccessError(f"--config {path}: expected a YAML recipe, but: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: expected a YAML recipe, but byte {error.start} is not UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected sections with fields, found {type(content).__name__}")
    return content


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
