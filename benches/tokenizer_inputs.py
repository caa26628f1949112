"""Inputs of the tokenizer benchmark that are made, not found: adversarial texts, and a large corpus from this machine.

Standard library only: workers under other interpreters use it too.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BASE64 = LETTERS.upper() + LETTERS + "0123456789+/"
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".cpp", ".js", ".json", ".html", ".rs")


def _unicode(generator: random.Random) -> str:
    """A character from anywhere outside ASCII, assigned or not, but no surrogate."""
    while 0xD800 <= (point := generator.randrange(0x80, 0x2FFFF)) < 0xE000:
        pass
    return chr(point)


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "one letter": lambda generator: "a",
    "blanks": lambda generator: " ",
    "newlines": lambda generator: "\n",
    "mixed blanks": lambda generator: generator.choice(" \n\t"),
    "digits": lambda generator: generator.choice("0123456789"),
    "carets": lambda generator: "^",
    "base64": lambda generator: generator.choice(BASE64),
    "random letters": lambda generator: generator.choice(LETTERS),
    "random Unicode": _unicode,
    "CJK": lambda generator: chr(generator.randrange(0x4E00, 0x9FA6)),
}
"""What a text without anything that helps a tokenizer is made of: a character at a time."""


def adversarial(kind: str, size: int) -> str:
    """One text of about `size` bytes of UTF-8, the same each time.

    Args:
        kind: a name of `MAKERS`.
        size: in bytes; the last character may go past it.
    """
    generator, maker = random.Random(5), MAKERS[kind]
    if len({maker(generator) for _ in range(8)}) == 1:
        return maker(generator) * size
    characters, done = [], 0
    while done < size:
        character = maker(generator)
        characters.append(character)
        done += len(character.encode())
    return "".join(characters)


def write_big(path: Path, size: int, roots: Iterable[Path] | None = None) -> int:
    """A corpus of text that this interpreter's installation holds: sources, headers and documents, each file once.

    Files are taken in the order of their paths below `roots` (standard library, then packages), those of 200 bytes to
    2 MB whose bytes are UTF-8, until there are `size` bytes. Two machines get different texts: a figure names its own.

    Returns:
        Bytes of text written.
    """
    paths = sysconfig.get_paths()
    roots = roots or [Path(paths["stdlib"]), Path(paths["purelib"]), Path(sys.base_prefix) / "include"]
    seen: set[bytes] = set()
    written = 0
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as out:
        for root in roots:
            for file in sorted(root.rglob("*")):
                if file.suffix not in SUFFIXES or not file.is_file() or not 200 <= file.stat().st_size <= 2_000_000:
                    continue
                content = file.read_bytes()
                key = hashlib.sha256(content).digest()
                try:
                    text = content.decode()
                except UnicodeDecodeError:
                    continue
                if key in seen:
                    continue
                seen.add(key)
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                written += len(content)
                if written >= size:
                    break
            if written >= size:
                break
    partial.replace(path)
    return written
