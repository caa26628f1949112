"""Where the installed commands begin: light, so that Ctrl-C ends them in one line while the rest is still imported."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType, ModuleType
from typing import NoReturn

INTERRUPTED = 130


def megaflow() -> int:
    """`megaflow`."""
    return _start("megaflow", "megaflow.cli.main")


def preprocess() -> int:
    """`megaflow-preprocess`."""
    return _start("megaflow-preprocess", "megaflow.cli.preprocess")


def _start(name: str, module: str) -> int:
    guard(f"{name}: stopped by Ctrl-C")
    code: int = load(name, module).main()
    return code


def load(name: str, module: str) -> ModuleType:
    """The module of a command; ends the process in one sentence where a package that it needs cannot be imported."""
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:  # an OSError of a library, or whatever a package raises
        first = (str(error).splitlines() or [""])[0]
        said = f"a package cannot be imported: {type(error).__name__}: {first}"
        sys.exit(f"{name}: {said}; install it again, by `pip install --force-reinstall megaflow` or `make build`")


def guard(sentence: str) -> None:
    """Until `unguard`, Ctrl-C says a sentence and ends the process; where it is ignored (nohup, `&`) it stays so."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        if sentence:
            os.write(2, f"{sentence}\n".encode())
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def unguard() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again."""
    if getattr(signal.getsignal(signal.SIGINT), "__module__", None) == __name__:
        signal.signal(signal.SIGINT, signal.default_int_handler)
