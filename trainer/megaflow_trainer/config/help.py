"""The text of --help: every flag under its section, with its default."""

from __future__ import annotations

import textwrap

from megaflow_trainer.config import fields
from megaflow_trainer.config.exit_codes import MEANINGS
from megaflow_trainer.config.flags import FLAGS, LEGACY, NOT_BUILT

DERIVED = (
    *("num_steps", "model.ffn_dim", "model.max_positions", "model.vocab_size", "parallel.backend", "log.run_dir"),
    *("step.micro_batch_size", "step.global_batch_size", "step.num_micro_batches", "schedule.decay_steps"),
)
"""Fields without a default of their own that follow from other settings, the data or the machine if not given."""


def format_help() -> str:
    """Usage, flags grouped by section, and what is accepted or refused."""
    known, docs = fields.list_fields(), fields.read_help()
    lines = [
        "usage: torchrun --nproc_per_node=N trainer/pretrain.py [--config RECIPE.yaml] [flags]",
        "",
        "  --config RECIPE.yaml                   Values of a file; flags override them.",
        "  --help, --version                      This text; the versions of the trainer and of torch.",
        "",
    ]
    for section, owner in fields.sections().items():
        lines += [f"{section or 'run'}: {(owner.__doc__ or '').strip()}"]
        for flag in FLAGS:
            if flag.field.rpartition(".")[0] == section:
                default = "" if flag.is_switch else f" [{_show(flag.field, known[flag.field].default)}]"
                value = f" (sets {flag.constant})" if flag.is_switch else ""
                lines += textwrap.wrap(
                    f"{docs[flag.field]}{value}{default}",
                    width=118,
                    initial_indent=f"  {flag.name:<38} ",
                    subsequent_indent=" " * 41,
                )
        lines.append("")
    lines += ["accepted without effect: " + ", ".join(flag.name for flag in LEGACY if flag.why), ""]
    lines += ["not in this version: " + "; ".join(item.feature for item in NOT_BUILT), ""]
    lines += [
        "exit codes:",
        *(f"  {code:<4} {meaning}" for code, meaning in MEANINGS.items()),
        "after a fault torchrun adds a report of its own; the `error:` line before it is the reason",
    ]
    return "\n".join(lines)


def _show(name: str, default: object) -> str:
    if default is None:
        return "derived" if name in DERIVED else "none"
    return " ".join(default) or "none" if isinstance(default, tuple) else str(default)
