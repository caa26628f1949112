"""`origin`: from samples and iterations back to source lines, whose text gives the tokens again."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow import GPTDataset, Loader, PreprocessOptions, StreamingDataset, Tokenizer, preprocess
from megaflow.cli.main import main
from megaflow.errors import CheckpointError, ConfigError, DataFormatError, MissingFileError
from megaflow.origin import OriginFinder, SampleOrigin, find_iteration, recipe_of

EOD = 50256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    """Two files of lines, some of them blank or bad, and the pair made of them."""
    folder = tmp_path_factory.mktemp("origin")
    rng = random.Random(3)
    paths = []
    for number in range(2):
        lines = []
        for line in range(160):
            text = f"{number}-{line} " + " ".join(
                rng.choice(["wood", "stone", "river", "42"]) for _ in range(rng.randint(0, 40))
            )
            lines.append(json.dumps({"text": text}))
            if rng.random() < 0.1:
                lines.append(rng.choice(["", "{broken", '{"other": 1}']))
        path = folder / f"part{number}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    options = PreprocessOptions(output_prefix=str(folder / "pair"), on_bad_record="skip")
    report = preprocess([str(path) for path in paths], options)
    assert report.num_rejected > 5
    return paths, report.pairs[0].prefix


@functools.cache
def gpt2() -> Tokenizer:
    return Tokenizer.gpt2()


def tokens_from_source(origin: SampleOrigin) -> list[int]:
    """Tokens of a sample, from the lines of the source files that its origin names."""
    tokenizer = gpt2()
    tokens: list[int] = []
    for piece in origin.pieces:
        place = piece.origin
        assert place is not None
        assert place.number is not None
        line = Path(place.path).read_text().split("\n")[place.number - 1]
        ids = [*tokenizer.encode(json.loads(line)["text"]).tolist(), EOD]
        tokens += ids[piece.first_token : piece.first_token + piece.tokens]
    return tokens


def test_origins_of_100_samples_re_read_from_the_source_equal_their_tokens(corpus: tuple[list[Path], str]) -> None:
    _, prefix = corpus
    dataset = GPTDataset(prefix, seq_len=50, num_samples=400, seed=5)
    chosen = np.random.default_rng(1).choice(len(dataset), 100, replace=False).tolist()
    origins = OriginFinder(dataset).samples(chosen)
    assert [origin.sample for origin in origins] == chosen
    for origin in origins:
        assert tokens_from_source(origin) == dataset.tokens(origin.sample).tolist()
    assert {piece.origin.path for origin in origins for piece in origin.pieces if piece.origin} == set(
        map(str, corpus[0])
    )


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_loader_names_the_documents_of_a_step(corpus: tuple[list[Path], str], order: Any) -> None:
    dataset = GPTDataset(corpus[1], seq_len=50, num_samples=400, seed=5)
    ranks = [Loader(dataset, 2, dp_rank=rank, dp_size=2, order=order) for rank in range(2)]
    for step in range(6):
        rows = [
            [*row, last]
            for b in map(next, ranks)
            for row, last in zip(b.tokens.tolist(), b.labels[:, -1].tolist(), strict=True)
        ]
        assert [tokens_from_source(origin) for origin in ranks[0].origin(step)] == rows
    assert len(ranks[0].origin(1, global_batch_size=6)) == 6


def test_stream_names_its_lines(corpus: tuple[list[Path], str]) -> None:
    dataset = StreamingDataset(
        [str(path) for path in corpus[0]], seq_len=40, on_bad_record="skip", shuffle_window=900, shard_bytes=1 << 30
    )
    loader = Loader(dataset, 2)
    rows = [
        [[*row, last] for row, last in zip(b.tokens.tolist(), b.labels[:, -1].tolist(), strict=True)]
        for b in (next(loader) for _ in range(30))
    ]
    for step in (0, 7, 29):
        assert [tokens_from_source(origin) for origin in loader.origin(step)] == rows[step]


def write_manifest(folder: Path, dataset: Any, *starts: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    common = {"dataset": recipe_of(dataset), "fingerprint": dataset.fingerprint, "last_iteration": 40}
    entries = [{"from_iteration": start.pop("from"), "data": {**common, **start}} for start in starts]
    (folder / "run.json").write_text(json.dumps({"starts": entries}))


def test_iteration_of_a_run_is_found_from_its_manifest(corpus: tuple[list[Path], str], tmp_path: Path) -> None:
    dataset = GPTDataset(corpus[1], seq_len=50, num_samples=400, seed=5)
    write_manifest(
        tmp_path / "run",
        dataset,
        {"from": 0, "consumed_samples": 0, "batches": [[0, 2], [10, 4], [21, 8]]},
        {"from": 12, "consumed_samples": 58, "batches": [[0, 5]]},
    )
    # 2 x 5 to sample 10, 4 x 3 to 22, 8 from there on; the second start takes over behind iteration 12.
    expected = {1: (0, 2), 5: (8, 2), 6: (10, 4), 8: (18, 4), 9: (22, 8), 12: (46, 8), 13: (58, 5), 15: (68, 5)}
    for iteration, place in expected.items():
        found = find_iteration(tmp_path / "run", iteration)
        assert (found.first_sample, found.num_samples) == place, iteration
    origins = find_iteration(tmp_path / "run" / "run.json", 9).origins()
    assert [tokens_from_source(origin) for origin in origins] == [dataset.tokens(n).tolist() for n in range(22, 30)]


def test_faults_of_a_manifest_are_told_in_words(corpus: tuple[list[Path], str], tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no manifest"):
        find_iteration(tmp_path, 1)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(DataFormatError, match="not the manifest of a run"):
        find_iteration(tmp_path, 1)
    (tmp_path / "run.json").write_text('{"starts": [{"from_iteration": 0}]}')
    with pytest.raises(DataFormatError, match="does not say how the data were opened"):
        find_iteration(tmp_path, 1)
    dataset = GPTDataset(corpus[1], seq_len=50)
    write_manifest(tmp_path, dataset, {"from": 0, "consumed_samples": 0, "batches": [[0, 2]]})
    for iteration, words in ((0, "counts its iterations from 1"), (41, "ends with iteration 40")):
        with pytest.raises(ConfigError, match=words):
            find_iteration(tmp_path, iteration)
    text = (tmp_path / "run.json").read_text().replace(dataset.fingerprint, "0" * 64)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match="trained on data of fingerprint 0000"):
        find_iteration(tmp_path, 1)


def test_command_shows_an_iteration_without_torch(corpus: tuple[list[Path], str], tmp_path: Path) -> None:
    dataset = GPTDataset(corpus[1], seq_len=50, seed=5)
    write_manifest(tmp_path, dataset, {"from": 0, "consumed_samples": 0, "batches": [[0, 3]]})
    code = (
        "import sys; from megaflow.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    words = ["inspect", "--run", str(tmp_path), "--iteration", "2"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "iteration 2: samples 3 to 5 (3 samples)" in done.stdout
    assert f"{corpus[0][0]}, line" in done.stdout or f"{corpus[0][1]}, line" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    samples = json.loads(done.stdout)["samples"]
    assert [sample["sample"] for sample in samples] == [3, 4, 5]
    piece = samples[0]["pieces"][0]
    assert piece["origin"]["number"] >= 1
    assert piece["tokens"] >= 1


def test_command_refuses_half_of_a_pair_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--run", "x"]) != 0
    assert "--run and --iteration go together" in capsys.readouterr().err
    assert main(["inspect"]) != 0
    assert "give a PREFIX, or --run DIR with --iteration N" in capsys.readouterr().err
