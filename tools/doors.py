"""What every command of the desk does alike: `--version`, Ctrl-C and a reader that has gone end it in quiet."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130


def run_door(main: Callable[[], int]) -> int:
    """Run a command; Ctrl-C is one line and code 130, a closed pipe is no fault."""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


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
