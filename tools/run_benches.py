#!/usr/bin/env python3
"""All benchmarks: criterion in the crates that have benches, then the programs in benches/ (README.md there).

python3 tools/run_benches.py                                       # everything
python3 tools/run_benches.py tokenizer -- --quick --only real      # one, with arguments of its own
"""

from __future__ import annotations

import argparse
import sys

from doors import run_door
from setup_env import ROOT, prepare_or_exit
from steps import Step, run_steps, sum_up

PROGRAMS = ("preprocess", "loader", "stream", "tokenizer")
RIVALS = ("stable", "rc")
"""Environments of the tokenizer benchmark's rivals, of which some exclude one another."""


def rivals_steps() -> list[Step]:
    """Makes `.rivals/NAME` from benches/rivals-NAME.txt where it is not there yet, and fetches tokenizers."""
    steps = []
    for name in RIVALS:
        folder, wanted = ROOT / ".rivals" / name, ROOT / "benches" / f"rivals-{name}.txt"
        python = folder / "bin" / "python"
        if not python.exists():
            steps.append(Step(f"environment {name}", [sys.executable, "-m", "venv", str(folder)]))
        install = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(wanted)]
        steps.append(Step(f"rivals {name}", install))
    return [*steps, Step("tokenizers", [sys.executable, "tools/fetch_tokenizers.py"])]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="crates or programs; all if none is named; behind -- its own arguments"
    )
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    names, own = parser.parse_args(words[:cut]).names, words[cut + 1 :]
    crates = sorted({path.parents[1].name for path in ROOT.glob("crates/*/benches/*.rs")})
    if unknown := set(names) - {*crates, *PROGRAMS}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join([*crates, *PROGRAMS])}")
    if own and len(names) != 1:
        parser.error("arguments behind -- are those of one benchmark: name it before them")
    environment = prepare_or_exit()
    steps = [
        Step(crate, ["cargo", "bench", "-p", crate, "--bench", "*", *(["--", *own] if own else [])]) for crate in crates
    ]
    steps += [
        Step(name, [environment.python, f"benches/{name}.py", *own], {"PYTHONPATH": str(ROOT / "tools")})
        for name in PROGRAMS
    ]
    if not names or "tokenizer" in names:
        run_steps(rivals_steps(), environment.variables())  # what is missing, the benchmark says itself
    chosen = [step for step in steps if not names or step.name in names]
    sys.exit(sum_up("benchmarks", run_steps(chosen, environment.variables())))


if __name__ == "__main__":
    sys.exit(run_door(main))
