#!/usr/bin/env python3
"""The whole command `megaflow-preprocess`: against rivals that write the same tokens, and against itself.

Sections (all by default, or those named):
  tokenizers   Python's json and the package tokenizers
  fast, slow   Megatron-LM's preprocess_data_fast.py and preprocess_data.py; need --megatron
  containers   Parquet, .zst and .gz of the same rows, against plain JSON lines
  threads      two threads against one
  start-up     one document, against an interpreter that only imports numpy

A rival that is not at hand is skipped by name. Megatron-LM's tools load torch before they do anything, so their rows
are given twice: as they are, and without the time that they take for one document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import megaflow
from demo_corpus import write_corpus
from measure import Spent, compare

GPT2 = Path(megaflow.__file__).parent / "data" / "gpt2"
SECTIONS = ("tokenizers", "fast", "slow", "containers", "threads", "start-up")


def ours(corpus: Path, prefix: Path, *flags: str) -> Callable[[], object]:
    """`megaflow-preprocess` over a corpus, in a process of its own."""
    command = [sys.executable, "-m", "megaflow.cli.preprocess", str(corpus), "--output-prefix", str(prefix), *flags]
    return lambda: subprocess.run(command, check=True, capture_output=True)


def tokenizers_rival(corpus: Path, output: Path) -> None:
    """json.loads line by line, encode_batch, and the ids with their ends of document to one file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = tokenizer.token_to_id("<|endoftext|>")
    with corpus.open(encoding="utf-8") as file, output.open("wb") as out:
        texts = [json.loads(line)["text"] for line in file]
        for start in range(0, len(texts), 256):
            for encoding in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
                out.write(np.array([*encoding.ids, end], dtype=np.uint16).tobytes())


def megatron(options: argparse.Namespace, tool: str, corpus: Path, prefix: Path) -> Callable[[], object]:
    """One of Megatron-LM's tools over a corpus, with GPT-2's tokenizer."""
    command = [options.megatron_python, str(options.megatron / "tools" / tool), "--input", str(corpus.resolve())]
    command += ["--output-prefix", str(prefix), "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(options.megatron_tokenizer.resolve())]
    command += ["--use-gigatoken"] if tool.endswith("fast.py") else ["--workers", "1"]
    return lambda: subprocess.run(command, check=True, capture_output=True, cwd=options.megatron)


def compare_with_megatron(options: argparse.Namespace, tool: str, corpus: Path, folder: Path) -> bool:
    """Whole commands over the corpus, then over one document; whether both sides wrote the same pair."""
    one = folder / "one.jsonl"
    one.write_text('{"text": "One document."}\n')
    name, rows = f"Megatron-LM {tool}", []
    # The special tokens of Megatron's Hugging Face path are those of the text, as here with `encode`.
    flags = [
        "--special-tokens-in-text",
        "encode",
        "--empty-documents",
        "eod" if tool.endswith("fast.py") else "boundary",
    ]
    flags += ["--workers", "2" if tool.endswith("fast.py") else "1"]
    for input_path, label in ((corpus, "whole command"), (one, "start-up, one document")):
        size = input_path.stat().st_size / 1e6
        sides = {
            f"megaflow {megaflow.__version__}": ours(input_path, folder / "ours", *flags),
            name: megatron(options, tool, input_path, folder / "theirs"),
        }
        title = f"{tool} {label}, {input_path.name}, {size:.1f} MB, GPT-2"
        rows.append((size, compare(title, "MB", size, sides, repeats=options.repeats)))
        if input_path == corpus:
            both = [folder / f"{side}_text_document.bin" for side in ("ours", "theirs")]
            same = both[0].read_bytes() == both[1].read_bytes()
    (size, whole), (_, start) = rows
    print(f"\n{tool}: the same without start-up")
    net = {side: Spent(*(a - b for a, b in zip(whole[side], start[side], strict=True))) for side in whole}
    rival = net[name]
    for side, row in net.items():
        print(f"{side:40} {size / row.wall_s:10.4g} MB/s {size / row.cpu_s:10.4g} MB/CPU s", end="")
        print(f" {rival.wall_s / row.wall_s:8.2f} x wall {rival.cpu_s / row.cpu_s:8.2f} x CPU")
    return same


def compare_containers(corpus: Path, folder: Path, repeats: int) -> bool:
    """The same rows packed: per second of text, each against plain lines."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
        import zstandard
    except ImportError as error:
        print(f"containers: skipped, {error.name} is not installed")
        return True
    with corpus.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    made = {name: folder / f"rows{name}" for name in (".parquet", ".jsonl.zst", ".jsonl.gz")}
    pq.write_table(pa.table({"text": texts}), made[".parquet"], compression="zstd")
    made[".jsonl.zst"].write_bytes(zstandard.compress(data))
    made[".jsonl.gz"].write_bytes(gzip.compress(data))
    made[".jsonl"] = folder / "rows.jsonl"  # the last: what the others are compared with
    made[".jsonl"].write_bytes(data)
    sides = {name: ours(path, folder / f"out{name}", "--workers", "1") for name, path in made.items()}
    size = len(data) / 1e6
    compare(f"containers, {corpus.name}, {size:.1f} MB as lines, one thread", "MB", size, sides, repeats=repeats)
    pairs = {Path(f"{folder}/out{name}_text_document.bin").read_bytes() for name in made}
    return len(pairs) == 1


def compare_with_tokenizers(corpus: Path, folder: Path, repeats: int) -> bool:
    """Against json and tokenizers; whether the tokens are equal."""
    try:
        import tokenizers
    except ImportError:
        print("tokenizers: skipped, the package is not installed")
        return True
    sides = {
        f"megaflow {megaflow.__version__}": ours(corpus, folder / "ours"),
        f"json + tokenizers {tokenizers.__version__}": lambda: tokenizers_rival(corpus, folder / "rival.bin"),
    }
    size = corpus.stat().st_size / 1e6
    compare(f"preprocess, {corpus.name}, {size:.1f} MB, GPT-2", "MB", size, sides, repeats=repeats)
    return Path(folder, "ours_text_document.bin").read_bytes() == Path(folder, "rival.bin").read_bytes()


def compare_threads(corpus: Path, folder: Path, repeats: int) -> None:
    """Two threads against one, start-up included."""
    size = corpus.stat().st_size / 1e6
    sides = {f"{count} threads": ours(corpus, folder / "out", "--workers", str(count)) for count in (2, 1)}
    compare(f"threads, {corpus.name}, {size:.1f} MB", "MB", size, sides, repeats=repeats)


def compare_start_up(folder: Path, repeats: int) -> None:
    """One document."""
    one = folder / "one.jsonl"
    one.write_text('{"text": "One document."}\n')
    imports = [sys.executable, "-c", "import numpy"]
    sides: dict[str, Callable[[], object]] = {
        "megaflow-preprocess": ours(one, folder / "out"),
        "python -c 'import numpy'": lambda: subprocess.run(imports, check=True),
    }
    compare("start-up, one document", "runs", 1, sides, repeats=repeats)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--corpus", type=Path, help="JSONL with the key text (default: the demo's, made for the run)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (default: 3)")
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-python", default=sys.executable, metavar="PYTHON", help="that runs its tools")
    parser.add_argument("--megatron-tokenizer", type=Path, metavar="DIR", help="GPT-2 as its tools take it")
    options = parser.parse_args()
    sections = options.sections or list(SECTIONS)
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    is_same = True
    with tempfile.TemporaryDirectory() as name:
        folder, corpus = Path(name), options.corpus or Path(name, "corpus.jsonl")
        if not options.corpus:
            write_corpus(corpus)
        if "tokenizers" in sections:
            is_same &= compare_with_tokenizers(corpus, folder, options.repeats)
        for section, tool in (("fast", "preprocess_data_fast.py"), ("slow", "preprocess_data.py")):
            if section in sections and (options.megatron is None or options.megatron_tokenizer is None):
                print(f"{section}: skipped, no Megatron-LM (--megatron DIR --megatron-tokenizer DIR)")
            elif section in sections:
                is_same &= compare_with_megatron(options, tool, corpus, folder)
        if "containers" in sections:
            is_same &= compare_containers(corpus, folder, options.repeats)
        if "threads" in sections:
            compare_threads(corpus, folder, options.repeats)
        if "start-up" in sections:
            compare_start_up(folder, options.repeats)
    print(f"the tokens of all sides are {'equal' if is_same else 'NOT EQUAL'}")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
