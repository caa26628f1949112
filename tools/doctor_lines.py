"""What `tools/doctor.py` is asked about, and how a finding looks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the run will use."""

    data_path: str | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    tokenizer_model: Path | None = None
    save: Path = Path()
    preset: str | None = None
    checkpoints: int = 2
    no_collective: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    state: str
    """ok, note or fail."""
    topic: str
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]
