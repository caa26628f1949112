"""The split of the step time and what the log says. Time is a clock that the test moves: sums are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megaflow.errors import ConfigError, DataFormatError
from megaflow_trainer.training.clock import (
    ASIDE,
    BACKWARD,
    CHECKPOINT,
    EVAL,
    FORWARD,
    H2D,
    HOST_WAIT,
    LOADER_BOUND,
    PHASES,
    Clock,
)
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.metrics import describe_stragglers, format_line

CPU = torch.device("cpu")


class FakeTime:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


class SlowLoader:
    """A source that takes `make_s` for a batch and works ahead of its reader, one batch at most."""

    def __init__(self, time: FakeTime, make_s: float, count: int = 100) -> None:
        self.time, self.make_s = time, make_s
        self.ready_at = make_s
        self.batches: Iterator[Any] = iter([np.arange(10).reshape(2, 5)] * count)

    def __next__(self) -> Any:
        rows = next(self.batches)
        self.time.seconds = max(self.time.seconds, self.ready_at)
        self.ready_at = self.time.seconds + self.make_s

        class Batch:
            tokens, labels, sample_ids, loss_mask = rows[:, :-1], rows[:, 1:], np.arange(2), None

        return Batch


def run_step(make_s: float, compute_s: float, num_steps: int = 3) -> list[tuple[float, dict[str, float]]]:
    """Steps of one batch each over a source that works ahead."""
    time = FakeTime()
    clock = Clock(CPU, time)
    feed = Feed(SlowLoader(time, make_s), CPU, clock, vocab_size=10, eod_id=None)  # type: ignore[arg-type]
    steps = []
    for _ in range(num_steps):
        feed.next()
        with clock.phase(FORWARD):
            time.pass_by(compute_s / 4)
        with clock.phase(BACKWARD):
            time.pass_by(3 * compute_s / 4)
        steps.append(clock.end_step().read())
    return steps


def test_a_slow_source_is_loader_bound_and_nothing_else() -> None:
    for step_s, seconds in run_step(make_s=5.0, compute_s=2.0)[1:]:
        assert step_s == pytest.approx(5.0)
        assert seconds[LOADER_BOUND] == seconds[HOST_WAIT] == pytest.approx(3.0)  # the source works while the step does
        assert seconds[FORWARD] == pytest.approx(0.5)
        assert seconds[BACKWARD] == pytest.approx(1.5)
        rest = [name for name in seconds if name not in (LOADER_BOUND, HOST_WAIT, FORWARD, BACKWARD)]
        assert {seconds[name] for name in rest} == {0.0}


def test_the_same_source_hidden_behind_compute_is_no_loader_bound_time() -> None:
    for step_s, seconds in run_step(make_s=5.0, compute_s=6.0)[1:]:
        assert step_s == pytest.approx(6.0)
        assert seconds[LOADER_BOUND] == seconds[HOST_WAIT] == 0.0


def test_the_copy_to_the_device_is_told_beside_and_within_loader_bound() -> None:
    time = FakeTime()
    clock = Clock(CPU, time)
    feed = Feed(SlowLoader(time, 1.0), CPU, clock, vocab_size=10, eod_id=None)  # type: ignore[arg-type]
    send: Callable[..., torch.Tensor] = feed._send

    def slow_send(array: Any) -> torch.Tensor:
        time.pass_by(0.25)
        return send(array)

    feed._send = slow_send  # type: ignore[method-assign]
    feed.next()
    _, seconds = clock.end_step().read()
    assert (seconds[HOST_WAIT], seconds[H2D], seconds[LOADER_BOUND]) == (1.0, 0.5, 1.5)


def test_what_comes_between_steps_is_aside() -> None:
    time = FakeTime()
    clock = Clock(CPU, time)
    for name, pause_s in ((EVAL, 7.0), (CHECKPOINT, 3.0), (FORWARD, 2.0)):
        with clock.phase(name):
            time.pass_by(pause_s)
    step_s, seconds = clock.end_step().read()
    assert step_s == 2.0
    assert [seconds[name] for name in ASIDE] == [7.0, 3.0]
    assert clock.end_step().read() == (0.0, dict.fromkeys(seconds, 0.0))


def test_a_phase_beats_and_is_known_while_it_lasts() -> None:
    clock = Clock(CPU, FakeTime())
    with clock.phase(FORWARD):
        assert clock.current == FORWARD
    assert (clock.current, clock.beats) == ("", 1)


def make_feed(vocab_size: int = 10, eod_id: int | None = None, count: int = 3) -> Feed:
    loader = SlowLoader(FakeTime(), 0.0, count)
    return Feed(loader, CPU, Clock(CPU), vocab_size=vocab_size, eod_id=eod_id)  # type: ignore[arg-type]


def test_predictions_at_the_end_of_a_document_do_not_count() -> None:
    batch = make_feed(eod_id=6).next()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 0, 1, 1]]
    assert (batch.num_tokens, batch.sample_ids) == (7, (0, 1))


def test_data_that_end_too_early_are_one_sentence() -> None:
    feed = make_feed(count=1)
    feed.next()
    with pytest.raises(ConfigError, match="the data end before the run does"):
        feed.next()


def test_a_token_outside_the_vocabulary_is_said_with_its_samples() -> None:
    with pytest.raises(DataFormatError, match=r"token 9 in one of samples \[0, 1\] is outside the vocabulary of 9"):
        make_feed(vocab_size=9).next()


VALUES = {
    "iteration": 7,
    "consumed_samples": 56,
    "lr": 1.23456789e-4,
    "lm_loss": 10.8234567,
    "grad_norm": 2.3456789,
    "param_norm": 3.5,
    "step_time_s": 0.12,
    **{f"{name}_s": 0.02 for name in (*PHASES, "other")},
    "host_wait_s": 0.001,
    "samples_per_s": 80.0,
    "tokens_per_s_per_gpu": 1280.0,
    "tflops_per_gpu": 0.5,
    "memory_now_bytes": 2**29,
    "memory_peak_bytes": 2**30,
}


def test_the_line_shows_every_value_with_six_digits_for_loss_and_norm() -> None:
    assert format_line(VALUES, 100) == (
        " iteration 7/100 | consumed samples: 56 | lr: 1.234568E-04 | lm loss: 1.082346E+01 | grad norm: 2.345679E+00"
        " | params norm: 3.500000E+00 | step time (ms): 120.00 = loader bound 20.00 + forward 20.00 + backward 20.00 + "
        "communication 20.00 + optimizer 20.00 + log 20.00 + other 20.00 | host wait (ms): 1.00 | samples/s: 80.00 | "
        "tokens/s/GPU: 1280 | TFLOP/s/GPU: 0.5 | memory (MiB): 512, peak 1024"
    )


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    assert "MFU" not in format_line(VALUES, 100)
    assert "| MFU: 45.0% (causal 42.0%) |" in format_line({**VALUES, "mfu": 0.45, "mfu_causal": 0.42}, 100)


def test_a_skipped_step_is_called_an_overflow_where_there_is_a_loss_scale() -> None:
    assert "| not finite: 2 steps skipped" in format_line({**VALUES, "skipped_steps": 2}, 100)
    assert "| loss scale: 8 | overflow: 2 steps skipped" in format_line(
        {**VALUES, "skipped_steps": 2, "loss_scale": 8.0}, 100
    )


def test_a_slow_rank_is_told_and_a_fast_crowd_is_not() -> None:
    even = {"work_by_rank_s": [0.1, 0.11, 0.1, 0.12], "loader_bound_by_rank_s": [0.0] * 4}
    assert describe_stragglers(even, 1.3) == []
    slow = {"work_by_rank_s": [0.1, 0.1, 0.2, 0.1], "loader_bound_by_rank_s": [0.0, 0.3, 0.0, 0.0]}
    assert describe_stragglers(slow, 1.3) == [
        " rank 1 waits for data: 300.0 ms a step, the median is 0.0",
        " rank 2 is slow: 200.0 ms of its own work a step, the median is 100.0",
    ]
    assert describe_stragglers(slow, 0) == []
    assert describe_stragglers({}, 1.3) == []
