"""`megaflow export PREFIX`."""

import sys
from collections.abc import Sequence

from megaflow.cli import exit_codes
from megaflow.cli.options import add_tokenizer, build_parser, named_tokenizer, plural, show_counts
from megaflow.exporting import export
from megaflow.indexed import resolve_prefix


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow export") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parser = build_parser(prog, "Write a pair as JSON lines or Parquet, a row for each document.")
        parser.add_argument("prefix", metavar="PREFIX", help="the pair, with or without _text_document")
        parser.add_argument("--to", choices=("jsonl", "parquet"), default="jsonl", help="default: jsonl")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--text", dest="content", action="store_const", const="text", help="text (the default)")
        what.add_argument("--ids", dest="content", action="store_const", const="ids", help="token ids")
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="a file that does not exist yet, or - for standard output (default: PREFIX.jsonl)",
        )
        add_tokenizer(parser)
        parsed = parser.parse(arguments)
        output = parsed.output or f"{resolve_prefix(parsed.prefix)}.{parsed.to}"
        tokenizer = named_tokenizer(parsed)
        with show_counts("exporting", "documents") as progress:
            documents = export(
                parsed.prefix,
                output,
                to=parsed.to,
                content=parsed.content or "text",
                tokenizer=tokenizer,
                progress=progress,
            )
        print(f"{output}: {plural(documents, 'document')}", file=sys.stderr if output == "-" else sys.stdout)

    return exit_codes.run(prog, command)
