"""Whole runs in this process: what they write, how they go on, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import SHAPE, read_curve, read_metrics, read_tensors, run_tiny
from megaflow.errors import (
    CheckpointError,
    ConfigError,
    DataFormatError,
    FileAccessError,
    MissingFileError,
    TokenizerError,
)
from megaflow_trainer.training import build as build_module
from megaflow_trainer.training import run as run_module
from megaflow_trainer.training.clock import PHASES
from megaflow_trainer.training.manifest import Ending, note_end, read_starts

STEPS = 6
PAUSE_S = 0.5
PART = "part_00000.safetensors"
LENGTH = ("--train-iters", str(STEPS), "--global-batch-size", "4", "--micro-batch-size", "2")
DROPOUT = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2", "--eod-mask-loss")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy_text_document")


def copy_step(source: Path, target: Path, step: int) -> None:
    """Leave in `target` what a run killed after `step` leaves."""
    shutil.copytree(source / f"iter_{step:07d}", target / f"iter_{step:07d}")


@pytest.mark.parametrize(
    "dtype",
    [
        (),
        ("--bf16",),
        ("--fp16", "--loss-scale-window", "2", "--rampup-batch-size", "2", "2", "6"),
        ("--bf16", "--all-bf16", "--optimizer", "muon"),
        ("--optimizer", "lion", "--optimizer-cpu-offload", "--exp-avg-dtype", "bf16"),
        ("--bf16", "--exp-avg-dtype", "bf16", "--mtp-num-layers", "1", "--lr-decay-style", "WSD"),
    ],
    ids=["fp32", "bf16", "fp16", "all_bf16_muon", "lion_offloaded", "narrow_states"],
)
def test_resuming_at_any_step_equals_the_straight_run_to_the_bit(
    prefix: str, tmp_path: Path, dtype: tuple[str, ...]
) -> None:
    straight = tmp_path / "straight"
    flags = (*LENGTH, *DROPOUT, *dtype, "--save-interval", "1", "--eval-interval", "2", "--eval-iters", "1")
    flags = (*flags, "--split", "80,20,0")
    assert run_tiny(prefix, [*flags, "--save", str(straight)]) == 0
    expected = read_tensors(straight, STEPS)
    for step in range(1, STEPS):
        resumed = tmp_path / f"from_{step}"
        copy_step(straight, resumed, step)
        assert run_tiny(prefix, [*flags, "--save", str(resumed)]) == 0
        assert read_curve(resumed) == read_curve(straight)[step:]
        assert read_metrics(resumed, "valid_loss") == read_metrics(straight, "valid_loss")[step // 2 :]
        found = read_tensors(resumed, STEPS)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_finished_run_started_again_does_nothing(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*LENGTH, "--save", str(tmp_path)]
    run_tiny(prefix, flags)
    before = read_curve(tmp_path)
    assert run_tiny(prefix, flags) == 0
    said = capsys.readouterr().out.split("resumed from")[1]
    assert "nothing to do: iteration 6 is already complete; a larger --train-iters goes on" in said
    assert "training on" not in said
    assert read_curve(tmp_path) == before


def test_a_run_that_keeps_no_checkpoint_says_so(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: no --save: this run leaves its log, and no checkpoint"
    assert run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "a")]) == 0
    assert note in capsys.readouterr().out
    assert run_tiny(prefix, [*LENGTH, "--save", str(tmp_path / "b")]) == 0
    assert note not in capsys.readouterr().out


def test_a_run_folder_that_is_a_file_or_below_one_has_no_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "nowhere"):
        assert read_starts(tmp_path / place) == []
        note_end(tmp_path / place, Ending())
    assert (tmp_path / "file").read_text() == ""


def test_save_and_load_of_one_empty_folder_is_a_fresh_start(prefix: str, tmp_path: Path) -> None:
    assert run_tiny(prefix, [*LENGTH, "--save", str(tmp_path / "d"), "--load", f"{tmp_path}/./d/"]) == 0


def test_loading_starts_from_another_folder_until_the_own_one_has_a_step(prefix: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_tiny(prefix, [*LENGTH, "--save", str(first), "--save-interval", "3"])
    (first / "latest_checkpointed_iteration.txt").write_text("3")
    run_tiny(prefix, [*LENGTH, "--save", str(second), "--load", str(first)])
    assert read_curve(second) == read_curve(first)[3:]


def test_loading_a_folder_without_a_checkpoint_is_an_error(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--load .*: no complete checkpoint there; drop the flag"):
        run_tiny(prefix, [*LENGTH, "--load", str(tmp_path), "--run-dir", str(tmp_path)])


def test_a_changed_vocabulary_names_tensor_and_both_shapes(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--save", str(tmp_path)])
    with pytest.raises(CheckpointError, match=r"embedding\.weight has shape \(96, 32\) .* and \(144, 32\) in this run"):
        run_tiny(prefix, [*LENGTH, "--save", str(tmp_path), "--vocab-size", "100"])


def test_another_precision_goes_on_from_the_full_weights(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--save", str(tmp_path), "--bf16"])
    longer = ["--train-iters", "8", *LENGTH[2:], "--override-opt_param-scheduler"]
    assert run_tiny(prefix, [*longer, "--save", str(tmp_path)]) == 0
    assert read_tensors(tmp_path, 8)["model/embedding.weight"].dtype == torch.float32
    assert read_curve(tmp_path)[-1][1] < read_curve(tmp_path)[0][1]


@pytest.mark.parametrize("dtype", [(), ("--bf16",), ("--fp16",)], ids=["fp32", "bf16", "fp16"])
def test_a_run_learns(prefix: str, tmp_path: Path, dtype: tuple[str, ...]) -> None:
    flags = ["--train-iters", "60", "--global-batch-size", "8", "--lr", "1e-2", *dtype]
    run_tiny(prefix, [*flags, "--micro-batch-size", "8", "--run-dir", str(tmp_path)])
    losses = [line[1] for line in read_curve(tmp_path)]
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5


def test_a_cut_into_micro_batches_gives_the_same_run(prefix: str, tmp_path: Path) -> None:
    for micro in (1, 4):
        flags = [*LENGTH[:4], "--micro-batch-size", str(micro), "--eod-mask-loss"]
        run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / str(micro))])
    for one, other in zip(read_curve(tmp_path / "1"), read_curve(tmp_path / "4"), strict=True):
        assert one[1] == pytest.approx(other[1], abs=2e-5)
        assert one[2] == pytest.approx(other[2], rel=1e-5)


def test_evaluation_does_not_touch_the_training(prefix: str, tmp_path: Path) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    common = [*LENGTH, *DROPOUT, "--split", "80,20,0"]
    run_tiny(prefix, [*common, "--eval-interval", "2", "--eval-iters", "2", "--run-dir", str(with_it)])
    run_tiny(prefix, [*common, "--run-dir", str(without)])
    assert [line["iteration"] for line in read_metrics(with_it, "valid_loss")] == [2, 4, 6]
    assert read_curve(with_it) == read_curve(without)


def test_the_log_adds_up_and_carries_full_precision(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--log-interval", "4", "--save", str(tmp_path), "--save-interval", "2"])
    lines = read_metrics(tmp_path)
    assert [line["iteration"] for line in lines] == [4, 6]
    for line in lines:
        parts = sum(line[f"{name}_s"] for name in (*PHASES, "other"))
        assert parts == pytest.approx(line["step_time_s"], rel=1e-9)
        assert line["other_s"] >= 0
        assert line["samples_per_s"] == pytest.approx(4 / line["step_time_s"])
        assert line["tokens_per_s_per_gpu"] == pytest.approx(4 * 16 / line["step_time_s"])
        assert "mfu" not in line  # the peak of a CPU is not known
    assert lines[1]["checkpoint_s"] > 0
    assert [line["num_steps"] for line in lines] == [4, 2]


def test_the_log_interval_does_not_change_what_is_logged(prefix: str, tmp_path: Path) -> None:
    for every in ("1", "3"):
        run_tiny(prefix, [*LENGTH, "--log-interval", every, "--run-dir", str(tmp_path / every)])
    assert read_curve(tmp_path / "3") == read_curve(tmp_path / "1")[2::3]
    mean = read_metrics(tmp_path / "3")[0]["lm_loss_mean"]
    assert mean == pytest.approx(sum(line[1] for line in read_curve(tmp_path / "1")[:3]) / 3, rel=1e-12)


def test_the_tiny_recipe_runs(prefix: str, tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[3] / "trainer" / "recipes" / "gpt_tiny_cpu.yaml"
    flags = ["--config", str(recipe), "--train-iters", "2", "--vocab-size", "64", "--run-dir", str(tmp_path)]
    assert run_tiny(prefix, flags, base=()) == 0
    assert read_metrics(tmp_path)[-1]["iteration"] == 2


def test_the_manifest_records_every_start(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, ["--train-iters", "3", *LENGTH[2:], "--save", str(tmp_path)])
    run_tiny(prefix, [*LENGTH, "--override-opt_param-scheduler", "--save", str(tmp_path)])
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["from_iteration"] for start in starts] == [0, 3]
    assert starts[1]["config"]["num_steps"] == STEPS
    assert starts[1]["config"]["model"]["vocab_size"] == 64
    assert starts[1]["versions"]["torch"] == torch.__version__


def test_missing_data_name_both_places(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nothing_text_document"):
        run_tiny(str(tmp_path / "nothing"), [*LENGTH, "--run-dir", str(tmp_path)])


def test_data_are_found_without_their_suffix(prefix: str, tmp_path: Path) -> None:
    assert run_tiny(prefix.removesuffix("_text_document"), [*LENGTH, "--run-dir", str(tmp_path)]) == 0


def test_an_empty_train_part_is_said(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the train part of --split 0,1,0 is empty"):
        run_tiny(prefix, [*LENGTH, "--split", "0,1,0", "--run-dir", str(tmp_path)])


def test_a_folder_that_cannot_be_written_is_said_before_training(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileAccessError, match="cannot be written"):
        run_tiny(prefix, [*LENGTH, "--save", str(tmp_path / "file" / "d")])
    with pytest.raises(FileAccessError, match="choose another --run-dir"):
        run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "file" / "d")])


def write_sidecar(prefix: Path, **tokenizer: object) -> str:
    """A pair whose sidecar names a tokenizer."""
    made = write_pair(prefix)
    own = {"type": "test", "vocab_size": 64, "eod_id": 0, "fingerprint": "f" * 16} | tokenizer
    Path(f"{made}.json").write_text(json.dumps({"format_version": 1, "tokenizer": own}))
    return made


def test_the_vocabulary_comes_from_the_data(tmp_path: Path) -> None:
    made = write_sidecar(tmp_path / "d", vocab_size=90)
    run_tiny(made, [*LENGTH, "--run-dir", str(tmp_path)], base=SHAPE)
    config = json.loads((tmp_path / "run.json").read_text())["starts"][0]["config"]
    assert config["model"]["vocab_size"] == 90


def test_without_sidecar_and_tokenizer_gpt2_is_assumed_and_said(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tiny(prefix, ["--train-iters", "1", "--run-dir", str(tmp_path)], base=SHAPE)
    assert "no sidecar and no tokenizer is named: GPT-2's 50257 tokens are assumed" in capsys.readouterr().out


@pytest.mark.usefixtures("no_model")
def test_another_tokenizer_than_the_datas_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    made = write_sidecar(tmp_path / "d")
    with pytest.raises(TokenizerError, match=r"the data were made with tokenizer test .* drop the tokenizer flags"):
        run_tiny(made, [*LENGTH, "--tokenizer-type", "GPT2BPETokenizer", "--run-dir", str(tmp_path)], base=SHAPE)


def test_other_data_than_the_checkpoints_are_refused(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--save", str(tmp_path)])
    longer = ["--train-iters", "8", *LENGTH[2:], "--override-opt_param-scheduler"]
    remedy = rf"--finetune --load {re.escape(str(tmp_path))} and another --save"
    with pytest.raises(CheckpointError, match=rf"iter_0000006: .*seed was 1234 and is 7; .*{remedy}"):
        run_tiny(prefix, [*longer, "--save", str(tmp_path), "--seed", "7"])
    other = write_pair(tmp_path / "other", num_documents=41)
    with pytest.raises(CheckpointError, match=r"tokens or their documents are others \(content \w{12}, now \w{12}\)"):
        run_tiny(other, [*longer, "--save", str(tmp_path)])


def test_a_corpus_too_small_for_a_valid_part_trains_without_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_pair(tmp_path / "d", num_documents=3)
    run_tiny(made, [*LENGTH, "--split", "969,30,1", "--eval-interval", "2", "--run-dir", str(tmp_path)])
    assert "no validation: the valid part of --split 969,30,1 is empty" in capsys.readouterr().out


def test_a_changed_batch_goes_on_at_the_same_sample(prefix: str, tmp_path: Path) -> None:
    run_tiny(prefix, [*LENGTH, "--save", str(tmp_path)])
    wider = ["--train-iters", "8", "--global-batch-size", "8", "--lr-decay-samples", "100"]
    wider = [*wider, "--override-opt_param-scheduler"]
    run_tiny(prefix, [*wider, "--save", str(tmp_path)])
    assert [line[4] for line in read_curve(tmp_path)[-2:]] == [32, 40]
    assert read_curve(tmp_path)[-1][3] == pytest.approx(1e-3 * (1 - 40 / 100))


def test_a_vocabulary_smaller_than_the_datas_is_refused(tmp_path: Path) -> None:
    made = write_sidecar(tmp_path / "d", vocab_size=90)
    with pytest.raises(ConfigError, match="--vocab-size 64 is less than the 90 tokens of the data's tokenizer"):
        run_tiny(made, [*LENGTH, "--run-dir", str(tmp_path)])


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_step_is_told_and_the_one_before_is_taken(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*LENGTH, "--save", str(tmp_path), "--save-interval", "3"]
    run_tiny(prefix, flags)
    straight = read_curve(tmp_path)
    flip_byte(tmp_path / "iter_0000006" / PART)
    run_tiny(prefix, flags)
    out = capsys.readouterr().out
    assert f" passed over {tmp_path}/iter_0000006: {PART} is damaged" in out
    assert "going on after iteration 3" in out
    assert read_curve(tmp_path) == straight


def test_with_only_damaged_steps_the_run_does_not_begin_anew(prefix: str, tmp_path: Path) -> None:
    flags = [*LENGTH, "--save", str(tmp_path)]
    run_tiny(prefix, flags)
    flip_byte(tmp_path / "iter_0000006" / PART)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for place in (flags, [*LENGTH, "--load", str(tmp_path), "--run-dir", str(tmp_path / "other")]):
        with pytest.raises(CheckpointError, match="move the folder away, or choose another --save"):
            run_tiny(prefix, place)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_fresh_start_begins_a_fresh_file_and_keeps_the_old_one(prefix: str, tmp_path: Path) -> None:
    for seed in ("1", "2", "3"):
        run_tiny(prefix, [*LENGTH, "--seed", seed, "--run-dir", str(tmp_path)])
    names = ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert sorted(path.name for path in tmp_path.glob("metrics*")) == names
    contents = [(tmp_path / name).read_text().splitlines() for name in names]
    assert [len(lines) for lines in contents] == [STEPS] * 3
    assert len({lines[0] for lines in contents}) == 3


def test_a_resumed_run_writes_no_iteration_twice(prefix: str, tmp_path: Path) -> None:
    flags = [*LENGTH, "--save", str(tmp_path), "--save-interval", "3", "--split", "80,20,0"]
    flags = [*flags, "--eval-interval", "2", "--eval-iters", "1"]
    run_tiny(prefix, flags)
    curve, valid = read_curve(tmp_path), read_metrics(tmp_path, "valid_loss")
    shutil.rmtree(tmp_path / "iter_0000006")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "lm_l')  # what a kill may leave
    run_tiny(prefix, flags)
    assert read_curve(tmp_path) == curve
    assert read_metrics(tmp_path, "valid_loss") == valid


def test_a_metrics_file_that_cannot_be_written_is_said(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(FileAccessError, match=r"metrics\.jsonl: cannot be written: .*; choose another --run-dir"):
        run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path)])


def test_evaluation_and_saving_are_not_in_the_step_time(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any) -> Any:
            time.sleep(PAUSE_S)
            return function(*args)

        return paused

    monkeypatch.setattr(run_module, "evaluate", slow(run_module.evaluate))
    monkeypatch.setattr(run_module.Saver, "start", slow(run_module.Saver.start))
    flags = [*LENGTH, "--save", str(tmp_path), "--split", "80,20,0", "--eval-iters", "1"]
    run_tiny(prefix, [*flags, "--save-interval", "1", "--eval-interval", "1"])
    later = read_metrics(tmp_path)[1:]  # the pauses after a step fall into the next interval
    assert len(later) == STEPS - 1
    for row in later:
        assert row["eval_s"] >= PAUSE_S
        assert row["checkpoint_s"] >= PAUSE_S
    assert min(row["step_time_s"] for row in later) < PAUSE_S
    assert min(row["other_s"] for row in later) < PAUSE_S


@pytest.mark.parametrize(
    "content, words",
    [
        (b"\xff\xfe{}", "expected a sidecar in UTF-8, byte 0 is not"),
        (b'{"format_version": 1, "tokenizer": {}}', "expected a text as `tokenizer.type`, found 'nothing'"),
        (b'{"format_version": 1, "tokenizer": "gpt2"}', "expected an object as `tokenizer`, found 'gpt2'"),
        (b'{"format_version": 1, "tokenizer": {"type": "t", "fingerprint": 1}}', "`tokenizer.fingerprint`, found 1"),
        (
            b'{"format_version": 1, "tokenizer": {"type": "t", "fingerprint": "f"}}',
            "a number as `tokenizer.vocab_size`",
        ),
        (
            b'{"format_version": 1, "tokenizer": {"type": "t", "fingerprint": "f", "vocab_size": 64, "eod_id": "x"}}',
            "a number as `tokenizer.eod_id`, found 'x'",
        ),
    ],
)
def test_a_damaged_sidecar_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    made = write_pair(tmp_path / "d")
    Path(f"{made}.json").write_bytes(content)
    with pytest.raises(DataFormatError) as caught:
        run_tiny(made, [*LENGTH, "--run-dir", str(tmp_path)])
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{made}.json: ")


def test_fp16_recovers_from_a_scale_far_too_high_and_trains(prefix: str, tmp_path: Path) -> None:
    flags = ["--train-iters", "60", "--global-batch-size", "4", "--fp16", "--loss-scale-window", "1000", "--lr", "1e-2"]
    run_tiny(prefix, [*flags, "--run-dir", str(tmp_path)])
    lines = read_metrics(tmp_path)
    scales = [line["loss_scale"] for line in lines]
    assert scales[0] == scales[1] == 2.0**32  # the first overflow costs patience only
    skipped = [line["skipped_steps"] for line in lines]
    num_skipped = sum(skipped)
    assert skipped == [1] * num_skipped + [0] * (60 - num_skipped)
    assert scales[num_skipped] == 2.0 ** (32 - num_skipped + 1)
    assert scales[num_skipped:] == [scales[num_skipped]] * (60 - num_skipped)
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"] - 0.1
    reference = tmp_path / "fp32"
    run_tiny(prefix, [*flags[:4], "--lr", "1e-2", "--run-dir", str(reference)])
    assert read_curve(reference)[0][1] == pytest.approx(lines[0]["lm_loss"], abs=5e-3)


def test_a_run_with_ramp_up_consumes_what_its_batches_say(prefix: str, tmp_path: Path) -> None:
    flags = ["--train-samples", "20", "--global-batch-size", "8", "--micro-batch-size", "2"]
    run_tiny(prefix, [*flags, "--rampup-batch-size", "2", "2", "12", "--run-dir", str(tmp_path)])
    lines = read_metrics(tmp_path)
    sizes = [line["global_batch_size"] for line in lines]
    assert sizes == [2, 2, 4, 6]  # 2 up to sample 4, 4 up to 8, 6 up to 12; then 8 would be too many
    assert [line["consumed_samples"] for line in lines] == [2, 4, 8, 14]


def test_tf32_is_a_switch(prefix: str, tmp_path: Path) -> None:
    flags = ["--train-iters", "1", "--run-dir", str(tmp_path)]
    run_tiny(prefix, [*flags, "--tf32"])
    assert torch.get_float32_matmul_precision() == "high"
    run_tiny(prefix, flags)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("dtype, tolerance", [((), 2e-5), (("--fp64",), 1e-10)], ids=["fp32", "fp64"])
def test_how_a_batch_is_cut_changes_nothing(
    prefix: str, tmp_path: Path, dtype: tuple[str, ...], tolerance: float
) -> None:
    curves = []
    for micro in ("8", "4", "2", "1"):
        flags = ["--train-iters", "10", "--global-batch-size", "8", "--micro-batch-size", micro, "--eod-mask-loss"]
        run_tiny(prefix, [*flags, *dtype, "--run-dir", str(tmp_path / micro)])
        curves.append([line["lm_loss"] for line in read_metrics(tmp_path / micro)])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=tolerance)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails as soon as a model is built."""

    def build(*args: object) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr(build_module, "build_model", build)


@pytest.mark.usefixtures("no_model")
def test_a_part_too_short_for_one_sample_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    made = write_pair(tmp_path / "d", document_tokens=30)  # the valid part is one document of at most 45 tokens
    flags = [*LENGTH, "--seq-length", "64", "--split", "98,2,0", "--eval-interval", "2", "--run-dir", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"the valid part of --split 98,2,0 has \d+ tokens, and one sample .*65"):
        run_tiny(made, flags)


@pytest.mark.usefixtures("no_model")
def test_a_token_outside_the_vocabulary_is_refused_before_the_model_is_built(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token 63 occurs in the data, and the vocabulary has 50 tokens \(0 to 49\)"):
        run_tiny(prefix, [*LENGTH, "--vocab-size", "50", "--run-dir", str(tmp_path)])


def test_losses_of_further_predictions_are_logged_apart_however_the_batch_is_cut(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = []
    for name, flags in (("4", []), ("1", []), ("2", ["--checkpoint-activations"])):
        cut = ["--train-iters", "4", "--global-batch-size", "4", "--micro-batch-size", name, "--mtp-num-layers", "2"]
        run_tiny(prefix, [*cut, *flags, "--run-dir", str(tmp_path / name)])
        lines = read_metrics(tmp_path / name)
        curves.append([[line[key] for key in ("mtp_1_loss", "mtp_2_loss", "lm_loss")] for line in lines])
    assert curves[0][0] == pytest.approx([4.16] * 3, abs=0.1)  # ln 64: a uniform guess
    assert curves[0][0][0] != curves[0][0][2]
    for curve in curves[1:]:
        for one, other in zip(curve, curves[0], strict=True):
            assert one == pytest.approx(other, abs=2e-5)
    assert " | mtp_1 loss: " in capsys.readouterr().out
    run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "plain")])
    assert "mtp_1_loss" not in read_metrics(tmp_path / "plain")[0]


def test_data_read_several_times_are_said(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny(prefix, ["--train-iters", "2", "--global-batch-size", "128", "--run-dir", str(tmp_path)])
    assert "is read 2 times" in capsys.readouterr().out
