"""Ten minutes on two cores: a small model learns more of English prose than how often each token occurs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import megaflow
from helpers.runs import read_metrics, run_tiny
from megaflow import IndexedDataset
from megaflow.preprocessing import PreprocessOptions, preprocess

SHARED = Path(os.environ.get("MEGAFLOW_SHARED", Path(__file__).resolve().parents[3] / "shared"))
PROSE = SHARED / "data" / "corpora" / "prose" / "prose.jsonl"
TOKENIZER = SHARED / "data" / "tokenizers" / "spm-bpe-16k-bytefallback" / "spm.model"
SPLIT = (95, 5, 0)
MODEL = (
    *("--num-layers", "3", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--split", ",".join(map(str, SPLIT))),
)
RECIPE = (
    *("--optimizer", "muon", "--lr", "8e-3", "--weight-decay", "0.1", "--adam-beta2", "0.95"),
    *("--lr-decay-style", "WSD", "--lr-wsd-decay-style", "linear", "--lr-wsd-decay-iters", "80"),
    *("--lr-warmup-iters", "20", "--train-iters", "200", "--global-batch-size", "16", "--micro-batch-size", "16"),
    *("--log-interval", "50", "--eval-interval", "200", "--eval-iters", "50"),
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Both cores, whatever the other tests are given."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def unigram_entropy(prefix: str) -> float:
    """Nats per token of the validation part if each token were drawn by its frequency in that very part."""
    indexed = IndexedDataset(prefix)
    first = math.floor(indexed.num_documents * SPLIT[0] / sum(SPLIT) + 0.5)
    documents = [indexed.document(number) for number in range(first, indexed.num_documents)]
    counts = np.bincount(np.concatenate(documents).astype(np.int64))
    parts = counts[counts > 0] / counts.sum()
    return float(-(parts * np.log(parts)).sum())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it takes less than ten minutes alone on two cores
@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not PROSE.exists(), reason="MEGAFLOW_SHARED names no folder with data/corpora/prose")
def test_ten_minutes_of_training_beat_the_unigram_entropy_by_a_nat(tmp_path: Path) -> None:
    tokenizer = megaflow.Tokenizer.from_files(tokenizer_model=str(TOKENIZER))
    preprocess(PROSE, PreprocessOptions(output_prefix=str(tmp_path / "prose")), tokenizer=tokenizer)
    prefix = str(tmp_path / "prose_text_document")
    assert run_tiny(prefix, [*RECIPE, "--run-dir", str(tmp_path / "run")], base=MODEL) == 0
    losses = [line["valid_loss"] for line in read_metrics(tmp_path / "run", "valid_loss")]
    assert losses[-1] < unigram_entropy(prefix) - 1.0, (losses, unigram_entropy(prefix))
