"""The doctor names what is broken, with a remedy, and never falls ill itself."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

import doctor
import doctor_checks
import doctor_packages
from doctor_checks import Asked, Gpu, Line

Usage = namedtuple("Usage", "total used free")


def fails(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.state == "fail"]


def test_no_space_for_the_checkpoints_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 100 * 10**9))
    (line,) = doctor_checks.check_disk(Asked(save=tmp_path, preset="llama3_8b"))
    assert line.state == "fail"
    assert "100.0 GB free, 2 checkpoints of llama3_8b need 225 GB" in line.text  # 2 x 14 bytes x 8.03e9
    assert "--keep-last 1" in line.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 300 * 10**9))
    lines = list(doctor_checks.check_disk(Asked(save=tmp_path, preset="llama3_8b")))
    assert not fails(lines)
    assert "MB/s" in lines[-1].text


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(folder: Path) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor_checks, "measure_disk", fill)
    line = list(doctor_checks.check_disk(Asked(save=tmp_path)))[-1]
    assert (line.state, "No space left on device" in line.text) == ("fail", True)


@pytest.mark.parametrize(
    ("save", "what"), [("file", "is a file"), ("file/inside", "is a file"), ("link", "is a link to nothing")]
)
def test_a_file_where_checkpoints_should_go_is_told(tmp_path: Path, save: str, what: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (line,) = doctor_checks.check_disk(Asked(save=tmp_path / save))
    assert (line.state, line.topic) == ("fail", "disk")
    assert line.text.startswith(f"--save {tmp_path / save}: expected a folder for checkpoints, found that ")
    assert line.text.endswith(what)
    assert line.remedy == "another --save, or move it away"
    assert not fails(list(doctor_checks.check_disk(Asked(save=tmp_path / "new" / "folder"))))


def test_a_name_that_no_disk_takes_is_told(tmp_path: Path) -> None:
    (line,) = doctor_checks.check_disk(Asked(save=tmp_path / ("x" * 5000)))
    assert (line.state, line.remedy) == ("fail", "another --save")
    assert line.text.endswith("...: File name too long")
    assert len(line.text) < 300


def test_a_folder_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_checks.os, "access", lambda path, mode: False)
    (line,) = doctor_checks.check_disk(Asked(save=tmp_path))
    assert line.state == "fail"


@pytest.mark.parametrize(
    "name, capability, state, words",
    [
        ("Tesla V100", (7, 0), "note", ["can fp16 and fp32", "--fp16", "not --use-flash-attn", "drop --fp8-hybrid"]),
        ("A100", (8, 0), "ok", ["can bf16, flash attention"]),
        ("L40S", (8, 9), "ok", ["can bf16, flash attention, fp8"]),
        ("H100", (9, 0), "ok", ["can bf16, flash attention, fp8"]),
    ],
)
def test_what_a_gpu_can_do_is_told(
    name: str, capability: tuple[int, int], state: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_checks, "list_gpus", lambda: [Gpu(name=name, capability=capability, memory_bytes=32 << 30)]
    )
    (line,) = doctor_checks.check_gpus(Asked())
    assert line.state == state
    for word in words:
        assert word in line.text + line.remedy


def test_gpus_of_several_kinds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [Gpu(name="A100", capability=(8, 0), memory_bytes=1), Gpu(name="H100", capability=(9, 0), memory_bytes=1)]
    monkeypatch.setattr(doctor_checks, "list_gpus", lambda: kinds)
    assert "waits for the slowest" in list(doctor_checks.check_gpus(Asked()))[-1].text


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages that a test does not ask about are not imported."""
    monkeypatch.setattr(doctor_packages, "FIRST", ())
    monkeypatch.setattr(doctor_packages, "NEEDED", {})


@pytest.mark.parametrize(
    "fault", ["OSError('libcudart.so.12: cannot open')", "ImportError('undefined symbol')", "RuntimeError('x')"]
)
def test_an_optional_package_that_breaks_at_import_is_told(
    light: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "liger_kernel.py").write_text(f"raise {fault}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
    monkeypatch.setattr(doctor_packages, "OPTIONAL", {"liger_kernel": ("fused norms", "liger-kernel")})
    (line,) = doctor_packages.check_packages(Asked())
    assert line.state == "fail"
    assert f"installed and cannot be imported: {fault.split('(')[0]}" in line.text


@pytest.mark.parametrize("fault", ["OSError('libyaml.so: cannot open')", "RuntimeError('x')"])
def test_a_package_that_is_needed_and_breaks_at_import_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    (tmp_path / "yaml.py").write_text(f"raise {fault}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    monkeypatch.setattr(doctor_packages, "OPTIONAL", {})
    (line,) = doctor_packages.check_packages(Asked())
    assert line.state == "fail"
    assert f"pyyaml cannot be imported: {fault.split('(')[0]}" in line.text


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "it crashes the process, by SIGSEGV"),
        ("import os\nos._exit(0)", "it ends the process, with code 0"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_package_that_takes_the_process_along_is_told_and_those_behind_it_too(
    light: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    fault: str,
) -> None:
    (tmp_path / "pkg_crash.py").write_text(content)
    (tmp_path / "pkg_fine.py").write_text("print('loud')")
    (tmp_path / "pkg_broken.py").write_text("raise OSError('lib.so')")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("pkg_crash", "pkg_fine", "pkg_broken")
    monkeypatch.setattr(doctor_packages, "OPTIONAL", {name: ("tests", name.replace("_", "-")) for name in names})
    monkeypatch.setattr(doctor, "CHECKS", (doctor_packages.check_packages,))
    assert doctor.main([]) == 1
    crash, remedy, fine, broken, *_, last = capsys.readouterr().out.splitlines()
    assert crash == f"FAIL  packages: pkg-crash is installed and cannot be imported: {fault}"
    assert "pip uninstall pkg-crash" in remedy
    assert fine == "ok    packages: pkg-fine (version unknown)"
    assert broken.endswith("cannot be imported: OSError: lib.so")
    assert last == "3 lines, 2 to mend"


def test_packages_are_imported_once_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = doctor_packages.subprocess.run

    def count(*rest: object, **names: object) -> object:
        calls.append(1)
        return run(*rest, **names)  # type: ignore[call-overload]

    monkeypatch.setattr(doctor_packages.subprocess, "run", count)
    doctor_packages._import_all.cache_clear()
    assert [doctor_packages.find_fault(name) for name in ("torch", "yaml", "megaflow", "numpy")] == [""] * 4
    assert len(calls) == 1


def test_a_check_that_fails_itself_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_first(asked: Asked) -> Iterator[Line]:
        yield Line("ok", "first", "begun")
        raise SystemExit(0)

    def check_second(asked: Asked) -> Iterator[Line]:
        yield Line("ok", "second", "found")

    monkeypatch.setattr(doctor, "CHECKS", (check_first, check_second))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "FAIL  first: the check failed: SystemExit: 0\n" in out
    assert "ok    second: found\n" in out


def test_packages_that_are_not_there_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_packages, "OPTIONAL", {"no_such_package_at_all": ("nothing", "nothing")})
    (line,) = doctor_packages.check_packages(Asked())
    assert (line.state, "not needed unless asked for" in line.text) == ("ok", True)


def test_an_old_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("torch")
    old.__version__ = "2.4.1"  # type: ignore[attr-defined]
    old.version = types.SimpleNamespace(cuda=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", old)
    first, _ = doctor_checks.check_torch(Asked())
    assert (first.state, first.remedy) == ("fail", "pip install 'torch>=2.11'")


@pytest.mark.parametrize("kind", [OSError, RuntimeError, AttributeError])
def test_a_torch_whose_library_is_broken_is_told(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail(name: str) -> types.ModuleType:
        raise kind("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(doctor_checks.importlib, "import_module", fail)
    (line,) = doctor_checks.check_torch(Asked())
    assert (line.state, "libtorch_cpu.so" in line.text) == ("fail", True)
    assert doctor_checks.list_gpus() == []


def test_fast_links_that_are_turned_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    (line,) = fails(list(doctor_checks.check_links(Asked())))
    assert line.remedy == "unset NCCL_IB_DISABLE"


def test_little_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    line = next(iter(doctor_checks.check_memory(Asked())))
    assert (line.state, "--shm-size" in line.remedy) == ("fail", True)


@pytest.mark.dist
def test_two_ranks_add_a_tensor_and_a_fault_of_theirs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = doctor_checks.check_collective(Asked())
    assert (line.state, "two ranks by gloo" in line.text) == ("ok", True)
    monkeypatch.setattr(doctor_checks, "PROGRAM", "raise SystemExit('ConnectionError: no route')")
    (line,) = doctor_checks.check_collective(Asked())
    assert (line.state, "no route" in line.text) == ("fail", True)


def test_the_exit_code_and_json_tell_about_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--no-collective", "--save", str(tmp_path)]
    doctor.main([*words, "--vocab-file", str(tmp_path / "none.json"), "--json"])
    lines = json.loads(capsys.readouterr().out)
    assert [line["topic"] for line in lines if line["state"] == "fail"] == ["tokenizer"]
    assert doctor.main([*words, "--vocab-file", str(tmp_path / "none.json")]) == 1
    assert doctor.main(words) == 0
    text = capsys.readouterr().out
    assert "nothing to mend" in text
    assert "\033" not in text  # no colours where nobody looks


def test_a_count_of_checkpoints_that_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--checkpoints", "-3", "--preset", "llama3_8b"])
    assert "--checkpoints must be >= 1, got -3" in capsys.readouterr().err
