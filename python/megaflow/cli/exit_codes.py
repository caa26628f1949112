"""How a command ends: one sentence and a code, never a traceback for what a user can mend."""

import os
import signal
import sys
from collections.abc import Callable

from megaflow.errors import (
    ConfigError,
    DataFormatError,
    MegaflowError,
    NoDocumentsError,
    SampleIndexError,
    TokenizerError,
)

USAGE, NO_DOCUMENTS, BAD_DATA, FILES, INTERRUPTED, TERMINATED = 2, 3, 4, 5, 130, 143

TABLE = """exit codes:
  0  done
  2  a setting, a document number or the tokenizer is wrong
  3  the input holds no document; nothing was written
  4  a record or a file does not hold what it should
  5  a file is missing, or cannot be read or written
  130, 143  stopped by Ctrl-C or SIGTERM; nothing was written"""


def run(name: str, command: Callable[[], None]) -> int:
    """Runs a command; faults end in one sentence on standard error.

    Returns:
        The exit code.
    """
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        command()
        sys.stdout.flush()
    except MegaflowError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt:
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except _Terminated:
        print(f"{name}: stopped by SIGTERM", file=sys.stderr)
        return TERMINATED
    except BrokenPipeError:  # whoever read our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def code_of(error: MegaflowError) -> int:
    """Exit code of an error."""
    if isinstance(error, NoDocumentsError):
        return NO_DOCUMENTS
    if isinstance(error, (ConfigError, TokenizerError, SampleIndexError)):
        return USAGE
    if isinstance(error, DataFormatError):
        return BAD_DATA
    return FILES if isinstance(error, OSError) else 1


class _Terminated(BaseException):
    pass


def _raise_terminated(*_: object) -> None:
    raise _Terminated
