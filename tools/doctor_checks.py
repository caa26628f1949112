"""What `tools/doctor.py` looks at. Each check is a function from what was asked to lines; none of them raises."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from doctor_files import check_files
from doctor_lines import Asked, Line, first_line
from doctor_packages import check_packages, find_fault

LEAST_PYTHON, LEAST_TORCH = (3, 10), (2, 11)
BF16, FLASH, FP8 = (8, 0), (8, 0), (8, 9)
"""Compute capabilities from which a GPU has them."""
PROBE_BYTES = 64 << 20
LEAST_SHARED_GB = 1.0
SLOW_DISK = 100e6
LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


def check_python(asked: Asked) -> Iterator[Line]:
    """Python and the package itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < LEAST_PYTHON:
        yield Line("fail", "python", f"{version}, at least 3.10 is needed", "make build PYTHON=python3.12")
    else:
        yield Line("ok", "python", f"{version} ({sys.executable})")
    fault = find_fault("megaflow")
    if fault:
        yield Line("fail", "megaflow", f"cannot be imported: {fault}", "`make build` in the checkout")
        return
    try:
        megaflow = importlib.import_module("megaflow")
        yield Line("ok", "megaflow", f"{megaflow.__version__}, extension loaded")
    except Exception as error:  # as of any package
        yield Line("fail", "megaflow", f"cannot be imported: {first_line(error)}", "`make build` in the checkout")


def check_torch(asked: Asked) -> Iterator[Line]:
    """Torch, CUDA and NCCL."""
    remedy = "make build installs it; for the data alone it is not needed"
    fault = find_fault("torch")
    if fault:
        yield Line("fail", "torch", f"cannot be imported: {fault}", remedy)
        return
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # as of any package: an OSError of a library, a RuntimeError of a driver
        yield Line("fail", "torch", f"cannot be imported: {first_line(error)}", remedy)
        return
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < LEAST_TORCH:
        yield Line("fail", "torch", f"{torch.__version__}, at least 2.11 is needed", "pip install 'torch>=2.11'")
    else:
        yield Line("ok", "torch", torch.__version__)
    if torch.version.cuda is None:
        yield Line("note", "cuda", "this torch is built without it: training runs on the CPU")
    elif not torch.cuda.is_available():
        yield Line("note", "cuda", f"torch is built for {torch.version.cuda}, but sees no GPU", _why_no_gpu())
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield Line("ok", "cuda", f"{torch.version.cuda}, NCCL {nccl}")


def _why_no_gpu() -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty: unset it"
    return "" if shutil.which("nvidia-smi") is None else "nvidia-smi shows whether the driver is new enough"


def list_gpus() -> list[Gpu]:
    """The GPUs of this machine; none without torch."""
    if find_fault("torch"):
        return []
    try:
        torch = importlib.import_module("torch")
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception:  # check_torch has told it
        return []
    return [Gpu(name=one.name, capability=(one.major, one.minor), memory_bytes=one.total_memory) for one in found]


def check_gpus(asked: Asked) -> Iterator[Line]:
    """What each kind of GPU can do."""
    gpus = list_gpus()
    if not gpus:
        yield Line("note", "gpu", "none: everything works, slowly; small models only")
    for gpu in dict.fromkeys(gpus):
        count, size = gpus.count(gpu), gpu.memory_bytes / 1e9
        yield judge_gpu(gpu, f"{count} x {gpu.name}, {size:.0f} GB, compute capability {_dotted(gpu.capability)}")
    if len(set(gpus)) > 1:
        yield Line("note", "gpu", "GPUs of several kinds: every step waits for the slowest")


def judge_gpu(gpu: Gpu, text: str) -> Line:
    """What a GPU lacks, and what to give instead."""
    lacks = []
    if gpu.capability < BF16:
        lacks.append("no bf16 and no flash attention before 8.0: give --fp16, and not --use-flash-attn")
    if gpu.capability < FP8:
        lacks.append("no fp8 before 8.9: drop --fp8-hybrid and --fp8-e4m3")
    can = [
        name for name, least in (("bf16", BF16), ("flash attention", FLASH), ("fp8", FP8)) if gpu.capability >= least
    ]
    state = "note" if gpu.capability < BF16 else "ok"
    return Line(
        state, "gpu", f"{text}; can {', '.join(can) or 'fp16 and fp32'}", "; ".join(lacks) if state == "note" else ""
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_links(asked: Asked) -> Iterator[Line]:
    """NVLink between GPUs, InfiniBand between machines."""
    if len(list_gpus()) > 1:
        table = _ask("nvidia-smi", "topo", "-m")
        if re.search(r"\bNV\d+\b", table):
            yield Line("ok", "links", "GPUs are joined by NVLink")
        else:
            yield Line("note", "links", "no NVLink: tensor parallelism will be slow", "--tensor-model-parallel-size 1")
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if cards:
        yield Line("ok", "network", f"InfiniBand or RoCE: {', '.join(cards)}")
    else:
        yield Line("note", "network", "no InfiniBand: several machines will talk over Ethernet")
    off = [name for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE") if os.environ.get(name) == "1"]
    if off:
        yield Line("fail", "network", f"{' and '.join(off)} is 1: fast links are turned off", f"unset {' '.join(off)}")


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def check_memory(asked: Asked) -> Iterator[Line]:
    """Shared memory and the CPU's memory."""
    folder = Path("/dev/shm")
    if folder.is_dir():
        size = shutil.disk_usage(folder).total / 1e9
        if size < LEAST_SHARED_GB:
            yield Line(
                "fail", "shared memory", f"/dev/shm has {size:.2f} GB", "docker run --shm-size=8g (or --ipc=host)"
            )
        else:
            yield Line("ok", "shared memory", f"/dev/shm has {size:.1f} GB")
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        yield Line("ok", "memory", f"{total:.0f} GB, {os.cpu_count()} CPUs")
    except (ValueError, OSError):
        return


def check_disk(asked: Asked) -> Iterator[Line]:
    """Room and speed where checkpoints go."""
    try:
        asked.save.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # it will be made, or what is above it is at fault
    except OSError as error:
        shown = str(asked.save) if len(str(asked.save)) < LONGEST_NAME else f"{str(asked.save)[:LONGEST_NAME]}..."
        yield Line("fail", "disk", f"--save {shown}: {error.strerror}", "another --save")
        return
    folder = next(path for path in (asked.save, *asked.save.resolve().parents) if os.path.lexists(path))
    if not folder.is_dir():
        what = "a link to nothing" if folder.is_symlink() and not folder.exists() else "a file"
        text = f"--save {asked.save}: expected a folder for checkpoints, found that {folder} is {what}"
        yield Line("fail", "disk", text, "another --save, or move it away")
        return
    if not os.access(folder, os.W_OK):
        yield Line("fail", "disk", f"{asked.save}: cannot be written", "another --save, or its permissions")
        return
    free, needed = shutil.disk_usage(folder).free, 0
    if asked.preset is not None:
        try:
            needed = asked.checkpoints * size_checkpoint(asked.preset)
        except KeyError:
            yield Line(
                "fail", "disk", f"preset {asked.preset!r} is not known", "python tools/plan.py --preset lists them"
            )
    want = f", {asked.checkpoints} checkpoints of {asked.preset} need {needed / 1e9:,.0f} GB" if needed else ""
    text = f"{folder.resolve()}: {free / 1e9:,.1f} GB free{want}"
    if free < needed or free < 2 * PROBE_BYTES:
        yield Line("fail", "disk", text, "another --save, --keep-last 1, or make room")
        return
    yield Line("ok", "disk", text)
    try:
        rate = measure_disk(folder)
    except OSError as error:
        yield Line("fail", "disk", f"{folder}: writing {PROBE_BYTES >> 20} MiB failed: {error.strerror}", "make room")
        return
    slow = rate < SLOW_DISK
    yield Line("note" if slow else "ok", "disk", f"writes {rate / 1e6:,.0f} MB/s", "a local disk" if slow else "")


def size_checkpoint(preset: str) -> int:
    """Bytes of a checkpoint in bf16 with fp32 states.

    Raises:
        KeyError: if there is no such preset.
    """
    from megaflow_trainer.config.arithmetic import count_state_bytes
    from megaflow_trainer.config.presets import PRESETS
    from megaflow_trainer.config.sections import ModelConfig, OptimConfig, StepConfig

    sizes = count_state_bytes(ModelConfig(**PRESETS[preset]), StepConfig(dtype="bf16"), OptimConfig())
    return sizes["weights"] + sizes["optimizer"]


def measure_disk(folder: Path) -> float:
    """Bytes per second of a flushed write."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_") as file:
        block, start = os.urandom(PROBE_BYTES >> 3), time.perf_counter()
        for _ in range(8):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - start)


PROGRAM = """
import datetime, sys, torch, torch.distributed as dist
rank, meeting, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, init_method="file://" + meeting, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
x = torch.full((1024,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
dist.all_reduce(x)
assert x.min().item() == x.max().item() == 3.0, x
dist.destroy_process_group()
"""


def check_collective(asked: Asked) -> Iterator[Line]:
    """Two processes add a tensor."""
    if asked.no_collective or find_fault("torch"):
        return
    backend = "nccl" if len(list_gpus()) > 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", PROGRAM]
        start = time.perf_counter()
        ranks = [
            subprocess.Popen([*command, str(rank), f"{folder}/meeting", backend], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        errors = [_wait(rank) for rank in ranks]
    fault = next((text for text in errors if text), "")
    if fault:
        lines = [line for line in fault.splitlines() if line.strip()]
        yield Line(
            "fail",
            "collective",
            f"two ranks by {backend}: {lines[-1]}",
            "NCCL_DEBUG=INFO shows where it stops; firewalls and /dev/shm are the usual reasons",
        )
    else:
        yield Line(
            "ok", "collective", f"two ranks by {backend} add a tensor ({time.perf_counter() - start:.0f} s with start)"
        )


def _wait(rank: subprocess.Popen[str], limit_s: float = 120.0) -> str:
    """What a process said of its fault; nothing if it had none."""
    try:
        said = rank.communicate(timeout=limit_s)[1]
    except subprocess.TimeoutExpired:
        rank.kill()
        said = f"{rank.communicate()[1]}\nno answer in {limit_s:.0f} s"
    return said if rank.returncode else ""


CHECKS: tuple[Callable[[Asked], Iterator[Line]], ...] = (
    check_python,
    check_torch,
    check_gpus,
    check_links,
    check_memory,
    check_disk,
    check_files,
    check_packages,
    check_collective,
)
