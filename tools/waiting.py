"""Says what a command is waiting for while it is silent: on a terminal one line that is rewritten, elsewhere a line
every few seconds; nothing of what is over soon. It needs no package, so that a broken one does not end it.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 0.2
SOON_S = 0.5


class Waiting:
    """While the context is open; `begin` says what comes next, `print` what is to stay."""

    def __init__(self, command: str) -> None:
        self._command, self._text = command, ""
        self._is_terminal = sys.stderr.isatty()
        self._begun = self._said = time.monotonic()
        self._is_shown = False
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._erase()

    def begin(self, text: str) -> None:
        """From now on `text` is waited for."""
        with self._lock:
            self._text = text
            self._begun = self._said = time.monotonic()

    def print(self, text: str) -> None:
        """A line on standard output, at once."""
        with self._lock:
            self._erase()
            print(text, flush=True)

    def _repeat(self) -> None:
        every = REDRAW_EVERY_S if self._is_terminal else LINE_EVERY_S / 10
        while not self._end.wait(every):
            with self._lock:
                self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        waited = now - self._begun
        if not self._text or waited < SOON_S:
            return
        line = f"{self._command}: {self._text}, {waited:.0f} s"
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()
            self._is_shown = True
        elif now - self._said >= LINE_EVERY_S:
            print(line, file=sys.stderr, flush=True)
            self._said = now

    def _erase(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._is_shown = False
