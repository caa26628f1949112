"""A process as the other ranks of its run know it: where it runs, its number, and when it began."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

GONE = "-"
"""The birth of a process that is not there, or that only waits to be collected."""


@dataclass(frozen=True)
class Process:
    """A process of some machine; no later process is equal to it, whatever its number."""

    host: str
    number: int
    birth: str

    @staticmethod
    def find(number: int) -> Process:
        """The process of this machine that has a number now."""
        return Process(socket.gethostname(), number, read_birth(number))

    @staticmethod
    def parse(name: str) -> Process:
        """From what `str` gives."""
        host, number, birth = name.rsplit("/", 2)
        return Process(host, int(number), birth)

    def __str__(self) -> str:
        return f"{self.host}/{self.number}/{self.birth}"

    def is_here(self) -> bool:
        """Whether it runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    def is_gone(self) -> bool:
        """Whether a process of this machine has ended."""
        return self.birth == GONE or read_birth(self.number) != self.birth


def read_birth(number: int) -> str:
    """When a process began, in ticks, which no later process of the same number shares; `GONE` if it is gone.

    Where the system has no /proc, all that live have the same word.
    """
    if sys.platform != "linux":
        try:
            os.kill(number, 0)
        except OSError:
            return GONE
        return "alive"
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return GONE
    return GONE if fields[0] in ("Z", "X") else fields[19]
