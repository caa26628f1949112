#!/usr/bin/env python3
"""What is wrong with a run, and the flag that mends it: `python tools/diagnose.py RUN`.

RUN is a run folder: metrics.jsonl, run.json. Findings come worst first, each with what was seen, the likely cause and
what to change. Exit code 0: nothing found; 3: something was found; 1: RUN cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python"), str(ROOT / "tools")]

from doors import DeskParser, guard_start, run_door, say_error  # noqa: E402

if __name__ == "__main__":
    guard_start()

from megaflow_trainer.training.lock_file import is_held  # noqa: E402
from report import ReportError  # noqa: E402
from symptoms import RULES, Finding, Record, read_record  # noqa: E402

FOUND, UNREADABLE = 3, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = DeskParser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_json()
    options = parser.parse_args(argv)
    try:
        record = read_record(options.run)
    except (ReportError, OSError) as error:
        say_error(str(error), as_json=options.json)
        return UNREADABLE
    findings = diagnose(record)
    if options.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        print(format_findings(record, findings))
    return FOUND if findings else 0


def diagnose(record: Record) -> list[Finding]:
    """Everything that the rules find, the worst first."""
    found = [finding for rule in (find_killed, *RULES) for finding in rule(record)]
    return sorted(found, key=lambda finding: finding.rank)


def find_killed(record: Record) -> Iterator[Finding]:
    """A run that has written no end although its process is gone."""
    if record.end or not record.start or is_held(record.folder) is not False:
        return
    yield Finding(
        symptom="killed",
        rank=0,
        title="the run was killed without a word",
        seen="no end is written, and no process holds the run folder's lock",
        cause="the kernel, because the machine's memory ran out (torchrun: signal 9); a scheduler; a loss of power",
        remedies=(
            "dmesg, or the scheduler's log: does it say out of memory?",
            "then --micro-batch-size, --recompute-granularity full; python tools/plan.py shows what fits",
            "else the same command: with --save it goes on from the last checkpoint",
        ),
    )


def format_findings(record: Record, findings: Sequence[Finding]) -> str:
    """The findings as text."""
    last = record.steps[-1]["iteration"] if record.steps else 0
    head = f"{record.folder}: {len(record.steps)} lines up to iteration {last}, {record.describe_end()}"
    if not findings:
        return f"{head}\nnothing found: no symptom of docs/troubleshooting.md shows in it"
    lines = [head]
    for number, finding in enumerate(findings, start=1):
        lines += [f"\n{number}. {finding.title}", f"   seen:   {finding.seen}", f"   likely: {finding.cause}"]
        lines += [f"   do:     {finding.remedies[0]}", *(f"           {text}" for text in finding.remedies[1:])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_door(main))
