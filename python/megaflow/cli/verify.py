"""`megaflow verify PREFIX`."""

import dataclasses
import sys
from collections.abc import Sequence

from megaflow.cli import exit_codes
from megaflow.cli.options import add_json, build_parser, megabytes, plural, print_json, show_bytes
from megaflow.verifying import VerifyReport, verify


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow verify") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parser = build_parser(
            prog, "Check structure, sizes, ids and checksums of a pair, and say so in its sidecar if all is well."
        )
        parser.add_argument("prefix", metavar="PREFIX", help="the pair, with or without _text_document")
        parser.add_argument("--threads", type=int, metavar="N", help="threads that read (default: one a processor)")
        parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below N (default: the sidecar's)")
        parser.add_argument("--no-stamp", action="store_true", help="leave the sidecar as it is")
        add_json(parser)
        parsed = parser.parse(arguments)
        with show_bytes("checking") as progress:
            report = verify(
                parsed.prefix,
                threads=parsed.threads,
                vocab_size=parsed.vocab_size,
                stamp=not parsed.no_stamp,
                progress=progress,
            )
        print_json(dataclasses.asdict(report)) if parsed.json else _print(report, prog, stamp=not parsed.no_stamp)
        if report.num_faults:
            raise exit_codes.ToldError(f"{report.prefix}: {plural(report.num_faults, 'fault')}")

    return exit_codes.run(prog, command, arguments=arguments)


def _print(report: VerifyReport, prog: str, *, stamp: bool) -> None:
    for fault in report.faults:
        print(fault)
    if report.num_faults > len(report.faults):
        print(f"... and {report.num_faults - len(report.faults):,} more")
    if report.num_faults:
        return
    ids = "" if report.ids is None else f", ids {report.ids[0]} to {report.ids[1]}"
    limit = "" if report.vocab_size is None else f" of {report.vocab_size:,}"
    print(f"{report.prefix}: {', '.join(report.checked)} are right ({megabytes(report.bytes)} read)")
    print(f"  {plural(report.documents, 'document')}, {report.tokens:,} tokens{ids}{limit}")
    if not report.has_checksums:
        print(f"{prog}: no sidecar, so the bytes could not be compared with checksums", file=sys.stderr)
    if stamp and report.not_stamped and report.has_checksums:
        print(f"{prog}: not stamped: {report.not_stamped}", file=sys.stderr)
