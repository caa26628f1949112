"""A small mixture of experts on English prose: what the balance loss and biases do to the load of experts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import megaflow
from helpers.runs import read_metrics, run_tiny
from megaflow.preprocessing import PreprocessOptions, preprocess

SHARED = Path(os.environ.get("MEGAFLOW_SHARED", Path(__file__).resolve().parents[3] / "shared"))
PROSE = SHARED / "data" / "corpora" / "prose" / "prose.jsonl"
TOKENIZER = SHARED / "data" / "tokenizers" / "spm-bpe-16k-bytefallback" / "spm.model"
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "2", "--seq-length", "64"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--split", "95,5,0", "--eval-interval", "0"),
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64", "--init-method-std", "0.1"),
    *("--lr", "5e-3", "--lr-warmup-iters", "10", "--train-iters", "100", "--global-batch-size", "16"),
    *("--micro-batch-size", "16", "--log-interval", "5"),
)
WAYS = {
    "neither": (),
    "loss": ("--moe-aux-loss-coeff", "0.02"),
    "bias": (
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-bias-update-rate", "0.02"),
    ),
    "sigmoid_neither": ("--moe-router-score-function", "sigmoid"),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PROSE.exists(), reason="MEGAFLOW_SHARED names no folder with data/corpora/prose")
def test_the_largest_load_falls_by_the_balance_loss_and_by_biases(tmp_path: Path) -> None:
    tokenizer = megaflow.Tokenizer.from_files(tokenizer_model=str(TOKENIZER))
    preprocess(PROSE, PreprocessOptions(output_prefix=str(tmp_path / "prose")), tokenizer=tokenizer)
    prefix, ratios, losses = str(tmp_path / "prose_text_document"), {}, {}
    for name, flags in WAYS.items():
        assert run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / name)], base=MODEL) == 0
        lines = read_metrics(tmp_path / name)[-6:]  # iterations 75 to 100
        ratios[name] = sum(line["expert_max_over_mean"] for line in lines) / len(lines)
        losses[name] = sum(line["lm_loss"] for line in lines) / len(lines)
    assert ratios["loss"] <= 0.7 * ratios["neither"], ratios
    assert ratios["bias"] <= 0.7 * ratios["sigmoid_neither"], ratios
    assert ratios["bias"] <= 0.7 * ratios["neither"], ratios
    assert max(losses.values()) - min(losses.values()) < 0.3, losses
