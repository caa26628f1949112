"""The split of the step time and what the log says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megaflow.errors import ConfigError, DataFormatError
from megaflow_trainer.training.clock import COMPUTE, DATA_WAIT, EVAL, PHASES, Clock
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.metrics import format_line

CPU = torch.device("cpu")


class SlowLoader:
    """Yields a few batches, each after a pause."""

    def __init__(self, pause_s: float, count: int = 3) -> None:
        self.pause_s = pause_s
        self.batches: Iterator[Any] = iter([np.arange(10).reshape(2, 5)] * count)

    def __next__(self) -> Any:
        time.sleep(self.pause_s)
        rows = next(self.batches)

        class Batch:
            tokens, labels, sample_ids = rows[:, :-1], rows[:, 1:], np.arange(2)

        return Batch


def test_a_slow_source_is_data_wait_and_nothing_else() -> None:
    clock = Clock(CPU)
    feed = Feed(SlowLoader(0.05), CPU, clock, vocab_size=10, eod_id=None)  # type: ignore[arg-type]
    for _ in range(3):
        feed.next()
        with clock.phase(COMPUTE):
            time.sleep(0.01)
    wall, seconds = clock.collect()
    assert 0.15 <= seconds[DATA_WAIT] <= wall
    assert 0.15 <= seconds["host_wait"] <= seconds[DATA_WAIT]
    assert 0.03 <= seconds[COMPUTE] < seconds[DATA_WAIT]
    assert sum(seconds[name] for name in PHASES) <= wall


def test_collecting_starts_anew() -> None:
    clock = Clock(CPU)
    with clock.phase(EVAL):
        time.sleep(0.02)
    assert clock.collect()[1][EVAL] >= 0.02
    assert not any(clock.collect()[1].values())


def test_predictions_at_the_end_of_a_document_do_not_count() -> None:
    feed = Feed(SlowLoader(0.0), CPU, Clock(CPU), vocab_size=10, eod_id=6)  # type: ignore[arg-type]
    batch = feed.next()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 0, 1, 1]]
    assert batch.num_tokens == 7


def test_data_that_end_too_early_are_one_sentence() -> None:
    feed = Feed(SlowLoader(0.0, count=1), CPU, Clock(CPU), vocab_size=10, eod_id=None)  # type: ignore[arg-type]
    feed.next()
    with pytest.raises(ConfigError, match="the data end before the run does"):
        feed.next()


def test_a_token_outside_the_vocabulary_is_said_with_its_samples() -> None:
    feed = Feed(SlowLoader(0.0), CPU, Clock(CPU), vocab_size=9, eod_id=None)  # type: ignore[arg-type]
    with pytest.raises(DataFormatError, match=r"token 9 in one of samples \[0, 1\] is outside the vocabulary of 9"):
        feed.next()


VALUES = {
    "iteration": 7,
    "consumed_samples": 56,
    "lr": 1.23456789e-4,
    "lm_loss": 10.8234567,
    "grad_norm": 2.3456789,
    "step_time_s": 0.1,
    **{f"{name}_s": 0.02 for name in (*PHASES, "other")},
    "samples_per_s": 80.0,
    "tokens_per_s_per_gpu": 1280.0,
    "tflops_per_gpu": 0.5,
    "memory_bytes": 2**30,
}


def test_the_line_shows_every_value_with_six_digits_for_loss_and_norm() -> None:
    assert format_line(VALUES, 100) == (
        " iteration 7/100 | consumed samples: 56 | lr: 1.234568E-04 | lm loss: 1.082346E+01 | grad norm: 2.345679E+00"
        " | step time (ms): 100.00 = data wait 20.00 + compute 20.00 + communication 20.00 + optimizer 20.00 + other "
        "20.00 | samples/s: 80.00 | tokens/s/GPU: 1280 | TFLOP/s/GPU: 0.5 | memory (MiB): 1024"
    )


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    assert "MFU" not in format_line(VALUES, 100)
    assert "| MFU: 45.0% (causal 42.0%) |" in format_line({**VALUES, "mfu": 0.45, "mfu_causal": 0.42}, 100)
