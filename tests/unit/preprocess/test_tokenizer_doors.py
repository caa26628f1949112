"""What a tokenizer lacks is refused at every door before any work; pickles keep to their tokenizer; names of a hub."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megaflow import StreamingDataset, Tokenizer, preprocess
from megaflow.cli import preprocess as command
from megaflow.errors import TokenizerError
from megaflow.preprocessing import PreprocessOptions

NOTHING = r"asked to add special tokens .* but this tokenizer has no rule that adds any; leave add_special_tokens off"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def write_corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text(json.dumps({"text": "hello world"}) + "\n")
    return path


def word_level(folder: Path, added: list[int]) -> Path:
    """A tokenizer of three words whose post-processor adds these ids before each text."""
    words = {"hello": 0, "[UNK]": 1, "<s>": 2}
    special = {"id": 2, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{**special, "special": True}],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    if added:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": added, "tokens": ["<s>"] * len(added)}},
        }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


def test_encoding_refuses_to_add_what_the_tokenizer_does_not_add() -> None:
    tokenizer = Tokenizer.gpt2()
    assert tokenizer.added_special_tokens == []
    with pytest.raises(TokenizerError, match=NOTHING):
        tokenizer.encode("hello", add_special_tokens=True)
    with pytest.raises(TokenizerError, match=NOTHING):
        tokenizer.encode_batch([], add_special_tokens=True)
    assert tokenizer.encode("hello").tolist() == [31373]


def test_a_sentencepiece_model_adds_nothing_by_itself(shared: Path) -> None:
    tokenizer = Tokenizer.from_file(shared / "data" / "tokenizers" / "spm-bpe-16k-bytefallback" / "spm.model")
    with pytest.raises(TokenizerError, match=NOTHING):
        tokenizer.encode("hello", add_special_tokens=True)


def test_preprocessing_refuses_before_it_writes_anything(tmp_path: Path) -> None:
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), add_special_tokens=True)
    with pytest.raises(TokenizerError, match=NOTHING):
        preprocess([str(write_corpus(tmp_path))], options, tokenizer=Tokenizer.gpt2())
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_stream_refuses_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=NOTHING):
        StreamingDataset(str(write_corpus(tmp_path)), seq_len=4, add_special_tokens=True)


def test_a_rule_that_adds_an_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(word_level(tmp_path, [7]))
    with pytest.raises(TokenizerError, match="adds the id 7, which is outside the vocabulary of 3 ids"):
        tokenizer.encode("hello", add_special_tokens=True)
    assert tokenizer.encode("hello").tolist() == [0]


def test_a_rule_that_adds_a_token_adds_it_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(word_level(tmp_path, [2]))
    assert tokenizer.added_special_tokens == [2]
    assert tokenizer.encode("hello", add_special_tokens=True).tolist() == [2, 0]


def test_an_end_of_document_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), eod_token="<eos>")
    with pytest.raises(TokenizerError, match='no token "<eos>"'):
        preprocess([str(corpus)], options, tokenizer=Tokenizer.gpt2())
    with pytest.raises(TokenizerError, match='no token "<eos>"'):
        StreamingDataset(str(corpus), seq_len=4, eod_token="<eos>")
    assert command.main([str(corpus), "--output-prefix", str(tmp_path / "out"), "--eod-token", "<eos>"]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_megatrons_default_asks_only_tokenizers_that_add_something(tmp_path: Path, shared: Path) -> None:
    corpus = write_corpus(tmp_path)
    model = shared / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
    arguments = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    arguments += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
    assert command.main(arguments, megatron_defaults=True) == 0
    record = json.loads((tmp_path / "out_text_document.json").read_text())
    assert record["tokenizer"]["add_special_tokens"] is False


def test_a_pickle_does_not_take_another_tokenizer_of_the_same_path(tmp_path: Path) -> None:
    path = word_level(tmp_path, [])
    tokenizer = Tokenizer.from_file(path)
    pickled = pickle.dumps(tokenizer)
    assert pickle.loads(pickled).fingerprint == tokenizer.fingerprint
    other = Tokenizer.from_file(word_level(tmp_path, [2])).fingerprint
    with pytest.raises(TokenizerError) as caught:
        pickle.loads(pickled)
    for part in (str(path), other, tokenizer.fingerprint):
        assert part in str(caught.value)


def ranks_of_bytes() -> bytes:
    lines = [base64.b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256)]
    return b"".join(lines)


def tekken_of_bytes() -> bytes:
    vocabulary = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    config = {"pattern": TEKKEN_PATTERN, "num_vocab_tokens": 256, "default_vocab_size": 259}
    config |= {"default_num_special_tokens": 3, "version": "v3"}
    return json.dumps({"config": config, "vocab": vocabulary, "special_tokens": []}).encode()


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline hub whose cache has one repository, `org/name`; the folder of its files."""
    constants = pytest.importorskip("huggingface_hub.constants")
    commit, repository = "0" * 40, tmp_path / "hub" / "models--org--name"
    files = repository / "snapshots" / commit
    files.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return files


def test_a_name_may_stand_for_tiktoken_ranks(hub: Path) -> None:
    (hub / "own.tiktoken").write_bytes(ranks_of_bytes())
    config = {"pat_str": GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 256}}
    (hub / "tiktoken_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_name("org/name")
    assert (tokenizer.encode("ab").tolist(), tokenizer.eod_id, tokenizer.type) == ([97, 98], 256, "TikTokenizer")
    (hub / "in.jsonl").write_text('{"text": "ab"}\n')
    stream = StreamingDataset(str(hub / "in.jsonl"), seq_len=2, tokenizer=tokenizer)
    again = StreamingDataset.from_recipe(stream.recipe())
    assert (again.tokenizer.type, again.fingerprint) == ("TikTokenizer", stream.fingerprint)


def test_a_name_may_stand_for_a_tekken_file(hub: Path) -> None:
    (hub / "tekken.json").write_bytes(tekken_of_bytes())
    tokenizer = Tokenizer.from_name("org/name")
    assert tokenizer.encode("ab").tolist() == [97 + 3, 98 + 3]


def test_ranks_of_a_name_without_their_rule_say_what_is_missing(hub: Path) -> None:
    (hub / "own.tiktoken").write_bytes(ranks_of_bytes())
    with pytest.raises(TokenizerError, match=r"own\.tiktoken: holds tiktoken ranks; put a tiktoken_config\.json"):
        Tokenizer.from_name("org/name")


def test_a_name_without_any_tokenizer_says_what_was_sought(hub: Path) -> None:
    (hub / "README.md").write_text("nothing")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer: neither tokenizer.json .* tiktoken ranks"):
        Tokenizer.from_name("org/name")
