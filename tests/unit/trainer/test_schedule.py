"""Learning rates against closed forms."""

from __future__ import annotations

import math

import pytest

from megaflow_trainer.config import read_command
from megaflow_trainer.optim.schedule import Schedule, build_schedule

PEAK, LOW, BATCH, STEPS, WARMUP = 1e-3, 1e-4, 8, 100, 10


def make(*flags: str) -> Schedule:
    run = ["--data-path", "x", "--lr", str(PEAK), "--global-batch-size", str(BATCH)]
    length = [] if "--train-samples" in flags else ["--train-iters", str(STEPS)]
    return build_schedule(read_command([*run, *length, *flags], world_size=1)[0])


def rates(schedule: Schedule) -> list[float]:
    return [schedule.lr_at(step * BATCH) for step in range(1, STEPS + 1)]


def expect(style: str, step: int, warmup: float = WARMUP, decay: int = STEPS) -> float:
    if step <= warmup:
        return PEAK * step / warmup
    done = min(1.0, (step - warmup) / (decay - warmup))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[style]
    return LOW + (PEAK - LOW) * left


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_decay_follows_its_closed_form(style: str) -> None:
    schedule = make("--lr-decay-style", style, "--min-lr", str(LOW), "--lr-warmup-iters", str(WARMUP))
    assert rates(schedule) == pytest.approx([expect(style, step) for step in range(1, STEPS + 1)], rel=1e-12)


@pytest.mark.parametrize(
    "flags",
    [
        ("--lr-warmup-iters", "10"),
        ("--lr-warmup-samples", "80"),
        ("--lr-warmup-fraction", "0.1"),
    ],
)
def test_warmup_is_the_same_in_iterations_samples_and_fraction(flags: tuple[str, ...]) -> None:
    schedule = make("--min-lr", str(LOW), *flags)
    assert rates(schedule) == pytest.approx([expect("linear", step) for step in range(1, STEPS + 1)], rel=1e-12)


@pytest.mark.parametrize("flags", [("--lr-decay-iters", "50"), ("--lr-decay-samples", "400")])
def test_after_the_decay_the_rate_stays_low(flags: tuple[str, ...]) -> None:
    schedule = make("--min-lr", str(LOW), *flags)
    expected = [expect("linear", step, warmup=0, decay=50) for step in range(1, STEPS + 1)]
    assert rates(schedule) == pytest.approx(expected, rel=1e-12)
    assert schedule.lr_at(99 * BATCH) == LOW


def test_a_run_in_samples_has_the_schedule_of_the_same_run_in_iterations() -> None:
    assert rates(make("--train-samples", str(STEPS * BATCH))) == rates(make())


def test_warmup_starts_from_its_initial_rate_and_the_first_step_moves() -> None:
    schedule = make("--lr-warmup-iters", "10", "--lr-warmup-init", "1e-5")
    assert schedule.lr_at(BATCH) == pytest.approx(1e-5 + (PEAK - 1e-5) / 10)
    assert schedule.lr_at(10 * BATCH) == PEAK
