#!/usr/bin/env python3
"""Training steps on GPUs, rows of the trainer's table: real data through the loader, whole steps, rivals beside them.

    python3 benches/gpu/train.py --data PREFIX gpt-1.3b --rival         # the row with its usual flags, all sides
    python3 benches/gpu/train.py --data PREFIX gpt-1.3b --flags="" --flags="--no-compile" --rival="--no-fusion"

Each row is a run of trainer/pretrain.py in a process of its own, once for every recipe (`--recipe`) and every `--flags`
(the row's usual ones in `rows.py` if not given); the figures are those of its log at the last multiple of `--window` of
its steps, means over as many steps. With several `--ranks` one more step is profiled, kernels only, for the time in
which a kernel of NCCL ran and no other, as the rival measures it; with `--kernels N` too, and the N kernels with the
most time are listed.

`--rival` without a value lets Megatron-Core (`rival_megatron.py`) follow each run: its sizes, recipe, layout, fp8 and
recompute, with the row's usual flags for the rest; with a value those flags stand for all but sizes and recipe. Rows
that have it run plain torch (`rival_torch.py`) too, others if `--torch` asks for it. Sides alternate. Sizes in
`--flags` are handed over; where a rival cannot follow a flag, nothing is run.

In a process of its own, before the runs and behind them, large products are timed (`machine.py`). JSON is written to
`benches/results/`, a file a row and set of flags; the same command replaces its own. `merge.py` makes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from facts import ROOT, RefusedError, check_rival, derive_megatron, derive_torch, describe_run
from launch import measure_machine, run_rival, run_row
from rows import RECIPE_FLAGS, ROWS

USUAL = "usual"
"""`--rival` or `--torch` without a value."""
LEAST = {"ranks": 1, "rounds": 1, "steps": 1, "window": 1, "kernels": 0}
NOT_IN_TABLE = ("tiny", "llama-6.7b")
SHOWN = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "loader_bound_s",
    "communication_s",
    "other_s",
    "exposed_communication_s",
    "pipeline_bubble",
    "memory_peak_bytes",
    "lm_loss",
)


def join(*parts: str) -> str:
    """Flags one behind the other."""
    return " ".join(part for part in parts if part)


def list_runs(row: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of megaflow of a row, as they are recorded.

    Raises:
        RefusedError: if megaflow refuses the flags.
    """
    usual = ROWS[row]
    if options.flags:
        added = [RECIPE_FLAGS[recipe] for recipe in options.recipe] or [""]
        return [describe_run(row, join(flags, more), options.ranks) for more in added for flags in options.flags]
    recipes, extra = options.recipe or usual.recipes, dict(usual.extra)
    return [
        describe_run(row, join(flags, RECIPE_FLAGS[recipe], extra.get(recipe, "")), options.ranks)
        for recipe in recipes
        for flags in usual.flags
    ]


def list_rivals(facts: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, str]]:
    """Script and flags of every rival of a run of megaflow.

    Raises:
        RefusedError: if one cannot follow it.
    """
    row, found = ROWS[facts["row"]], []
    for given in options.rival:
        if given == USUAL:
            found += [("rival_megatron.py", join(derive_megatron(facts), flags)) for flags in row.megatron]
        else:
            words = join("" if "--recipe" in given else f"--recipe {facts['recipe']}", given)
            found.append(("rival_megatron.py", words))
    for given in options.torch or []:
        usual = (row.torch or ("",)) if given == USUAL else (given,)
        found += [("rival_torch.py", join(derive_torch(facts), flags)) for flags in usual]
    if options.torch is None and USUAL in options.rival:
        with contextlib.suppress(RefusedError):  # not asked for by name: left out where it cannot follow
            found += [("rival_torch.py", join(derive_torch(facts), flags)) for flags in row.torch]
    if found:
        check_rival(facts)
    return found


def run_round(runs: list[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every run of a row once, each followed by its rivals; a rival that two of them share runs once."""
    done = set()
    for facts in runs:
        yield run_row(facts, options)
        for script, flags in list_rivals(facts, options):
            if (script, flags, facts["sizes"]) not in done:
                done.add((script, flags, facts["sizes"]))
                yield run_rival(script, flags, facts, options)


def name_file(options: argparse.Namespace) -> Path:
    """Where the results of this command go: the rows, and a hash of what else decides about the runs."""
    words = {name: str(value) for name, value in sorted(vars(options).items()) if name != "out"}
    mark = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]
    rows = "+".join(options.rows) if len(options.rows) < 4 else f"{len(options.rows)}-rows"
    return ROOT / "benches" / "results" / f"gpu-{rows}-{mark}.json"


def parse_options() -> tuple[argparse.Namespace, dict[str, list[dict[str, Any]]]]:
    """Command line, and the runs of megaflow by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: those of the table)")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a .bin/.idx pair of GPT-2's vocabulary")
    parser.add_argument(
        "--flags", action="append", default=[], help="in place of the row's usual flags; repeated: that many runs a row"
    )
    parser.add_argument(
        "--recipe", action="append", default=[], choices=sorted(RECIPE_FLAGS), help="repeated (default: the row's)"
    )
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of a run (default: 1)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (default: 16)")
    parser.add_argument("--window", type=int, default=6, help="steps of the figures (default: 6)")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels with the most time (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: gpu-ROW-HASH.json in benches/results)")
    value: dict[str, Any] = {"action": "append", "nargs": "?", "const": USUAL, "metavar": "FLAGS"}
    parser.add_argument("--rival", default=[], help="Megatron-Core in turn, with its usual flags or these", **value)
    parser.add_argument("--torch", help="plain torch in turn, with its usual flags or these", **value)
    parser.add_argument("--no-torch", dest="torch", action="store_const", const=[], help="without plain torch")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turn (default: 1)")
    options = parser.parse_args()
    if swallowed := {*options.rival, *(options.torch or [])} & set(ROWS):
        parser.error(
            f"{', '.join(sorted(swallowed))} was read as flags of a rival: name rows before --rival and --torch"
        )
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be >= {least}, got {getattr(options, name)}")
    if options.window > options.steps:
        parser.error(f"--window must be from 1 to --steps ({options.steps}), got {options.window}")
    options.rows = list(dict.fromkeys(options.rows)) or [row for row in ROWS if row not in NOT_IN_TABLE]
    runs = {}
    for row in options.rows:
        try:
            runs[row] = list_runs(row, options)
            for facts in runs[row]:
                list_rivals(facts, options)
        except RefusedError as error:
            parser.error(f"{row}: {error}")
    if missing := [end for end in (".bin", ".idx") if not Path(options.data + end).is_file()]:
        parser.error(f"--data {options.data}: there is no {options.data}{missing[0]}")
    return options, runs


def main() -> None:
    """Command line."""
    options, runs = parse_options()
    out = options.out or name_file(options)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = measure_machine()
    ceilings = [machine.pop("ceilings", {})]
    shared = {"machine": machine, "ceilings": ceilings, "command": f"{out.name} {machine.get('date')}"}
    found: list[dict[str, Any]] = []
    for row, own in runs.items():
        for _ in range(options.rounds):
            for result in run_round(own, options):
                found.append({**result, **shared})
                shown = {name: round(result[name], 6) for name in SHOWN if result.get(name) is not None}
                text = json.dumps(shown) if "error" not in result else result["error"]
                print(row, result["side"], result["recipe"], repr(result["flags"]), text, flush=True)
                out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    ceilings.append(measure_machine().get("ceilings", {}))
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"written: {out}")
    if all("error" in result for result in found):
        sys.exit("error: no run came to an end")


if __name__ == "__main__":
    main()
