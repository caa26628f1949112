"""Choosing an entry of an op: the asked one if it can run here, or the first that can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megaflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What the run asks of an entry."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    has_window: bool = False
    has_documents: bool = False
    has_dropout: bool = False
    value_dim: int | None = None
    """Width of a head of values, where it is not that of queries and keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One way to compute an op. `obstacle` returns why it cannot serve a need, or None. One that is not timed is chosen
    by name or order only: a reference that is slow by design.
    """

    name: str
    function: Callable[..., torch.Tensor]
    joined: Callable[..., torch.Tensor] | None = None
    """Attention of heads that lie side by side, whose gradient is one tensor: as `flash_4.attend_flash_4_joined`."""
    obstacle: Callable[[Need], str | None] = lambda need: None
    is_timed: bool = True
    package: str | None = None
    """The optional package it comes from. Such an entry is loaded when it is asked for, or when entries are timed."""
    is_traceable: bool = True
    """Whether it can be part of a compiled graph; else it cuts blocks in two."""


def choose(op: str, entries: Sequence[Entry], wanted: str, need: Need) -> Entry:
    """Pick the entry called `wanted`; `auto` takes the first of `entries` without an obstacle that needs no package.

    Raises:
        ConfigError: if there is no such entry or it cannot run here, with the reason and what to use instead.
    """
    usable = [entry.name for entry in entries if entry.package is None and entry.obstacle(need) is None]
    name = usable[0] if wanted == "auto" and usable else wanted
    for entry in entries:
        if entry.name == name:
            reason = entry.obstacle(need)
            if reason is None:
                return entry
            raise ConfigError(f"{op} {name!r} cannot run here: {reason}; use {' or '.join(usable)}, or auto")
    known = ", ".join(["auto", *(entry.name for entry in entries)])
    raise ConfigError(f"{op} {wanted!r} is not known; the known ones are {known}")
