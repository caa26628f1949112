"""SentencePiece models of every kind and oddity: the ids are those of the library, recorded and, where it is, live."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.families import digest, library
from helpers.sentencepiece_models import SPEECH, models, texts
from megaflow import Tokenizer
from megaflow.errors import TokenizerError

RECORDED = json.loads(Path(__file__).with_name("sentencepiece_ids.json").read_text())
MODELS = models()


def load(name: str, folder: Path) -> Tokenizer:
    path = folder / "spm.model"
    path.write_bytes(MODELS[name])
    return Tokenizer.from_file(path)


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    tokenizer = load(name, tmp_path)
    assert tokenizer.encode(SPEECH).tolist() == RECORDED["models"][name]["speech"]
    ids, offsets = tokenizer.encode_batch(texts(), threads=2)
    assert digest(ids, np.diff(offsets)) == RECORDED["models"][name]["texts"]


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_library(name: str, tmp_path: Path, fetched_tokenizers: Path) -> None:
    sentencepiece = library("sentencepiece", fetched_tokenizers)
    tokenizer = load(name, tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=MODELS[name])
    wrong = [text for text in texts() if tokenizer.encode(text).tolist() != processor.encode(text)]
    assert wrong == []


def test_models_of_one_kind_differ_where_their_pieces_do() -> None:
    """The recorded ids tell the models apart: unused, user-defined and control pieces each change them."""
    recorded = RECORDED["models"]
    for kind in ("bpe", "unigram", "word", "char"):
        digests = [row["texts"] for name, row in recorded.items() if name.split()[0] == kind]
        assert len(set(digests)) == len(digests) > 1, kind


def test_engines_are_named(tmp_path: Path) -> None:
    engines = {name: load(name, tmp_path).engine for name in ("bpe", "bpe unused", "unigram unused", "word", "char")}
    assert engines == {
        "bpe": "megaflow-sentencepiece-bpe",
        "bpe unused": "megaflow-sentencepiece-bpe-stepwise",
        "unigram unused": "megaflow-sentencepiece-unigram",
        "word": "megaflow-sentencepiece-word",
        "char": "megaflow-sentencepiece-char",
    }


def test_a_kind_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spm.model"
    path.write_bytes(MODELS["char"].replace(bytes([0x18, 4, 0xC0]), bytes([0x18, 9, 0xC0])))
    with pytest.raises(TokenizerError, match="of kind 9, expected 1 to 4"):
        Tokenizer.from_file(path)
