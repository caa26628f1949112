"""Every flag that names data or orders samples changes the run as its help says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.pairs import EOD, write_pair
from helpers.runs import TINY, one_rank, read_curve, read_metrics
from megaflow.errors import ConfigError
from megaflow.origin import find_iteration
from megaflow_trainer.config import read_command
from megaflow_trainer.config.exit_codes import OUT_OF_TIME
from megaflow_trainer.training.run import train

BLEND = "--data-path 0.3 A 0.7 B"
INSTANT = "--sample-order instant"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two corpora: B has shorter documents, hence other samples."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "A": write_pair(folder / "a_text_document"),
        "B": write_pair(folder / "b_text_document", num_documents=90, document_tokens=20),
    }


class Run:
    """What a run left behind."""

    def __init__(self, folder: Path, said: str) -> None:
        self.folder = folder
        self.losses = [line[1] for line in read_curve(folder)]
        self.valid = [line["valid_loss"] for line in read_metrics(folder, "valid_loss")]
        self.said = said


@pytest.fixture
def run(pairs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs four steps with flags in which A and B stand for the corpora and DIR for a folder."""

    def start(flags: str, steps: int = 4, code: int = 0) -> Run:
        capsys.readouterr()
        words = [pairs.get(word, word.replace("DIR", str(tmp_path))) for word in flags.split()]
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        argv = [*TINY, "--train-iters", str(steps), "--run-dir", str(folder), *words]
        config, notes = read_command(argv, world_size=1)
        assert train(config, one_rank(), notes) == code
        return Run(folder, capsys.readouterr().out)

    return start


def test_a_blend_reads_both_datasets_and_says_its_shares(run: Any) -> None:
    both = run(f"{BLEND} --micro-batch-size 5")
    assert both.losses not in (run("--data-path A --micro-batch-size 5").losses, run("--data-path B").losses)
    table = both.said[both.said.index("train blend:") :].splitlines()
    assert table[1].split() == ["dataset", "documents", "tokens", "requested", "achieved", "samples", "epochs"]
    assert [line.split()[3:6] for line in table[2:4]] == [["30.000%", "30.000%", "6"], ["70.000%", "70.000%", "14"]]


def test_parts_of_their_own_for_each_split(run: Any) -> None:
    flags = "--eval-interval 2 --eval-iters 2"
    one = run(f"--train-data-path A --valid-data-path A {flags}")
    other = run(f"--train-data-path A --valid-data-path B --test-data-path B {flags}")
    assert one.losses == other.losses
    assert one.valid != other.valid
    assert one.losses != run(f"--data-path A {flags}").losses  # which leaves a tenth to the valid part


def test_files_that_name_the_data(run: Any, pairs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "args").write_text(f"0.3 {pairs['A']}\n0.7 {pairs['B']}\n")
    assert run("--data-args-path DIR/args").losses == run(BLEND).losses
    (tmp_path / "parts.json").write_text(json.dumps({"train": ["1", pairs["A"], "3", pairs["B"]], "valid": pairs["A"]}))
    assert run("--per-split-data-args-path DIR/parts.json").losses == run("--train-data-path 1 A 3 B").losses


def test_made_up_data_need_no_file(run: Any) -> None:
    made_up = run("--mock-data")
    assert len(made_up.losses) == 4
    assert "made-up data" in made_up.said


def test_a_cyclic_sampler_draws_the_samples_as_its_seed_says_and_goes_on(run: Any, tmp_path: Path) -> None:
    flags = "--data-path A --micro-batch-size 2 --dataloader-type cyclic"
    cyclic = run(flags)
    assert cyclic.losses not in (run("--data-path A --micro-batch-size 2").losses, run(f"{flags} --seed 5").losses)
    assert "--dataloader-type cyclic" not in cyclic.said  # as a flag without effect
    found = find_iteration(cyclic.folder, 3)
    drawn = torch.randperm(len(found.dataset), generator=torch.Generator().manual_seed(1234)).tolist()
    assert [origin.sample for origin in found.origins()] == drawn[4:6]
    saved = f"{flags} --train-iters 4 --save DIR/saved"
    first = run(f"{saved} --exit-interval 2", code=OUT_OF_TIME)
    assert first.losses + run(saved).losses == cyclic.losses
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 50)
    with pytest.raises(ConfigError, match="text is read in order"):
        run("--data-path DIR/text.jsonl --dataloader-type cyclic --vocab-size 50257")


def test_flags_that_go_by_document_ends_say_so_where_the_data_have_none(run: Any, tmp_path: Path) -> None:
    made = write_pair(tmp_path / "half_text_document")
    tokens = np.fromfile(f"{made}.bin", dtype="<u2")
    ends = np.flatnonzero(tokens == EOD)
    tokenizer = {"type": "test", "vocab_size": 64, "eod_id": EOD, "fingerprint": "f" * 16}
    Path(f"{made}.json").write_text(json.dumps({"format_version": 1, "tokenizer": tokenizer}))
    flags = f"--data-path {made} --eod-mask-loss --reset-position-ids"
    assert "warning" not in run(flags).said
    odd = sum(number % 2 for number in np.unique(np.linspace(0, 39, 32).astype(int)))
    for replaced, found in ((ends[::2], str(odd)), (ends, "none")):
        without = tokens.copy()
        without[replaced] = 1
        without.tofile(f"{made}.bin")
        said = next(line for line in run(flags).said.splitlines() if "warning" in line)
        assert said.startswith(f" note: warning: {made}: {found} of 32 documents looked at")
        assert f"token {EOD}, and --eod-mask-loss and --reset-position-ids go by that token" in said
        assert "--append-eod" in said
    assert "warning" not in run(f"--data-path {made}").said


def test_order_shuffle_and_packing_change_the_samples(run: Any) -> None:
    kinds = [
        "",
        "--sample-order instant",
        f"{INSTANT} --sample-shuffle documents",
        f"{INSTANT} --sample-packing best_fit",
    ]
    curves = [tuple(run(f"--data-path A {kind}").losses) for kind in kinds]
    assert len(set(curves)) == len(kinds)


def test_padding_of_packed_samples_counts_in_no_loss(run: Any, tmp_path: Path) -> None:
    # Documents of 10 tokens, samples of 17: each packed sample holds one document, whose 9 predictions count.
    prefix = write_pair(tmp_path / "ten_text_document", num_documents=64, document_tokens=10)
    packed = run(f"--data-path {prefix} {INSTANT} --sample-packing best_fit --lr 0.01", steps=20)
    assert 0 < packed.losses[-1] < packed.losses[0] < 6


def test_weights_as_epochs_follow_the_sizes(run: Any) -> None:
    flags = "--data-path 1 A 1 B --micro-batch-size 10"
    shares, epochs = run(flags), run(f"{flags} --blend-weights epochs")
    rows, even = (
        [line.split() for line in kind.said.splitlines() if "_text_document" in line and "%" in line]
        for kind in (epochs, shares)
    )
    assert [row[3] for row in even] == ["50.000%", "50.000%"]
    ratio = float(rows[0][3][:-1]) / float(rows[1][3][:-1])
    tokens = [int(row[2].replace(",", "")) for row in rows]
    assert ratio == pytest.approx(tokens[0] / tokens[1], rel=1e-3)


def test_a_schedule_of_weights_leaves_the_past_as_it_was(run: Any, tmp_path: Path) -> None:
    phases = [{"from_sample": 0, "weights": [0.3, 0.7]}, {"from_sample": 4, "weights": [1, 0]}]
    (tmp_path / "phases.json").write_text(json.dumps(phases))
    plain = run(f"{BLEND} {INSTANT} --micro-batch-size 2", steps=6)
    changed = run(f"{BLEND} {INSTANT} --micro-batch-size 2 --blend-schedule DIR/phases.json", steps=6)
    assert changed.losses[:2] == plain.losses[:2]
    assert changed.losses[2:] != plain.losses[2:]


def test_a_run_goes_on_under_weights_that_change_later(run: Any, tmp_path: Path) -> None:
    flags = f"{BLEND} {INSTANT} --micro-batch-size 2 --save DIR/ckpt --lr-decay-iters 6"
    run(flags, steps=3)
    phases = [{"from_sample": 0, "weights": [0.3, 0.7]}, {"from_sample": 8, "weights": [1, 0]}]
    (tmp_path / "phases.json").write_text(json.dumps(phases))
    resumed = run(f"{flags} --blend-schedule DIR/phases.json", steps=6)
    straight = run(flags.replace("DIR/ckpt", "DIR/other") + " --blend-schedule DIR/phases.json", steps=6)
    assert resumed.losses[-3:] == straight.losses[3:]


def test_a_cache_holds_the_index_and_changes_nothing(run: Any, tmp_path: Path) -> None:
    cached = run(f"{BLEND} --data-cache-path DIR/cache --num-dataset-builder-threads 2")
    assert cached.losses == run(BLEND).losses
    assert len(list((tmp_path / "cache").glob("*-GPTDataset-train-shuffle_index.npy"))) == 2
    assert len(list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy"))) == 1


def test_fill_in_the_middle_takes_its_marks_from_the_tokenizer(run: Any) -> None:
    # '!' is token 0 of GPT-2, '"' token 1, '#' token 2.
    marks = '--fim-prefix-token ! --fim-middle-token " --fim-suffix-token #'
    base = "--data-path A --vocab-size 50257 --micro-batch-size 8"
    plain, fim = run(base), run(f"{base} --fim-rate 0.9 {marks}")
    assert fim.losses != plain.losses
    assert run(f"{base} --fim-rate 0.9 --fim-spm-rate 0 {marks}").losses != fim.losses
    with pytest.raises(ConfigError, match=r"no token '<fim_prefix>'; name its own by --fim-prefix-token"):
        run(f"{base} --fim-rate 0.5")


def test_weights_without_meaning_are_refused_before_anything_is_built(run: Any) -> None:
    for flags, words in (
        ("--data-path -1 A 2 B", "weight 1 of .*a_text_document is -1.0"),
        ("--data-path nan A 2 B", "is nan"),
        ("--data-path 0 A 0 B", "all weights of the blend are 0"),
        ("--data-path 1 A B A", "stands where other entries have a weight"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(flags)


def test_a_dataset_of_weight_zero_is_named_and_not_read(run: Any) -> None:
    blend = run("--data-path 1 A 0 B")
    assert "b_text_document has weight 0 and is not read" in blend.said
    assert blend.losses == run("--data-path 1 A").losses
