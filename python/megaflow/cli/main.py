"""`megaflow COMMAND`."""

import argparse
import sys
from collections.abc import Sequence

from megaflow.cli import exit_codes
from megaflow.cli.arguments import Parser
from megaflow.cli.start import load

COMMANDS = {
    "preprocess": ("preprocess", "turn text files into .bin/.idx (the same as megaflow-preprocess)"),
    "merge": ("merge", "several .bin/.idx pairs to one"),
    "verify": ("verify", "check structure, sizes, ids and checksums of a pair"),
    "inspect": ("inspect", "what a pair holds; one document or training sample with its source line"),
    "bench-loader": ("bench_loader", "how fast batches come from this disk, and whether that feeds a model"),
    "stats": ("stats", "lengths of documents, most frequent ids"),
    "export": ("export", "a pair to JSON lines or Parquet"),
    "import": ("import_", "token files of datatrove, nanoGPT and llm.c to .bin/.idx"),
    "completion": ("completion", "what lets bash, zsh or fish complete commands and flags"),
}
"""Name of each command: its module in this folder, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in COMMANDS:
        name = arguments[0]
        module = load(f"megaflow {name}", f"megaflow.cli.{COMMANDS[name][0]}")
        code: int = module.main(arguments[1:], prog=f"megaflow {name}")
        return code

    def other() -> None:
        from megaflow import __version__

        commands = "\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
        parser = Parser(
            prog="megaflow",
            description="The commands of megaflow.",
            epilog=f"commands:\n{commands}\n\nmegaflow COMMAND --help tells more.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"megaflow {__version__}")
        parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND")
        parser.parse(arguments)

    return exit_codes.run("megaflow", other)


if __name__ == "__main__":
    raise SystemExit(main())
