"""Everything that can be checked about a pair."""

import datetime
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow import _core
from megaflow.errors import ConfigError
from megaflow.indexed import resolve_prefix
from megaflow.merging import BytesProgress, StrPath
from megaflow.processors import count_processors


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong with a pair."""

    path: str
    place: int | None
    """Byte of the file; None if it concerns the file as a whole."""
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: " + ("" if self.place is None else f"byte {self.place}: ") + self.problem


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was checked, and what is wrong."""

    prefix: str
    faults: tuple[Fault, ...]
    """The first faults, by file and place."""
    num_faults: int
    has_checksums: bool
    """Whether the bytes were compared with the sidecar's checksums."""
    vocab_size: int | None
    """What the ids were compared with; None if it is not known."""
    ids: tuple[int, int] | None
    """Smallest and largest id."""
    bytes: int
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    stamped: bool
    """Whether the sidecar says now that the pair was verified."""
    not_stamped: str | None
    """Why it does not."""

    @property
    def checked(self) -> list[str]:
        """What the check covered, in words."""
        checksums = ["checksums"] if self.has_checksums else []
        return ["structure", "sizes", *checksums, *(["ids"] if self.vocab_size is not None else [])]


def verify(
    prefix: StrPath,
    *,
    threads: int | None = None,
    vocab_size: int | None = None,
    stamp: bool = True,
    progress: BytesProgress | None = None,
) -> VerifyReport:
    """Checks lengths, offsets, boundaries, sizes, ids and checksums of a pair; reads each byte of it.

    A pair without a sidecar has no checksums: then a changed token or a boundary that still fits goes unseen.

    Args:
        prefix: as `resolve_prefix` takes it.
        threads: that read; by default one for each processor. The result does not depend on it.
        vocab_size: every id must be below it; by default what the sidecar says.
        stamp: a pair without faults gets `verified` in its sidecar; one with faults loses it.
        progress: called on the calling thread.

    Raises:
        MissingFileError, FileAccessError: there is no such pair, or a file cannot be opened. What is wrong with a pair
            is no error: it is in the report.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads must be at least 1, got {threads}")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"--vocab-size must be at least 1, got {vocab_size}")
    path = Path(f"{resolve_prefix(prefix)}.json")
    before = path.read_bytes() if path.is_file() else None
    found = _core.verify(
        prefix, threads=threads or count_processors(), vocab_size=vocab_size, progress=progress or _ignore
    )
    found["faults"] = tuple(Fault(path=where, place=place, problem=text) for where, place, text in found["faults"])
    report = VerifyReport(**found, stamped=False, not_stamped="not asked for")
    if not stamp:
        return report
    reason = _stamp(path, before, report)
    return VerifyReport(**found, stamped=reason is None, not_stamped=reason)


def _stamp(path: Path, before: bytes | None, report: VerifyReport) -> str | None:
    """Writes or removes the stamp; returns why there is none."""
    if before is None:
        return "the pair has no sidecar"
    try:
        content: Any = json.loads(before)
    except ValueError:
        return f"{path} is not JSON"
    if not isinstance(content, dict):
        return f"{path} is no sidecar"
    had_stamp = content.pop("verified", None) is not None
    if report.num_faults == 0:
        from megaflow import __version__

        now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
        content["verified"] = {
            "time": now.isoformat(),
            "megaflow_version": __version__,
            "checked": report.checked,
            "bytes": report.bytes,
        }
    elif not had_stamp:
        return "the pair has faults"
    try:
        if path.read_bytes() != before:
            return f"{path} was changed in the meantime"
        _replace(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return None if report.num_faults == 0 else "the pair has faults"


def _replace(path: Path, text: str) -> None:
    """Gives a file another content at once: whoever reads it sees the old one or the new one."""
    mode = path.stat().st_mode & 0o777
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _ignore(*_: int) -> None:
    return None
