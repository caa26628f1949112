"""Token files of datatrove, nanoGPT and llm.c to `.bin/.idx`. docs/inspect-and-merge.md describes the formats."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megaflow import _core
from megaflow.errors import ConfigError, DataFormatError, FileAccessError, MissingFileError, NoDocumentsError
from megaflow.merging import BytesProgress, StrPath
from megaflow.tokenizer import Tokenizer

_PIECE_TOKENS = 1 << 22
_MAX_LENGTH = 2**31 - 1
_U16_VOCAB_LIMIT = 65_500
_HEADER_BYTES = 1024
LLMC_KINDS = {(20240520, 1): (2, 50256), (20240801, 7): (4, 128000)}
"""Magic and version of an llm.c shard: bytes of a token, and the id that begins a document."""
Format = Literal["datatrove", "nanogpt", "llmc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What was imported."""

    prefix: str
    dtype: str
    documents: int
    empty_documents: int
    tokens: int
    notes: tuple[str, ...]
    """What the user should know of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A checked input: little-endian unsigned tokens from byte `begin` on."""

    path: Path
    begin: int
    item_bytes: int
    num_tokens: int
    eod_id: int | None = None
    """Id that separates documents, where there is no index."""
    index: Path | None = None
    """datatrove's ends of documents."""


def import_tokens(
    inputs: Sequence[StrPath],
    output_prefix: StrPath,
    *,
    from_format: Format,
    eod_id: int | None = None,
    tokenizer: Tokenizer | None = None,
    progress: BytesProgress | None = None,
) -> ImportReport:
    """Turns token files into one pair with a sidecar, in the order of the inputs. No token is added or left out.

    nanoGPT: `eod_id` ends a document. llm.c: it begins one, and a document may go on in the next shard. datatrove: the
    `.index` beside each file says where documents end.

    Args:
        inputs: the files.
        output_prefix: of the pair, without `.bin`; nothing is appended to it.
        from_format: what the files are.
        eod_id: id that separates documents; nanoGPT needs it, llm.c shards tell it themselves.
        tokenizer: that made the tokens. It is recorded, and ids outside its vocabulary are refused.
        progress: called with tokens done and in all.

    Raises:
        ConfigError: if `eod_id` is missing, or means nothing.
        MissingFileError, FileAccessError: an input or the output cannot be used.
        DataFormatError: a file is not of this format, is cut, or holds an impossible id.
        NoDocumentsError: there is no token.
    """
    if from_format == "nanogpt" and eod_id is None:
        raise ConfigError("nanoGPT files do not say where documents end: give --eod-id (50256 for GPT-2's tokens)")
    if from_format == "datatrove" and eod_id is not None:
        raise ConfigError("--eod-id means nothing for datatrove files: their .index says where documents end")
    files = [_open(Path(path), from_format, eod_id) for path in inputs]
    total = sum(file.num_tokens for file in files)
    if total == 0:
        raise NoDocumentsError(f"the {len(files)} files hold no token; nothing was written")
    writer = _Writer(Path(output_prefix), _dtype(files, tokenizer), tokenizer, total, progress)
    try:
        for file in files:
            writer.take(file, from_format)
        return writer.publish(files, from_format, tokenizer)
    finally:
        writer.core.close()


def _open(path: Path, kind: Format, eod_id: int | None) -> _File:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such input file") from None
    if not path.is_file():
        raise FileAccessError(f"{path}: expected a file of tokens, found a folder")
    if kind == "llmc":
        return _open_llmc(path, size, eod_id)
    if kind == "datatrove":
        return _open_datatrove(path, size)
    if size % 2:
        raise DataFormatError(f"{path}: {size} bytes are no whole number of 16-bit tokens; is it a nanoGPT file?")
    return _File(path=path, begin=0, item_bytes=2, num_tokens=size // 2, eod_id=eod_id)


def _open_llmc(path: Path, size: int, eod_id: int | None) -> _File:
    with path.open("rb") as file:
        head = np.frombuffer(file.read(_HEADER_BYTES), dtype="<i4")
    if len(head) < _HEADER_BYTES // 4:
        raise DataFormatError(f"{path}: truncated: the header of an llm.c shard has 1024 bytes, the file has {size}")
    magic, version, num_tokens = (int(value) for value in head[:3])
    if (magic, version) not in LLMC_KINDS:
        known = ", ".join(f"magic {magic} version {version}" for magic, version in LLMC_KINDS)
        raise DataFormatError(f"{path}: expected the header of an llm.c shard ({known}), found {magic}, {version}")
    item_bytes, known_eod = LLMC_KINDS[magic, version]
    if size != _HEADER_BYTES + num_tokens * item_bytes:
        end = _HEADER_BYTES + num_tokens * item_bytes
        raise DataFormatError(
            f"{path}: the header counts {num_tokens} tokens, which end at byte {end}, but the file has {size} bytes; "
            "it is truncated, or carries bytes that do not belong to it"
        )
    separator = known_eod if eod_id is None else eod_id
    return _File(path=path, begin=_HEADER_BYTES, item_bytes=item_bytes, num_tokens=num_tokens, eod_id=separator)


def _open_datatrove(path: Path, size: int) -> _File:
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        raise MissingFileError(f"{index}: a datatrove file needs its index of document ends beside it")
    index_bytes = index.stat().st_size
    if index_bytes % 8:
        raise DataFormatError(f"{index}: {index_bytes} bytes are no whole number of 64-bit document ends")
    ends = _ends(index)
    num_tokens = int(ends[-1]) if len(ends) else 0
    item_bytes, rest = divmod(size, num_tokens) if num_tokens else (2, size)
    if rest or item_bytes not in (2, 4):
        raise DataFormatError(
            f"{path}: its index ends at token {num_tokens}, but {size} bytes are neither 2 nor 4 for each token; "
            "the file is truncated, or belongs to another index"
        )
    step = 1 << 20
    for begin in range(0, len(ends), step):
        piece = ends[max(begin - 1, 0) : begin + step]
        if len(piece) > 1 and bool((piece[1:] < piece[:-1]).any()):
            place = max(begin - 1, 0) + int(np.argmax(piece[1:] < piece[:-1])) + 1
            raise DataFormatError(
                f"{index}: document end {place} (byte {8 * place}) is before the one that precedes it"
            )
    return _File(path=path, begin=0, item_bytes=item_bytes, num_tokens=num_tokens, index=index)


def _ends(index: Path) -> NDArray[np.uint64]:
    if index.stat().st_size == 0:
        return np.zeros(0, dtype="<u8")
    return np.memmap(index, dtype="<u8", mode="r")


def _dtype(files: list[_File], tokenizer: Tokenizer | None) -> np.dtype[Any]:
    """Type of the pair: by the vocabulary as Megatron-LM does, by the files where it is not known."""
    if tokenizer is not None:
        return np.dtype("uint16" if tokenizer.vocab_size < _U16_VOCAB_LIMIT else "int32")
    return np.dtype("uint16" if all(file.item_bytes == 2 for file in files) else "int32")


class _Writer:
    """Cuts tokens into documents of one sequence each."""

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype[Any],
        tokenizer: Tokenizer | None,
        total: int,
        progress: BytesProgress | None,
    ) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.limit = tokenizer.vocab_size if tokenizer is not None else int(np.iinfo(dtype).max) + 1
        self.core = _core.PairWriter(prefix, dtype.name)
        self.open_tokens = 0
        """Tokens of the document that has not ended yet."""
        self.ended = 0
        """Documents that have ended."""
        self.done, self.total, self.progress = 0, total, progress
        self.first_documents: list[int] = []

    def take(self, file: _File, kind: Format) -> None:
        """Appends the tokens of a file, and the ends of documents in it."""
        if kind != "llmc":
            self._end_open_document()
        self.first_documents.append(self.ended + bool(self.open_tokens))
        at = 0
        for piece in _read(file):
            self._check_ids(file, at, piece)
            self._append(piece, _document_ends(file, kind, at, piece, bool(self.open_tokens)))
            at += len(piece)
        if file.index is not None and not file.num_tokens:
            self._write(np.zeros(0, dtype=self.dtype), np.zeros(len(_ends(file.index)), dtype=np.int64))

    def _check_ids(self, file: _File, at: int, piece: NDArray[Any]) -> None:
        if len(piece) and int(piece.max()) >= self.limit:
            place = int(np.argmax(piece >= self.limit))
            byte = file.begin + (at + place) * file.item_bytes
            raise DataFormatError(
                f"{file.path}: token {at + place} (byte {byte}) is id {int(piece[place])}; "
                f"expected ids below {self.limit}"
            )

    def _append(self, piece: NDArray[Any], ends: NDArray[np.int64]) -> None:
        lengths = np.diff(np.concatenate(([-self.open_tokens], ends)))
        self.open_tokens = len(piece) - int(ends[-1]) if len(ends) else self.open_tokens + len(piece)
        self._check_lengths(lengths)
        self._write(piece, lengths)
        self.done += len(piece)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        longest = max(self.open_tokens, int(lengths.max()) if len(lengths) else 0)
        if longest > _MAX_LENGTH:
            raise DataFormatError(
                f"a document of at least {longest} tokens is longer than the {_MAX_LENGTH} that an .idx can hold; "
                "is --eod-id right?"
            )

    def _write(self, piece: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        tokens = np.ascontiguousarray(piece, dtype=self.dtype.newbyteorder("<"))
        has_tokens = lengths > 0
        self.core.append(
            tokens.view(np.uint8),
            np.ascontiguousarray(lengths[has_tokens], dtype=np.int32),
            np.ascontiguousarray(has_tokens, dtype=np.uint32),
        )
        self.ended += len(lengths)

    def _end_open_document(self) -> bool:
        is_open = self.open_tokens > 0
        if is_open:
            self._write(np.zeros(0, dtype=self.dtype), np.array([self.open_tokens]))
            self.open_tokens = 0
        return is_open

    def publish(self, files: list[_File], kind: Format, tokenizer: Tokenizer | None) -> ImportReport:
        """Ends the pair; its sidecar names the files."""
        is_open = self._end_open_document()
        found = self.core.finish()
        from megaflow import __version__

        ends = [*self.first_documents[1:], found["num_documents"]]
        sources = [
            {
                "path": str(file.path),
                "format": kind,
                "range": None,
                "content": _core.checksum_file(file.path),
                "hashed": "all",
                "num_lines": end - first,
                "num_records": end - first,
                "num_documents": end - first,
                "first_document": first,
                "num_rejected": 0,
                "lines_without_document": [],
                "lines_without_document_complete": True,
            }
            for file, first, end in zip(files, self.first_documents, ends, strict=True)
        ]
        counts = {name: found.pop(name) for name in tuple(found) if name.startswith("num_")}
        sidecar = {
            "format_version": 1,
            "megaflow_version": __version__,
            "command": list(sys.argv),
            "json_key": "",
            "dtype": self.dtype.name,
            **counts,
            "tokenizer": None if tokenizer is None else _tokenizer_record(tokenizer, files[0], kind),
            "sources": sources,
            **found,
        }
        prefix = self.core.publish(json.dumps(sidecar, indent=2, ensure_ascii=False) + "\n")
        return ImportReport(
            prefix=str(prefix),
            dtype=self.dtype.name,
            documents=counts["num_documents"],
            empty_documents=counts["num_empty_documents"],
            tokens=counts["num_tokens"],
            notes=tuple(_notes(files, kind, is_open, tokenizer)),
        )


def _read(file: _File) -> Iterator[NDArray[Any]]:
    kind = np.dtype("<u2" if file.item_bytes == 2 else "<u4")
    rest = file.num_tokens
    with file.path.open("rb") as stream:
        stream.seek(file.begin)
        while rest:
            data = stream.read(min(rest, _PIECE_TOKENS) * file.item_bytes)
            if not data or len(data) % file.item_bytes:
                raise DataFormatError(f"{file.path}: ended {rest} tokens early; it was changed while it was read")
            piece = np.frombuffer(data, dtype=kind)
            rest -= len(piece)
            yield piece


def _document_ends(file: _File, kind: Format, at: int, piece: NDArray[Any], is_open: bool) -> NDArray[np.int64]:
    """Where documents end in a piece, counted from its begin; `at` is the place of the piece in the file."""
    if file.index is not None:
        ends = _ends(file.index)
        # An end where the piece begins was taken by the piece before, with the empty documents that end there too.
        first = int(np.searchsorted(ends, np.uint64(at), side="right")) if at else 0
        last = int(np.searchsorted(ends, np.uint64(at + len(piece)), side="right"))
        return ends[first:last].astype(np.int64) - at
    places = np.flatnonzero(piece == file.eod_id)
    if kind == "nanogpt":
        return places + 1
    return places if is_open else places[places > 0]


def _tokenizer_record(tokenizer: Tokenizer, file: _File, kind: Format) -> dict[str, Any]:
    eod = tokenizer._core.eod(is_needed=False)
    is_appended = kind == "nanogpt" and eod is not None and eod[1] == file.eod_id
    return {
        "type": tokenizer.type,
        "engine": tokenizer.engine,
        "files": [
            {"name": Path(path).name, "sha256": sha256(Path(path).read_bytes()).hexdigest()}
            for path in tokenizer._core.files
        ],
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod_token": None if eod is None else eod[0],
        "eod_id": None if eod is None else eod[1],
        "append_eod": is_appended,
        "add_bos": False,
        "add_eos": False,
        "add_special_tokens": False,
        "special_tokens_in_text": "unknown",
        "special_tokens_in_text_hits": 0,
    }


def _notes(files: list[_File], kind: Format, is_open: bool, tokenizer: Tokenizer | None) -> Iterator[str]:
    if kind == "nanogpt" and is_open:
        yield f"the last document does not end in id {files[-1].eod_id}"
    for file in files:
        if kind == "datatrove" and file.path.with_name(f"{file.path.name}.loss").exists():
            yield f"{file.path}.loss: loss masks are not part of .bin/.idx and were left out"
    if tokenizer is None:
        yield "no tokenizer was named, so the sidecar names none (--tokenizer)"


def default_output(inputs: Sequence[StrPath]) -> str:
    """Output prefix of a single input: its path without its suffix, and `_document`."""
    if len(inputs) != 1:
        raise ConfigError(f"{len(inputs)} inputs need a name for their output: --output-prefix")
    return f"{os.path.splitext(os.fspath(inputs[0]))[0]}_document"  # noqa: PTH122 - keeps the spelling of the folder
