"""The limits that a field has by itself: each function returns faults as texts, one a field."""

from __future__ import annotations

from megaflow.errors import ConfigError


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
