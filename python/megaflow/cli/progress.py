"""How far a job is: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megaflow.preprocessing import Progress

PLAIN_LINE_EVERY_S = 5.0


@contextmanager
def show_progress(log_interval: int | None = None) -> Iterator[Progress]:
    """Shows progress on standard error while the context is open.

    Args:
        log_interval: a plain line whenever this many more documents are done, instead of every few seconds.
    """
    if log_interval is None and sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield _PlainLines(log_interval)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", counts="")

        def update(done: int, total: int, documents: int, tokens: int, rejected: int) -> None:
            counts = f"{documents:,} documents, {tokens:,} tokens" + (f", {rejected:,} rejected" if rejected else "")
            bar.update(task, completed=done, total=total, counts=counts)

        yield update


class _PlainLines:
    def __init__(self, log_interval: int | None) -> None:
        self._log_interval = log_interval
        self._start_s = self._last_s = time.monotonic()
        self._last_documents = 0

    def __call__(self, done: int, total: int, documents: int, tokens: int, rejected: int) -> None:
        now = time.monotonic()
        if self._log_interval is None:
            due = now - self._last_s >= PLAIN_LINE_EVERY_S
        else:
            due = documents - self._last_documents >= self._log_interval
        if not due:
            return
        self._last_s, self._last_documents = now, documents
        share = f"{done / total:.0%}: " if total else ""
        rate = done / 1e6 / (now - self._start_s)
        print(
            f"{share}{documents:,} documents, {tokens:,} tokens, {rejected:,} rejected, {rate:.1f} MB/s",
            file=sys.stderr,
            flush=True,
        )
