"""Runs named commands one after the other, tells how long each took, and sums up at the end."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from setup_env import ROOT


class Step(NamedTuple):
    """One command of a list."""

    name: str
    command: Sequence[str | Path]
    extra_variables: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """How one step ended."""

    name: str
    exit_code: int
    seconds: float


def run_steps(steps: Sequence[Step], variables: Mapping[str, str]) -> list[Outcome]:
    """Runs every step in the checkout, also after one has failed; each one's output goes straight to the terminal."""
    outcomes = []
    for step in steps:
        words = [str(part) for part in step.command]
        print(f"\n=== {step.name}: {shlex.join(words)}", flush=True)
        start = time.monotonic()
        try:
            exit_code = subprocess.run(
                words, cwd=ROOT, env={**variables, **step.extra_variables}, check=False
            ).returncode
        except OSError as error:
            print(f"{words[0]}: {error.strerror}", file=sys.stderr)
            exit_code = 127
        outcomes.append(Outcome(step.name, exit_code, time.monotonic() - start))
        print(f"=== {step.name}: {describe(outcomes[-1])}", flush=True)
    return outcomes


def describe(outcome: Outcome) -> str:
    """`ok, 1.2 s` or `FAILED with exit code 1, 1.2 s`."""
    word = "ok" if outcome.exit_code == 0 else f"FAILED with exit code {outcome.exit_code}"
    return f"{word}, {outcome.seconds:.1f} s"


def sum_up(title: str, outcomes: Sequence[Outcome]) -> int:
    """Prints one line a step and returns the exit code for all of them: 0 only if each passed."""
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    print(f"\n{title}")
    for outcome in outcomes:
        print(f"  {outcome.name:{width}}  {describe(outcome)}")
    failed = [outcome.name for outcome in outcomes if outcome.exit_code != 0]
    total = sum(outcome.seconds for outcome in outcomes)
    print(
        f"{title}: " + (f"{len(failed)} of {len(outcomes)} FAILED: {', '.join(failed)}" if failed else "all passed"),
        end="",
    )
    print(f", {total:.0f} s", flush=True)
    return 1 if failed else 0
