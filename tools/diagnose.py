#!/usr/bin/env python3
"""What is wrong with a run, and the flag that mends it: `python tools/diagnose.py RUN`.

RUN is a run folder: metrics.jsonl, run.json. Findings come worst first, each with what was seen, the likely cause and
what to change; then what could not be judged, and why. Exit code 0: nothing found; 3: something was found; 1: RUN
cannot be read, or half of it is missing and nothing was found in the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python"), str(ROOT / "tools")]

from doors import DeskParser, guard_start, run_door, say_error  # noqa: E402

if __name__ == "__main__":
    guard_start()

from findings import Finding, Rule  # noqa: E402
from report import ReportError  # noqa: E402
from run_record import MANIFEST, METRICS, Record, read_record  # noqa: E402
from symptoms import RULES  # noqa: E402

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
    findings, notes = diagnose(record), list_notes(record)
    if options.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=1))
        print("".join(f"note: {_clean(note)}\n" for note in notes), end="", file=sys.stderr)
    else:
        print(_clean(format_findings(record, findings, notes)))
    if findings:
        return FOUND
    return UNREADABLE if record.missing or not record.steps else 0


def diagnose(record: Record) -> list[Finding]:
    """Everything that the rules find, the worst first."""
    found = [finding for rule in RULES if rule.can_judge(record) for finding in rule.find(record)]
    return sorted(found, key=lambda finding: finding.rank)


def list_notes(record: Record) -> list[str]:
    """Sentences about what is missing or cannot be used, with the symptoms that can therefore not be judged."""
    open_rules = [rule for rule in RULES if not rule.can_judge(record)]
    notes, count = [*record.notes], len(record.steps)
    if MANIFEST in record.missing:
        lost = [rule for rule in open_rules if MANIFEST in rule.needs]
        why = f"{record.folder / MANIFEST}: there is none: device, flags and end of the run are not known"
        notes.append(_describe_gap(why, lost) + "; remedies are named without this run's values")
    lost = [rule for rule in open_rules if METRICS in rule.needs and MANIFEST not in record.missing & {*rule.needs}]
    if METRICS in record.missing:
        why = f"{record.folder / METRICS}: there is none: the run ended before it could log, or the file was moved"
    elif not count:
        why = f"{record.folder / METRICS}: no training step is in it: the run ended, or still is, before its first line"
    else:
        why = f"{record.folder / METRICS}: {count} {'line' if count == 1 else 'lines'} of training steps are too few"
    return [*notes, _describe_gap(why, lost)] if lost else notes


def _describe_gap(why: str, rules: Sequence[Rule]) -> str:
    return f"{why}; not judged: {', '.join(rule.symptom for rule in rules)}"


def format_findings(record: Record, findings: Sequence[Finding], notes: Sequence[str] = ()) -> str:
    """The findings as text."""
    last = record.steps[-1]["iteration"] if record.steps else 0
    lines = [f"{record.folder}: {len(record.steps)} lines up to iteration {last}, {record.describe_end()}"]
    if not findings:
        where = " in what is left of it" if record.missing or not record.steps else " in it"
        lines.append(f"nothing found: no symptom of docs/troubleshooting.md shows{where}")
    for number, finding in enumerate(findings, start=1):
        lines += [f"\n{number}. {finding.title}", f"   seen:   {finding.seen}", f"   likely: {finding.cause}"]
        lines += [f"   do:     {finding.remedies[0]}", *(f"           {text}" for text in finding.remedies[1:])]
    lines += ["\nnote: " + note for note in notes]
    return "\n".join(lines)


def _clean(text: str) -> str:
    """Without characters that would move a terminal's cursor: texts of a run folder may be anybody's."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


if __name__ == "__main__":
    sys.exit(run_door(main))
