#!/usr/bin/env python3
"""All benchmarks: criterion in the crates that have benches, then the programs in benches/ (README.md there)."""

from __future__ import annotations

import argparse
import sys

from setup_env import ROOT, prepare_or_exit
from steps import Step, run_steps, sum_up

PROGRAMS = ("preprocess", "loader")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="crates or programs; all if none is named")
    names = parser.parse_args().names
    environment = prepare_or_exit()
    crates = sorted({path.parents[1].name for path in ROOT.glob("crates/*/benches/*.rs")})
    steps = [Step(crate, ["cargo", "bench", "-p", crate, "--bench", "*"]) for crate in crates]
    steps += [
        Step(name, [environment.python, f"benches/{name}.py"], {"PYTHONPATH": str(ROOT / "tools")}) for name in PROGRAMS
    ]
    chosen = [step for step in steps if not names or step.name in names]
    sys.exit(sum_up("benchmarks", run_steps(chosen, environment.variables())))


if __name__ == "__main__":
    main()
