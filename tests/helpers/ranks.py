"""A pool of ranks that is started once a test run and reused: starting torch takes seconds, a test milliseconds.

`RankPool.run(function, *args)` calls a top-level function of a test file on every rank, as `function(mesh, *args)`, and
returns what each rank returned. The ranks meet through a file in a temporary folder, never by port.
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

START_S, ANSWER_S = 300.0, 300.0


class RankPool:
    """`size` processes joined by gloo. After a failure they are started anew by the next call."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.folder = folder
        self.starts = 0
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(mesh, *args)` on every rank; the results in rank order.

        Raises:
            AssertionError: with the traceback of every rank that failed or did not answer.
        """
        if not self.processes:
            self._start()
        place = (inspect.getsourcefile(function), function.__qualname__)
        for pipe in self.pipes:
            pipe.send((place, args, list(sys.path)))
        deadline = time.monotonic() + ANSWER_S
        answers = [self._read(pipe, deadline) for pipe in self.pipes]
        failures = [f"rank {rank}:\n{text}" for rank, (is_done, text) in enumerate(answers) if not is_done]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the ranks that this pool started."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        self.starts += 1
        meeting = self.folder / f"meeting_{self.size}_{self.starts}"
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        deadline = time.monotonic() + START_S
        for rank, pipe in enumerate(self.pipes):
            is_done, text = self._read(pipe, deadline)
            assert is_done, f"rank {rank} did not start: {text}"

    @staticmethod
    def _read(pipe: Connection, deadline: float) -> tuple[bool, Any]:
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                answer: tuple[bool, Any] = pipe.recv()
                return answer
        except EOFError:
            return False, "the process died"
        return False, "no answer in time"


def _serve(rank: int, size: int, meeting: str, pipe: Connection) -> None:
    """What a rank does: join, then answer calls until the pipe closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megaflow_trainer.parallel.mesh import Launch, build_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = build_mesh(Launch(rank=rank, world_size=size), torch.device("cpu"), "gloo")
    modules: dict[str, ModuleType] = {}
    pipe.send((True, None))
    while True:
        try:
            (file, name), args, path = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            pipe.send((True, getattr(_load(file, modules), name)(mesh, *args)))
        except Exception:  # the test that asked reports it
            pipe.send((False, traceback.format_exc()))


def _load(file: str, modules: dict[str, ModuleType]) -> ModuleType:
    """The test file as a module: pytest's own import mode gives it no name that another process could import."""
    if file not in modules:
        spec = importlib.util.spec_from_file_location(f"rank_side_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[file]
