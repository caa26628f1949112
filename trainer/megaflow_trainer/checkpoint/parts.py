"""One file of tensors of a checkpoint, in the safetensors format: a header of names, dtypes and places, then raw bytes.

Files are written here and not by the safetensors package, because it copies every tensor once more and leaves no
moment for the sum; they are read by the package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaflow.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the dtypes that a run has."""
BLOCK_BYTES = 1 << 20


def write_part(path: Path, tensors: Mapping[str, Tensor], *, on_progress: Callable[[], None]) -> tuple[int, str]:
    """Write tensors that lie in the CPU's memory, and flush them to the disk.

    Args:
        path: the file.
        tensors: by name; contiguous or not.
        on_progress: called after each tensor.

    Returns:
        Size of the file in bytes and its SHA-256.

    Raises:
        OSError: if the disk refuses.
    """
    header, place = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def put(block: Any) -> None:
            digest.update(block)
            file.write(block)

        put(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            put(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            on_progress()
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


@contextmanager
def open_part(path: Path) -> Iterator[Any]:
    """A file of tensors, to be read.

    Raises:
        CheckpointError: if it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def sum_file(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
