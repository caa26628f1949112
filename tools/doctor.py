#!/usr/bin/env python3
"""Is this machine ready to train? Environment, GPUs, links, disks, files and packages in words, with remedies.

    python tools/doctor.py
    python tools/doctor.py --data-path corpus --vocab-file vocab.json --save /checkpoints --preset llama3_8b

Every line is `ok`, `note` or `fail`; a fail says what to do. Exit code 0: no fails; 1: some.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python"), str(ROOT / "tools")]

from doors import DeskParser, guard_start, run_door  # noqa: E402

if __name__ == "__main__":
    guard_start()

from doctor_checks import CHECKS, Asked, Line, first_line  # noqa: E402
from waiting import Waiting  # noqa: E402

MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}
COLOURS = {"ok": "32", "note": "33", "fail": "31"}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = DeskParser(__doc__)
    parser.add_argument("--data-path", metavar="PREFIX", help="prefix of a .bin/.idx pair to look at")
    parser.add_argument("--vocab-file", type=Path, help="vocabulary of the tokenizer")
    parser.add_argument("--merge-file", type=Path, help="merges of the tokenizer")
    parser.add_argument("--tokenizer-model", type=Path, help="a tokenizer.json or the folder with one")
    parser.add_argument("--save", type=Path, default=Path(), help="where checkpoints will go (default: here)")
    parser.add_argument("--preset", help="model whose checkpoints must find room")
    parser.add_argument("--checkpoints", type=int, default=2, help="how many of them are kept (default: 2)")
    parser.add_argument("--no-collective", action="store_true", help="leave out the two-process test")
    parser.add_json()
    options = parser.parse_args(argv)
    if options.checkpoints < 1:
        parser.error(f"--checkpoints must be >= 1, got {options.checkpoints}")
    asked = Asked(**{name: value for name, value in vars(options).items() if name != "json"})
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    lines = []
    with Waiting("doctor") as waiting:
        for line in examine(asked, waiting.begin):
            lines.append(line)
            if not options.json:
                waiting.print(format_line(line, has_colour=has_colour))
    fails = sum(line.state == "fail" for line in lines)
    if options.json:
        print(json.dumps([line.as_dict() for line in lines], indent=1))
    else:
        print(f"\n{len(lines)} lines, {fails} to mend" if fails else f"\n{len(lines)} lines, nothing to mend")
    return int(fails > 0)


def examine(asked: Asked, begin: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Every check, in order; `begin` is told which comes next."""
    for number, check in enumerate(CHECKS, start=1):
        begin(f"{check.__name__.removeprefix('check_')} ({number} of {len(CHECKS)})")
        try:
            yield from check(asked)
        except (Exception, SystemExit) as error:  # of a package that works and then does not
            text = f"the check failed: {type(error).__name__}: {first_line(error)}"
            yield Line("fail", check.__name__.removeprefix("check_"), text, "the lines above may say why")


def format_line(line: Line, *, has_colour: bool) -> str:
    """A line for people."""
    mark = MARKS[line.state]
    mark = f"\033[{COLOURS[line.state]}m{mark}\033[0m" if has_colour else mark
    return f"{mark}  {line.topic}: {line.text}" + (f"\n      -> {line.remedy}" if line.remedy else "")


if __name__ == "__main__":
    sys.exit(run_door(main))
