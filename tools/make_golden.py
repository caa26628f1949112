"""Record the loss curves that tests/golden/test_loss_curves.py repeats: `python tools/make_golden.py`.

Run it only when a change is meant to change the numbers, and say so in the commit.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "tests")]

import torch  # noqa: E402

import megaflow  # noqa: E402
from doors import run_door  # noqa: E402
from helpers.pairs import write_pair  # noqa: E402
from helpers.runs import read_metrics, run_tiny  # noqa: E402

CURVES = ROOT / "tests" / "golden" / "curves"
LENGTH = "--train-iters 20 --global-batch-size 8 --micro-batch-size 4 --lr 3e-3 --lr-warmup-iters 4"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 2"
MODELS = {
    "gpt2_like": LENGTH,
    "llama_like": f"{LENGTH} {LLAMA} --untie-embeddings-and-output-weights --lr-decay-style cosine",
}


def compute(name: str, folder: Path) -> dict[str, list[float]]:
    """Losses and gradient norms of each step of one model, on a corpus made by numpy."""
    prefix = write_pair(folder / "toy_text_document")
    run_tiny(prefix, [*MODELS[name].split(), "--run-dir", str(folder / name)])
    lines = read_metrics(folder / name)
    return {key: [line[key] for line in lines] for key in ("lm_loss", "grad_norm")}


def main() -> int:
    """Write one file a model."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    CURVES.mkdir(exist_ok=True)
    versions = {"megaflow": megaflow.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, flags in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            record: dict[str, Any] = {"flags": flags, "versions": versions, **compute(name, Path(folder))}
        (CURVES / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {CURVES / name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(run_door(main))
