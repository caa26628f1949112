"""From a document back to its line, and from a sidecar back to its tokenizer."""

from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaflow.errors import MegaflowError, TokenizerError
from megaflow.tokenizer import Tokenizer

_UNITS = {"text": "file", "parquet": "row", "arrow": "row", "arrow-stream": "row"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The place in the input that a document came from."""

    path: str
    format: str
    unit: str
    """What is counted: `line`, `row`, `document`, or `file` for a source that is one document."""
    number: int | None
    """Number of the line, row or document in the source, from 1; None if the sidecar does not say."""
    range: tuple[int, int] | None
    """The bytes of the source in which the lines were counted; None for all of it."""

    def __str__(self) -> str:
        if self.unit == "file":
            return self.path
        number = "a number that the sidecar does not say" if self.number is None else f"{self.number:,}"
        inside = "" if self.range is None else f", counted from byte {self.range[0]:,}"
        return f"{self.path}, {self.unit} {number}{inside}"

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)


def origin_of(sidecar: dict[str, Any] | None, document: int) -> Origin | None:
    """Where document number `document` of a pair came from.

    Args:
        sidecar: of the pair.
        document: number in the pair, from 0.

    Returns:
        None without a sidecar, or if it names no source of this document.
    """
    sources: list[dict[str, Any]] = (sidecar or {}).get("sources") or []
    # Several sources may begin at one document, if all but the last are empty.
    place = bisect_right([source["first_document"] for source in sources], document) - 1
    if place < 0 or document >= sources[place]["first_document"] + sources[place]["num_documents"]:
        return None
    source = sources[place]
    form = source.get("format", "jsonl")
    unit = _UNITS.get(form, "line" if form in ("jsonl", "text-lines") else "document")
    number, found = _line(source, document - source["first_document"]), source.get("range")
    if unit == "row" and found is not None:
        number, found = number and number + found[0], None  # a range of rows says where it begins
    return Origin(
        path=source["path"],
        format=form,
        unit=unit,
        number=number,
        range=None if found is None or found[0] == 0 else (found[0], found[1]),
    )


def _line(source: dict[str, Any], document: int) -> int | None:
    """Line of the document with this number in its source: the lines without a document are stepped over.

    Of a partition only its own lines count: every `modulo`-th of all inputs together.
    """
    index, modulo, before = source.get("every") or (0, 1, 0)
    line = (index - before) % modulo + 1 + document * modulo
    for first, count in source["lines_without_document"]:
        if first > line:
            return line
        line += count * modulo
    return line if source.get("lines_without_document_complete", True) else None


def tokenizer_for(sidecar: dict[str, Any] | None, named: Tokenizer | None = None) -> Tokenizer:
    """The tokenizer of a pair.

    Args:
        sidecar: of the pair.
        named: a tokenizer that the user names; it must be the sidecar's, if that names one.

    Returns:
        `named`; else GPT-2's or the one in the files of the sidecar's command, if the sidecar's fingerprint is theirs.

    Raises:
        TokenizerError: if there is none, or another one was named.
    """
    record = (sidecar or {}).get("tokenizer")
    if named is not None:
        if record and named.fingerprint != record["fingerprint"]:
            raise TokenizerError(
                f"the data were made with tokenizer {record['type']} (fingerprint {record['fingerprint']}), the one "
                f"named has fingerprint {named.fingerprint}: its text would mean nothing; name the data's own"
            )
        return named
    if not record:
        raise TokenizerError("no sidecar names the tokenizer of these tokens; name it with --tokenizer")
    gpt2 = Tokenizer.gpt2()
    if gpt2.fingerprint == record["fingerprint"]:
        return gpt2
    for load in _named_by((sidecar or {}).get("command") or []):
        try:
            tokenizer = Tokenizer.from_files(**load)
        except (MegaflowError, OSError):
            continue
        if tokenizer.fingerprint == record["fingerprint"]:
            return tokenizer
    names = ", ".join(file["name"] for file in record.get("files", [])) or "unknown files"
    raise TokenizerError(
        f"the data were made with tokenizer {record['type']} ({names}), which is not at hand; name it with --tokenizer"
    )


def _named_by(command: list[str]) -> list[dict[str, Any]]:
    """Tokenizers that the flags of a command name."""
    found: dict[str, str] = {}
    flags = {
        "--tokenizer": "tokenizer_model",
        "--tokenizer-model": "tokenizer_model",
        "--vocab-file": "vocab_file",
        "--vocab": "vocab_file",
        "--merge-file": "merge_file",
    }
    for word, following in zip(command, [*command[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag in flags:
            found[flags[flag]] = value or following
    files = {name: path for name, path in found.items() if Path(path).exists()}
    model = {"tokenizer_model": files["tokenizer_model"]} if "tokenizer_model" in files else {}
    pair = {name: path for name, path in files.items() if name != "tokenizer_model"}
    return [choice for choice in (model, pair) if choice]
