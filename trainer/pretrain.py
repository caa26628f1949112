"""Pretrain a GPT: flags or a recipe -> configuration -> run.

torchrun --nproc_per_node=8 trainer/pretrain.py --config trainer/recipes/gpt2_124m_1gpu.yaml --data-path corpus
python trainer/pretrain.py --help
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO, cast

try:
    from megaflow.cli.start import guard, unguard

    if __name__ == "__main__":  # imports take a while
        guard("stopped by Ctrl-C" if os.environ.get("RANK", "0") == "0" else "")

    from megaflow import __version__
    from megaflow.cli.output import Output, describe_fault, drop_output, prepare_output
    from megaflow.errors import ConfigError, MegaflowError
    from megaflow_trainer.config import format_help, read_command
    from megaflow_trainer.training.last_word import leave_last_word
    from megaflow_trainer.training.orphan import end_with_launcher
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: {missing.name} is not installed for {sys.executable}; run `make build` in the checkout once, "
        "then `. .venv/bin/activate`"
    )
except (Exception, SystemExit) as broken:  # of a package: an OSError of a library, or whatever it raises
    sys.exit(
        f"error: a package cannot be imported: {type(broken).__name__}: {broken}; `python tools/doctor.py` tells which"
    )

EXIT_BAD_CONFIG, EXIT_NO_OUTPUT = 2, 1
PATIENCE_S = 5.0
MOST_DIGITS = 9
"""Of a number in the environment."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code (see --help)."""
    end_with_launcher(os.environ)
    rank = 0
    try:
        rank, world_size, local_rank = read_place(os.environ)
        if "--help" in argv or "-h" in argv or "--version" in argv:
            if rank == 0:
                print(describe_version() if "--version" in argv else format_help())
            return 0
        config, notes = read_command(argv, world_size=world_size)
    except MegaflowError as error:
        say_early(str(error), rank=rank)
        return EXIT_BAD_CONFIG
    try:
        from megaflow_trainer.training.launch import launch  # only now: a fault in the flags does not wait for torch
    except ModuleNotFoundError as missing:
        say_early(f"{missing.name} is not installed; run `make build`, then `. .venv/bin/activate`", rank=rank)
        return EXIT_BAD_CONFIG
    except (ImportError, OSError, SystemExit) as broken:  # a library of torch, or a package that gives up
        what = f"a package cannot be imported: {type(broken).__name__}: {broken}"
        say_early(f"{what}; `python tools/doctor.py` tells which", rank=rank)
        return EXIT_BAD_CONFIG

    unguard()
    return launch(config, notes, rank=rank, world_size=world_size, local_rank=local_rank)


def run(argv: Sequence[str]) -> int:
    """Run the command line; a fault of standard output is one line. Where it is closed, the log goes to files alone."""
    if not prepare_output():
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # to the end of the process
    output = Output(sys.stdout)
    try:
        with redirect_stdout(cast(TextIO, output)):
            code = main(argv)
            sys.stdout.flush()
            return code
    except OSError as error:
        if error is not output.fault:
            raise
        drop_output()
        if isinstance(error, BrokenPipeError) and {"--help", "-h", "--version"} & {*argv}:
            return 0  # whoever read it has seen enough
        print(f"error: {describe_fault(error)}", file=sys.stderr)
        return EXIT_NO_OUTPUT


def describe_version() -> str:
    """The trainer and torch."""
    return f"megaflow {__version__}, torch {importlib.metadata.version('torch')}"


def read_place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks and rank on this machine, as the launcher says them; a single process needs none.

    Raises:
        ConfigError: naming the variable that is missing or wrong.
    """
    size = _read_number(environment, "WORLD_SIZE", 1, at_least=1)
    rank = _read_number(environment, "RANK", 0)
    if size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={size} without {', '.join(missing)}: start the ranks by torchrun, or unset WORLD_SIZE"
            )
        _read_number(environment, "MASTER_PORT", 0)
    if rank >= size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={size}; start the ranks by torchrun, or unset both")
    return rank, size, _read_number(environment, "LOCAL_RANK", 0)


def _read_number(environment: Mapping[str, str], name: str, default: int, *, at_least: int = 0) -> int:
    text = environment.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS) or int(text) < at_least:
        raise ConfigError(
            f"the environment says {name}={text[:40]}: expected a whole number >= {at_least}, of at most {MOST_DIGITS} "
            f"digits; start the ranks by torchrun, or unset {name}"
        )
    return int(text)


def say_early(message: str, *, rank: int) -> None:
    """Say a fault that every rank finds alike before the ranks meet: the first rank speaks, the others let it.

    A launcher ends all ranks as soon as one has left, so the others stay until the first has surely spoken.
    """
    if rank == 0:
        print(f"error: {message}", file=sys.stderr, flush=True)
        leave_last_word(os.environ, message)
    else:
        time.sleep(PATIENCE_S)


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # as the run begins, which says more from then on
        sys.exit(130)
