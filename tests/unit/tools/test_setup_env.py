"""The set-up: what it says when a tool is missing, and that it repeats only what has changed. Installs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import setup_env
from setup_env import Environment, SetupError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An empty folder as an environment."""
    folder = tmp_path / "venv"
    folder.mkdir()
    return Environment(folder)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one crate and a built extension."""
    root = tmp_path / "checkout"
    (root / "crates/one/src").mkdir(parents=True)
    (root / "python/megaflow").mkdir(parents=True)
    (root / "crates/one/src/lib.rs").write_text("//! one\n")
    (root / "Cargo.toml").write_text("[workspace]\n")
    (root / "pyproject.toml").write_text(
        "[project]\ndependencies = ['a']\n[project.optional-dependencies]\ntrainer = ['b']\n"
    )
    monkeypatch.setattr(setup_env, "ROOT", root)
    return root


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command that would have run in the environment."""
    seen: list[str] = []
    monkeypatch.setattr(Environment, "run", lambda _, *words, **__: seen.append(" ".join(str(word) for word in words)))
    return seen


def path_with(folder: Path, *programs: str) -> str:
    """A PATH that holds only the named programs."""
    folder.mkdir()
    for program in programs:
        (folder / program).write_text("#!/bin/sh\necho rustc 1.90.0\n")
        (folder / program).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        (("cc",), "cargo is missing: install Rust >= 1.85"),
        (("cargo", "rustc"), "a C compiler is missing"),
    ],
)
def test_a_missing_compiler_is_one_line_with_the_remedy(tmp_path, monkeypatch, programs, says):
    for name in ("CC", "CARGO", "RUSTC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin", *programs))
    (problem,) = setup_env.missing_tools(extension=True)
    assert says in problem
    assert "\n" not in problem


def test_an_old_rust_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin", "cc", "cargo", "rustc"))
    monkeypatch.delenv("RUSTC", raising=False)
    (tmp_path / "bin/rustc").write_text("#!/bin/sh\necho rustc 1.70.0\n")
    (problem,) = setup_env.missing_tools(extension=True)
    assert problem.startswith("rustc is 1.70, megaflow needs >= 1.85")


def test_an_old_python_is_named(monkeypatch):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 7))
    (problem,) = setup_env.missing_tools(extension=False)
    assert problem.startswith("python3 is 3.9.7, megaflow needs >= 3.10")


def test_the_command_line_prints_problems_without_a_traceback(tmp_path):
    # Without cargo, and with a compiler: one line.
    variables = {**os.environ, "PATH": path_with(tmp_path / "bin", "cc"), "MEGAFLOW_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/setup_env.py")], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("[setup] cargo is missing")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_a_stamp_appears_whole_or_not_at_all(environment):
    setup_env.write_stamp(environment, "packages", {"a": 1})
    assert setup_env.read_stamp(environment, "packages") == {"a": 1}
    (environment.folder / setup_env.STATE_FOLDER / "packages.json").write_text('{"a"')
    assert setup_env.read_stamp(environment, "packages") is None


def build(environment: Environment, checkout: Path) -> None:
    """Builds as `setup_env` does; the extension appears as maturin would leave it."""
    (environment.folder / "bin").mkdir(exist_ok=True)
    (environment.folder / "bin/megaflow-preprocess").touch()
    module = checkout / "python/megaflow/_core.abi3.so"
    if not module.exists():
        module.write_bytes(b"built")
    setup_env.build_extension(environment)


def test_the_extension_is_built_once(environment, checkout, commands):
    build(environment, checkout)
    build(environment, checkout)
    assert len(commands) == 1
    assert "maturin develop --release" in commands[0]


@pytest.mark.parametrize("changed", ["crates/one/src/lib.rs", "Cargo.toml", "pyproject.toml"])
def test_the_extension_is_built_again_after_a_change(environment, checkout, commands, changed):
    build(environment, checkout)
    (checkout / changed).write_text("# changed\n")
    build(environment, checkout)
    assert len(commands) == 2


def test_the_extension_is_built_again_if_another_environment_replaced_it(environment, checkout, commands):
    build(environment, checkout)
    (checkout / "python/megaflow/_core.abi3.so").write_bytes(b"another build")
    build(environment, checkout)
    assert len(commands) == 2


def test_the_extension_is_built_again_after_a_build_that_failed(environment, checkout, monkeypatch):
    def fail(*_: object) -> None:
        raise SetupError("cargo failed")

    monkeypatch.setattr(Environment, "run", fail)
    with pytest.raises(SetupError):
        build(environment, checkout)
    seen: list[object] = []
    monkeypatch.setattr(Environment, "run", lambda _, *words: seen.append(words))
    build(environment, checkout)
    assert len(seen) == 1


def test_packages_are_installed_once_and_torch_only_where_there_is_none(environment, checkout, commands, monkeypatch):
    monkeypatch.setattr(setup_env, "torch_of", lambda _: "2.11.0")
    monkeypatch.setattr(setup_env, "read_requirements", lambda _: ["numpy", "torch>=2.11"])
    (environment.folder / "bin").mkdir()
    (environment.folder / "bin/torchrun").touch()
    setup_env.install_packages(environment)
    setup_env.install_packages(environment)
    assert len(commands) == 2  # pip itself, then everything else
    assert "torch" not in commands[1]
    (checkout / "pyproject.toml").write_text("# changed\n")
    monkeypatch.setattr(setup_env, "torch_of", lambda _: None)
    setup_env.install_packages(environment)
    assert setup_env.TORCH_RANGE in commands[3]


def test_programs_of_a_reused_environment_start_in_ours(environment, checkout, commands, monkeypatch):
    monkeypatch.setattr(setup_env, "torch_of", lambda _: "2.11.0")
    monkeypatch.setattr(setup_env, "read_requirements", lambda _: ["numpy"])
    (environment.folder / "bin").mkdir()
    setup_env.install_packages(environment)
    assert "--ignore-installed --no-deps --group build" in commands[2]
    torchrun = environment.folder / "bin/torchrun"
    assert f"exec {environment.python} -m torch.distributed.run" in torchrun.read_text()
    assert os.access(torchrun, os.X_OK)


def test_a_folder_that_is_no_environment_is_refused_and_kept(environment):
    (environment.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupError, match="not a virtual environment"):
        setup_env.make_virtual_environment(environment)
    assert (environment.folder / "thesis.txt").exists()


def test_a_strange_environment_that_does_not_start_is_refused_and_kept(environment):
    (environment.folder / "pyvenv.cfg").touch()
    with pytest.raises(SetupError, match="does not start"):
        setup_env.make_virtual_environment(environment)
    assert (environment.folder / "pyvenv.cfg").exists()


def test_an_interrupted_creation_starts_afresh(environment, monkeypatch):
    monkeypatch.setattr(setup_env, "torch_of", lambda _: None)
    state = environment.folder / setup_env.STATE_FOLDER
    state.mkdir()
    (state / setup_env.MADE_HERE).touch()
    (environment.folder / "pyvenv.cfg").write_text("half")
    (environment.folder / "lib").mkdir()
    setup_env.make_virtual_environment(environment)
    assert "home" in (environment.folder / "pyvenv.cfg").read_text()
    assert setup_env.output_of([str(environment.python), "-m", "pip", "--version"])


def test_requirements_come_from_pyproject(environment, checkout):
    (environment.folder / "bin").mkdir()
    environment.python.symlink_to(sys.executable)
    assert setup_env.read_requirements(environment) == ["a", "b"]


def test_a_long_command_that_prints_nothing_is_said_to_be_at_work(
    environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_more = "import sys; sys.stdin.read()"
    held = subprocess.Popen([sys.executable, "-c", wait_for_more], stdin=subprocess.PIPE)
    assert setup_env.wait_for(held, 0.05) is None
    held.communicate()
    assert setup_env.wait_for(held, 0.05) == 0
    environment.run(sys.executable, "-c", "import time; time.sleep(0.5)", beat_s=0.1)
    said = capsys.readouterr().out.splitlines()
    assert said
    assert all(line.startswith("[setup] still at it, ") for line in said)
    environment.run(sys.executable, "-c", "")
    assert capsys.readouterr().out == ""
    with pytest.raises(SetupError, match="failed with exit code 7: "):
        environment.run(sys.executable, "-c", "raise SystemExit(7)", beat_s=0.1)
