"""`megaflow COMMAND`."""

import argparse
import sys
from collections.abc import Sequence

from megaflow.cli import exit_codes, preprocess
from megaflow.cli.arguments import Parser

COMMANDS = {"preprocess": "turn files of JSON lines into .bin/.idx (the same as megaflow-preprocess)"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["preprocess"]:
        return preprocess.main(arguments[1:], prog="megaflow preprocess")

    def other() -> None:
        from megaflow import __version__

        commands = "\n".join(f"  {name}  {text}" for name, text in COMMANDS.items())
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
