"""`megaflow merge A B --output-prefix C`, and Megatron-LM's `tools/merge_datasets.py`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from megaflow.cli import exit_codes
from megaflow.cli.options import add_json, build_parser, megabytes, plural, print_json, show_bytes
from megaflow.errors import ConfigError, MissingFileError
from megaflow.merging import MergeReport, expand, merge, prefixes_in


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow merge") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parser = build_parser(prog, "Merge .bin/.idx pairs, in the order named, into one.")
        parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="pairs, or patterns of them")
        parser.add_argument(
            "--output-prefix",
            required=True,
            metavar="PREFIX",
            help="writes PREFIX.bin, .idx and .json; nothing is added",
        )
        parser.add_argument(
            "--widen", action="store_true", help="store pairs of different token types in the type that holds them all"
        )
        parser.add_argument(
            "--force", action="store_true", help="merge pairs of different tokenizers, without a sidecar"
        )
        add_json(parser)
        parsed = parser.parse(arguments)
        run(
            expand(parsed.prefixes),
            parsed.output_prefix,
            prog=prog,
            widen=parsed.widen,
            force=parsed.force,
            as_json=parsed.json,
        )

    return exit_codes.run(prog, command, arguments=arguments)


def main_megatron(arguments: Sequence[str] | None = None, *, prog: str = "merge_datasets.py") -> int:
    """Megatron-LM's merge: all pairs of a folder, by name.

    Returns:
        The exit code.
    """

    def command() -> None:
        parser = build_parser(prog, "Merge all .bin/.idx pairs of a folder, by name, into one.")
        parser.add_argument("--input", required=True, metavar="DIR", help="folder of the pairs")
        parser.add_argument(
            "--output-prefix",
            required=True,
            metavar="PREFIX",
            help="writes PREFIX.bin, .idx and .json; its folder must exist",
        )
        parser.add_argument("--multimodal", action="store_true", help="not available")
        parsed = parser.parse(arguments)
        if parsed.multimodal:
            raise ConfigError("--multimodal is not available: pairs with a mode for each sequence are not merged")
        folder = Path(parsed.output_prefix).parent
        if not folder.is_dir():
            raise MissingFileError(f"{folder}: the folder of --output-prefix does not exist")
        run(prefixes_in(parsed.input), parsed.output_prefix, prog=prog)

    return exit_codes.run(prog, command)


def run(
    prefixes: Sequence[str],
    output_prefix: str,
    *,
    prog: str,
    widen: bool = False,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Merges, and says what was merged."""
    with show_bytes("merging") as progress:
        report = merge(prefixes, output_prefix, widen=widen, force=force, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    print(summary(report, len(prefixes)))
    if report.no_sidecar is not None:
        print(f"{prog}: no sidecar was written: {report.no_sidecar}", file=sys.stderr)


def summary(report: MergeReport, num_pairs: int) -> str:
    """What was merged, for people."""
    suffixes = ".bin .idx" if report.no_sidecar else ".bin .idx .json"
    empty = f" ({report.empty_documents:,} empty)" if report.empty_documents else ""
    widened = f", {plural(report.num_widened, 'pair')} widened" if report.num_widened else ""
    return "\n".join(
        [
            f"{report.prefix}{suffixes} from {plural(num_pairs, 'pair')}",
            f"  documents  {report.documents:,}{empty}",
            f"  tokens     {report.tokens:,} as {report.dtype} ({megabytes(report.bin_bytes)}){widened}",
        ]
    )
