"""`tools/preprocess_data.py` writes Megatron-LM's bytes, whatever the number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow.cli.preprocess import main

pytestmark = pytest.mark.golden

GPT2 = ["--tokenizer-type", "GPT2BPETokenizer"]
HF = ["--tokenizer-type", "HuggingFaceTokenizer"]

# Prefix of the golden pair: input, tokenizer, flags.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    **{f"{name}_eod": (name, GPT2, ["--append-eod"]) for name in ("tiny", "unicode", "unicode_escaped", "empty_docs")},
    **{f"{name}_noeod": (name, GPT2, []) for name in ("tiny", "unicode", "unicode_escaped", "empty_docs")},
    "json_keys_eod": ("json_keys", GPT2, ["--json-keys", "title", "text", "content", "--append-eod"]),
    "tiny_hf_eod": ("tiny", HF, ["--append-eod"]),
    "unicode_hf_eod": ("unicode", HF, ["--append-eod"]),
    "presplit_eod": ("presplit_sentences", HF, ["--append-eod"]),
    "presplit_noeod": ("presplit_sentences", HF, []),
    "fast_empty_docs_eod": ("empty_docs", HF, ["--append-eod", "--empty-documents", "eod"]),
}


def arguments(shared: Path, case: str, prefix: Path, workers: int) -> list[str]:
    name, kind, flags = CASES[case]
    folder = shared / "data" / "tokenizers" / "gpt2"
    if kind is HF:
        files = ["--tokenizer-model", str(folder)]
    else:
        files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    source = shared / "goldens" / "inputs" / f"{name}.jsonl"
    output = ["--output-prefix", str(prefix), "--workers", str(workers)]
    return ["--input", str(source), *output, *kind, *files, *flags]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("case", sorted(CASES))
def test_pairs_equal_megatrons(case: str, workers: int, shared: Path, tmp_path: Path) -> None:
    assert main(arguments(shared, case, tmp_path / case, workers), prog="test", megatron_defaults=True) == 0
    golden = [
        path
        for path in sorted((shared / "goldens" / "bin").iterdir())
        if path.name.rsplit("_", 2)[0] == case and (tmp_path / path.name).exists()
    ]
    assert len(golden) == (4 if case == "json_keys_eod" else 2)
    for path in golden:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_every_golden_pair_without_partitions_is_covered(shared: Path) -> None:
    prefixes = {path.name.rsplit("_", 2)[0] for path in (shared / "goldens" / "bin").iterdir()}
    assert {prefix for prefix in prefixes if "part3" not in prefix} == set(CASES)


def test_the_comparison_can_fail(shared: Path, tmp_path: Path) -> None:
    flags = arguments(shared, "tiny_eod", tmp_path / "tiny_eod", 1)
    flags.remove("--append-eod")
    assert main(flags, prog="test", megatron_defaults=True) == 0
    name = "tiny_eod_text_document.bin"
    assert (tmp_path / name).read_bytes() != (shared / "goldens" / "bin" / name).read_bytes()


def test_megaflow_preprocess_gives_the_same_bytes_with_megatrons_two_choices(shared: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text((shared / "goldens" / "inputs" / "tiny.jsonl").read_text() + '{"text": "a<|endoftext|>b"}\n')
    assert main([str(source), "--no-append-eod", "--special-tokens-in-text", "encode"]) == 0
    output = ["--input", str(source), "--output-prefix", str(tmp_path / "megatron"), "--workers", "2"]
    assert main([*output, *GPT2], prog="test", megatron_defaults=True) == 0
    for suffix in (".bin", ".idx"):
        ours = tmp_path / f"in_text_document{suffix}"
        assert ours.read_bytes() == (tmp_path / f"megatron_text_document{suffix}").read_bytes()
