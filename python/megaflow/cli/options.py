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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_tokenizer(parser: Parser) -> None:
    """The tokenizer of the data, by megaflow's or Megatron's flags."""
    group = parser.add_argument_group("tokenizer (default: the one that the sidecar names, if it is at hand)")
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
    if not sys.stderr.isatty():
        yield _PlainLines(word)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(word), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainLines:
    def __init__(self, word: str) -> None:
        self._word = word
        self._start_s = self._last_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last_s >= PLAIN_LINE_EVERY_S:
            self._last_s = now
            rate = done / 1e6 / (now - self._start_s)
            share = f"{done / total:.0%}" if total else "?"
            print(f"{self._word} {share}: {megabytes(done)}, {rate:.1f} MB/s", file=sys.stderr, flush=True)
