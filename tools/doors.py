"""What every command of the desk does alike: `--version`, faults of the flags, Ctrl-C, and a reader that has gone."""

from __future__ import annotations

import argparse
import atexit
import importlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO, cast

INTERRUPTED, UNWRITTEN = 130, 1
REMEDY = "python tools/doctor.py tells which packages are broken, `make build` installs them"


def run_door(main: Callable[[], int | None]) -> int:
    """Run a command; Ctrl-C is one line and code 130, a closed pipe is no fault, and any other fault of standard output
    is one line and code 1. What its encoding does not have is written with backslashes.
    """
    _release_start()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # to the end of the process
    if sys.stdout is None:
        print("error: standard output is closed; leave it open, or send it to a file or /dev/null", file=sys.stderr)
        return UNWRITTEN
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    output = _Output(sys.stdout)
    try:
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with redirect_stdout(cast(TextIO, output)):
            try:
                return main() or 0
            finally:  # of --help too, which ends by SystemExit
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        if error is not output.fault:
            raise
        _drop_output()
        reason = error.strerror or type(error).__name__
        print(f"error: standard output cannot be written: {reason}; make room, or send it elsewhere", file=sys.stderr)
        return UNWRITTEN


class _Output:
    """Standard output that remembers the fault of a write: no other fault is taken for one of its own.

    As in `megaflow.cli.output`, which the desk cannot take: doctor must run where megaflow cannot be imported.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.fault = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drop_output() -> None:
    """What is left in the buffer goes nowhere as the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guard_start() -> None:
    """Until `run_door` begins, Ctrl-C ends the process as it will then, and a package that cannot be imported, or ends
    the process, is one line: for the imports of a script.
    """
    sys.excepthook = _tell_import
    atexit.register(_tell_end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as behind nohup and &
        signal.signal(signal.SIGINT, _leave)


def _release_start() -> None:
    if sys.excepthook is _tell_import:
        sys.excepthook = sys.__excepthook__
        atexit.unregister(_tell_end)


def _tell_import(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fault of an import, with the package in which it is."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)]
    roots = [name.partition(".")[0] for name in names]
    others = [name for name in roots if name not in ("__main__", "importlib", *_list_own())]
    package = getattr(error, "name", None) or (others[0] if others else roots[-1])
    first = (str(error).splitlines() or [""])[0]
    said = f"error: {package} cannot be imported: {kind.__name__}: {first}; {REMEDY}\n"
    os.write(2, said.encode(errors="backslashreplace"))
    atexit.unregister(_tell_end)


def _list_own() -> list[str]:
    return [path.stem for path in Path(__file__).parent.glob("*.py")]


def _tell_end() -> NoReturn:
    os.write(2, f"error: a package ended the process as it was imported; {REMEDY}\n".encode())
    os._exit(UNWRITTEN)


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
