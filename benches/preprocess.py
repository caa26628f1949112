#!/usr/bin/env python3
"""The whole command `megaflow-preprocess` against Python's json and tokenizers, which write the same tokens."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

import megaflow
from demo_corpus import write_corpus
from measure import compare

GPT2 = Path(megaflow.__file__).parent / "data" / "gpt2"


def rival_tokenizer() -> Tokenizer:
    """GPT-2 in the tokenizers package, from the same two files."""
    model = models.BPE.from_file(str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt"))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def rival(corpus: Path, output: Path) -> None:
    """json.loads line by line, encode_batch, and the ids with their ends of document to one file."""
    tokenizer = rival_tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    with corpus.open(encoding="utf-8") as file, output.open("wb") as out:
        texts = [json.loads(line)["text"] for line in file]
        for start in range(0, len(texts), 256):
            for encoding in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
                out.write(np.array([*encoding.ids, end], dtype=np.uint16).tobytes())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSONL with the key text (default: the demo's, made for the run)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or Path(folder, "corpus.jsonl")
        if not options.corpus:
            write_corpus(corpus)
        ours = Path(folder, "ours")
        command = [str(Path(sys.executable).parent / "megaflow-preprocess"), str(corpus), "--output-prefix", str(ours)]
        sides = {
            f"megaflow {megaflow.__version__}": lambda: subprocess.run(command, check=True, capture_output=True),
            f"json + tokenizers {tokenizers.__version__}": lambda: rival(corpus, Path(folder, "rival.bin")),
        }
        size = corpus.stat().st_size / 1e6
        compare(f"preprocess, {corpus.name}, {size:.1f} MB, GPT-2", "MB", size, sides, repeats=options.repeats)
        same = Path(f"{ours}_text_document.bin").read_bytes() == Path(folder, "rival.bin").read_bytes()
        print(f"the tokens of both sides are {'equal' if same else 'NOT EQUAL'}")
        sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
