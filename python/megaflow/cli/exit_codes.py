"""How a command ends: one sentence and a code, never a traceback for what a user can mend."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import TextIO, cast

from megaflow.cli.output import CLOSED, Output, describe_fault, drop_output, prepare_output
from megaflow.cli.start import INTERRUPTED, unguard
from megaflow.errors import (
    CheckpointError,
    ConfigError,
    DataFormatError,
    MegaflowError,
    NoDocumentsError,
    SampleIndexError,
    TokenizerError,
)

USAGE, NO_DOCUMENTS, BAD_DATA, FILES, TERMINATED = 2, 3, 4, 5, 143

TABLE = """exit codes:
  0  done
  2  a setting, a document number or the tokenizer is wrong
  3  the input holds no document; nothing was written
  4  a record or a file does not hold what it should
  5  a file is missing, or cannot be read or written
  130, 143  stopped by Ctrl-C or SIGTERM
Nothing incomplete ever has its final name."""


class ToldError(DataFormatError):
    """Faults of data that a report on standard output has told already."""


def run(
    name: str,
    command: Callable[[], None],
    *,
    on_stop: Callable[[bool], str] | None = None,
    arguments: Sequence[str] | None = (),
) -> int:
    """Runs a command; faults end in one sentence on standard error.

    Args:
        name: what the sentences begin with.
        command: the work.
        on_stop: what to add when it was stopped or failed, such as that the same command goes on; empty for nothing. It
            is told whether the data were the cause.
        arguments: those of the command, None for the process's own. With `--json` among them a fault is an object on
            standard output as well.

    Returns:
        The exit code.
    """
    if not prepare_output():
        _say(name, CLOSED, None)
        return FILES
    before, output = signal.signal(signal.SIGTERM, _raise_terminated), Output(sys.stdout)
    try:
        unguard()
        with redirect_stdout(cast(TextIO, output)):
            try:
                command()
            finally:  # of --help too, which ends by SystemExit
                sys.stdout.flush()
    except MegaflowError as error:
        if "--json" in (sys.argv[1:] if arguments is None else arguments) and not isinstance(error, ToldError):
            print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
        _say(name, str(error), on_stop if isinstance(error, (OSError, DataFormatError)) else None, error)
        return code_of(error)
    except KeyboardInterrupt:
        _say(name, "stopped by Ctrl-C", on_stop)
        return INTERRUPTED
    except _Terminated:
        _say(name, "stopped by SIGTERM", on_stop)
        return TERMINATED
    except BrokenPipeError:  # whoever read our output has gone; nobody is left to tell
        drop_output()
    except OSError as error:
        if error is not output.fault:
            raise
        drop_output()
        _say(name, describe_fault(error), None)
        return FILES
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _say(name: str, sentence: str, on_stop: Callable[[bool], str] | None, error: MegaflowError | None = None) -> None:
    addition = on_stop(isinstance(error, DataFormatError)) if on_stop is not None else ""
    print(f"{name}: {sentence}{'; ' if addition else ''}{addition}", file=sys.stderr)


def code_of(error: MegaflowError) -> int:
    """Exit code of an error."""
    if isinstance(error, NoDocumentsError):
        return NO_DOCUMENTS
    if isinstance(error, (ConfigError, TokenizerError, CheckpointError, SampleIndexError)):
        return USAGE
    if isinstance(error, DataFormatError):
        return BAD_DATA
    return FILES if isinstance(error, OSError) else 1


class _Terminated(BaseException):
    pass


def _raise_terminated(*_: object) -> None:
    raise _Terminated
