"""Settings beyond any run end in sentences and small lists, never in a full memory or hours of counting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.batch import count_samples, count_steps
from megaflow_trainer.config.layout import list_divisors
from megaflow_trainer.config.sections import StepConfig

ROOT = Path(__file__).resolve().parents[3]
BASE = ["--train-iters", "9", "--mock-data", "--vocab-size", "99", "--seq-length", "64", "--bf16"]

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.fields import list_fields
from megaflow_trainer.config.flags import FLAGS
from megaflow_trainer.config.memory import describe_memory
base = %r
taken = refused = 0
for more in ([], ["--num-experts", "8"], ["--preset", "deepseek_v3"]):
    for flag in FLAGS:
        if flag.constant is not None or list_fields()[flag.field].kind not in (int, float):
            continue
        for value in ("99999999999", "9" * 16, "9" * 400, "1e30", "1e308"):
            try:
                describe_memory(read_command([*base, *more, flag.name, value], world_size=1)[0])
                taken += 1
            except ConfigError:
                refused += 1
print(taken > 100, refused > 500)
"""


def test_no_number_of_a_flag_fills_the_memory_or_is_a_traceback() -> None:
    command = [sys.executable, "-c", PROGRAM % BASE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=240)
    assert (done.stdout, done.stderr) == ("True True\n", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--num-layers 4097", "model.num_layers (--num-layers) must be <= 4,096, got 4,097; lower it"),
        ("--mtp-num-layers 99999", "model.num_mtp_layers (--mtp-num-layers) must be <= 4,096, got 99,999; lower it"),
        ("--num-experts 100001", "model.num_experts (--num-experts) must be <= 100,000, got 100,001; lower it"),
        ("--hidden-size 10000008", "model.hidden_dim (--hidden-size) must be <= 10,000,000, got 10,000,008; lower it"),
        ("--seq-length 2147483648", "must be <= 2,147,483,647, got 2,147,483,648; lower it"),
        ("--micro-batch-size 1000001", "(--micro-batch-size) must be <= 1,000,000, got 1,000,001; lower it"),
        ("--num-workers 1025", "data.num_threads (--num-workers) must be <= 1,024, got 1,025; lower it"),
        (f"--lr-warmup-iters {10**15 + 1}", "takes a whole number of at most 1,000,000,000,000,000, got '1000000000"),
        ("--rampup-batch-size 1 1 99 --global-batch-size 20000", "takes more than 10,000 increments; give a larger"),
        (f"--rampup-batch-size 1 1 {'9' * 5000}", "step.ramp_up (--rampup-batch-size) takes three whole numbers"),
    ],
    ids=lambda part: str(part)[:24],
)
def test_what_is_too_large_is_named_with_its_limit(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as fault:
        read_command([*BASE, *words.split()], world_size=1)
    assert sentence in str(fault.value)


def test_the_limits_themselves_are_taken() -> None:
    words = "--num-layers 4096 --mtp-num-layers 3 --num-experts 100000 --num-workers 1024"
    config, _ = read_command([*BASE, *words.split()], world_size=1)
    assert (config.model.num_layers, config.model.num_experts, config.data.num_threads) == (4096, 100_000, 1024)


def test_the_steps_of_a_long_ramp_up_are_counted_at_once() -> None:
    step = StepConfig(
        micro_batch_size=1, global_batch_size=8, num_micro_batches=8, ramp_up=("2", "2", str(6 * 10**12))
    )  # 2 * 10^12 samples each of 2, 4 and 6
    whole = 10**12 + 5 * 10**11 + 333_333_333_334  # the last step of 6 goes 4 samples beyond the ramp
    assert count_samples(step, whole) == 6 * 10**12 + 4
    assert count_samples(step, whole + 1) == 6 * 10**12 + 12
    assert count_steps(step, 6 * 10**12 + 4) == whole
    assert count_steps(step, 6 * 10**12 + 3) == whole - 1


def test_divisors_of_a_large_number_are_found_at_once() -> None:
    assert list_divisors(12) == (1, 2, 3, 4, 6, 12)
    assert list_divisors(1_000_000)[-2:] == (500_000, 1_000_000)
    assert 999_999_999_989 in list_divisors(999_999_999_989)  # a prime
    assert list_divisors(10**15)[:3] == (1, 2, 4)
