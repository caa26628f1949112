"""Training samples made of text on the fly: Parquet, Arrow, JSON lines, local, remote, or any Arrow stream."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

from megaflow import _core
from megaflow.errors import CheckpointError, ConfigError
from megaflow.inputs import CoreInput, Input, resolve_inputs
from megaflow.tokenizer import Tokenizer


class StreamingDataset:
    """Documents of any source, tokenized, shuffled in a window across shards, and cut into samples while training runs.

    The order of the samples is a function of inputs, options, seed and position alone. It does not depend on ranks,
    micro-batch size, threads or restarts: every rank makes the same row of samples and takes its own of it. The tokens
    of the documents follow one another and are cut every `seq_len` tokens; an epoch runs into the next. Empty
    documents leave no trace.

    A stream is read by a `Loader`, in order; it has no access by position. Each loader over it starts anew.

    Args:
        sources: one input or several: a file, a folder, a pattern, `@list`, a URL, or any object with
            `__arrow_c_stream__` (tables of pyarrow, polars, duckdb, datasets). An object that can hand over its data
            only once serves one epoch, and no resume.
        seq_len: tokens that the model sees of one sample.
        tokenizer: GPT-2's by default.
        seed: of all shuffles.
        shuffle: False reads in input order.
        shuffle_window: tokens of the documents that are shuffled together. They and the next window's first blocks are
            held in memory, at 4 bytes a token.
        interleave: shards that are read side by side, so that a window mixes documents of several.
        shard_bytes: bytes of a shard, about: plain text is cut at lines and Parquet between row groups; other files
            are a shard each.
        epochs: times that the inputs are read; None has no end.
        num_samples: samples after which the stream ends, if the epochs do not end before; None has no such bound.
        keep_partial: the tokens left over at the very end make one more sample, padded.
        pad_id: id that fills it up; the loader masks it.
        json_key: key (of tables: column) of the text; with dots it is a path.
        input_format: as for `megaflow.preprocess`.
        invalid_utf8: as for `megaflow.preprocess`.
        append_eod: whether the end-of-document token is appended to each document.
        eod_token: text of that token; by default the declared one, else the first known name.
        split: shares of train, valid and test, such as "969,30,1"; None takes everything. A document's text decides
            which part it is in: the same text falls into the same part of any corpus, whatever seed or file.
        split_name: "train", "valid" or "test".
        on_bad_record: whether a record without text ends the stream with an error, or is skipped and counted.
        max_bad_records: with skip: how many are allowed.
        special_tokens_in_text: as for `megaflow.preprocess`.
        add_special_tokens: as for `megaflow.preprocess`.
        add_bos: whether the tokenizer's BOS goes before each document.
        add_eos: whether the tokenizer's EOS goes behind each document, before the end-of-document token.
        num_threads: threads that read and tokenize.
        block_bytes: bytes of input that a thread takes at a time. The samples do not depend on it.

    Raises:
        ConfigError: if an option is wrong.
        MissingFileError: if a folder, pattern or list leads nowhere.
        TokenizerError: if the tokenizer has none of the tokens to add, or one would be added twice.
    """

    add_extra_token = True

    def __init__(  # noqa: PLR0913 - keywords, each with its default
        self,
        sources: Input | Sequence[Input],
        *,
        seq_len: int,
        tokenizer: Tokenizer | None = None,
        seed: int = 1234,
        shuffle: bool = True,
        shuffle_window: int = 1 << 22,
        interleave: int = 8,
        shard_bytes: int = 16 << 20,
        epochs: int | None = None,
        num_samples: int | None = None,
        keep_partial: bool = False,
        pad_id: int = -1,
        json_key: str = "text",
        input_format: str = "auto",
        invalid_utf8: Literal["error", "replace"] = "error",
        append_eod: bool = True,
        eod_token: str | None = None,
        split: str | None = None,
        split_name: str = "train",
        on_bad_record: Literal["error", "skip"] = "error",
        max_bad_records: int | None = None,
        special_tokens_in_text: str = "text",
        add_special_tokens: bool = False,
        add_bos: bool = False,
        add_eos: bool = False,
        num_threads: int = 1,
        block_bytes: int = 1 << 20,
    ) -> None:
        self.tokenizer = tokenizer or Tokenizer.gpt2()
        self.warnings: list[str] = []
        """Sentences about inputs that are named twice."""
        self.inputs: list[CoreInput] = resolve_inputs(
            sources, takes_text=input_format.startswith("text"), notes=self.warnings
        )
        if any(name == "-" for _, name, _, _ in self.inputs):
            raise ConfigError("standard input can be read once, so no run could go on from it; name a file")
        self.seq_len = seq_len
        self.num_samples = num_samples
        self.pad_id = pad_id
        self.num_threads = num_threads
        self._eod_token = eod_token
        self._part = _find_part(split, split_name)
        self.eod_id = self._find_eod(append_eod, eod_token)
        added = {"add_special_tokens": add_special_tokens, "add_bos": add_bos, "add_eos": add_eos}
        self.tokenizer._core.check_documents(**added, append_eod=self.eod_id if append_eod else None)
        self._order: dict[str, Any] = {
            "seq_len": seq_len,
            "seed": seed,
            "shuffle": shuffle,
            "shuffle_window": shuffle_window,
            "interleave": interleave,
            "shard_bytes": shard_bytes,
            "epochs": epochs,
            "keep_partial": keep_partial,
            "json_key": json_key,
            "input_format": input_format,
            "invalid_utf8": invalid_utf8,
            "eod_id": self.eod_id if append_eod else None,
            **({} if split is None else {"split": split, "split_name": split_name}),
            "on_bad_record": on_bad_record,
            "special_tokens_in_text": special_tokens_in_text,
            "add_special_tokens": add_special_tokens,
            **({"add_bos": True} if add_bos else {}),
            **({"add_eos": True} if add_eos else {}),
        }
        self._other: dict[str, Any] = {
            "num_samples": num_samples,
            "pad_id": pad_id,
            "max_bad_records": max_bad_records,
            "num_threads": num_threads,
            "block_bytes": block_bytes,
        }
        for name, value in {**self._order, **self._other}.items():
            if name != "pad_id" and isinstance(value, int) and value < 0:
                raise ConfigError(f"{name} = {value}: expected 0 or more")

    def _find_eod(self, append_eod: bool, eod_token: str | None) -> int | None:
        found = self.tokenizer._core.eod(eod_token, is_needed=append_eod)
        if found is None and append_eod:
            raise ConfigError(
                "the tokenizer has no end-of-document token; name one with eod_token, or give append_eod=False"
            )
        return None if found is None else found[1]

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        return {
            "order": "stream",
            "sources": [[name, _size_of(kind, name, item)] for kind, name, item, _ in self.inputs],
            "tokenizer": self.tokenizer.fingerprint,
            **self._order,
            **({"bos_id": self.tokenizer.bos_id} if "add_bos" in self._order else {}),
            **({"eos_id": self.tokenizer.eos_id} if "add_eos" in self._order else {}),
        }

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order. Of the inputs it knows names and sizes, not the content."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        if self.num_samples is None:
            raise ConfigError("this stream has no known length; give num_samples")
        return self.num_samples

    def __bool__(self) -> bool:
        return True

    def open_at(self, position: str | None = None) -> OpenStream:
        """Starts the threads of the stream at its start, or at what `OpenStream.position` told.

        Raises:
            MissingFileError, FileAccessError, DataFormatError: if an input cannot be opened.
            CheckpointError: if the position does not fit the inputs.
        """
        ends = {"add_bos": False, "add_eos": False}
        settings = {**ends, **self._order, **self._other, "inputs": self.inputs, "part": self._part}
        return OpenStream(_core.Stream(settings, self.tokenizer._core, position))

    def recipe(self) -> dict[str, Any]:
        """How this dataset is opened again, in plain types; `megaflow.origin.open_dataset` does.

        Raises:
            ConfigError: if an input exists in memory only, or the tokenizer's files are not known.
        """
        tables = [name for kind, name, _, _ in self.inputs if kind == "arrow"]
        files = [str(path) for path in self.tokenizer._core.files]
        if tables or not files:
            what = f"input {tables[0]} exists" if tables else "the tokenizer exists"
            raise ConfigError(f"{what} in memory only, so that no manifest can name it")
        names = [name if kind == "remote" else os.path.abspath(name) for kind, name, _, _ in self.inputs]  # noqa: PTH100
        settings = {name: value for name, value in {**self._order, **self._other}.items() if name != "eod_id"}
        settings |= {"append_eod": self._order["eod_id"] is not None, "eod_token": self._eod_token}
        return {"kind": "StreamingDataset", "sources": names, "settings": settings, "tokenizer": files}

    @classmethod
    def from_recipe(cls, recipe: dict[str, Any]) -> StreamingDataset:
        """The dataset that `recipe` described."""
        return cls(recipe["sources"], tokenizer=Tokenizer._reread(recipe["tokenizer"]), **recipe["settings"])

    def __repr__(self) -> str:
        names = ", ".join(name for _, name, _, _ in self.inputs[:3]) + (", ..." if len(self.inputs) > 3 else "")
        return f"StreamingDataset({names}: samples of {self.seq_len} tokens, seed {self._order['seed']})"


class OpenStream:
    """A stream that stands somewhere; its threads end when it is collected."""

    def __init__(self, core: _core.Stream) -> None:
        self._core = core
        self.source: _core.SampleSource = core.source()

    def position(self, count: int) -> str:
        """The position behind `count` samples, all of which were handed out; fits any rank, thread count or batch size.

        Raises:
            CheckpointError: if the stream does not stand there.
        """
        return self._core.position(count)

    def pieces_at(self, index: int) -> list[dict[str, Any]]:
        """As `pieces`, for a sample that is yet to come; the stream goes there, and leaves all before it behind."""
        self._core.go_to(index)
        return self.pieces(index)

    def counts(self) -> dict[str, int]:
        """Made so far: `samples` and `tokens` since it was opened; `documents` and `bad_records` since the start of the
        data; the `epoch` that is being read.
        """
        return self._core.counts()

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """Where the tokens of a sample come from, while the stream holds it: source, line or row, bytes, tokens."""
        names = self._core.names
        return [
            {
                "path": str(names[source]),
                "number": number,
                "byte": offset,
                "counted_from": counted_from,
                "first_token": first,
                "tokens": count,
            }
            for source, number, offset, counted_from, first, count in self._core.origins(index)
        ]


def _find_part(split: str | None, split_name: str) -> tuple[int, int] | None:
    """The part of the documents as a range of shares in 2^32; None for all."""
    from megaflow.dataset import SPLIT_NAMES

    if split is None:
        return None
    if split_name not in SPLIT_NAMES:
        raise ConfigError(f"split_name = {split_name!r}: expected one of {', '.join(SPLIT_NAMES)}")
    part = _core.split_sequences(split, 1 << 32)[SPLIT_NAMES.index(split_name)]
    if part is None or part[0] == part[1]:
        raise ConfigError(f"split = {split!r}: the {split_name} part is empty; give it a share")
    return part


def _size_of(kind: str, name: str, item: Any) -> int | None:
    if kind == "file":
        try:
            return os.stat(name).st_size  # noqa: PTH116 - a name of any bytes
        except OSError:
            return None
    return getattr(item, "size_bytes", None)


class StreamBlend:
    """Streams blended with other streams, and with sets whose samples stay, at exact shares.

    At every prefix each set has given its share to within two samples; which set gives a sample is computed, so that
    the blend is as exact to resume as its streams are.

    Args:
        datasets: `StreamingDataset`s that do not end (`epochs=None`), and `GPTDataset`s or blends that hold what is
            drawn of them. They agree in `seq_len`.
        weights: shares, in any unit.
        num_samples: samples of the blend.

    Raises:
        ConfigError: if weights mean nothing, or the sets do not agree.
    """

    add_extra_token = True

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], *, num_samples: int) -> None:
        from megaflow.blend import check_weights

        check_weights(weights, [repr(dataset) for dataset in datasets])
        first = datasets[0]
        for name in ("seq_len", "add_extra_token", "pad_id"):
            if any(getattr(dataset, name) != getattr(first, name) for dataset in datasets):
                raise ConfigError(f"the datasets of a blend must have the same {name}")
        if not first.add_extra_token:
            raise ConfigError("a blend of streams needs samples with the extra token")
        self.datasets = list(datasets)
        self.weights = [float(weight) for weight in weights]
        self.num_samples = num_samples
        self.seq_len, self.pad_id = first.seq_len, first.pad_id

    @property
    def description(self) -> dict[str, Any]:
        """Everything that determines the samples and their order, in plain types."""
        parts = [dataset.description for dataset in self.datasets]
        return {"order": "blend of streams", "weights": self.weights, "datasets": parts}

    @property
    def fingerprint(self) -> str:
        """A key of the samples and their order."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self.num_samples

    def open_at(self, position: str | None = None) -> OpenBlend:
        """Opens every stream where it stands; the others stay as they are."""
        positions: list[str | None] = [None] * len(self.datasets) if position is None else json.loads(position)
        if not isinstance(positions, list) or len(positions) != len(self.datasets):
            raise CheckpointError("the saved position is not that of a blend of as many sets")
        opened = [
            dataset.open_at(at) if hasattr(dataset, "open_at") else None
            for dataset, at in zip(self.datasets, positions, strict=True)
        ]
        sources = [
            dataset.source if part is None else part.source for dataset, part in zip(self.datasets, opened, strict=True)
        ]
        return OpenBlend(_core.Blend.shares(sources, [(0, self.weights)], self.num_samples), opened)

    def __repr__(self) -> str:
        return f"StreamBlend({self.num_samples} samples of {self.seq_len} tokens from {len(self.datasets)} sets)"


class OpenBlend:
    """A blend whose streams stand somewhere."""

    def __init__(self, core: _core.Blend, opened: Sequence[OpenStream | None]) -> None:
        self._core = core
        self._opened = opened
        self.source = core.source()

    def position(self, count: int) -> str:
        """The position behind `count` samples of the blend; see `OpenStream.position`."""
        counts = self._core.counts(count)
        positions = [
            None if part is None else part.position(own) for part, own in zip(self._opened, counts, strict=True)
        ]
        return json.dumps(positions)

    def counts(self) -> dict[str, int]:
        """Sums over the streams; see `OpenStream.counts`. The epoch is the largest of theirs."""
        parts = [part.counts() for part in self._opened if part is not None]
        sums = {name: sum(part[name] for part in parts) for name in ("samples", "tokens", "documents", "bad_records")}
        return {**sums, "epoch": max((part["epoch"] for part in parts), default=0)}
