"""What `tools/doctor.py` looks at of the data and the tokenizer: both are opened as the trainer opens them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from doctor_lines import Asked, Line, first_line

LONGEST_TEXT = 450
AGAIN = "fetch it again; without tokenizer flags GPT-2's own is taken, which needs no file"


def check_files(asked: Asked) -> Iterator[Line]:
    """Tokenizer and data, and whether they go together."""
    flags = ("--vocab-file", asked.vocab_file), ("--merge-file", asked.merge_file)
    given = {flag: path for flag, path in (*flags, ("--tokenizer-model", asked.tokenizer_model)) if path is not None}
    faults = [line for flag, path in given.items() for line in _judge_file(flag, path)]
    lines = faults or ([_judge_tokenizer(given)] if given else [])
    yield from lines
    if asked.data_path is not None:
        is_good = all(line.state == "ok" for line in lines)
        yield _judge_pair(asked.data_path, given if is_good else {}, is_compared=is_good)


def _judge_file(flag: str, path: Path) -> Iterator[Line]:
    """What is wrong with a file before anybody reads it."""
    takes_folder = flag == "--tokenizer-model"
    if not path.exists():
        remedy = "check the path; without tokenizer flags GPT-2's own is taken, which needs no file"
        yield Line("fail", "tokenizer", f"{flag} {path}: no such file", remedy)
    elif path.is_dir() and not takes_folder:
        yield Line("fail", "tokenizer", f"{flag} {path}: expected a file, found a folder", f"a file of {path}")
    elif path.is_file() and path.stat().st_size == 0:
        yield Line("fail", "tokenizer", f"{flag} {path}: the file is empty", AGAIN)


def _judge_tokenizer(given: Mapping[str, Path]) -> Line:
    """The tokenizer that the files make."""
    names = ", ".join(f"{flag} {path}" for flag, path in given.items())
    if list(given) == ["--merge-file"]:
        return Line("fail", "tokenizer", f"{names}: the vocabulary of these merges is not named", "--vocab-file FILE")
    try:
        if _are_swapped(given):
            swapped = f"--vocab-file {given['--merge-file']} --merge-file {given['--vocab-file']}"
            return Line("fail", "tokenizer", f"{names}: the two are mistaken for each other", swapped)
        tokenizer = importlib.import_module("megaflow").Tokenizer.from_files(
            **{flag[2:].replace("-", "_"): path for flag, path in given.items()}
        )
        if "--merge-file" in given and not _has_merges(given["--merge-file"]):
            text = f"--merge-file {given['--merge-file']}: no merges in it, so every byte would be a token"
            return Line("fail", "tokenizer", text, AGAIN)
    except Exception as error:  # of the file, or of a broken package
        return _fail("tokenizer", error, AGAIN, about=f"{names}: ")
    end = "no end of document" if tokenizer.eod_id is None else f"end of document {tokenizer.eod_id}"
    return Line("ok", "tokenizer", f"{names}: {tokenizer.type}, {tokenizer.vocab_size:,} ids, {end}")


def _are_swapped(given: Mapping[str, Path]) -> bool:
    """Whether the merges are the JSON, and the vocabulary is not."""
    heads = []
    for flag in ("--vocab-file", "--merge-file"):
        if flag in given:
            with given[flag].open("rb") as file:
                heads.append(file.read(64).lstrip()[:1])
    return len(heads) == 2 and heads[0] != b"{" and heads[1] == b"{"


def _has_merges(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return any(line.strip() and not line.startswith("#version") for line in file)


def _judge_pair(prefix: str, given: Mapping[str, Path], *, is_compared: bool) -> Line:
    """A pair, and whether its ids are those of the tokenizer: by its sidecar, and by the ids themselves."""
    try:
        data = importlib.import_module("megaflow").IndexedDataset(_find_prefix(prefix))
    except Exception as error:  # of the file, or of a broken package
        return _fail("data", error, "megaflow-preprocess makes the pair; megaflow verify PREFIX checks it")
    text = f"{prefix}: {data.num_documents:,} documents, {data.num_tokens:,} tokens"
    if not is_compared:
        return Line("ok", "data", f"{text}; not compared with the tokenizer, which cannot be opened")
    try:
        sections = importlib.import_module("megaflow_trainer.config.sections")
        vocabulary = importlib.import_module("megaflow_trainer.training.vocabulary")
        files = {flag[2:].replace("-", "_"): str(path) for flag, path in given.items()}
        config = sections.TrainConfig(data=sections.DataConfig(path=(prefix,), **files))
        size, _, notes = vocabulary.read_vocabulary([data.prefix], config)
        vocabulary.check_largest_id(data, data.prefix, size)
    except Exception as error:  # of the file, or of a broken package
        return _fail("data", error, "name the tokenizer that made the data")
    return Line("ok", "data", "; ".join([f"{text}, ids within {size:,}", *notes]))


def _fail(topic: str, error: BaseException, remedy: str, *, about: str = "") -> Line:
    """An error as a finding; the remedy that it names goes before ours."""
    text, _, own = first_line(error).rpartition("; ")
    if not text:
        text, own = own, remedy
    return Line("fail", topic, about + (text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."), own)


def _find_prefix(prefix: str) -> str:
    names = (prefix, f"{prefix}_text_document")
    return next((name for name in names if Path(f"{name}.idx").is_file()), prefix)
