"""The same records in every container that preprocessing reads."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

LINES: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": lambda data: data,
    ".jsonl.gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),
    ".jsonl.zst": lambda data: zstandard.compress(data),
    ".jsonl.bz2": bz2.compress,
    ".jsonl.xz": lzma.compress,
}
"""Ending of a file of JSON lines, and how its bytes are packed; gzip in two members."""

TABLES = (".parquet", ".arrow", ".arrows")
"""Ending of a table."""


def write_lines(folder: Path, name: str, ending: str, data: bytes) -> Path:
    """Writes lines, packed as the ending says."""
    path = folder / f"{name}{ending}"
    path.write_bytes(LINES[ending](data))
    return path


def table_of(texts: Sequence[Any]) -> pa.Table:
    """A table whose column `text` holds these values, with another column beside it."""
    return pa.table({"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts)})


def write_table(folder: Path, name: str, ending: str, table: pa.Table) -> Path:
    """Writes a table in several row groups or batches."""
    path = folder / f"{name}{ending}"
    rows = max(1, table.num_rows // 3)
    if ending == ".parquet":
        pq.write_table(table, path, compression="zstd", row_group_size=rows)
        return path
    new = pa.ipc.new_file if ending == ".arrow" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression="lz4" if ending == ".arrow" else None)
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path
