"""Arguments and words that several commands share."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megaflow.cli import exit_codes
from megaflow.cli.arguments import Parser
from megaflow.cli.progress import PLAIN_LINE_EVERY_S
from megaflow.tokenizer import Tokenizer


def build_parser(prog: str, description: str) -> Parser:
    """A parser whose help ends with the exit codes."""
    import argparse

    return Parser(
        prog=prog,
        description=description,
        epilog=exit_codes.TABLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json(parser: Parser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text, of a fault too")


def add_tokenizer(parser: Parser, default: str = "the one that the sidecar names, if it is at hand") -> None:
    """The tokenizer of the data, by megaflow's or Megatron's flags; `default` says what is taken without them."""
    group = parser.add_argument_group(f"tokenizer (default: {default})")
    group.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder that holds a tokenizer")
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="JSON vocabulary; with --merge-file")
    group.add_argument("--merge-file", metavar="FILE", help="merges of the vocabulary")


def named_tokenizer(parsed: Any) -> Tokenizer | None:
    """The tokenizer that the arguments name, if they name one.

    Raises:
        ConfigError, TokenizerError, MissingFileError: as `Tokenizer.from_files`.
    """
    if parsed.tokenizer is None and parsed.vocab_file is None and parsed.merge_file is None:
        return None
    return Tokenizer.from_files(
        tokenizer_model=parsed.tokenizer, vocab_file=parsed.vocab_file, merge_file=parsed.merge_file
    )


def print_json(content: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(content, indent=2, ensure_ascii=False))


def megabytes(size: float) -> str:
    """A size for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:.0f} bytes"


def plural(count: int, word: str) -> str:
    """A count with its word: `1 document`, `1,234 documents`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


@contextmanager
def show_bytes(word: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on standard error: a bar on a terminal, plain lines elsewhere, nothing for short work."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar_or_lines(_PlainLines(word, _bytes_in_words), word, DownloadColumn(), TransferSpeedColumn()) as progress:
        yield progress


@contextmanager
def show_counts(word: str, what: str) -> Iterator[Callable[[int, int], None]]:
    """The same for work that is counted in `what`, such as documents."""
    from rich.progress import TextColumn

    def in_words(done: int, rate: float) -> str:
        return f"{done:,} {what}, {rate:,.0f} {what}/s"

    counts = TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + what)
    with _bar_or_lines(_PlainLines(word, in_words), word, counts) as progress:
        yield progress


@contextmanager
def _bar_or_lines(lines: "_PlainLines", word: str, *columns: Any) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn(word), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainLines:
    def __init__(self, word: str, in_words: Callable[[int, float], str]) -> None:
        self._word, self._in_words = word, in_words
        self._start_s = self._last_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_s >= PLAIN_LINE_EVERY_S:
            self._last_s = now
            share = f"{done / total:.0%}" if total else "?"
            words = self._in_words(done, done / (now - self._start_s))
            print(f"{self._word} {share}: {words}", file=sys.stderr, flush=True)


def _bytes_in_words(done: int, rate: float) -> str:
    return f"{megabytes(done)}, {rate / 1e6:.1f} MB/s"
