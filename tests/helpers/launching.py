"""The trainer started as a user starts it: by torchrun, on one node or as several agents, watched from outside."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def start_agent(
    log: Path, flags: Sequence[str], *, nproc: int = 2, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """One agent of torchrun with `nproc` ranks of the trainer; what it prints goes to `log`."""
    with log.open("w") as file:
        return subprocess.Popen(
            [*_TORCHRUN, f"--nproc_per_node={nproc}", *(options or ("--standalone",)), "trainer/pretrain.py", *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def start_rank(
    log: Path, flags: Sequence[str], rank: int, *, size: int, port: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """One rank without torchrun, as a batch system starts it: the first rank keeps the store."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "trainer/pretrain.py", *flags],
            cwd=ROOT,
            env={**os.environ, **where, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", **(environment or {})},
            text=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def find_port() -> int:
    """A port of this machine that nobody listens on, and that no connection is given as its own end before it is used:
    those are numbers above 32767.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port


def meet(*, num_nodes: int, restarts: int = 0) -> tuple[str, ...]:
    """Options by which the agents of several nodes find each other on this machine."""
    port = find_port()
    where = (f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d", f"--rdzv-id=test{port}")
    return (f"--nnodes={num_nodes}", f"--max-restarts={restarts}", *where)


def wait_for(log: Path, word: str, agents: Sequence[subprocess.Popen[str]], *, times: int = 1) -> None:
    """Wait until a word stands in a log.

    Raises:
        AssertionError: with the log, if an agent has ended before, or it takes too long.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        text = log.read_text()
        if text.count(word) >= times:
            return
        ended = any(agent.poll() is not None for agent in agents)
        assert not ended, f"ended without {word!r}: {text}"
        assert time.monotonic() < deadline, f"no {word!r}: {text}"
        time.sleep(0.05)


def end(agents: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for the agents and return their codes; those that do not end are killed, and say -9. Once one has failed the
    others have two minutes.
    """
    deadline, has_failed = time.monotonic() + WAIT_S, False
    try:
        while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
            if not has_failed and any(agent.poll() for agent in agents):
                deadline, has_failed = min(deadline, time.monotonic() + 120), True
            time.sleep(0.05)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
    return [agent.wait() for agent in agents]


def is_running(process: int) -> bool:
    """Whether a process is there and not merely waiting to be collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def find_children(parent: int) -> list[int]:
    """Process ids of the children of a process, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return sorted(found)
