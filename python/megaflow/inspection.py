"""What a pair holds, one document of it, one sample of it."""

import os
from collections import Counter
from typing import Any

import numpy as np

from megaflow.counting import ID_LIMIT, Advance, histogram, id_counts, index_bytes, length_counts, percentiles
from megaflow.dataset import GPTDataset
from megaflow.errors import TokenizerError
from megaflow.indexed import IndexedDataset, to_position
from megaflow.merging import BytesProgress
from megaflow.provenance import origin_of, tokenizer_for
from megaflow.sidecar import read_sidecar
from megaflow.tokenizer import Tokenizer

StrPath = str | os.PathLike[str]
SHARES = (0.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0, 100.0)


def describe(prefix: StrPath, *, progress: BytesProgress | None = None) -> dict[str, Any]:
    """Counts, token type, tokenizer, sources and document lengths of a pair, in plain types. Reads the index once.

    Args:
        prefix: of the pair.
        progress: called with bytes read and in all.

    Raises:
        MissingFileError, FileAccessError, DataFormatError: as `IndexedDataset`.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    counts = length_counts(dataset, _advance_to(progress, index_bytes(dataset)))
    known = sidecar or {}
    return {
        **_counts(dataset, counts),
        "histogram": histogram(counts),
        "sidecar": sidecar is not None,
        "tokenizer": known.get("tokenizer"),
        "verified": known.get("verified"),
        "megaflow_version": known.get("megaflow_version"),
        "command": known.get("command"),
        "sources": known.get("sources", []),
    }


def _counts(dataset: IndexedDataset, counts: Counter[int]) -> dict[str, Any]:
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "empty_documents": counts[0],
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": str(dataset.dtype),
        "bin_bytes": dataset.num_tokens * dataset.dtype.itemsize,
        "lengths": {f"p{share:g}": length for share, length in zip(SHARES, percentiles(counts, SHARES), strict=True)},
    }


def _advance_to(progress: BytesProgress | None, total: int) -> Advance | None:
    """What turns bytes that were just read into bytes read so far."""
    if progress is None:
        return None
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return advance


def statistics(
    prefix: StrPath, *, top: int = 10, tokenizer: Tokenizer | None = None, progress: BytesProgress | None = None
) -> dict[str, Any]:
    """Counts, percentiles of document length, most frequent ids and share of special ids. Reads each token once.

    Args:
        prefix: of the pair.
        top: how many of the most frequent ids.
        tokenizer: which ids are special; by default the sidecar's, and just its end of document where that is not at
            hand.
        progress: called with bytes read and in all.

    Raises:
        MissingFileError, FileAccessError, DataFormatError: as `IndexedDataset`.
        TokenizerError: if `tokenizer` is not the one of the sidecar.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    record = (sidecar or {}).get("tokenizer") or {}
    try:
        tokenizer = tokenizer_for(sidecar, tokenizer)
    except TokenizerError:
        if tokenizer is not None:
            raise
    eod_id = record.get("eod_id")
    special = sorted({*(tokenizer.special_ids if tokenizer else ()), *([] if eod_id is None else [eod_id])})
    advance = _advance_to(progress, dataset.num_tokens * dataset.dtype.itemsize + index_bytes(dataset))
    counts, outside = id_counts(dataset, advance)
    order = np.argsort(-counts, kind="stable")[:top]
    tokens = max(dataset.num_tokens, 1)
    frequent = [
        {
            "id": int(number),
            "count": int(counts[number]),
            "share": float(counts[number] / tokens),
            "text": _text(tokenizer, [int(number)]),
        }
        for number in order
        if counts[number]
    ]
    num_special = int(sum(int(counts[number]) for number in special if number < len(counts)))
    return {
        **_counts(dataset, length_counts(dataset, advance)),
        "mean_length": dataset.num_tokens / max(dataset.num_documents, 1),
        "distinct_ids": int(np.count_nonzero(counts)),
        "vocab_size": record.get("vocab_size") or (tokenizer.vocab_size if tokenizer else None),
        "impossible_ids": outside,
        "id_limit": ID_LIMIT,
        "frequent_ids": frequent,
        "special_ids": special if tokenizer or special else None,
        "special_tokens": num_special if tokenizer or special else None,
    }


def show_document(
    prefix: StrPath, number: int, *, tokenizer: Tokenizer | None = None, as_sequence: bool = False
) -> dict[str, Any]:
    """One document, or one sequence: its ids, its text and its place in the input.

    Args:
        prefix: of the pair.
        number: counted from 0, or from the end if negative.
        tokenizer: by default the sidecar's; where none is at hand there is no text, and `no_text` says why.
        as_sequence: `number` counts sequences.

    Raises:
        SampleIndexError: if there is no such document.
        TokenizerError: if `tokenizer` is not the one of the sidecar.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    decoder, no_text = _decoder(sidecar, tokenizer)
    if as_sequence:
        sequence = to_position(number, dataset.num_sequences, "sequence")
        document, tokens, sequences = document_of(dataset, sequence), dataset[sequence], [sequence, sequence + 1]
    else:
        document = to_position(number, dataset.num_documents, "document")
        tokens = dataset.document(document)
        sequences = dataset.document_boundaries[document : document + 2].tolist()
    origin = origin_of(sidecar, document)
    return {
        "prefix": dataset.prefix,
        "document": document,
        "sequences": sequences,
        "lengths": dataset.sequence_lengths[sequences[0] : sequences[1]].tolist(),
        "ids": tokens.tolist(),
        "text": _text(decoder, tokens),
        "no_text": no_text,
        "origin": None if origin is None else origin.as_dict(),
        "place": _place(origin),
    }


def show_sample(
    prefix: StrPath,
    number: int,
    *,
    seq_len: int,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One training sample: the pieces of documents that it is made of, with text and place in the input of each.

    Args:
        prefix: of the pair.
        number: of the sample in the order of training, from 0.
        seq_len: tokens that the model sees of one sample.
        tokenizer: as for `show_document`.
        options: `num_samples`, `seed`, `split`, `split_name` of `GPTDataset`; they decide the order.

    Raises:
        SampleIndexError: if there is no such sample.
        ConfigError: if an option is wrong.
        TokenizerError: if `tokenizer` is not the one of the sidecar.
    """
    dataset = GPTDataset(prefix, seq_len=seq_len, **options)
    indexed = dataset.indexed
    sidecar = read_sidecar(indexed.prefix)
    decoder, no_text = _decoder(sidecar, tokenizer)
    pieces = []
    for sequence, first, length in dataset.pieces(number):
        tokens = indexed[sequence][first : first + length]
        document = document_of(indexed, sequence)
        origin = origin_of(sidecar, document)
        piece = {
            "sequence": sequence,
            "document": document,
            "first_token": first,
            "tokens": length,
            "sequence_tokens": int(indexed.sequence_lengths[sequence]),
            "ids": tokens.tolist(),
            "text": _text(decoder, tokens),
            "origin": None if origin is None else origin.as_dict(),
            "place": _place(origin),
        }
        pieces.append(piece)
    return {
        "prefix": indexed.prefix,
        "sample": to_position(number, len(dataset), "sample"),
        "samples": len(dataset),
        "seq_len": seq_len,
        "epochs": dataset.num_epochs,
        "pieces": pieces,
        "no_text": no_text,
    }


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    """The document that holds a sequence. Empty documents hold none, so the last that begins there is meant."""
    return int(np.searchsorted(dataset.document_boundaries, sequence, side="right")) - 1


def _decoder(sidecar: dict[str, Any] | None, named: Tokenizer | None) -> tuple[Tokenizer | None, str | None]:
    try:
        return tokenizer_for(sidecar, named), None
    except TokenizerError as error:
        if named is not None:
            raise
        return None, str(error)


def _text(tokenizer: Tokenizer | None, ids: Any) -> str | None:
    try:
        return None if tokenizer is None else tokenizer.decode(ids)
    except (TokenizerError, OverflowError):
        return None


def _place(origin: Any) -> str | None:
    return None if origin is None else str(origin)
