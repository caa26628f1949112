"""Rules that recognise what is wrong with a run from what it wrote down; `tools/diagnose.py` is their command.

Here are those about loss and gradients, and the table of all.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from findings import LEAST_STEPS, Finding, Rule
from megaflow_trainer.config import exit_codes
from run_record import MANIFEST, METRICS, Record
from symptoms_of_end import find_end, find_killed, find_out_of_memory
from symptoms_of_speed import (
    find_bubble,
    find_communication,
    find_low_use,
    find_slow_loader,
    find_slowdown,
    find_stragglers,
)


def find_nonfinite(record: Record) -> Iterator[Finding]:
    """Losses or gradients that were not finite."""
    events = record.events("nonfinite")
    if not events:
        return
    first = events[0]
    guilty = [item for item in first.get("samples", []) if item.get("loss") is None]
    cause = "the rate is too high for this model, or activations overflow in this precision"
    if 0 < len(guilty) < len(first.get("samples", [])):
        cause = f"documents: only {len(guilty)} of {len(first['samples'])} samples of the step had no finite loss"
    yield Finding(
        symptom="nan",
        rank=0 if record.end.get("exit_code") == exit_codes.DIVERGED else 1,
        title="NaN or infinity in loss or gradient",
        seen=f"{len(events)} iterations from {first['iteration']} on, first the {first.get('kind')}; "
        f"learning rate {_lr_at(record, first['iteration'])}",
        cause=cause,
        remedies=(
            *_calm(record),
            _inspect(record, first),
        ),
    )


def _inspect(record: Record, event: Mapping[str, Any]) -> str:
    folder = shlex.quote(str(record.folder))
    return f"megaflow inspect --run {folder} --iteration {event['iteration']}: the documents of that step"


def _lr_at(record: Record, iteration: int) -> str:
    near = [row for row in record.steps if row["iteration"] <= iteration and "lr" in row]
    return f"{near[-1]['lr']:.3g}" if near else "not logged yet"


def _calm(record: Record) -> list[str]:
    """Flags that make training calmer, with the values of this run."""
    found = []
    config = record.config
    if config is None:
        return ["a lower --lr, a longer --lr-warmup-iters, --clip-grad 1.0, --bf16"]
    found.append(f"--lr {config.optim.lr / 3:.2g}: a third of {config.optim.lr:.2g}")
    schedule = config.schedule
    if not (schedule.warmup_steps or schedule.warmup_samples or schedule.warmup_fraction):
        found.append("--lr-warmup-fraction 0.01: there is no warm-up")
    if config.optim.clip_grad == 0 or config.optim.clip_grad > 1:
        found.append(f"--clip-grad 1.0: it is {config.optim.clip_grad:g}")
    if config.model.init_std > 0.02:
        found.append(f"--init-method-std 0.02: it is {config.model.init_std:g}")
    if config.model.hidden_dropout > 0 or config.model.attention_dropout > 0:
        found.append("--hidden-dropout 0 --attention-dropout 0: dropout adds noise that large data do not need")
    if config.step.dtype == "fp16":
        found.append("--bf16 instead of --fp16: the range of fp32, no loss scale")
    return found


def find_overflow(record: Record) -> Iterator[Finding]:
    """fp16 steps that overflow again and again."""
    scaled = [row for row in record.steps if "loss_scale" in row]
    skipped = sum(row.get("skipped_steps") or 0 for row in scaled)
    total = sum(row.get("num_steps") or 1 for row in scaled)
    if not scaled or skipped <= max(3, 0.05 * total):
        return
    late = sum(row.get("skipped_steps") or 0 for row in scaled[len(scaled) // 2 :])
    first, last = scaled[0]["loss_scale"], scaled[-1]["loss_scale"]
    cause = "the loss scale starts far too high and is still coming down: no update is made until it fits"
    remedies = ["--initial-loss-scale 65536"]
    static = record.config is not None and record.config.step.loss_scale is not None
    if static:
        cause, remedies = "the static loss scale is too high for these gradients", ["drop --loss-scale: a dynamic one"]
    elif first == last or late == 0:
        cause = "gradients overflow although the scale is low: the run diverges, or activations overflow"
        remedies = _calm(record)
    if not any("--bf16" in remedy for remedy in remedies):
        remedies = [*remedies, "--bf16 instead of --fp16 where the device has it: no loss scale at all"]
    yield Finding(
        symptom="overflow",
        rank=1,
        title="overflow again and again",
        seen=f"{skipped} of {total} steps skipped; loss scale {first:.4g} at first, {last:.4g} at last",
        cause=cause,
        remedies=tuple(remedies),
    )


def find_spikes(record: Record) -> Iterator[Finding]:
    """Losses far above the usual, that came down again."""
    events = record.events("spike")
    if any(find_divergence(record)):
        events = [event for event in events if _came_down(record, event)]
    if not events:
        return
    worst = max(events, key=lambda event: event.get("deviations", 0.0))
    mean = worst.get("loss") or 0.0
    high = [item for item in worst.get("samples", []) if (item["loss"] or 0.0) > mean]
    named = [_name(document) for item in high[:2] for document in item["documents"][:2]]
    yield Finding(
        symptom="loss-spikes",
        rank=1 if len(events) > 3 else 3,
        title="loss spikes",
        seen=f"{len(events)}, the highest at iteration {worst['iteration']}: loss {mean:.2f}, "
        f"{worst.get('deviations', 0):.0f} deviations above the usual"
        + (f"; the samples above that hold {', '.join(named)}" if named else ""),
        cause="unusual documents, or a rate that is too high for the batch",
        remedies=(
            _inspect(record, worst),
            "leave bad documents out and preprocess again",
            *_calm(record),
        ),
    )


def _came_down(record: Record, event: Mapping[str, Any]) -> bool:
    """Whether any later loss is nearer to those before the spike than to it."""
    finite = [row for row in record.steps if row["lm_loss"] is not None]
    before = [row["lm_loss"] for row in finite if row["iteration"] < event["iteration"]]
    after = [row["lm_loss"] for row in finite if row["iteration"] > event["iteration"]]
    return bool(before and after) and min(after) < (median(before) + (event.get("loss") or 0.0)) / 2


def _name(document: Mapping[str, Any]) -> str:
    return str(document.get("origin") or f"document {document.get('document')}")


def find_divergence(record: Record) -> Iterator[Finding]:
    """A loss that was lower and has risen for good."""
    losses = record.losses
    if len(losses) < LEAST_STEPS or record.events("nonfinite"):
        return
    recent, best = median(losses[-max(5, len(losses) // 10) :]), min(losses)  # not a spike or two at the end
    if recent <= best + max(0.5, 0.15 * best) or recent <= median(losses[: len(losses) // 2]):
        return
    yield Finding(
        symptom="divergence",
        rank=1,
        title="the loss diverges",
        seen=f"loss {losses[0]:.2f} at first, {best:.2f} at best, {recent:.2f} at last",
        cause="the learning rate is too high for this model and batch",
        remedies=tuple(_calm(record)),
    )


def find_flat(record: Record) -> Iterator[Finding]:
    """A loss that does not fall."""
    losses, config = record.losses, record.config
    if len(losses) < LEAST_STEPS or record.events("nonfinite"):
        return
    edge = max(3, len(losses) // 8)
    first, last = sum(losses[:edge]) / edge, sum(losses[-edge:]) / edge
    if abs(first - last) > max(0.02 * first, 0.05) or max(losses) - min(losses) > 0.5 * first:
        return
    skipped = sum(row.get("skipped_steps") or 0 for row in record.steps)
    if skipped > len(losses) / 2:
        return  # the overflow is the cause, and is told
    vocabulary = config.model.vocab_size if config else None
    guess = math.log(vocabulary) if vocabulary else None
    rate = max(row.get("lr") or 0.0 for row in record.steps)
    if rate < 1e-5:
        cause, do = f"the learning rate is next to nothing: {rate:.2g} at most", "--lr 3e-4, and check the warm-up"
    elif guess is not None and abs(last - guess) < 0.35:
        cause = f"the model guesses among all tokens (ln {vocabulary} = {guess:.2f}): the data may be noise to it"
        do = "check that --tokenizer-type and files are those of preprocessing: megaflow inspect PREFIX shows the text"
    else:
        cause, do = "the rate is too low, or the data are the same few samples", "--lr three times as high"
    yield Finding(
        symptom="flat-loss",
        rank=1,
        title="the loss does not fall",
        seen=f"{first:.3f} at first, {last:.3f} at last, over {len(losses)} lines",
        cause=cause,
        remedies=(do, "megaflow inspect PREFIX and megaflow stats PREFIX: is it the text that you expect?"),
    )


RULES = (
    Rule("killed", find_killed, (MANIFEST,)),
    Rule("out-of-memory", find_out_of_memory, (MANIFEST,)),
    Rule("nan", find_nonfinite),
    Rule("overflow", find_overflow),
    Rule("loss-spikes", find_spikes),
    Rule("divergence", find_divergence, least=LEAST_STEPS),
    Rule("flat-loss", find_flat, least=LEAST_STEPS),
    Rule("slow-loader", find_slow_loader, least=LEAST_STEPS),
    Rule("low-gpu-use", find_low_use, (METRICS, MANIFEST), least=LEAST_STEPS),
    Rule("slow-communication", find_communication, least=LEAST_STEPS),
    Rule("slowdown", find_slowdown, least=LEAST_STEPS + 1),
    Rule("straggler", find_stragglers, least=5),
    Rule("pipeline-bubble", find_bubble),
    Rule("stopped", find_end, (MANIFEST,)),
)
