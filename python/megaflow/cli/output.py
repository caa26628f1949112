"""Standard output of a command: whether it is there, what its encoding lacks, and which faults are its own."""

import codecs
import io
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

CLOSED = "standard output is closed; leave it open, or send it to a file or /dev/null"


class Output:
    """Standard output that remembers the fault of a write: no other fault is taken for one of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        """As of any stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        """As of any stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self.fault = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_output() -> bool:
    """Whether there is a standard output; what its encoding does not have is written as JSON escapes it."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # to the end of the process
    if sys.stdout is None:
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("megaflow.escape", _escape)
        sys.stdout.reconfigure(errors="megaflow.escape")
    return True


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "nothing is decoded"
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def drop_output() -> None:
    """What is left in the buffer goes nowhere as the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_fault(error: OSError) -> str:
    """A sentence about a write that failed."""
    reason = error.strerror or type(error).__name__
    return f"standard output cannot be written: {reason}; make room, or send it elsewhere"
