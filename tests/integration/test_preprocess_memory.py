"""Memory does not grow with the input: a small version of benches/memory.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_BYTES = 160 << 20
"""The tokenizer, two threads with their blocks and word caches; the texts alone would be more in some tests."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc (Linux)")


def anonymous_bytes(pid: int) -> int:
    """Heap and stacks of a process; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def peak_of(command: list[str]) -> int:
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while job.poll() is None:
        peak = max(peak, anonymous_bytes(job.pid))
        time.sleep(0.01)
    _, err = job.communicate()
    assert job.returncode == 0, err
    return peak


def test_the_measure_sees_what_a_process_takes() -> None:
    assert peak_of([sys.executable, "-c", f"x = b'x' * {2 * LIMIT_BYTES}; import time; time.sleep(0.3)"]) > LIMIT_BYTES


@pytest.mark.parametrize("kind", ["tiny documents", "megabytes"])
def test_memory_is_bounded(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        if kind == "tiny documents":  # as Python lists of lengths and positions they would take 200 MB
            for begin in range(0, 600_000, 1000):
                file.write("".join(f'{{"text": "word{number}"}}\n' for number in range(begin, begin + 1000)))
        else:
            text = " ".join(f"w{word * 104729 % 1_000_003}" for word in range(300_000))
            for _ in range(100):
                file.write(json.dumps({"text": text}) + "\n")
    if kind == "megabytes":
        assert path.stat().st_size > LIMIT_BYTES
    command = [sys.executable, "-m", "megaflow.cli.preprocess", str(path), "--output-prefix", str(tmp_path / "out")]
    assert peak_of([*command, "--workers", "2"]) < LIMIT_BYTES
