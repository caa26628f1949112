"""Every loop of docs/loops.md runs as it stands there, and takes the samples that it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow import GPTDataset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loops.md"
LOOP = re.compile(r"<!-- loop: (\S+) needs: ([^>]*) -->\n```python\n(.*?)```", re.DOTALL)
LOOPS = {name: (needs.split(), code) for name, needs, code in LOOP.findall(PAGE.read_text(encoding="utf-8"))}
SAMPLES = {"lightning": 160, "hf-trainer": 160, "torchtitan": 48, "megatron": 24}
"""Samples that a loop has consumed at its end, where it does not walk the whole dataset."""
MUST_RUN = os.environ.get("MEGAFLOW_ALL_LOOPS") == "1"
"""Set by `make test-loops`: nothing may be skipped."""


def test_the_page_has_all_loops() -> None:
    assert set(LOOPS) == {
        "torch-iterable",
        "torch-map",
        "lightning",
        "hf-trainer",
        "accelerate",
        "torchtitan",
        "megatron",
        "jax",
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `corpus_text_document.*`."""
    from megaflow import preprocess

    folder = tmp_path_factory.mktemp("loops")
    text = "One document says that data come first, and that a loop of ten lines is enough to learn from them. "
    lines = [json.dumps({"text": f"{number}. {text * 4}"}) for number in range(60)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    preprocess(folder / "corpus.jsonl")
    return folder


@pytest.mark.parametrize("name", list(LOOPS))
def test_loop_runs_and_takes_its_samples(name: str, corpus: Path) -> None:
    needs, code = LOOPS[name]
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing and not MUST_RUN:
        pytest.skip(f"{', '.join(missing)} is not installed (make test-loops installs it)")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=corpus, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"state (\d+) loss ([\d.]+)", done.stdout)
    assert found, done.stdout
    whole = len(GPTDataset(corpus / "corpus_text_document", seq_len=64, num_samples=200))
    assert int(found[1]) == SAMPLES.get(name, whole if name == "torch-map" else whole // 8 * 8)
    assert float(found[2]) < 9.5, "it starts above 10.8, a guess among 50,257 tokens"
