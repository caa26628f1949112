"""What every command of the desk does alike: `--version`, faults of the flags, Ctrl-C, and a reader that has gone."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130


def run_door(main: Callable[[], int | None]) -> int:
    """Run a command; Ctrl-C is one line and code 130, a closed pipe is no fault."""
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def guard_start() -> None:
    """Until `run_door` begins, Ctrl-C ends the process as it will then: for the imports of a script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind nohup and &
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(INTERRUPTED)


def say_error(sentence: str, *, as_json: bool) -> None:
    """A fault for people on standard error; for a script that asked for JSON an object on standard output too."""
    if as_json:
        print(json.dumps({"error": sentence}))
    print(f"error: {sentence}", file=sys.stderr)


class DeskParser(argparse.ArgumentParser):
    """A parser with `--version` and `--json`; with it a fault of the flags is an object on standard output as well."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self._has_json = False
        self.add_argument("--version", action=ShowVersion)

    def add_json(self) -> None:
        """Add `--json`, as the last flag."""
        self.add_argument("--json", action="store_true", help="print JSON")

    def parse_known_args(  # type: ignore[override]  # one signature for the overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As of any parser."""
        self._has_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Say it and end with code 2."""
        if self._has_json:
            print(json.dumps({"error": message}), flush=True)
        super().error(message)


class ShowVersion(argparse.Action):
    """`--version`; the package is imported only if it is asked for, so that a broken one ends no other command."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help="show the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and end."""
        try:
            version = importlib.import_module("megaflow").__version__
        except (ImportError, OSError) as error:
            version = f"(cannot be imported: {error})"
        print(f"{parser.prog} of megaflow {version}")
        parser.exit()
