"""What must agree for two runs to be compared. No torch, no megaflow."""

from __future__ import annotations

import argparse
from typing import Any

from rows import write_sizes


def make_key(facts: dict[str, Any]) -> tuple[Any, ...]:
    """What must agree for two runs to be compared; each side's attention, graphs and kernels need not.

    Raises:
        KeyError: if the run was recorded without it.
    """
    layout = tuple(sorted(facts["layout"].items()))
    names = ("row", "recipe", "fp8", "ranks", "recompute")
    return (*(facts[name] for name in names), layout, facts["sizes"])


def name_layout(facts: dict[str, Any]) -> str:
    """`1 GPU`, or ranks with every axis that they are laid out along."""
    layout, ranks = facts["layout"], facts["ranks"]
    shown = [f"{name}{layout[name]}" for name in ("tp", "pp", "cp", "ep") if layout[name] > 1]
    shown += ["sp"] if layout["sp"] else []
    shown += [f"zero{layout['zero']}"] if layout["zero"] else []
    return " ".join([f"{ranks} GPU{'s' if ranks > 1 else ''}", *shown])


def record_rival(options: argparse.Namespace, sizes: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The same facts of a run of a rival, from its options."""
    is_sharded = options.recipe == "fp32" and ranks > options.tp
    return {
        "recipe": options.recipe,
        "ranks": ranks,
        "layout": {
            "tp": options.tp,
            "pp": 1,
            "cp": 1,
            "ep": options.ep,
            "sp": int(options.tp > 1),
            "zero": int(is_sharded),
        },
        "fp8": options.fp8 or "none",
        "attention": options.attention,
        "recompute": options.recompute or "none",
        "sizes": write_sizes(sizes),
    }
