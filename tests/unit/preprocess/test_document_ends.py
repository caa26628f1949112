"""BOS and EOS stand around documents only when asked for, once each; what does not exist is refused before any work."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.families import library
from megaflow import IndexedDataset, Loader, PreprocessOptions, StreamingDataset, Tokenizer, merge, preprocess
from megaflow.cli import preprocess as command
from megaflow.cli.inspect import main as inspect_command
from megaflow.errors import CheckpointError, MegaflowError, TokenizerError
from megaflow.exporting import export
from megaflow.origin import open_dataset
from megaflow.ray_executor import preprocess_on_ray

LLAMA3 = "bbpe-100k-llama3split/tokenizer.json"
SENTENCEPIECE = "spm-bpe-16k-bytefallback/spm.model"
TEXTS = ["Hello, world!", "", " two words", "Zeile\n\nzwei", "x" * 300]
NO_BOS = r"{}: asked for a BOS before each document \(add_bos\), but this tokenizer has none: .* leave add_bos off"
NO_EOS = r"{}: asked for an EOS behind each document \(add_eos\), but this tokenizer has none: .* leave add_eos off"
EOS_TWICE = r"{}: add_eos and append_eod would both end each document with \"{}\" \(id {}\)"


def tokenizer_of(shared: Path, name: str) -> Tokenizer:
    return Tokenizer.from_file(shared / "data" / "tokenizers" / name)


def words(folder: Path, *, added: tuple[int, ...] = (), bos: int = 3) -> Path:
    """A tokenizer of `a`, `b`, `[UNK]`, `<s>` and `</s>` whose post-processor may add ids before each text."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {"a": 0, "b": 1, "[UNK]": 2, "<s>": bos, "</s>": 4}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": bos, "content": "<s>", **special}, {"id": 4, "content": "</s>", **special}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    if added:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": list(added), "tokens": ["x"] * len(added)}},
        }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


def corpus(folder: Path, texts: Sequence[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sequences(prefix: Path, level: str = "document") -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(f"{prefix}_text_{level}")]


def record(prefix: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(Path(f"{prefix}_text_document.json").read_text())["tokenizer"]
    return known


def test_ids_of_a_llama_tokenizer_are_those_of_hugging_face_with_a_template(shared: Path) -> None:
    hugging_face = pytest.importorskip("tokenizers")
    ours, path = tokenizer_of(shared, LLAMA3), shared / "data" / "tokenizers" / LLAMA3
    names = {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}
    assert (ours.bos_id, ours.eos_id, ours.eod_id) == (100_000, 100_001, 100_001)
    for single, asked in (
        ("{bos} $A", {"add_bos": True}),
        ("$A {eos}", {"add_eos": True}),
        ("{bos} $A {eos}", {"add_bos": True, "add_eos": True}),
    ):
        other = hugging_face.Tokenizer.from_file(str(path))
        special = [(name, other.token_to_id(name)) for name in names.values() if name in single.format(**names)]
        other.post_processor = hugging_face.processors.TemplateProcessing(
            single=single.format(**names), special_tokens=special
        )
        other.encode_special_tokens = True
        expected = [encoding.ids for encoding in other.encode_batch(TEXTS)]
        assert [ours.encode(text, **asked).tolist() for text in TEXTS] == expected
        for threads in (1, 2):
            ids, offsets = ours.encode_batch(TEXTS, threads=threads, **asked)
            assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == expected
        assert [ours.encode(text).tolist() for text in TEXTS] != expected


def test_ids_of_a_sentencepiece_model_are_the_recorded_ones_with_an_id_on_each_side(shared: Path) -> None:
    tokenizer = tokenizer_of(shared, SENTENCEPIECE)
    with (shared / "data" / "tokenizers" / "golden" / "spm-bpe-16k-bytefallback.jsonl").open() as file:
        rows = [json.loads(line) for line in file][1:]
    assert len(rows) > 20
    for row in rows:
        assert tokenizer.encode(row["text"], add_bos=True, add_eos=True).tolist() == [1, *row["ids"], 2]


@pytest.mark.parametrize("name", [SENTENCEPIECE, "spm-unigram-16k/spm.model"])
def test_a_sentencepiece_model_has_the_ends_that_sentencepiece_finds(
    shared: Path, fetched_tokenizers: Path, name: str
) -> None:
    path = shared / "data" / "tokenizers" / name
    processor = library("sentencepiece", fetched_tokenizers).SentencePieceProcessor(model_file=str(path))
    ours = Tokenizer.from_file(path)
    assert [-1 if end is None else end for end in (ours.bos_id, ours.eos_id)] == [
        processor.bos_id(),
        processor.eos_id(),
    ]
    asked = {"add_bos": ours.bos_id is not None, "add_eos": True}
    for text in TEXTS:
        assert ours.encode(text, **asked).tolist() == processor.encode(text, **asked)


@pytest.mark.parametrize(
    ("name", "bos", "eos"),
    [
        ("gpt2/tokenizer.json", None, 50256),
        ("bbpe-32k-gpt2split/tokenizer.json", None, 31999),
        (LLAMA3, 100_000, 100_001),
        ("bbpe-100k-llama3split/ranks.tiktoken", 100_000, 100_001),
        (SENTENCEPIECE, 1, 2),
        ("spm-unigram-16k/spm.model", None, 1),
        ("bert-base-uncased/tokenizer.json", None, None),
    ],
)
def test_each_door_refuses_an_end_that_a_tokenizer_lacks(
    shared: Path, tmp_path: Path, name: str, bos: int | None, eos: int | None
) -> None:
    tokenizer, source = tokenizer_of(shared, name), corpus(tmp_path, ["hello"])
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    plain = tokenizer.encode("hello").tolist()
    for end, message, flag in ((bos, NO_BOS, "add_bos"), (eos, NO_EOS, "add_eos")):
        asked, output = {flag: True}, str(tmp_path / "out")
        options = PreprocessOptions(output_prefix=output, append_eod=False, workers=1, **asked)
        if end is not None:
            expected = [end, *plain] if flag == "add_bos" else [*plain, end]
            assert tokenizer.encode("hello", **asked).tolist() == expected
            continue
        error = message.format(name)
        with pytest.raises(TokenizerError, match=error):
            tokenizer.encode("hello", **asked)
        with pytest.raises(TokenizerError, match=error):
            tokenizer.encode_batch([], **asked)
        with pytest.raises(TokenizerError, match=error):
            preprocess(source, options, tokenizer=tokenizer)
        with pytest.raises(TokenizerError, match=error):
            StreamingDataset(source, seq_len=4, tokenizer=tokenizer, append_eod=False, **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "nothing was begun"


def test_no_cluster_is_joined_for_an_end_that_a_tokenizer_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # has nothing that could be called
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), add_bos=True)
    with pytest.raises(TokenizerError, match=NO_BOS.format(r"vocab\.json")):
        preprocess_on_ray(corpus(tmp_path, ["hello"]), options, tokenizer=Tokenizer.gpt2())


DOCUMENTS: list[Any] = ["a b", "", ["", "b", "", "a a"], "a", [], ["", ""]]
"""Three of them are empty: an empty string, an empty list, a list of empty strings."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[0, 1, 4], [1], [0, 0, 4], [0, 4]]),
        ({"add_bos": True}, [[3, 0, 1, 4], [3, 1], [0, 0, 4], [3, 0, 4]]),
        ({"add_bos": True, "append_eod": False}, [[3, 0, 1], [3, 1], [0, 0], [3, 0]]),
        ({"add_eos": True, "append_eod": False}, [[0, 1, 4], [1], [0, 0, 4], [0, 4]]),
        ({"add_bos": True, "add_eos": True, "eod_token": "b"}, [[3, 0, 1, 4, 1], [3, 1], [0, 0, 4, 1], [3, 0, 4, 1]]),
    ],
)
def test_each_document_has_them_once_and_an_empty_one_has_none(
    tmp_path: Path, settings: dict[str, Any], expected: list[list[int]]
) -> None:
    tokenizer, source = Tokenizer.from_file(words(tmp_path)), corpus(tmp_path, DOCUMENTS)
    found = []
    for workers in (1, 2):
        options = PreprocessOptions(
            output_prefix=str(tmp_path / f"out{workers}"), workers=workers, block_bytes=20, **settings
        )
        report = preprocess(source, options, tokenizer=tokenizer).pairs[0]
        found.append(sequences(tmp_path / f"out{workers}"))
        assert (report.documents, report.empty_documents, report.sequences) == (6, 3, 4)
        assert report.tokens == sum(map(len, expected))
    assert found == [expected, expected]
    filled = PreprocessOptions(output_prefix=str(tmp_path / "filled"), empty_documents="eod", **settings)
    preprocess(source, filled, tokenizer=tokenizer)
    lone = [] if settings.get("append_eod") is False else [[1 if "eod_token" in settings else 4]]
    assert sequences(tmp_path / "filled") == [*expected[:1], *lone, *expected[1:], *lone, *lone]


def test_the_sidecar_says_which_ids_were_added_and_a_merge_and_inspect_go_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, source = Tokenizer.from_file(words(tmp_path)), corpus(tmp_path, DOCUMENTS)
    pairs = []
    for name, asked in (("plain", {}), ("with", {"add_bos": True})):
        preprocess(source, PreprocessOptions(output_prefix=str(tmp_path / name), **asked), tokenizer=tokenizer)
        pairs.append(tmp_path / f"{name}_text_document")
        ends = {"bos_token": "<s>", "bos_id": 3, "eos_token": "</s>", "eos_id": 4, "add_eos": False}
        expected = {**ends, "add_bos": "add_bos" in asked}
        assert {key: record(tmp_path / name)[key] for key in expected} == expected
    with pytest.raises(MegaflowError, match="add_bos is false"):
        merge(pairs, tmp_path / "all")
    assert inspect_command([str(pairs[1])]) == 0
    assert "5 ids, BOS 3 added, end of document 4 appended" in capsys.readouterr().out
    assert inspect_command([str(pairs[0])]) == 0
    assert "BOS" not in capsys.readouterr().out


def test_exported_text_is_the_text_without_what_was_put_around_it(tmp_path: Path) -> None:
    tokenizer, texts = Tokenizer.from_file(words(tmp_path)), ["a b", "", "b"]
    source, settings = corpus(tmp_path, texts), {"add_bos": True, "add_eos": True, "eod_token": "b"}
    preprocess(source, PreprocessOptions(output_prefix=str(tmp_path / "out"), **settings), tokenizer=tokenizer)
    assert sequences(tmp_path / "out") == [[3, 0, 1, 4, 1], [3, 1, 4, 1]]
    export(tmp_path / "out_text_document", tmp_path / "back.jsonl", tokenizer=tokenizer)
    rows = [json.loads(line)["text"] for line in (tmp_path / "back.jsonl").read_text().splitlines()]
    assert rows == texts


def test_a_job_does_not_go_on_with_another_bos(tmp_path: Path) -> None:
    path = words(tmp_path)
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "a"}\n' * 2000 + "{broken\n")

    def job(**more: Any) -> None:
        settings = {"output_prefix": str(tmp_path / "out"), "block_bytes": 500, "journal_every_s": 0.0, **more}
        preprocess(source, PreprocessOptions(**settings), tokenizer=Tokenizer.from_file(path))

    with pytest.raises(MegaflowError, match="line 2001"):
        job(add_bos=True)
    with pytest.raises(CheckpointError, match="BOS of documents was token 3 and is none"):
        job()
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "b"}')
    with pytest.raises(CheckpointError, match="BOS of documents was token 3 and is token 1"):
        job(add_bos=True)
    (tmp_path / "tokenizer_config.json").unlink()
    job(add_bos=True, on_bad_record="skip")
    assert sequences(tmp_path / "out") == [[3, 0, 4]] * 2000


def test_a_long_document_cut_for_two_threads_has_each_end_once(shared: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(shared, LLAMA3)
    text = "many words in one document " * 60_000
    source = corpus(tmp_path, [text, "short"])
    for workers in (1, 2):
        options = PreprocessOptions(
            output_prefix=str(tmp_path / f"out{workers}"), workers=workers, add_bos=True, add_eos=True, append_eod=False
        )
        preprocess(source, options, tokenizer=tokenizer)
    first, second = (tmp_path / f"out{workers}_text_document.bin" for workers in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    long, short = IndexedDataset(tmp_path / "out2_text_document")
    assert long.tolist() == [100_000, *tokenizer.encode(text).tolist(), 100_001]
    assert short.tolist() == [100_000, *tokenizer.encode("short").tolist(), 100_001]


def test_a_bos_beyond_16_bits_makes_the_tokens_wider(tmp_path: Path) -> None:
    tokenizer, source = Tokenizer.from_file(words(tmp_path, bos=70_000)), corpus(tmp_path, ["a"])
    report = preprocess(
        source, PreprocessOptions(output_prefix=str(tmp_path / "out"), add_bos=True), tokenizer=tokenizer
    )
    assert (report.pairs[0].dtype, sequences(tmp_path / "out")) == ("int32", [[70_000, 0, 4]])


def test_nothing_is_put_there_twice(tmp_path: Path) -> None:
    path, source = words(tmp_path, added=(3,)), corpus(tmp_path, ["a"])
    tokenizer = Tokenizer.from_file(path)
    both = r"tokenizer.json: add_bos and add_special_tokens would both put the BOS \"<s>\" \(id 3\) before each text"
    ends = EOS_TWICE.format("tokenizer.json", "</s>", 4)
    asked = {"add_bos": True, "add_special_tokens": True}
    with pytest.raises(TokenizerError, match=both):
        tokenizer.encode("a", **asked)
    for more, message in ((asked, both), ({"add_eos": True}, ends)):
        options = PreprocessOptions(output_prefix=str(tmp_path / "out"), **more)
        with pytest.raises(TokenizerError, match=message):
            preprocess(source, options, tokenizer=tokenizer)
        with pytest.raises(TokenizerError, match=message):
            StreamingDataset(source, seq_len=4, tokenizer=tokenizer, **more)
    assert tokenizer.encode("a", add_eos=True, add_special_tokens=True).tolist() == [3, 0, 4]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["in.jsonl", "tokenizer.json"]


def test_a_stream_has_them_around_each_document_and_none_around_an_empty_one(tmp_path: Path) -> None:
    tokenizer, source = Tokenizer.from_file(words(tmp_path)), corpus(tmp_path, DOCUMENTS)
    expected = {
        (False, False): [0, 1, 4, 1, 0, 0, 4, 0, 4],
        (True, False): [3, 0, 1, 4, 3, 1, 0, 0, 4, 3, 0, 4],
        (True, True): [3, 0, 1, 4, 1, 3, 1, 0, 0, 4, 1, 3, 0, 4, 1],
    }
    fingerprints = set()
    for (add_bos, add_eos), tokens in expected.items():
        dataset = StreamingDataset(
            source,
            seq_len=len(tokens) - 1,
            tokenizer=tokenizer,
            shuffle=False,
            epochs=1,
            keep_partial=True,
            add_bos=add_bos,
            add_eos=add_eos,
            eod_token="b" if add_eos else None,
        )
        for opened in (dataset, open_dataset(dataset.recipe())):
            batch = next(iter(Loader(opened, micro_batch_size=1)))
            assert [*batch.tokens[0].tolist(), int(batch.labels[0, -1])] == tokens
        fingerprints.add(dataset.fingerprint)
    assert len(fingerprints) == 3


def test_the_command_puts_them_there_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, source = words(tmp_path), corpus(tmp_path, ["a", "b a"])
    arguments = [str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer", str(path), "--workers", "1"]
    assert command.main([*arguments, "--add-bos", "--add-eos"]) != 0
    assert "leave one of the two off" in capsys.readouterr().err
    assert command.main([*arguments, "--add-bos", "--add-eos", "--no-append-eod"]) == 0
    assert "BOS and EOS added, end of document not appended" in capsys.readouterr().out
    assert sequences(tmp_path / "out") == [[3, 0, 4], [3, 1, 0, 4]]
    assert command.main([*arguments[:1], "--output-prefix", str(tmp_path / "gpt2"), "--add-bos"]) != 0
    assert "vocab.json: asked for a BOS before each document" in capsys.readouterr().err
    assert not list(tmp_path.glob("gpt2*"))
    parts = [*arguments[:2], str(tmp_path / "parts"), *arguments[3:], "--add-bos"]
    for part in ("0/2", "1/2"):
        assert command.main([*parts, "--shard", part]) == 0
    merge(sorted(str(found)[:-4] for found in tmp_path.glob("parts_shard*.bin")), tmp_path / "parts_text_document")
    assert sequences(tmp_path / "parts") == [[3, 0, 4], [3, 1, 0, 4]]


def test_the_command_says_which_end_of_document_it_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the configuration declares, and also where that does not exist."""
    path, source = words(tmp_path), corpus(tmp_path, ["a"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nada>"}))
    arguments = [str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer", str(path), "--workers", "1"]
    assert command.main([*arguments, "--eod-token", "b"]) == 0
    assert "5 ids, end of document 1, by" in capsys.readouterr().out
    assert sequences(tmp_path / "out") == [[0, 1]]
    assert command.main([*arguments, "--no-append-eod"]) == 0
    assert "5 ids, by" in capsys.readouterr().out
    assert command.main(arguments) != 0
    assert '"<nada>"' in capsys.readouterr().err
    tokenizer = Tokenizer.from_file(path)
    stream = StreamingDataset(str(source), seq_len=1, tokenizer=tokenizer, append_eod=False)
    assert stream.eod_id is None
    with pytest.raises(TokenizerError, match="<nada>"):
        StreamingDataset(str(source), seq_len=1, tokenizer=tokenizer)
