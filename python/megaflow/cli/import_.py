"""`megaflow import --from FORMAT FILE...`."""

import dataclasses
import sys
from collections.abc import Sequence

from megaflow.cli import exit_codes
from megaflow.cli.options import add_json, add_tokenizer, build_parser, named_tokenizer, print_json, show_counts
from megaflow.importing import default_output, import_tokens


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow import") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parser = build_parser(
            prog, "Turn token files of datatrove, nanoGPT or llm.c into .bin/.idx, without a change of tokens."
        )
        parser.add_argument("inputs", nargs="+", metavar="FILE", help="token files, in this order")
        parser.add_argument(
            "--from",
            dest="from_format",
            required=True,
            choices=("datatrove", "nanogpt", "llmc"),
            help="what the files are",
        )
        parser.add_argument(
            "--output-prefix",
            metavar="PREFIX",
            help="writes PREFIX.bin, .idx and .json (default: FILE's name + _document)",
        )
        parser.add_argument("--eod-id", type=int, metavar="ID", help="id that separates documents; nanogpt needs it")
        add_tokenizer(parser, default="none, and the sidecar names none")
        add_json(parser)
        parsed = parser.parse(arguments)
        tokenizer = named_tokenizer(parsed)
        with show_counts("importing", "tokens") as progress:
            report = import_tokens(
                parsed.inputs,
                parsed.output_prefix or default_output(parsed.inputs),
                from_format=parsed.from_format,
                eod_id=parsed.eod_id,
                tokenizer=tokenizer,
                progress=progress,
            )
        for note in report.notes:
            print(f"{prog}: {note}", file=sys.stderr)
        if parsed.json:
            print_json(dataclasses.asdict(report))
            return
        empty = f" ({report.empty_documents:,} empty)" if report.empty_documents else ""
        print(f"{report.prefix}.bin .idx .json")
        print(f"  documents  {report.documents:,}{empty}")
        print(f"  tokens     {report.tokens:,} as {report.dtype}")

    return exit_codes.run(prog, command, arguments=arguments)
