"""The benchmark of phases runs on the trainer as it is: it puts a source into the place of the trainer's loader."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_source_is_measured_and_a_slow_one_alone_is_waited_for() -> None:
    command = [sys.executable, str(ROOT / "benches" / "phases.py"), "--model", "small", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    shares = dict(re.findall(r"^(\w+) +step.*?loader_bound ([\d.]+)%", done.stdout, re.MULTILINE))
    assert sorted(shares) == ["fast", "hidden", "plain", "slow"]
    assert float(shares["slow"]) > 0
    assert float(shares["fast"]) == 0  # what lies ready is taken over, not waited for
