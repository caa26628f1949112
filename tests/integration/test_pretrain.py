"""The commands as a user types them: exit codes, one sentence a fault, and a run that survives being killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.launching import find_children, is_running
from helpers.pairs import write_pair
from helpers.runs import TINY, read_curve, read_metrics

pytestmark = pytest.mark.timeout(1200)  # several runs a test, on machines that may be busy

WAIT_S = 300
ROOT = Path(__file__).resolve().parents[2]
LENGTH = ("--train-iters", "8", "--global-batch-size", "4", "--micro-batch-size", "2")
PLAIN = (sys.executable, "trainer/pretrain.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "trainer/pretrain.py")
OLD_LAUNCH = (sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node=1", "--master_port=0")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def start(program: Sequence[str], flags: Sequence[str], *, own_group: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*program, *flags],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=own_group,
    )


def run(program: Sequence[str], flags: Sequence[str]) -> tuple[int, str, str]:
    process = start(program, flags)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def list_errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error")]


def wait_for_line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"ended without {word!r}: {process.communicate()[1]}")


def test_one_process_trains_and_shows_where_the_time_went(prefix: str, tmp_path: Path) -> None:
    code, out, err = run(PLAIN, [*TINY, *LENGTH, "--data-path", prefix, "--run-dir", str(tmp_path)])
    assert (code, err) == (0, "")
    line = next(line for line in out.splitlines() if " iteration 8/8 " in line)
    for word in (
        "lm loss:",
        "lr:",
        "grad norm:",
        "loader bound",
        "forward",
        "backward",
        "samples/s:",
        "tokens/s/GPU:",
        "memory",
    ):
        assert word in line
    assert len(read_curve(tmp_path)) == 8
    assert json.loads((tmp_path / "run.json").read_text())["starts"][0]["world_size"] == 1


@pytest.mark.dist
def test_torchrun_trains_on_two_ranks_like_one(prefix: str, tmp_path: Path) -> None:
    for name, program in (("one", PLAIN), ("two", TORCHRUN)):
        code, out, _ = run(program, [*TINY, *LENGTH, "--data-path", prefix, "--run-dir", str(tmp_path / name)])
        assert code == 0
        assert out.count(" iteration 8/8 ") == 1
    for one, two in zip(read_curve(tmp_path / "one"), read_curve(tmp_path / "two"), strict=True):
        assert two[1] == pytest.approx(one[1], abs=2e-5)
        assert two[2] == pytest.approx(one[2], rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("door", ["pretrain_gpt.py", "examples/pretrain_gpt.py"])
def test_the_old_launcher_and_the_old_names_are_doors(prefix: str, tmp_path: Path, door: str) -> None:
    flags = [*TINY, *LENGTH, "--data-path", prefix.removesuffix("_text_document"), "--run-dir", str(tmp_path)]
    code, out, _ = run([*OLD_LAUNCH, door], [*flags, "--distributed-backend", "nccl", "--use-mcore-models"])
    assert code == 0
    assert out.count("--use-mcore-models has no effect") == 1
    assert len(read_curve(tmp_path)) == 8


@pytest.mark.parametrize(
    "flags, code, words",
    [
        (("--num-attention-heads", "5"), 2, "is not divisible by model.num_heads (--num-attention-heads) 5"),
        (("--no-such-flag",), 2, "--no-such-flag is not a flag of this trainer"),
        (("--bf16", "--fp8-hybrid"), 1, "fp8 (--fp8-hybrid) needs a GPU"),
        (("--fp8-hybrid",), 2, "step.fp8 (--fp8-format) is beside bf16, and this run is fp32"),
        (("--data-path", "/nowhere/data"), 1, "/nowhere/data"),
        (("--use-flash-attn",), 1, "flash attention needs a CUDA GPU"),
        (("--vocab-file", "/nowhere/vocab.json", "--merge-file", "/nowhere/merges.txt"), 1, "/nowhere/vocab.json"),
        (("--save", "/dev/null/checkpoints"), 1, "cannot be written"),
        (("--config", "."), 2, "--config .: expected a YAML recipe, but: Is a directory"),
        (("--config", "/proc/self/exe"), 2, "--config /proc/self/exe: "),
    ],
)
def test_a_fault_is_one_sentence_without_traceback(
    prefix: str, tmp_path: Path, flags: tuple[str, ...], code: int, words: str
) -> None:
    base = [*TINY, *LENGTH, "--data-path", prefix, "--run-dir", str(tmp_path), "--distributed-backend", "gloo"]
    found, _, err = run(PLAIN, [*base, *flags])
    assert found == code
    assert words in err
    assert len(err.splitlines()) == len(list_errors(err)) == 1


@pytest.mark.dist
@pytest.mark.parametrize("flags", [("--data-path", "/nowhere/data"), ("--num-attention-heads", "5")])
def test_a_fault_of_all_ranks_is_said_once(prefix: str, flags: tuple[str, ...]) -> None:
    code, _, err = run(TORCHRUN, [*TINY, *LENGTH, "--data-path", prefix, *flags])
    assert code != 0
    assert len(list_errors(err)) == 1
    assert list_errors(err)[0].startswith("error: ")
    ours, _, report = err.partition("Traceback (most recent call last)")
    assert list_errors(ours) == list_errors(err)  # said before the report that torchrun adds
    assert "Traceback" not in report
    assert report == "" or f"traceback : {list_errors(err)[0]}" in report  # and once more at its end


@pytest.mark.parametrize(
    "variables, words",
    [
        (
            {"RANK": "9" * 5000},
            f"the environment says RANK={'9' * 40}: expected a whole number >= 0, of at most 9 digits",
        ),
        ({"RANK": "x"}, "the environment says RANK=x: expected a whole number >= 0"),
        ({"WORLD_SIZE": "many"}, "the environment says WORLD_SIZE=many: expected a whole number >= 1"),
        ({"WORLD_SIZE": "0"}, "the environment says WORLD_SIZE=0"),
        ({"LOCAL_RANK": "-1"}, "the environment says LOCAL_RANK=-1"),
        ({"RANK": "1"}, "RANK=1 must be below WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT: start the ranks by torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE=2 without MASTER_ADDR: start"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
            "the environment says MASTER_PORT=x",
        ),
    ],
)
def test_a_wrong_environment_is_one_sentence(
    prefix: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = run(PLAIN, [*TINY, *LENGTH, "--data-path", prefix])
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == len(list_errors(err)) == 1


def test_ranks_that_cannot_meet_are_one_sentence(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        code, _, err = run(PLAIN, [*TINY, *LENGTH, "--data-path", prefix])
    assert code == 1
    (line,) = list_errors(err)
    assert line.startswith("error: the ranks did not meet: ")
    assert "Traceback" not in err


def test_without_the_package_one_sentence_says_what_to_do() -> None:
    code, out, err = run((sys.executable, "-I", "-S", "trainer/pretrain.py"), ["--help"])
    assert (code, out) == (1, "")
    assert "megaflow is not installed" in err
    assert "run `make build` in the checkout once, then `. .venv/bin/activate`" in err
    assert len(err.splitlines()) == len(list_errors(err)) == 1


def test_help_needs_neither_data_nor_torch() -> None:
    code, out, err = run(PLAIN, ["--help"])
    assert (code, err) == (0, "")
    assert "--tensor-model-parallel-size" in out
    assert "75   stopped by SIGTERM or SIGUSR1 and saved" in out
    assert "--profile-step-start" in out


def test_killed_between_steps_the_same_command_goes_on_with_the_same_samples(prefix: str, tmp_path: Path) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--hidden-dropout", "0.1", "--save-interval", "3"]
    flags = [*flags, "--train-iters", "300"]
    assert run(PLAIN, [*flags, "--save", str(tmp_path / "straight")])[0] == 0
    killed = tmp_path / "killed"
    for word in ("iteration 40/", "iteration 133/"):
        process = start(PLAIN, [*flags, "--save", str(killed)])
        wait_for_line(process, word)
        process.kill()
        process.communicate()
    code, out, _ = run(PLAIN, [*flags, "--save", str(killed)])
    assert code == 0
    assert "resumed from" in out
    expected = {line[0]: line for line in read_curve(tmp_path / "straight")}
    assert {line[0]: line for line in read_curve(killed)} == expected
    assert all(line == expected[line[0]] for line in read_curve(killed))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_the_step_and_ends_with_its_own_code(
    prefix: str, tmp_path: Path, number: signal.Signals
) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--save", str(tmp_path)]
    process = start(PLAIN, flags)
    wait_for_line(process, "iteration 5/")
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (75, "")
    step = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert f"stopped by {number.name} after iteration {step}" in out
    assert read_metrics(tmp_path)[-1]["iteration"] == step


@pytest.mark.dist
def test_sigterm_to_the_launcher_saves_once_and_the_run_goes_on(prefix: str, tmp_path: Path) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--save", str(tmp_path)]
    process = start(TORCHRUN, flags)
    wait_for_line(process, "iteration 5/")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    step = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert out.count(f"stopped by SIGTERM after iteration {step}") == 1
    assert list_errors(err) == []
    assert read_metrics(tmp_path)[-1]["iteration"] == step


def test_ctrl_c_is_one_sentence(prefix: str, tmp_path: Path) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--run-dir", str(tmp_path)]
    process = start(PLAIN, flags)
    wait_for_line(process, "iteration 5/")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err.splitlines() == ["error: interrupted; nothing was saved: give --save to be able to go on"]
    assert json.loads((tmp_path / "run.json").read_text())["starts"][-1]["end"]["exit_code"] == 130


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
@pytest.mark.parametrize(
    ("lost", "layout"),
    [(0, ""), (1, ""), (1, "--tensor-model-parallel-size 2"), (1, "--pipeline-model-parallel-size 2")],
)
def test_when_one_rank_dies_all_end_soon_and_not_with_success(
    prefix: str, tmp_path: Path, lost: int, layout: str
) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--run-dir", str(tmp_path)]
    process = start(TORCHRUN, [*flags, *layout.split()])
    wait_for_line(process, "iteration 5/")
    ranks = find_children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[lost], signal.SIGKILL)
    began = time.monotonic()
    while is_running(ranks[1 - lost]) and time.monotonic() < began + 30:
        time.sleep(0.05)
    assert not is_running(ranks[1 - lost]), "the rank that is left must end by itself, before the launcher ends it"
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert not is_running(ranks[lost])
    assert any(f": rank {lost} died; " in line for line in list_errors(err))
    end = json.loads((tmp_path / "run.json").read_text())["starts"][-1]["end"]
    assert (end["exit_code"], end["reason"]) == (78, f"rank {lost} died")
    assert end["iteration"] >= 5


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
def test_ranks_end_with_a_launcher_that_was_killed_and_the_same_command_goes_on(prefix: str, tmp_path: Path) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--save-interval", "3", "--save", str(tmp_path)]
    flags = [*flags, "--train-iters", "100000"]
    process = start(TORCHRUN, flags)
    wait_for_line(process, "saved iteration 3 ")
    ranks = find_children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=WAIT_S)  # the ranks hold the pipe: it closes when they are gone
    deadline = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(rank) for rank in ranks)
    step = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert read_metrics(tmp_path)[-1]["iteration"] == step  # they saved before they left
    process = start(TORCHRUN, flags)
    wait_for_line(process, f"going on after iteration {step}")
    wait_for_line(process, f"iteration {step + 1}/")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT_S)
    assert list_errors(err) == []


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the ranks in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_whole_process_group_saves_and_the_run_goes_on(
    prefix: str, tmp_path: Path, number: signal.Signals
) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--save", str(tmp_path)]
    process = start(TORCHRUN, flags, own_group=True)
    wait_for_line(process, "iteration 5/")
    ranks = find_children(process.pid)
    os.killpg(process.pid, number)  # SIGUSR1 ends torchrun itself at once: the ranks save without it
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert not any(is_running(rank) for rank in ranks)
    step = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert out.count(f"after iteration {step}; the same command goes on") == 1
    assert read_metrics(tmp_path)[-1]["iteration"] == step
    assert json.loads((tmp_path / "run.json").read_text())["starts"][-1]["end"]["exit_code"] == 75


@pytest.mark.dist
def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(prefix: str, tmp_path: Path) -> None:
    flags = [*TINY, *LENGTH[2:], "--data-path", prefix, "--train-iters", "100000", "--save", str(tmp_path)]
    process = start(PLAIN, flags)
    wait_for_line(process, "iteration 5/")
    code, _, err = run(TORCHRUN, flags)
    assert code != 0
    (line,) = list_errors(err)
    assert f"another run (process {process.pid} on " in line
    assert "wait until it has ended, or choose another --save" in line
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (75, "")
