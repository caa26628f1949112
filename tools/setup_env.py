#!/usr/bin/env python3
"""Makes the environment that every `make` target uses: a virtual environment with megaflow's extension built in.

    python3 tools/setup_env.py              # everything: build, test and check tools, torch, the extension
    python3 tools/setup_env.py --no-extension

The environment is `.venv`, or the folder that `MEGAFLOW_VENV` names. An importable torch >= 2.11 is reused, otherwise
torch is installed. Each step leaves a stamp when it is done: a second run repeats only what has changed, and a run that
was interrupted goes on. Only the standard library is used, because nothing else is there yet.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from doors import INTERRUPTED, run_door

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 10)
OLDEST_RUST = (1, 85)
OLDEST_TORCH = (2, 11)
TORCH_RANGE = "torch==2.11.*"
"""What is installed where no torch is found: one known version, so that two machines agree."""
GROUPS = ("build", "test", "check")
"""Dependency groups of pyproject.toml that the environment holds."""
STATE_FOLDER = ".megaflow"
"""Folder inside the environment for stamps."""
MADE_HERE = "made-here"
"""File in the state folder of an environment that this tool made, and may therefore clear."""


class SetupError(Exception):
    """Why the environment cannot be made: one line, with the remedy."""


class Environment(NamedTuple):
    """A virtual environment and how to start programs in it."""

    folder: Path

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """The process environment with this virtual environment first."""
        variables = dict(os.environ)
        for name in ("PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX"):
            variables.pop(name, None)
        variables["VIRTUAL_ENV"] = str(self.folder)
        variables["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{variables.get('PATH', '')}"
        return variables

    def run(self, *command: str | Path, beat_s: float | None = None) -> None:
        """Runs a command of the environment in the checkout.

        Args:
            command: program and arguments.
            beat_s: seconds after which a command that prints nothing is said to be at work still, again and again.

        Raises:
            SetupError: if it fails; its own output stands above.
        """
        words, begin = [str(part) for part in command], time.monotonic()
        with subprocess.Popen(words, cwd=ROOT, env=self.variables()) as process:
            try:
                while (code := wait_for(process, beat_s)) is None:
                    say(f"still at it, {time.monotonic() - begin:.0f} s")
            except BaseException:
                process.kill()
                raise
        if code != 0:
            raise SetupError(f"failed with exit code {code}: {' '.join(words)}")


def wait_for(process: subprocess.Popen[bytes], timeout_s: float | None) -> int | None:
    """The exit code of a process; None if it has not ended by then."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def say(text: str) -> None:
    """Prints one line of progress at once."""
    print(f"[setup] {text}", flush=True)


# --- what must be there -----------------------------------------------------------------------------------------------


def missing_tools(*, extension: bool) -> list[str]:
    """One line for each tool that is missing or too old, with the remedy."""
    problems = []
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        problems.append(
            f"python3 is {found}, megaflow needs >= 3.10: install one and name it, as in `make demo PYTHON=python3.12`"
        )
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            problems.append(
                f"python3 has no module {module}: install it (Debian, Ubuntu: the package python3-venv of your version)"
            )
            break
    if extension:
        problems += missing_compilers()
    return problems


def missing_compilers() -> list[str]:
    """One line for each of Rust and C that cannot compile here."""
    problems = []
    rust_remedy = "install Rust >= 1.85 with rustup (rustup.rs) or your distribution's packages"
    rustc = output_of([os.environ.get("RUSTC", "rustc"), "--version"])
    version = re.search(r"(\d+)\.(\d+)", rustc or "")
    if output_of([os.environ.get("CARGO", "cargo"), "--version"]) is None or rustc is None:
        problems.append(f"cargo is missing: {rust_remedy}")
    elif version and (int(version[1]), int(version[2])) < OLDEST_RUST:
        problems.append(f"rustc is {version[0]}, megaflow needs >= 1.85: `rustup update stable`, or {rust_remedy}")
    compilers = [os.environ["CC"].split()[0]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        problems.append(
            f"a C compiler is missing (looked for {', '.join(compilers)}): install gcc or clang (Debian: gcc libc6-dev)"
        )
    return problems


def output_of(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- stamps -----------------------------------------------------------------------------------------------------------


def read_stamp(environment: Environment, step: str) -> Any:
    """What `step` left when it was last completed here, or None."""
    try:
        return json.loads((environment.folder / STATE_FOLDER / f"{step}.json").read_text())
    except (OSError, ValueError):
        return None


def write_stamp(environment: Environment, step: str, value: Any) -> None:
    """Records that `step` is complete; the file appears whole or not at all."""
    folder = environment.folder / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{step}.{os.getpid()}"
    temporary.write_text(json.dumps(value))
    temporary.replace(folder / f"{step}.json")


def drop_stamp(environment: Environment, step: str) -> None:
    """Forgets that `step` was complete, before it starts again."""
    with contextlib.suppress(FileNotFoundError):
        (environment.folder / STATE_FOLDER / f"{step}.json").unlink()


def fingerprint(paths: Iterator[Path]) -> str:
    """Hash over the names and contents of files, in a fixed order."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def extension_sources() -> Iterator[Path]:
    """Files whose change means that the extension or its entry points must be built again."""
    for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml"):
        if (ROOT / name).exists():
            yield ROOT / name
    for path in (ROOT / "crates").rglob("*"):
        if path.is_file() and path.suffix in {".rs", ".toml", ".c", ".h", ".json", ".txt", ".bin"}:
            yield path


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Holds the environment's folder, so that two `make` at once do not build over each other."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run prepares {folder}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# --- steps ------------------------------------------------------------------------------------------------------------


def make_virtual_environment(environment: Environment) -> None:
    """Creates the environment, or takes over the one that is there."""
    stamp = read_stamp(environment, "venv")
    works = output_of([str(environment.python), "-c", "import sys; print(*sys.version_info[:2], sep='.')"])
    if stamp is not None and works == stamp["python"]:
        return
    config = environment.folder / "pyvenv.cfg"
    ours = (environment.folder / STATE_FOLDER / MADE_HERE).exists()
    if config.exists() and not ours:  # somebody else's, named by MEGAFLOW_VENV or left in .venv: use it, never clear it
        if works is None:
            raise SetupError(
                f"{environment.folder} is a virtual environment that does not start: remove it, then again"
            )
        if tuple(int(part) for part in works.split(".")) < OLDEST_PYTHON:
            raise SetupError(
                f"{environment.folder} holds Python {works}, megaflow needs >= 3.10: remove it, then again"
            )
        say(f"using the virtual environment {environment.folder} (Python {works})")
    else:
        if not ours and any(environment.folder.iterdir()):
            raise SetupError(
                f"{environment.folder} is a folder but not a virtual environment: remove it, or set MEGAFLOW_VENV"
            )
        reuse = torch_of(sys.executable) is not None
        say(
            f"creating {environment.folder} with Python {sys.version.split()[0]}"
            + (", on top of this Python's torch" if reuse else "")
        )
        create_environment(environment, reuse_packages=reuse)
        works = ".".join(str(part) for part in sys.version_info[:2])
    if output_of([str(environment.python), "-m", "pip", "--version"]) is None:
        environment.run(environment.python, "-m", "ensurepip", "--upgrade")
    drop_stamp(environment, "packages")
    drop_stamp(environment, "extension")
    write_stamp(environment, "venv", {"python": works})


def create_environment(environment: Environment, *, reuse_packages: bool) -> None:
    """Runs `python -m venv` in the empty folder; with `reuse_packages` this Python's packages are visible in it."""
    state = environment.folder / STATE_FOLDER
    state.mkdir(exist_ok=True)
    (state / MADE_HERE).touch()
    # What an interrupted run left. Not `venv --clear`, which would drop our mark.
    for path in environment.folder.iterdir():
        if path != state:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    options = ["--system-site-packages"] if reuse_packages else []
    done = subprocess.run([sys.executable, "-m", "venv", *options, str(environment.folder)], check=False)
    if done.returncode != 0:
        raise SetupError(
            f"`{sys.executable} -m venv` failed (its words stand above); "
            "Debian and Ubuntu need the package python3-venv of your version"
        )
    if reuse_packages and torch_of(environment.python) is None:
        # This Python is itself a virtual environment: the new one has the same base, and must be told of its parent.
        found = output_of([sys.executable, "-c", "import torch; print(torch.__file__)"])
        site = output_of([str(environment.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        if found and site:
            (Path(site) / "megaflow_parent_environment.pth").write_text(f"{Path(found).parents[1]}\n")


def torch_of(python: str | Path) -> str | None:
    """Version of the torch that `python` imports, if it is new enough."""
    version = output_of([str(python), "-c", "import torch; print(torch.__version__)"])
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return version if numbers and (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH else None


def install_packages(environment: Environment) -> None:
    """Installs what megaflow, its trainer, its tests and its checks import."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if read_stamp(environment, "packages") == wanted:
        return
    drop_stamp(environment, "packages")
    pip = [str(environment.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    say("installing the build, test and check tools (network; a minute or less)")
    environment.run(*pip, "pip>=25.1")  # the first that knows dependency groups
    groups = [part for group in GROUPS for part in ("--group", group)]
    requirements = read_requirements(environment)
    torch = torch_of(environment.python)
    if torch is None:
        say(f"installing {TORCH_RANGE} with its CUDA libraries (network; loads about 3 GB, 5 GB on disk, 1-10 minutes)")
        requirements.append(TORCH_RANGE)
    else:
        say(f"torch {torch} is there and is used")
        # A vendor's build may call itself a pre-release, which pip would replace.
        requirements = [name for name in requirements if not re.match(r"torch\b", name)]
    environment.run(*pip, *groups, *requirements, beat_s=30)
    if not (environment.folder / "bin" / "torchrun").exists():
        bring_programs_home(environment, [*pip, "--ignore-installed", "--no-deps", *groups])
    write_stamp(environment, "packages", wanted)


def bring_programs_home(environment: Environment, pip: Sequence[str]) -> None:
    """Where packages of another environment are reused: their programs would start in that one, not in ours.

    Args:
        environment: ours.
        pip: the command that installs the tools once more, here, without what they depend on.
    """
    environment.run(*pip)
    torchrun = environment.folder / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {shlex.quote(str(environment.python))} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)


def read_requirements(environment: Environment) -> list[str]:
    """Requirements of megaflow and its trainer, from pyproject.toml; pip's own TOML reader serves Python 3.10 too."""
    program = """
import json
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(json.dumps(project["dependencies"] + project["optional-dependencies"]["trainer"]))
"""
    done = subprocess.run(
        [str(environment.python), "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["no reason given"]
        raise SetupError(f"pyproject.toml cannot be read: {words[-1]}")
    requirements: list[str] = json.loads(done.stdout)
    return requirements


def build_extension(environment: Environment) -> None:
    """Builds `megaflow._core` with the optimised profile and installs the package in place, with its commands."""
    stamp = {
        "sources": fingerprint(extension_sources()),
        "checkout": str(ROOT),
        "python": output_of([str(environment.python), "--version"]),
    }
    last = read_stamp(environment, "extension")
    command = environment.folder / "bin" / "megaflow-preprocess"
    if last is not None and last == {**stamp, "module": built_module()} and last["module"] and command.exists():
        return
    drop_stamp(environment, "extension")
    say("building the extension megaflow._core with cargo (the first time: crates from the network, 3 to 6 minutes)")
    start = time.monotonic()
    # maturin calls pip, which would list every package that is there already.
    environment.run("env", "PIP_QUIET=1", environment.python, "-m", "maturin", "develop", "--release")
    say(f"built in {time.monotonic() - start:.0f} s")
    write_stamp(environment, "extension", {**stamp, "module": built_module()})


def built_module() -> list[Any] | None:
    """Name, size and time of the extension in the checkout; another environment may have built it since."""
    for path in sorted((ROOT / "python" / "megaflow").glob("_core*.so")):
        status = path.stat()
        return [path.name, status.st_size, status.st_mtime_ns]
    return None


def prepare(*, extension: bool = True) -> Environment:
    """Makes the environment if it is not there, brings it up to date, and returns it.

    Args:
        extension: whether the Rust extension is needed too.

    Raises:
        SetupError: if a tool is missing or a step fails.
    """
    problems = missing_tools(extension=extension)
    if problems:
        raise SetupError("\n".join(problems))
    environment = Environment(Path(os.environ.get("MEGAFLOW_VENV") or ROOT / ".venv").absolute())
    with only_one(environment.folder):
        make_virtual_environment(environment)
        install_packages(environment)
        if extension:
            build_extension(environment)
    return environment


def prepare_or_exit(*, extension: bool = True) -> Environment:
    """As `prepare`, for commands: a problem is printed as it is, and ends the program."""
    try:
        return prepare(extension=extension)
    except SetupError as error:
        for line in str(error).splitlines():
            print(f"[setup] {line}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n[setup] stopped; the next run goes on from here", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-extension", action="store_true", help="only the Python packages, no Rust build")
    options = parser.parse_args()
    environment = prepare_or_exit(extension=not options.no_extension)
    say(f"ready: {environment.python}")


if __name__ == "__main__":
    sys.exit(run_door(main))
