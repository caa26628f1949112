"""Going on from a torch_dist checkpoint of Megatron-Core: with its masters and moments it is the same run."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMBERS
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from helpers.megatron import FORMATS, cut_and_flatten, write_megatron
from helpers.pairs import write_pair
from helpers.runs import read_curve, read_tensors, run_tiny
from megaflow.errors import CheckpointError
from megaflow_trainer.checkpoint.megatron import MegatronReader, _join_cuts
from megaflow_trainer.config.batch import count_samples
from megaflow_trainer.config.sections import StepConfig

LENGTH = ["--train-iters", "8", "--global-batch-size", "4", "--micro-batch-size", "2", "--lr-decay-style", "cosine"]
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA += " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
MODELS = {"gpt": ([], 4), "llama": (LLAMA.split(), 2)}
STEP = 5


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture(scope="module", params=MODELS)
def straight(request: pytest.FixtureRequest, prefix: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 8 steps with bf16 weights and fp32 masters, saved after the fifth."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*LENGTH, *MODELS[request.param][0], "--bf16", "--save-interval", str(STEP), "--save", str(folder)]
    assert run_tiny(prefix, flags) == 0
    return folder, request.param


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_from_megatrons_state_as_the_straight_one(
    prefix: str, straight: tuple[Path, str], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = straight
    flags, num_groups = MODELS[model]
    write_megatron(source, tmp_path / "megatron", step=STEP, num_heads=4, num_groups=num_groups, kind=kind)
    capsys.readouterr()
    flags = [*LENGTH, *flags, "--bf16", "--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "run")]
    assert run_tiny(prefix, flags) == 0
    assert "weights and optimizer states (exp_avg, exp_avg_sq, master)" in capsys.readouterr().out
    assert read_curve(tmp_path / "run") == read_curve(source)[STEP:]
    before, after = read_tensors(source, 8), read_tensors(tmp_path / "run", 8)
    names = [name for name in before if not name.startswith("rng/")]
    assert {name.partition(".")[0] for name in names} > {"optimizer/master", "optimizer/exp_avg", "optimizer/step"}
    assert all(torch.equal(before[name], after[name]) for name in names)


def test_fresh_states_are_asked_for_and_give_another_run(
    prefix: str, straight: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = straight
    flags, num_groups = MODELS[model]
    write_megatron(source, tmp_path / "megatron", step=STEP, num_heads=4, num_groups=num_groups, kind="plain")
    flags = [*LENGTH, *flags, "--bf16", "--load", str(tmp_path / "megatron"), "--run-dir", str(tmp_path / "run")]
    assert run_tiny(prefix, [*flags, "--no-load-optim"]) == 0
    assert "weights and fresh optimizer states; going on after iteration 5 and 20 samples" in capsys.readouterr().out
    found, expected = read_curve(tmp_path / "run"), read_curve(source)[STEP:]
    assert found[0] == expected[0]  # the masters are there, and the data go on
    assert found[1][1] != expected[1][1]
    with pytest.raises(CheckpointError, match="is of Adam, and this run's optimizer is lion; give --no-load-optim"):
        run_tiny(prefix, [*flags, "--optimizer", "lion"])


def test_what_cannot_be_gone_on_from_is_told(prefix: str, straight: tuple[Path, str], tmp_path: Path) -> None:
    source, model = straight
    folder = tmp_path / "megatron"
    write_megatron(source, folder, step=STEP, num_heads=4, num_groups=MODELS[model][1], kind="plain")
    flags = [*LENGTH, *MODELS[model][0], "--bf16", "--run-dir", str(tmp_path / "run")]
    (folder / f"iter_{STEP:07d}").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match=r"names no iteration .* give --finetune to take its weights"):
        run_tiny(prefix, [*flags, "--load", str(folder)])
    with pytest.raises(CheckpointError, match=r"tensor .* has shape .* in the checkpoint and .* in this run"):
        run_tiny(prefix, [*flags, "--load", str(folder), "--finetune", "--vocab-size", "128"])


class _EarlyPython(pickle._Pickler):  # the one in Python, which asks `reducer_override` for members too
    """Writes members of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, one: Any) -> Any:
        return (getattr, (type(one), one.name)) if isinstance(one, enum.Enum) else NotImplemented


class _Asking:
    """Pickled as a call of `getattr`."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __reduce__(self) -> Any:
        return getattr, self.given


def test_a_description_by_an_early_python_311_is_read_and_getattr_gives_no_more(tmp_path: Path) -> None:
    given = Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])})
    for content, told in (
        (given, None),
        (_Asking(MEMBERS, "__class__"), "__class__ of .* no part of a description"),
        (_Asking(torch.Size, "numel"), "numel of .*Size.* no part of a description"),
    ):
        with (tmp_path / ".metadata").open("wb") as file:
            _EarlyPython(file, protocol=4).dump(content)
        assert b"getattr" in (tmp_path / ".metadata").read_bytes()
        if told is None:
            assert MegatronReader(tmp_path).read_metadata() == given
        else:
            with pytest.raises(CheckpointError, match=told):
                MegatronReader(tmp_path).read_metadata()


def test_cuts_are_joined_and_what_is_no_cut_is_refused() -> None:
    whole = torch.arange(2 * 6 * 4).view(2, 6, 4)
    for counts in ([2, 3, 1], [1, 1, 2], [2, 2, 4]):
        assert torch.equal(_join_cuts(cut_and_flatten(whole, counts), whole.shape), whole)
    for shape in ((2, 5, 1, 9), (0, 1, 1, 48), (2, 24), (2, 3, 1, 7)):
        with pytest.raises(RuntimeError):
            _join_cuts(torch.zeros(shape), whole.shape)


@pytest.mark.parametrize("ramp", [(), ("2", "1", "30")])
def test_samples_of_steps_are_those_that_the_batches_add_up_to(ramp: tuple[str, ...]) -> None:
    step = StepConfig(global_batch_size=5, micro_batch_size=1, num_micro_batches=5, ramp_up=ramp)
    sizes = [count_samples(step, n + 1) - count_samples(step, n) for n in range(20)]
    assert (sizes[0], sizes[-1]) == ((2, 5) if ramp else (5, 5))
    assert sizes == sorted(sizes)
