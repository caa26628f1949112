"""The split of the step time and what the log says. Time is a clock that the test moves: sums are exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from megaflow import Loader, StreamingDataset
from megaflow.errors import ConfigError, DataFormatError
from megaflow_trainer.training.clock import (
    ASIDE,
    BACKWARD,
    CHECKPOINT,
    EVAL,
    FEED,
    FORWARD,
    H2D,
    HOST_WAIT,
    LOADER_BOUND,
    PHASES,
    Clock,
)
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.metrics import describe_stragglers, find_median_without, format_line

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
    """A source that takes `make_s` for a batch and works ahead of its reader, one batch at most; handing it over takes
    `give_s` even if it lies ready.
    """

    def __init__(self, time: FakeTime, make_s: float, count: int = 100, give_s: float = 0.0) -> None:
        self.time, self.make_s, self.give_s = time, make_s, give_s
        self.ready_at = make_s
        self.batches: Iterator[Any] = iter([np.arange(10).reshape(2, 5)] * count)

    def __next__(self) -> Any:
        rows = next(self.batches)
        num_ready = int(self.ready_at <= self.time.seconds)
        self.time.seconds = max(self.time.seconds, self.ready_at)
        self.ready_at = self.time.seconds + self.make_s
        self.time.pass_by(self.give_s)

        class Batch:
            tokens, labels, sample_ids, loss_mask = rows[:, :-1], rows[:, 1:], np.arange(2), None
            queue_depth = num_ready

        return Batch


def run_step(
    make_s: float, compute_s: float, num_steps: int = 3, give_s: float = 0.0
) -> list[tuple[float, dict[str, float]]]:
    """Steps of one batch each over a source that works ahead."""
    time = FakeTime()
    clock = Clock(CPU, time)
    loader = SlowLoader(time, make_s, give_s=give_s)
    feed = Feed(loader, CPU, clock, vocab_size=10, eod_id=None)  # type: ignore[arg-type]
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


def test_taking_over_a_batch_that_lay_ready_is_work_and_no_waiting() -> None:
    for step_s, seconds in run_step(make_s=5.0, compute_s=6.0, give_s=0.25)[1:]:
        assert step_s == pytest.approx(6.25)
        assert (seconds[LOADER_BOUND], seconds[FEED], seconds[HOST_WAIT]) == (0.0, 0.25, 0.25)
    for step_s, seconds in run_step(make_s=5.0, compute_s=2.0, give_s=0.25)[1:]:
        assert step_s == pytest.approx(5.0)  # the next batch is begun when this one is asked for
        assert (seconds[LOADER_BOUND], seconds[FEED]) == (pytest.approx(3.0), 0.0)


PAUSE_S = 0.05


def feed_from_a_slow_stream(num_threads: int, compute_s: float, num_steps: int = 6) -> list[dict[str, float]]:
    """Seconds by phase of steps over a real loader, whose source pauses before every micro-batch it can make."""
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([("text", pa.string())])
    text = "one two three four five six seven"  # with its end as many tokens as a sample

    def read() -> Iterator[Any]:
        for _ in range(200):
            time.sleep(PAUSE_S)
            yield pa.record_batch([[text] * 4], schema)

    dataset = StreamingDataset(
        pa.RecordBatchReader.from_batches(schema, read()), seq_len=8, shuffle_window=1, interleave=1, num_threads=1
    )
    clock = Clock(CPU)
    with Loader(dataset, 4, num_threads=num_threads, prefetch=2) as loader:
        feed = Feed(loader, CPU, clock, vocab_size=50257, eod_id=None)
        found = []
        for _ in range(num_steps):
            feed.next()
            with clock.phase(FORWARD):
                time.sleep(compute_s)
            found.append(clock.end_step().read()[1])
    return found[1:]


def test_a_slow_stream_is_loader_bound_and_hidden_behind_compute_it_is_exactly_zero() -> None:
    shown = feed_from_a_slow_stream(num_threads=0, compute_s=0.0)
    assert sum(seconds[LOADER_BOUND] for seconds in shown) >= 0.5 * len(shown) * PAUSE_S
    hidden = feed_from_a_slow_stream(num_threads=1, compute_s=8 * PAUSE_S)
    found = [seconds[LOADER_BOUND] for seconds in hidden]
    assert found.count(0.0) >= len(found) - 1, found  # a busy machine may keep the loader's thread from one batch
    assert all(0 < seconds[HOST_WAIT] <= seconds[FEED] for seconds in hidden)


def test_the_copy_to_the_device_is_told_beside_and_within_the_feed() -> None:
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
    assert (seconds[HOST_WAIT], seconds[LOADER_BOUND], seconds[H2D], seconds[FEED]) == (1.0, 1.0, 0.5, 0.5)


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
    "step_time_s": 0.14,
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
        " | params norm: 3.500000E+00 | step time (ms): 140.00 = loader bound 20.00 + feed 20.00 + forward 20.00 + "
        "backward 20.00 + communication 20.00 + optimizer 20.00 + log 20.00 + other 20.00 | host wait (ms): 1.00 | "
        "samples/s: 80.00 | tokens/s/GPU: 1280 | TFLOP/s/GPU: 0.5 | memory (MiB): 512, peak 1024"
    )


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    assert "MFU" not in format_line(VALUES, 100)
    assert "| MFU: 45.0% (causal 42.0%) |" in format_line({**VALUES, "mfu": 0.45, "mfu_causal": 0.42}, 100)


def test_a_skipped_step_is_called_an_overflow_where_there_is_a_loss_scale() -> None:
    assert "| not finite: 2 steps skipped" in format_line({**VALUES, "skipped_steps": 2}, 100)
    assert "| loss scale: 8 | overflow: 2 steps skipped" in format_line(
        {**VALUES, "skipped_steps": 2, "loss_scale": 8.0}, 100
    )


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_the_median_of_the_others_is_that_of_the_list_without_one(size: int) -> None:
    numbers = [float((7 * number) % 5) for number in range(size)]
    for place, number in enumerate(numbers):
        assert find_median_without(sorted(numbers), number) == median(numbers[:place] + numbers[place + 1 :])


def test_a_slow_rank_is_told_and_a_fast_crowd_is_not() -> None:
    even = {"work_by_rank_s": [0.1, 0.11, 0.1, 0.12], "loader_bound_by_rank_s": [0.0] * 4}
    assert describe_stragglers(even, 1.3) == []
    slow = {"work_by_rank_s": [0.1, 0.1, 0.2, 0.1], "loader_bound_by_rank_s": [0.0, 0.3, 0.0, 0.0]}
    assert describe_stragglers(slow, 1.3) == [
        " rank 1 waits for data: 300.0 ms a step, the median of the others is 0.0",
        " rank 2 is slow: 200.0 ms of its own work a step, the median of the others is 100.0",
    ]
    two = {"work_by_rank_s": [0.1, 0.14], "loader_bound_by_rank_s": [0.0, 0.0]}
    assert describe_stragglers(two, 1.3) == [
        " rank 1 is slow: 140.0 ms of its own work a step, the median of the others is 100.0"
    ]
    assert describe_stragglers(slow, 0) == []
    assert describe_stragglers({}, 1.3) == []
