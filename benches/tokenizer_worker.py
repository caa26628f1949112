"""One tokenizer engine in a process of its own, asked line by line: `tokenizer_worker.py ENGINE TOKENIZER THREADS`.

The benchmark starts it with the interpreter that has the engine; of this project it needs nothing but the package
itself, and that only for the engine `megaflow`. Each line of standard input is a JSON object with `do`; each gets one
JSON line:

    load                  {cpu_s, wall_s, version}            reads the tokenizer
    texts {file, step}    {documents, bytes}                  reads documents, not counted; `step`: every which of them
    text {kind, bytes}    {documents, bytes}                  makes one document (tokenizer_inputs.py)
    first                 {cpu_s, wall_s}                     the first call, on one short text
    pass                  {cpu_s, wall_s}                     encodes all documents
    peak                  {growth_bytes, ids}                 the same once, with the largest growth of anonymous memory
    hashes {file}         {documents, tokens}                 one hash a document of its ids, to a file
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import threading
import time
from array import array
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401 - by all engines, before any clock: some import it with the package, others at their first call

from tokenizer_inputs import adversarial

BATCH = 1500
"""Documents that a rival gets in one call: their caches last from call to call, their results take much memory."""


class Megaflow:
    """`encode_batch` over all documents in one call."""

    whole = True

    def __init__(self, path: str, threads: int) -> None:
        from megaflow import Tokenizer

        self.tokenizer, self.threads = Tokenizer.from_file(path), threads
        # Rivals take text that spells a special token for the token; SentencePiece does not.
        self.special = "text" if path.endswith(".model") else "encode"

    def encode(self, texts: list[str]) -> Any:
        return self.tokenizer.encode_batch(texts, threads=self.threads, special_tokens_in_text=self.special)

    def rows(self, result: Any) -> list[Any]:
        ids, offsets = result
        return [ids[begin:end] for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


class MegaflowBatches(Megaflow):
    """The same in batches as rivals get them."""

    whole = False


class HuggingFace:
    """`tokenizers`, whatever its version."""

    whole = False

    def __init__(self, path: str, threads: int) -> None:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(path)
        self.call = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(self, texts: list[str]) -> Any:
        return self.call(texts, add_special_tokens=False)

    def rows(self, result: Any) -> list[Any]:
        return [encoding.ids for encoding in result]


class Fastokens(HuggingFace):
    """`fastokens`."""

    def __init__(self, path: str, threads: int) -> None:
        import fastokens

        tokenizer = fastokens.Tokenizer.from_file(path)
        self.call = tokenizer.encode_batch


class Gigatoken:
    """`gigatoken`, from a tokenizer.json or a SentencePiece model."""

    whole = False

    def __init__(self, path: str, threads: int) -> None:
        import gigatoken

        make = gigatoken.Tokenizer.from_sentencepiece if path.endswith(".model") else gigatoken.Tokenizer
        self.tokenizer = make(path)

    def encode(self, texts: list[str]) -> Any:
        return self.tokenizer.encode_batch(texts)

    def rows(self, result: Any) -> list[Any]:
        return list(result)


class SentencePiece:
    """`sentencepiece`."""

    whole = False

    def __init__(self, path: str, threads: int) -> None:
        import sentencepiece

        self.processor, self.threads = sentencepiece.SentencePieceProcessor(model_file=path), threads

    def encode(self, texts: list[str]) -> Any:
        return self.processor.encode(texts, num_threads=self.threads)

    def rows(self, result: Any) -> list[Any]:
        return list(result)


class Tiktoken:
    """`tiktoken`, from ranks and the split rule beside them."""

    whole = False

    def __init__(self, path: str, threads: int) -> None:
        import tiktoken

        config = json.loads(Path(path).with_name("tiktoken_config.json").read_text())
        lines = (line.split() for line in Path(path).read_bytes().splitlines() if line)
        self.encoding = tiktoken.Encoding(
            "x",
            pat_str=config["pat_str"],
            mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
            special_tokens=config["special_tokens"],
        )
        self.threads = threads

    def encode(self, texts: list[str]) -> Any:
        return self.encoding.encode_batch(texts, num_threads=self.threads, allowed_special="all")

    def rows(self, result: Any) -> list[Any]:
        return list(result)


ENGINES: dict[str, tuple[Any, str]] = {
    "megaflow": (Megaflow, "megaflow"),
    "megaflow-batches": (MegaflowBatches, "megaflow"),
    "fastokens": (Fastokens, "fastokens"),
    "gigatoken": (Gigatoken, "gigatoken"),
    "tokenizers": (HuggingFace, "tokenizers"),
    "tokenizers-rc": (HuggingFace, "tokenizers"),
    "tiktoken": (Tiktoken, "tiktoken"),
    "sentencepiece": (SentencePiece, "sentencepiece"),
}


class Worker:
    """The state between two lines."""

    def __init__(self, engine: str, path: str, threads: int) -> None:
        self.name, self.path, self.threads = engine, path, threads
        self.engine: Any = None
        self.texts: list[str] = []

    def load(self, **_: Any) -> dict[str, Any]:
        kind, package = ENGINES[self.name]
        start = time.process_time(), time.perf_counter()
        self.engine = kind(self.path, self.threads)
        spent = _since(start)
        try:
            found = version(package)
        except ModuleNotFoundError:
            found = str(getattr(sys.modules[package], "__version__", "?"))
        return {**spent, "version": found}

    def keep(self, texts: list[str]) -> dict[str, Any]:
        self.texts = texts
        return {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}

    def read(self, file: list[str], step: int = 1, **_: Any) -> dict[str, Any]:
        texts = []
        for path in file:
            with Path(path).open(encoding="utf-8") as lines:
                texts += [json.loads(line)["text"] for line in lines]
        return self.keep(texts[::step])

    def make(self, kind: str, size: int, **_: Any) -> dict[str, Any]:
        return self.keep([adversarial(kind, size)])

    def first(self, **_: Any) -> dict[str, Any]:
        start = time.process_time(), time.perf_counter()
        self.engine.encode(["a"])
        return _since(start)

    def batches(self) -> list[list[str]]:
        if self.engine.whole:
            return [self.texts]
        return [self.texts[at : at + BATCH] for at in range(0, len(self.texts), BATCH)]

    def measure(self, **_: Any) -> dict[str, Any]:
        batches = self.batches()
        start = time.process_time(), time.perf_counter()
        for batch in batches:
            self.engine.encode(batch)
        return _since(start)

    def peak(self, **_: Any) -> dict[str, Any]:
        before, most, done = _anonymous_bytes(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.002):
                most = max(most, _anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        count = 0
        for batch in self.batches():
            result = self.engine.encode(batch)
            most = max(most, _anonymous_bytes())
            if self.engine.whole:
                count += len(result[0])
            else:
                count += sum(len(row) for row in self.engine.rows(result))
            del result
        done.set()
        watcher.join()
        return {"growth_bytes": most - before, "ids": count}

    def hashes(self, file: str, **_: Any) -> dict[str, Any]:
        count = tokens = 0
        with Path(file).open("wb") as out:
            for batch in self.batches():
                for row in self.engine.rows(self.engine.encode(batch)):
                    ids = array("I", [int(token) for token in row])
                    out.write(hashlib.blake2b(ids.tobytes(), digest_size=16).digest())
                    count, tokens = count + 1, tokens + len(ids)
        return {"documents": count, "tokens": tokens}


def _since(start: tuple[float, float]) -> dict[str, float]:
    return {"cpu_s": time.process_time() - start[0], "wall_s": time.perf_counter() - start[1]}


def _anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - called every 2 ms
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Answers lines until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer
    worker = Worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    names = ("load", "first", "peak", "hashes")
    calls = {"texts": worker.read, "text": worker.make, "pass": worker.measure}
    calls |= {name: getattr(worker, name) for name in names}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = calls[question.pop("do")](**question)
        except Exception as error:  # whatever an engine raises is a result: it refuses
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
