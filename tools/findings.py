"""What `tools/diagnose.py` finds in a run, and the form of the rules that find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from run_record import METRICS, Record

LEAST_STEPS = 8
"""Log lines that must be there before speed or loss are judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A symptom with its likely cause and what to change."""

    symptom: str
    rank: int
    """0: the run cannot go on; 1: it learns nothing or wrongly; 2: it is slow; 3: worth a look."""
    title: str
    seen: str
    cause: str
    remedies: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rule:
    """How symptoms are found, and without what they cannot be judged."""

    symptom: str
    find: Callable[[Record], Iterator[Finding]]
    needs: tuple[str, ...] = (METRICS,)
    least: int = 0
    """Log lines of steps that it takes."""

    def can_judge(self, record: Record) -> bool:
        """Whether the run has left what it takes."""
        if METRICS in self.needs and not record.rows:
            return False
        return not record.missing & {*self.needs} and len(record.steps) >= self.least
