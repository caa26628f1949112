"""What a job reads: files, folders, patterns, lists, remote objects, Arrow streams."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from megaflow import _core
from megaflow.errors import ConfigError, FileAccessError, MissingFileError, tell_break


@runtime_checkable
class ArrowStream(Protocol):
    """Any object that hands over an Arrow stream: tables of pyarrow, polars, duckdb, Hugging Face datasets."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A capsule that holds an ArrowArrayStream."""


Input: TypeAlias = "str | os.PathLike[str] | ArrowStream"
CoreInput: TypeAlias = "tuple[str, str, Any, tuple[int, int] | None]"

_REMOTE = re.compile(r"^[a-z][a-z0-9+.-]*://")


def resolve_inputs(
    inputs: Input | Sequence[Input], *, takes_text: bool = False, notes: list[str] | None = None
) -> list[CoreInput]:
    """Inputs as the core takes them, in reading order.

    Args:
        inputs: names (a file, a folder, a pattern, `@list`, `-`, a URL such as `s3://bucket/part.parquet`) or tables.
        takes_text: whether folders are searched for `.txt` files too.
        notes: gets a sentence for each input that is named more than once. It is read once, at its first place.

    Raises:
        MissingFileError: if a folder, pattern or list leads nowhere.
        ConfigError: for a URL whose file system needs a package that is not installed.
    """
    several = [inputs] if isinstance(inputs, (str, os.PathLike, ArrowStream)) else list(inputs)
    resolved: list[CoreInput] = []
    for number, item in enumerate(several):
        if isinstance(item, (str, os.PathLike)):
            name = os.fspath(item)
            if _REMOTE.match(name):
                resolved += [("remote", url, RemoteFile(url), None) for url in expand_url(name)]
            else:
                resolved += [("file", os.fspath(path), None, None) for path in _core.discover([name], takes_text)]
        elif isinstance(item, ArrowStream):
            resolved.append(("arrow", f"{type(item).__name__} {number}", item, None))
        else:
            raise ConfigError(f"input {number} is a {type(item).__name__}; expected a name or an Arrow stream")
    unique: dict[tuple[str, str], CoreInput] = {}
    for found in resolved:
        unique.setdefault(found[:2], found)
    if notes is not None:
        notes += _tell_repeats(resolved, list(unique))
    return list(unique.values())


def _tell_repeats(resolved: Sequence[CoreInput], unique: Sequence[tuple[str, str]]) -> list[str]:
    counts = Counter(found[:2] for found in resolved)
    told = [
        f"{name} is named {counts[kind, name]} times; it is read once, at its first place"
        for kind, name in unique
        if counts[kind, name] > 1
    ]
    firsts: dict[str, str] = {}
    for kind, name in unique:
        first = firsts.setdefault(os.path.realpath(name), name) if kind == "file" and name != "-" else name
        if first != name:
            told.append(f"{first} and {name} are the same file; it is read twice")
    return told


def plan_shards(inputs: Sequence[CoreInput], input_format: str, num_shards: int) -> list[list[CoreInput]]:
    """Inputs of each of `num_shards` shards, about equal in bytes, in reading order.

    Uncompressed text is cut at lines, Parquet between row groups, everything else between files.
    """
    shards = _core.plan_shards(list(inputs), input_format, num_shards)
    return [[(*inputs[index][:3], place) for index, place in shard] for shard in shards]


class RemoteFile:
    """An object of a remote file system, read at any place; opened when first read, safe for threads and pickling."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._file: Any = None
        with _Explained(url):
            filesystem, path = _filesystem(url)
            self.size_bytes: int = filesystem.size(path)

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end."""
        with self._lock:
            if self._file is None:
                filesystem, path = _filesystem(self.url)
                self._file = filesystem.open(path, "rb", block_size=8 << 20)
            self._file.seek(offset)
            read: bytes = self._file.read(size)
            return read

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFile, (self.url,)


def expand_url(url: str) -> list[str]:
    """The objects that a URL leads to: itself, those that match its pattern, or those below it; sorted."""
    with _Explained(url):
        filesystem, path = _filesystem(url)
        if not any(mark in path for mark in "*?["):
            if filesystem.isfile(path):
                return [url]
            found = filesystem.find(path)
        else:
            found = filesystem.glob(path)
        files = sorted(name for name in found if filesystem.isfile(name))
        if not files:
            raise MissingFileError(f"{url}: no input files")
        return [str(filesystem.unstrip_protocol(name)) for name in files]


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
        found = f"{url}: reading URLs needs the package fsspec{tell_break(error, 'fsspec')}"
        raise ConfigError(f"{found}: pip install 'megaflow[remote]'") from None
    filesystem, path = url_to_fs(url)
    return filesystem, str(path)


class _Explained:
    """Turns what a remote file system raises into sentences that name the URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (ConfigError, MissingFileError)):
            return
        if isinstance(error, ImportError):
            raise ConfigError(f"{self._url}: its file system needs another package: {error}") from None
        if isinstance(error, FileNotFoundError):
            raise MissingFileError(f"{self._url}: no such input") from None
        if isinstance(error, (OSError, ValueError)):
            raise FileAccessError(f"{self._url}: cannot be read: {error}") from error
