"""The limits that a field has by itself: each function returns faults as texts, one a field."""

from __future__ import annotations

from megaflow.errors import ConfigError

MOST_LAYERS, MOST_EXPERTS = 4096, 100_000
"""Layers and experts are counted one by one, here and in the trainer."""
MOST_WIDTH, MOST_TOKENS = 10_000_000, 2**31 - 1
"""Sizes of one weight's axes, and ids or tokens of a sample: above them tensors have no size that counts."""
MOST_MICRO, MOST_BATCH = 1_000_000, 1_000_000_000
"""Samples of a micro-batch and of a step."""
MOST_THREADS, MOST_HELD = 1024, 65_536
"""Threads that a process starts, and what it holds ready or remembers, is there at once."""


def raise_faults(faults: list[str]) -> None:
    """Raise one ConfigError that lists every fault, one a line."""
    if faults:
        raise ConfigError("\n".join(faults))


def at_least(section: str, least: float, **values: float | None) -> list[str]:
    """Faults of the given fields that are below `least`; None (to be derived) passes."""
    return [
        f"{section}.{name} must be >= {least}, got {value}"
        for name, value in values.items()
        if value is not None and not value >= least
    ]


def at_most(section: str, most: int, remedy: str, **values: float | None) -> list[str]:
    """Faults of the given fields that are above `most`, with a remedy; None (to be derived) passes."""
    return [
        f"{section}.{name} must be <= {most:,}, got {value:,}; {remedy}"
        for name, value in values.items()
        if value is not None and value > most
    ]


def fraction(section: str, **values: float | None) -> list[str]:
    """Faults of the given fields that are outside [0, 1)."""
    return [
        f"{section}.{name} must be in [0, 1), got {value}"
        for name, value in values.items()
        if value is not None and not 0 <= value < 1
    ]


def one_of(section: str, known: tuple[str, ...], **values: str | None) -> list[str]:
    """Faults of the given fields whose value is not one of `known`."""
    return [
        f"{section}.{name} must be one of {', '.join(known)}, got {value!r}"
        for name, value in values.items()
        if value is not None and value not in known
    ]
