"""`.bin/.idx` to JSON lines or Parquet, of text or of ids."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megaflow.counting import boundaries_between, tokens_before
from megaflow.errors import ConfigError, DataFormatError, FileAccessError, tell_break
from megaflow.indexed import IndexedDataset
from megaflow.merging import BytesProgress, StrPath
from megaflow.provenance import tokenizer_for
from megaflow.sidecar import read_sidecar
from megaflow.tokenizer import Tokenizer

_PIECE_TOKENS, _PIECE_DOCUMENTS = 1 << 20, 1 << 16
_EMPTY: dict[bool, Any] = {True: "", False: []}
"""What an empty document is, as text and as ids."""


def export(
    prefix: StrPath,
    output: StrPath,
    *,
    to: Literal["jsonl", "parquet"] = "jsonl",
    content: Literal["text", "ids"] = "text",
    tokenizer: Tokenizer | None = None,
    progress: BytesProgress | None = None,
) -> int:
    """Writes one row for each document, in order, empty ones included.

    A row has one field, `text` or `ids`. If any document of the pair has more than one sequence, the field of every row
    is the list of its sequences, as preprocessing takes them; else it is the one text, or the one list of ids. Text
    leaves out the end-of-document token behind a document; ids are all ids.

    Args:
        prefix: of the pair.
        output: file to write, which must not exist; `-` is standard output, for JSON lines.
        to: format of the file.
        content: what a row holds.
        tokenizer: for text; by default the sidecar's.
        progress: called with documents done and in all.

    Returns:
        Number of documents.

    Raises:
        ConfigError: if `output` exists, or pyarrow is missing for Parquet.
        TokenizerError: if no tokenizer is at hand for text, or it is not the sidecar's.
        MissingFileError, FileAccessError, DataFormatError: as `IndexedDataset`, or the output cannot be written.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    is_nested = _has_several_sequences(dataset)
    decoder = _Decoder(sidecar, tokenizer) if content == "text" else None
    write = _write_parquet if to == "parquet" else _write_jsonl
    if os.fspath(output) == "-" and to == "parquet":
        raise ConfigError("Parquet cannot go to standard output; name a file with --output")
    with _staged(output) as path:
        write(path, _pieces(dataset, progress), content, decoder, is_nested)
    return dataset.num_documents


class _Piece:
    """Documents one after the other: their tokens, and where sequences and documents end among them."""

    def __init__(self, dataset: IndexedDataset, begin: int, end: int) -> None:
        boundaries = boundaries_between(dataset, begin, end)
        lengths = dataset.sequence_lengths[boundaries[0] : boundaries[-1]].astype(np.int64)
        ends = np.cumsum(lengths)
        self.sequence_ends: NDArray[np.int64] = ends
        self.sequence_begins: NDArray[np.int64] = ends - lengths
        self.boundaries = boundaries - boundaries[0]
        """First sequence of each document, then the number of sequences."""
        first = 0
        if len(lengths):
            first = dataset._core.sequence_tokens(int(boundaries[0]))[0]
            last = dataset._core.sequence_tokens(int(boundaries[-1]) - 1)[1]
            if last != first + int(ends[-1]):
                raise DataFormatError(
                    f"{dataset.prefix}.idx: sequences {boundaries[0]} to {boundaries[-1] - 1} have {ends[-1]} tokens, "
                    f"but lie at tokens {first} to {last} of the .bin; the file is damaged: write or copy it again"
                )
        self.tokens = dataset._tokens[first : first + int(ends[-1] if len(ends) else 0)]


def _pieces(dataset: IndexedDataset, progress: BytesProgress | None) -> Iterator[_Piece]:
    begin, count = 0, dataset.num_documents
    while begin < count:
        end = min(count, begin + _PIECE_DOCUMENTS)
        totals = tokens_before(dataset, boundaries_between(dataset, begin, end))
        # At least one document, and no more than fit into a piece.
        end = begin + max(1, int(np.searchsorted(totals, _PIECE_TOKENS, side="right")) - 1)
        yield _Piece(dataset, begin, end)
        begin = end
        if progress is not None:
            progress(begin, count)


class _Decoder:
    def __init__(self, sidecar: dict[str, Any] | None, named: Tokenizer | None) -> None:
        self.tokenizer = tokenizer_for(sidecar, named)
        record = (sidecar or {}).get("tokenizer")
        if record is None:
            bos, eos, eod = None, None, self.tokenizer.eod_id
        else:
            bos, eos = (record[f"{end}_id"] if record.get(f"add_{end}") else None for end in ("bos", "eos"))
            eod = record["eod_id"] if record["append_eod"] else None
        self.begin: int | None = bos
        self.ends = [end for end in (eod, eos) if end is not None]
        """Ids behind each document, from the outermost."""

    def texts(self, piece: _Piece) -> list[str]:
        """Text of each sequence, without what was put around the documents."""
        tokens = piece.tokens.astype(np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.tokenizer.vocab_size:
            raise DataFormatError(
                f"ids from {tokens.min()} to {tokens.max()} are not all in the vocabulary of "
                f"{self.tokenizer.vocab_size} ids; is this the tokenizer of the data?"
            )
        begins, ends = piece.sequence_begins.copy(), piece.sequence_ends.copy()
        has_sequences = np.diff(piece.boundaries) > 0
        first, last = piece.boundaries[:-1][has_sequences], piece.boundaries[1:][has_sequences] - 1
        for end in self.ends:
            full = last[ends[last] > begins[last]]
            ends[full] -= tokens[ends[full] - 1] == end
        if self.begin is not None:
            full = first[ends[first] > begins[first]]
            begins[full] += tokens[begins[full]] == self.begin
        return self.tokenizer._core.decode_many(tokens.astype(np.uint32), begins, ends)


def _rows(piece: _Piece, content: str, decoder: _Decoder | None, is_nested: bool) -> Iterator[Any]:
    """What the field of each document holds."""
    begins, ends, bounds = piece.sequence_begins.tolist(), piece.sequence_ends.tolist(), piece.boundaries.tolist()
    texts = None if decoder is None else decoder.texts(piece)

    def sequence(index: int) -> Any:
        return piece.tokens[begins[index] : ends[index]].tolist() if texts is None else texts[index]

    empty = _EMPTY[content == "text"]
    for begin, end in pairwise(bounds):
        if is_nested:
            yield [sequence(index) for index in range(begin, end)]
        else:
            yield sequence(begin) if begin < end else empty


def _write_jsonl(
    path: Path | None, pieces: Iterator[_Piece], content: str, decoder: _Decoder | None, is_nested: bool
) -> None:
    with _text_file(path) as file:
        for piece in pieces:
            rows = _rows(piece, content, decoder, is_nested)
            file.write("".join(json.dumps({content: row}, ensure_ascii=False) + "\n" for row in rows))


def _write_parquet(
    path: Path | None, pieces: Iterator[_Piece], content: str, decoder: _Decoder | None, is_nested: bool
) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
        found = f"--to parquet needs pyarrow{tell_break(error, 'pyarrow')}"
        raise ConfigError(f"{found}: pip install pyarrow, or take --to jsonl") from None
    value = pa.large_string() if content == "text" else pa.list_(pa.int64())
    schema = pa.schema([(content, pa.list_(value) if is_nested else value)])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for piece in pieces:
            writer.write_table(pa.table([_column(pa, piece, decoder, is_nested)], schema=schema))


def _column(pa: Any, piece: _Piece, decoder: _Decoder | None, is_nested: bool) -> Any:
    """The field of all documents, without a Python object for any token."""
    if decoder is not None:
        values = pa.array(decoder.texts(piece), type=pa.large_string())
    else:
        offsets = np.append(piece.sequence_begins, len(piece.tokens)).astype(np.int32)
        values = pa.ListArray.from_arrays(pa.array(offsets), pa.array(piece.tokens.astype(np.int64)))
    if is_nested:
        return pa.ListArray.from_arrays(pa.array(piece.boundaries.astype(np.int32)), values)
    if len(values) + 1 == len(piece.boundaries):
        return values
    # An empty document has no sequence: take an empty value for it.
    missing = pa.array([_EMPTY[decoder is not None]], type=values.type)
    begins = piece.boundaries[:-1]
    return pa.concat_arrays([values, missing]).take(
        pa.array(np.where(np.diff(piece.boundaries) > 0, begins, len(values)))
    )


def _has_several_sequences(dataset: IndexedDataset) -> bool:
    boundaries = dataset.document_boundaries
    step = 1 << 20
    return any(
        bool((np.diff(boundaries[begin : begin + step + 1]) > 1).any()) for begin in range(0, len(boundaries), step)
    )


@contextmanager
def _staged(output: StrPath) -> Iterator[Path | None]:
    """A path beside `output` that gets its name when all went well; None for standard output."""
    if os.fspath(output) == "-":
        yield None
        return
    path = Path(output)
    if path.exists():
        raise ConfigError(f"{path} exists; name another file with --output, or remove it")
    staged = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield staged
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.rename(path)
    except OSError as error:
        if isinstance(error, FileAccessError) or (error.filename is None and not error.strerror):
            raise
        raise FileAccessError(f"{path}: cannot write it: {error.strerror or error}") from error
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def _text_file(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
    else:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
