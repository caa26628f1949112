"""Every command line of the articles, run: sizes and paths replaced, and what needs a GPU's packages left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.runs import read_metrics, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.training.preflight import refuse_device

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("MEGAFLOW_SHARED", ROOT.parent / "shared"))
GPT2 = SHARED / "data" / "tokenizers" / "gpt2"
pytestmark = [
    pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="MEGAFLOW_SHARED names no folder with seeds/"),
    pytest.mark.skipif(not GPT2.exists(), reason="MEGAFLOW_SHARED names no folder with data/tokenizers/gpt2"),
]
SIZES = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--max-position-embeddings": "64",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
    "--train-iters": "3",
    "--lr-decay-iters": "3",
    "--lr-warmup-iters": "1",
    "--save-interval": "2",
    "--eval-interval": "2",
    "--log-interval": "1",
    "--eval-iters": "1",
    "--workers": "2",
}
NOT_HERE = {"--transformer-impl": "local"}
"""What this machine refuses of the articles' lines, and the value that it accepts."""


def find_lines(program: str) -> list[list[str]]:
    """The words after a program's name in every article, up to the first that is neither a flag nor a flag's value."""
    found = []
    for path in sorted((SHARED / "seeds").glob("*.txt")):
        for after in path.read_text(encoding="utf-8").split(program)[1:]:
            words: list[str] = []
            for word in (word for word in after.split() if word != "\\"):
                is_value = bool(words) and words[-1].startswith("--") and word.isascii()
                if not word.startswith("--") and not is_value:
                    break
                words.append(word)
            if len(words) > 8:
                found.append(words)
    return found


def scale_down(words: list[str], places: dict[str, str]) -> list[str]:
    """The same flags with small sizes and with paths of this machine."""
    known = {**SIZES, **places}
    out: list[str] = []
    for word in words:
        flag = out[-1] if out else ""
        small = known.get(flag, {"$TP": "2", "$PP": "1", "$CP": "1", "$LR": "3e-4"}.get(word, word))
        out.append(small if not word.startswith("--") else word)
    return out


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A corpus, the vocabulary under the name that an article gives it, and where things go."""
    folder = tmp_path_factory.mktemp("work")
    lines = [{"text": f"Document {number} says that {number} and {number} make {2 * number}."} for number in range(200)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "vocab.txt").write_bytes((GPT2 / "vocab.json").read_bytes())
    vocab, merges = str(folder / "vocab.txt"), str(GPT2 / "merges.txt")
    return {
        "--input": str(folder / "corpus.jsonl"),
        "--output-prefix": str(folder / "my_data"),
        "--vocab": vocab,
        "--vocab-file": vocab,
        "--merge-file": merges,
        "--data-path": str(folder / "my_data"),
    }


@pytest.fixture(scope="module")
def prepared(places: dict[str, str]) -> list[str]:
    """What the preprocessing lines of the articles print; their pair is there afterwards."""
    said = []
    for words in find_lines("preprocess_data.py"):
        command = [sys.executable, "tools/preprocess_data.py", *scale_down(words, places)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout + done.stderr)
    return said


def test_the_preprocessing_lines_write_the_pair(prepared: list[str], places: dict[str, str]) -> None:
    assert len(prepared) == 2
    sidecar = json.loads(Path(f"{places['--data-path']}_text_document.json").read_text())
    assert sidecar["tokenizer"]["vocab_size"] == 50257


@pytest.mark.parametrize("number", range(3))
def test_a_training_line_runs_but_for_what_this_machine_lacks(
    number: int, prepared: list[str], places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = find_lines("pretrain_gpt.py")
    assert len(lines) == 3
    own = {**places, "--save": str(tmp_path / "d"), "--load": str(tmp_path / "d")}
    flags = scale_down(lines[number], own)
    shared = scale_down(flags, {"--tensor-model-parallel-size": "2"})
    config, _ = read_command(shared, world_size=2 if "--tensor-model-parallel-size" in flags else 1)
    if any(name in flags for name in NOT_HERE):
        with pytest.raises(
            ConfigError, match="--transformer-impl transformer_engine cannot run here: transformer-engine"
        ):
            refuse_device(config, torch.device("cpu"))
    else:
        refuse_device(config, torch.device("cpu"))
    flags = scale_down(flags, {**NOT_HERE, "--tensor-model-parallel-size": "1"})
    shape = ["--hidden-size", "32", "--num-attention-heads", "4", "--num-layers", "2", "--seq-length", "16"]
    tail = ["--train-iters", "3", "--global-batch-size", "4", "--micro-batch-size", "2", "--run-dir", str(tmp_path)]
    assert run_tiny(places["--data-path"], [*flags, *shape, *tail, "--log-interval", "1"], base=()) == 0
    losses = [line["lm_loss"] for line in read_metrics(tmp_path)]
    assert len(losses) == 3
    assert losses[0] == pytest.approx(10.8, abs=0.2)  # ln 50257: a uniform guess
    said = capsys.readouterr().out
    if "--data-impl" in flags:
        assert "--data-impl has no effect: a .bin/.idx pair is always memory-mapped" in said
    if "--use-mcore-models" in flags:
        assert "--use-mcore-models has no effect: there is one model implementation" in said
    if "--save" in flags:
        assert (tmp_path / "d" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
        again = [*flags, *shape, *tail]
        assert run_tiny(places["--data-path"], again, base=()) == 0  # --load of the same folder goes on from it
        assert "nothing to do: iteration 3 is already complete" in capsys.readouterr().out
