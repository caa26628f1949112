"""The fields of the configuration by dotted name (`model.num_layers`): their types, defaults, help and values."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import TrainConfig

_MOST_SHOWN = 80
_LARGEST = 10**15
"""Of whole numbers: their products are still numbers that a float holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of the configuration."""

    name: str
    kind: Any
    default: Any
    is_optional: bool


@functools.cache
def list_fields() -> dict[str, Field]:
    """Every field by dotted name, in the order in which the sections declare them."""
    found: dict[str, Field] = {}
    for section, owner in sections().items():
        hints = typing.get_type_hints(owner)
        for item in dataclasses.fields(owner):
            if not dataclasses.is_dataclass(hints[item.name]):
                name = f"{section}.{item.name}" if section else item.name
                kind, is_optional = _without_none(hints[item.name])
                found[name] = Field(name, kind, item.default, is_optional)
    return found


@functools.cache
def sections() -> dict[str, type]:
    """The section classes by name; the run itself is the section without a name."""
    hints = typing.get_type_hints(TrainConfig)
    inner = {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    return {"": TrainConfig, **inner}


def _without_none(kind: Any) -> tuple[Any, bool]:
    """`int | None` -> (int, True); `int` -> (int, False)."""
    if isinstance(kind, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not type(None)), True
    return kind, False


def convert(field: Field, value: Any, spelled: str) -> Any:
    """Turn text from a flag, or a value from YAML, into the field's type.

    Raises:
        ConfigError: if the value is not of that type; `spelled` is how the user wrote the field.
    """
    if value is None and field.is_optional:
        return None
    try:
        converted = _CONVERT[field.kind](value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{spelled} takes {_KIND_NAMES[field.kind]}, got {_shorten(value)}") from None
    if isinstance(converted, int) and abs(converted) > _LARGEST:
        raise ConfigError(f"{spelled} takes a whole number of at most {_LARGEST:,}, got {_shorten(value)}")
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{spelled} takes a finite number, got {_shorten(value)}")
    return converted


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text):,} characters)"


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _to_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _to_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_to_text(value),)
    return tuple(_to_text(item) for item in value)


_CONVERT: Mapping[Any, Any] = types.MappingProxyType(
    {int: _to_int, float: _to_float, bool: _to_bool, str: _to_text, tuple[str, ...]: _to_texts}
)
_KIND_NAMES: Mapping[Any, str] = types.MappingProxyType(
    {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text that is not empty",
        tuple[str, ...]: "texts that are not empty",
    }
)


def build(values: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """Make the configuration from values by dotted name.

    Returns:
        The configuration and every fault that the sections find in themselves. With faults, the fields at fault hold
        their defaults, so that the rules between sections can still be checked.
    """
    faults: list[str] = []
    made: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, leaf = name.rpartition(".")
        grouped.setdefault(section, {})[leaf] = value
    for section, owner in reversed(sections().items()):
        inner = made if section == "" else {}
        made[section] = _build_section(owner, grouped.get(section, {}), inner, faults)
    run = made[""]
    assert isinstance(run, TrainConfig)
    return run, faults


def _build_section(owner: type, own: dict[str, Any], inner: dict[str, Any], faults: list[str]) -> Any:
    try:
        return owner(**own, **inner)
    except ConfigError as error:
        found = str(error).split("\n")
    faults += found
    broken = {fault.split()[0].rpartition(".")[2] for fault in found}
    return owner(**{name: value for name, value in own.items() if name not in broken}, **inner)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as nested dicts, ready for JSON or YAML; `build` and `recipe` read it back."""
    return dataclasses.asdict(config)


def read_help() -> dict[str, str]:
    """The docstring below each field, by dotted name: the help text."""
    found: dict[str, str] = {}
    for section, owner in sections().items():
        for part in owner.__mro__:
            if not dataclasses.is_dataclass(part):
                continue
            body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
            assert isinstance(body, ast.ClassDef)
            for item, below in zip(body.body, body.body[1:], strict=False):
                match item, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[f"{section}.{name}".lstrip(".")] = " ".join(text.split())
    return found
