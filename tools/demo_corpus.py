"""Real text that every machine has: documentation and sources of the Python standard library, as JSONL."""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LARGEST_CORPUS = 10_000_000
"""Bytes of text after which no further document is taken."""
LARGEST_DOCUMENT = 400_000
"""Bytes; longer sources are tables."""
LEFT_OUT = {"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}
"""Folders that hold tests, tables, or other people's packages."""


def write_corpus(path: Path) -> tuple[int, int]:
    """Writes one document a line in a fixed order; the file appears whole or not at all.

    Returns:
        The number of documents and the bytes of the file.

    Raises:
        SystemExit: if this Python carries no sources.
    """
    temporary = path.with_suffix(".writing")
    documents = size = 0
    with temporary.open("w", encoding="utf-8") as file:
        for name, text in standard_library_texts():
            if size >= LARGEST_CORPUS:
                break
            file.write(json.dumps({"text": text, "source": name}, ensure_ascii=False) + "\n")
            documents, size = documents + 1, size + len(text.encode())
    if size < LARGEST_CORPUS // 20:
        temporary.unlink()
        raise SystemExit(
            f"{standard_library()} holds {size} bytes of text, too few for the demo: use a Python with sources"
        )
    temporary.replace(path)
    return documents, path.stat().st_size


def standard_library() -> Path:
    """Folder of the standard library's Python sources."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_texts() -> Iterator[tuple[str, str]]:
    """Name and text of each document: the language reference, then each module's docstrings and source."""
    yield from sorted(reference_topics().items())
    root = standard_library()
    for path in sorted(sources(root)):
        text = read_text(path)
        if text is None:
            continue
        name = path.relative_to(root).as_posix()
        docstrings = docstrings_of(text)
        if len(docstrings) > 200:
            yield f"{name} (docstrings)", docstrings
        yield name, text


def reference_topics() -> dict[str, str]:
    """The pages that `help()` shows, where this Python has them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {f"topic {name}": text for name, text in topics.items()}


def sources(root: Path) -> Iterator[Path]:
    """Python files below `root`, tests and tables left out; links are not followed."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def read_text(path: Path) -> str | None:
    """Text of a source, or None if it is not UTF-8, empty, or a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() and len(text) <= LARGEST_DOCUMENT else None


def docstrings_of(source: str) -> str:
    """The docstrings of a module, each under the name that it belongs to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # old spellings in the library are not ours to mend
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # some sources of the library are meant for other parsers
        return ""
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                parts.append(f"{getattr(node, 'name', '')}\n\n{docstring}".strip())
    return "\n\n\n".join(parts)
