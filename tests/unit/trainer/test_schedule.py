"""Learning rates against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megaflow_trainer.config import read_command
from megaflow_trainer.config.batch import batch_at, count_steps
from megaflow_trainer.optim.schedule import Schedule, build_planner, build_schedule

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
        ("--lr-warmup-fraction", "0", "--lr-warmup-iters", "10"),
    ],
)
def test_warmup_is_the_same_in_iterations_samples_and_fraction(flags: tuple[str, ...]) -> None:
    schedule = make("--min-lr", str(LOW), *flags)
    assert rates(schedule) == pytest.approx([expect("linear", step) for step in range(1, STEPS + 1)], rel=1e-12)


def test_a_fraction_of_warmup_is_one_of_the_decay_as_in_megatron() -> None:
    schedule = make("--lr-decay-iters", "50", "--lr-warmup-fraction", "0.1")
    assert schedule.lr_at(4 * BATCH) == pytest.approx(PEAK * 4 / 5)
    assert schedule.lr_at(5 * BATCH) == PEAK


def test_a_step_has_the_rate_of_the_samples_it_ends_with() -> None:
    run = ["--data-path", "x", "--lr", str(PEAK), "--global-batch-size", str(BATCH), "--train-iters", str(STEPS)]
    planner = build_planner(read_command([*run, "--lr-warmup-iters", str(WARMUP)], world_size=1)[0])
    assert planner.plan(0).lr == pytest.approx(PEAK / WARMUP)
    assert planner.plan(9 * BATCH).lr == PEAK


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


def test_inverse_square_root_meets_the_peak_after_warmup_and_stays_above_the_minimum() -> None:
    schedule = make("--lr-decay-style", "inverse-square-root", "--lr-warmup-iters", "10", "--min-lr", "5e-4")
    expected = [PEAK * step / 10 if step <= 10 else max(5e-4, PEAK * math.sqrt(10 / step)) for step in range(1, 100)]
    assert rates(schedule)[:99] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "style, shape",
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: 0.5 * (1 + math.cos(math.pi * done))),
        ("exponential", lambda done: 2 * 0.5**done - 1),
        ("minus_sqrt", lambda done: 1 - math.sqrt(done)),
    ],
)
@pytest.mark.parametrize("length", [("--lr-wsd-decay-iters", "20"), ("--lr-wsd-decay-samples", "160")])
def test_wsd_stays_at_the_peak_and_decays_at_the_end(style: str, shape: Any, length: tuple[str, str]) -> None:
    flags = ("--lr-decay-style", "WSD", "--lr-warmup-iters", "10", "--lr-wsd-decay-style", style, *length)
    found = rates(make(*flags, "--min-lr", str(LOW)))
    assert found[10:80] == [PEAK] * 70
    expected = [LOW + (PEAK - LOW) * shape((step - 80) / 20) for step in range(81, 101)]
    assert found[80:] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "style, quarter, middle",
    [("linear", 0.04, 0.06), ("cosine", 0.02 + 0.08 * 0.5 * (1 - math.sqrt(0.5)), 0.06), ("constant", 0.1, 0.1)],
)
def test_weight_decay_goes_from_start_to_end(style: str, quarter: float, middle: float) -> None:
    run = ["--data-path", "x", "--train-iters", "100", "--start-weight-decay", "0.02", "--end-weight-decay", "0.1"]
    planner = build_planner(read_command([*run, "--weight-decay-incr-style", style], world_size=1)[0])
    assert planner.plan(24).weight_decay == pytest.approx(quarter)
    assert planner.plan(49).weight_decay == pytest.approx(middle)
    assert planner.plan(99).weight_decay == pytest.approx(0.1)


def test_the_batch_grows_by_equal_parts_of_the_ramp() -> None:
    run = ["--data-path", "x", "--train-samples", "200", "--global-batch-size", "16", "--micro-batch-size", "2"]
    config, _ = read_command([*run, "--rampup-batch-size", "4", "4", "60"], world_size=2)
    assert [batch_at(config.step, n) for n in (0, 19, 20, 39, 40, 59, 60, 150)] == [4, 4, 8, 8, 12, 12, 16, 16]
    planner, consumed, steps = build_planner(config), 0, 0
    while consumed + batch_at(config.step, consumed) <= 200:
        plan = planner.plan(consumed)
        assert plan.num_micro_batches * 4 == plan.num_samples
        consumed, steps = consumed + plan.num_samples, steps + 1
    assert config.num_steps == steps == count_steps(config.step, 200)
