"""A pool of ranks that is started once a test run and reused: starting torch takes seconds, a test milliseconds.

`RankPool.run(function, *args)` calls a top-level function of a test file on every rank, as `function(mesh, *args)`, and
returns what each rank returned. The ranks meet through a file in a temporary folder, never by port.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

START_S, ANSWER_S = 300.0, 300.0


class RankPool:
    """`size` processes joined by gloo, or each with a GPU and NCCL. After a failure the next call starts them anew."""

    def __init__(self, size: int, folder: Path, *, has_gpus: bool = False) -> None:
        self.size = size
        self.folder = folder
        self.has_gpus = has_gpus
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
            try:
                self._start()
            except BaseException:
                self.close()
                raise
        place = (inspect.getsourcefile(function), function.__module__, function.__qualname__)
        for pipe in self.pipes:
            pipe.send((place, args, list(sys.path)))
        answers = self._gather(time.monotonic() + ANSWER_S)
        failures = [f"rank {rank}:\n{text}" for rank, (is_done, text) in answers.items() if not is_done]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.size)]

    def _gather(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank. Once a rank has failed the others, which may wait for it, get a second to fail too."""
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                has_failed = any(not is_done for is_done, _ in answers.values())
                says = "waits for a rank that has failed" if has_failed else "no answer in time"
                return answers | dict.fromkeys(waiting.values(), (False, says))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = self._read(pipe, deadline)
            if any(not is_done for is_done, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 1.0)
        return answers

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
        meeting, backend = self.folder / f"meeting_{self.size}_{self.starts}", "nccl" if self.has_gpus else "gloo"
        context = mp.get_context("forkserver")  # the server imports torch once; a rank is a copy of it
        context.set_forkserver_preload(["torch", "torch.distributed.device_mesh"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            place = (rank, self.size, str(meeting), backend)
            process = context.Process(target=_serve, args=(place, theirs), daemon=True)
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


def _share_device() -> None:
    """Let the groups of this process share one device of gloo. Each would have its own, with a thread that wakes a
    hundred times a second, and a pool makes hundreds of groups: eight ranks would take a core and do nothing.
    """
    import torch.distributed as dist

    device = dist.ProcessGroupGloo.create_default_device()

    class Sharing(dist.ProcessGroupGloo):
        """As torch's, on the shared device."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


def _serve(place: tuple[int, int, str, str], pipe: Connection) -> None:
    """What a rank does: join, then answer calls until the pipe closes."""
    rank, size, meeting, backend = place
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from megaflow_trainer.parallel.mesh import Launch, build_mesh

    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kinds = "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl"
    _share_device()
    dist.init_process_group(kinds, init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = build_mesh(Launch(rank=rank, world_size=size), device, backend)
    modules: dict[str, ModuleType] = {}
    pipe.send((True, None))
    while True:
        try:
            (file, module, name), args, path = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            pipe.send((True, getattr(_load(file, module, modules), name)(mesh, *args)))
        except Exception:  # the test that asked reports it
            pipe.send((False, traceback.format_exc()))


def _load(file: str, module: str, modules: dict[str, ModuleType]) -> ModuleType:
    """The module of a function: a helper by its name; a test file, to which pytest gives no name that another process
    could import, by its path.
    """
    if module.startswith("helpers."):
        return importlib.import_module(module)
    if file not in modules:
        spec = importlib.util.spec_from_file_location(f"rank_side_{Path(file).stem}", file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[file]
