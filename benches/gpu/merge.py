#!/usr/bin/env python3
"""Tables from what `train.py` has measured: medians of the runs of each side, each side's best flags.

    python3 benches/gpu/merge.py benches/results/gpu-*.json

Two sides stand in a line only if row, sizes, ranks, layout, recipe, fp8 and recompute agree; a run without a partner
has a line of its own. Where a side ran several times, the median is followed by the least and the most. MFU is model
FLOP/s over one peak, that of products in bf16, in fp8 rows too; the ceiling is what the warm GPU reached in a large
product before and after the runs, in fp8 for rows in fp8 (in bf16, and the cell says so, where that was not measured).
Memory is torch's peak on one GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keys import make_key, name_layout

PEAKS = {"H200": 989e12, "H100": 989e12}
"""Dense, bf16; by a word of the GPU's name."""
PHASES = ("loader_bound", "feed", "forward", "backward", "communication", "optimizer", "log")
LEAST_SUM = {True: 0.97, False: 0.95}
"""What the phases must explain of a step, on a GPU and without."""
TITLES = (
    "model",
    "run",
    "megaflow, tokens/s",
    "rival",
    "its tokens/s",
    "ratio",
    "MFU (causal)",
    "of the ceiling",
    "memory, GiB",
    "exposed communication, ms",
    "loader bound",
    f"{'/'.join(name.replace('_', ' ') for name in PHASES)}/other, ms",
    "sum of the phases (with other)",
)
ALWAYS, NEEDED = ("row", "side", "flags", "recipe"), ("tokens_per_s", "step_time_s", "memory_peak_bytes")
NAMES = {"megaflow": "megaflow", "megatron-core": "Megatron-Core", "torch": "plain torch"}


class ResultError(ValueError):
    """A file that is not what train.py writes."""


@dataclass(frozen=True, slots=True)
class Side:
    """The runs of a side with its best flags.

    Args:
        rate: median tokens/s over all GPUs.
        runs: all of these flags.
        num_flags: how many flags were tried.
    """

    rate: float
    runs: list[dict[str, Any]]
    num_flags: int

    @property
    def run(self) -> dict[str, Any]:
        """The run that is nearest to the median."""
        return min(self.runs, key=lambda run: abs(run["tokens_per_s"] - self.rate))

    def show_rate(self) -> str:
        """The median, and the spread where there are several runs."""
        rates = [run["tokens_per_s"] for run in self.runs]
        spread = f" ({min(rates) / 1e3:.1f} to {max(rates) / 1e3:.1f}, {len(rates)} runs)" if len(rates) > 1 else ""
        return f"{self.rate / 1e3:.1f} k{spread}"

    def show_flags(self) -> str:
        """Its flags and attention, and out of how many they are the best."""
        tried = f", best of {self.num_flags}" if self.num_flags > 1 else ""
        return f"`{self.run['flags']}` (attention {self.run.get('attention', '-')}{tried})"


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of a file.

    Raises:
        ResultError: if it cannot be read, or a run lacks something.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ResultError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(run, dict) for run in found):
        raise ResultError(f"{path}: not results of train.py: expected a list of runs, found {type(found).__name__}")
    for number, run in enumerate(found):
        check_run(run, f"{path}: run {number}")
    return found


def check_run(run: dict[str, Any], where: str) -> None:
    """See that a run has what the table needs.

    Raises:
        ResultError: if not.
    """
    needed = ALWAYS if "error" in run else (*ALWAYS, *NEEDED)
    if missing := [name for name in needed if name not in run]:
        raise ResultError(f"{where}: no {missing[0]!r}; was it measured by an older train.py?")
    if "error" in run:
        return
    try:
        make_key(run)
        name_layout(run)
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{where}: no {error}; was it measured by an older train.py?") from None
    for name in NEEDED:
        if not isinstance(run[name], (int, float)) or not run[name] > 0:
            raise ResultError(f"{where}: {name} must be a number above 0, got {run[name]!r}")


def group(results: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Side]]:
    """Sides that may be compared, each with its best flags."""
    found: dict[tuple[Any, ...], dict[str, dict[tuple[str, str], list[Any]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in results:
        if "error" not in run:
            found[make_key(run)][run["side"]][run["flags"], str(run.get("attention"))].append(run)
    return {
        key: {side: take_best(list(by_flags.values())) for side, by_flags in sides.items()}
        for key, sides in found.items()
    }


def take_best(tried: list[list[dict[str, Any]]]) -> Side:
    """The flags with the largest median."""
    rates = [statistics.median(run["tokens_per_s"] for run in runs) for runs in tried]
    best = max(range(len(tried)), key=lambda number: rates[number])
    return Side(rates[best], tried[best], len(tried))


def list_ceilings(run: dict[str, Any], kind: str, state: str = "warm") -> list[float]:
    """What was measured before and after the runs of a command, of a format and a state; older files have the warm ones
    in bf16 alone.
    """
    if "ceilings" in run:
        measured = [found.get(f"{kind}_{state}_flops_per_s") for found in run["ceilings"]]
    else:
        measured = run.get("ceilings_flops_per_s", []) if (kind, state) == ("bf16", "warm") else []
    return [value for value in measured if value]


def find_ceiling(run: dict[str, Any]) -> tuple[float | None, str]:
    """The mean of the warm ceilings in the format of a run, and what must be said of it in a cell."""
    kind = "bf16" if run["fp8"] == "none" else "fp8"
    if measured := list_ceilings(run, kind):
        return statistics.mean(measured), "" if kind == "bf16" else " of fp8's"
    measured = list_ceilings(run, "bf16")
    return (statistics.mean(measured), " of bf16's, fp8's not measured") if measured else (None, "")


def find_peak(run: dict[str, Any]) -> float | None:
    """The declared peak of its GPU."""
    name = (run.get("machine") or {}).get("gpu") or ""
    return next((peak for word, peak in PEAKS.items() if word in name), None)


def show_shares(side: Side) -> tuple[str, str]:
    """MFU, with the causal one in brackets, and the share of the ceiling."""
    run, rate = side.run, side.rate / side.run["ranks"]
    flops, peak, (ceiling, remark) = run.get("flops_per_token"), find_peak(side.run), find_ceiling(side.run)
    mfu = f"{flops * rate / peak:.1%}" if flops and peak else "-"
    if flops and peak and run.get("flops_per_token_causal"):
        mfu += f" ({run['flops_per_token_causal'] * rate / peak:.1%})"
    return mfu, f"{flops * rate / ceiling:.1%}{remark}" if flops and ceiling else "-"


def show_phases(run: dict[str, Any]) -> tuple[str, str, str]:
    """Loader-bound share, milliseconds of the phases, and what of the step they explain without and with `other`."""
    step = run["step_time_s"]
    known = [name for name in PHASES if f"{name}_s" in run]
    if not known:
        return "-", "-", "-"
    other = run.get("other_s", 0.0)
    phases = sum(run[f"{name}_s"] for name in known)
    cells = [f"{run[f'{name}_s'] * 1e3:.1f}" if name in known else "-" for name in PHASES]
    least = LEAST_SUM[(run.get("machine") or {}).get("gpu") is not None]
    verdict = "" if phases / step >= least else f", below {least:.0%}"
    total = f"{phases / step:.2%} ({(phases + other) / step:.2%}){verdict}"
    bound = f"{run['loader_bound_s'] / step:.2%}" if "loader_bound" in known else "-"
    return bound, "/".join([*cells, f"{other * 1e3:.1f}"]), total


def format_row(key: tuple[Any, ...], own: Side | None, rival: Side | None) -> str:
    """One line of the table, of two sides or of one alone."""
    both = [side for side in (own, rival) if side is not None]
    facts = both[0].run
    kinds = [name_layout(facts), facts["recipe"]]
    kinds += [f"fp8 {facts['fp8']}"] if facts["fp8"] != "none" else []
    kinds += [f"recompute {facts['recompute']}"] if facts["recompute"] != "none" else []
    kinds += ["even load"] if "force-load-balancing" in facts["sizes"] else []
    shares = [show_shares(side) for side in both]
    bound, phases, total = show_phases(own.run) if own is not None else ("-", "-", "-")
    ratio = "-"
    if own is not None and rival is not None:
        commands = [{run.get("command") for run in side.runs} for side in both]
        ratio = f"{own.rate / rival.rate:.3f}{'' if commands[0] & commands[1] else ' *'}"
    cells = [
        key[0],
        f"{', '.join(kinds)} {own.show_flags() if own is not None else ''}".strip(),
        own.show_rate() if own is not None else "-",
        f"{NAMES.get(rival.run['side'], rival.run['side'])} {rival.show_flags()}" if rival is not None else "-",
        rival.show_rate() if rival is not None else "-",
        ratio,
        " / ".join(mfu for mfu, _ in shares),
        " / ".join(share for _, share in shares),
        " / ".join(f"{side.run['memory_peak_bytes'] / 2**30:.1f}" for side in both),
        " / ".join(f"{side.run.get('exposed_communication_s', 0.0) * 1e3:.1f}" for side in both),
        bound,
        phases,
        total,
    ]
    return f"| {' | '.join(cells)} |"


def list_rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table."""
    for key, sides in sorted(group(results).items(), key=lambda item: [str(part) for part in item[0]]):
        own = sides.pop("megaflow", None)
        for rival in [sides[name] for name in sorted(sides)] or [None]:
            yield format_row(key, own, rival)


def show_commit(commit: str | None) -> str:
    """A commit, and whether files of the checkout differed from it."""
    if commit is None:
        return "commit unknown"
    return f"commit {commit.removesuffix('+')} ({'files changed' if commit.endswith('+') else 'clean'})"


def show_ceilings(run: dict[str, Any], kind: str) -> str:
    """What a product in a format reached before and after the runs, warm and cold."""
    measured, cold = list_ceilings(run, kind), list_ceilings(run, kind, "cold")
    if not measured:
        return "not measured"
    text = " then ".join(f"{value / 1e12:.0f}" for value in measured) + " TFLOP/s"
    text += f" ({measured[-1] / measured[0] - 1:+.1%})" if len(measured) > 1 else ""
    return text + (f", cold {' then '.join(f'{value / 1e12:.0f}' for value in cold)}" if cold else "")


def list_machines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What stands above the table: of each command the machine, versions and ceilings."""
    for command, run in {str(run.get("command")): run for run in results}.items():
        machine = run.get("machine") or {}
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        uuid = (machine.get("uuid") or "unknown").removeprefix("GPU-")[:8]
        yield (
            f"- {command}: {machine.get('gpu') or 'no GPU'}, uuid {uuid}; {versions or 'versions unknown'}; "
            f"{show_commit(machine.get('commit'))}; 8192^3 product in bf16: {show_ceilings(run, 'bf16')}; "
            f"in fp8: {show_ceilings(run, 'fp8')}"
        )


def list_remarks(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What stands below the table: notes of runs, and those that failed."""
    for run in results:
        for note in run.get("notes", []):
            yield f"note: {run['row']} {run['side']} {run['flags']!r}: {note}"
        if "error" in run:
            yield f"failed: {run['row']} {run['side']} {run['recipe']} {run['flags']!r}: {str(run['error'])[-400:]}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of train.py")
    options = parser.parse_args()
    try:
        results = [run for path in options.files for run in read_results(path)]
    except ResultError as error:
        sys.exit(f"error: {error}")
    rows = list(list_rows(results))
    peak = PEAKS["H200"] / 1e12
    print("\n".join([*list_machines(results), ""]))
    print(f"MFU: over {peak:.0f} TFLOP/s, Hopper's dense peak in bf16, in fp8 too; sides as megaflow / rival.\n")
    print("\n".join([f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *rows]))
    if any(" * |" in row for row in rows):
        print("\n* the two sides ran in different commands")
    print("\n".join(f"\n{remark}" for remark in dict.fromkeys(list_remarks(results))))


if __name__ == "__main__":
    main()
