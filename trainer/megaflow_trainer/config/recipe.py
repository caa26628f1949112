"""YAML recipes: the same fields as the flags, grouped by section. JSON is YAML too.

A recipe is read as a tree of nodes, so that every fault has its line; a value is made only where a field takes it, so
that neither a name nested in itself nor aliases of aliases can fill the memory.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaflow.errors import ConfigError, FileAccessError, MissingFileError
from megaflow_trainer.config.fields import Field, convert

LARGEST_BYTES = 1 << 20
"""Recipes are a few kilobytes; a file of this size is another one."""
MOST_LEVELS = 64
"""Lists and mappings in each other; a recipe has three."""
_LIKE = "recipes of every kind are in trainer/recipes"
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Entry:
    """A field that a recipe sets, or what is wrong in a line of it."""

    line: int
    name: str
    value: Any = None
    fault: str = ""


def read_recipe(path: str, known: dict[str, Field], values: dict[str, Any], faults: list[str]) -> None:
    """Add the fields that a recipe sets to `values`, and what is wrong with it to `faults`.

    Raises:
        MissingFileError: if there is no such file.
        FileAccessError: if it cannot be read, or is a folder.
        ConfigError: if it is not YAML, or not a mapping.
    """
    for entry in _load(path):
        place = f"{path}, line {entry.line}"
        if entry.fault:
            faults.append(f"{place}: {entry.fault}")
        elif entry.name not in known:
            faults.append(f"{place}: {_unknown(entry.name, known)}")
        else:
            try:
                values[entry.name] = convert(known[entry.name], entry.value, f"{place}: {entry.name}")
            except ConfigError as error:
                is_text = known[entry.name].kind is str and not isinstance(entry.value, str)
                faults.append(f"{error}; put quotes round it" if is_text else str(error))


def _unknown(name: str, known: dict[str, Field]) -> str:
    sections = {field.partition(".")[0] for field in known if "." in field}
    if name in sections:
        return f"{name} is a section: expected its fields in the lines below it, indented by spaces"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"{name} is not a field; the nearest known one is {near[0]}"
    return f"{name} is not a field; drop it, or look it up in docs/flags.md"


def _load(path: str) -> tuple[Entry, ...]:
    try:
        state = Path(path).stat()
        return _read(path, (state.st_mtime_ns, state.st_size, state.st_ino))
    except FileNotFoundError:
        raise MissingFileError(f"--config {path}: no such recipe") from None
    except OSError as error:
        raise FileAccessError(
            f"--config {path}: expected a YAML recipe, but: {error.strerror}; name a file that can be read"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path}: expected a YAML recipe, but byte {error.start} is not UTF-8; save it as UTF-8, or name "
            f"another file: {_LIKE}"
        ) from None


@functools.lru_cache(maxsize=4)
def _read(path: str, state: tuple[int, int, int]) -> tuple[Entry, ...]:
    """What a recipe says; `state` tells apart what it said before it was written again."""
    with Path(path).open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ConfigError(
            f"--config {path}: expected a YAML recipe, found a file of more than {LARGEST_BYTES >> 20} MiB; {_LIKE}"
        )
    loader = None
    try:
        text = content.decode()
        if _is_nested_deeply(text):
            raise ConfigError(
                f"--config {path}: brackets or lines are nested deeper than any recipe; expected `section:` and below "
                "it `field: value`"
            )
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"--config {path}: expected sections with fields, found nothing in it; {_LIKE}")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"--config {path}, line {_line(root)}: expected sections with fields, found {_describe(root)}; write "
                "`section:` and below it, indented, `field: value`"
            )
        return tuple(_list_entries(loader, root))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}{_explain(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


_ADVICE = (
    ("'\\t'", "indent by spaces, not tabs"),
    ("alias", "put quotes round a text that begins with *"),
    ("another document", "keep one document, drop the line ---"),
    ("mapping values are not allowed", "put quotes round a text with a colon, or give the line its right indent"),
)


def _explain(error: yaml.YAMLError) -> str:
    """Line, what is wrong, and a remedy."""
    if isinstance(error, yaml.reader.ReaderError):
        return f": not YAML: position {error.position} holds a character that no text has; name another file: {_LIKE}"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    context, begin = getattr(error, "context", None) or "", getattr(error, "context_mark", None)
    advice = next((text for word, text in _ADVICE if word in f"{context} {problem}"), "mend what comes before it")
    if "flow" in context and begin is not None:
        advice = f"a bracket opens in line {begin.line + 1}, column {begin.column + 1}: close it, or mend what is in it"
    elif "block" in context:
        advice = "lines of one section begin in the same column"
    elif "quoted" in context and begin is not None:
        advice = f"a quote opens in line {begin.line + 1}, column {begin.column + 1}: close it"
    return f"{place}: not YAML: {problem}; {advice}"


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a section"


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _is_nested_deeply(text: str) -> bool:
    """Whether lists and mappings lie in each other deeper than `MOST_LEVELS`.

    Counted, since what Python's stack bears is another depth in every process.

    Raises:
        yaml.YAMLError: if the text is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS:
            return True
    return False


def _list_entries(loader: yaml.SafeLoader, root: yaml.MappingNode) -> Iterator[Entry]:
    """Every field of a recipe: those of sections, and those of the run itself."""
    for name, key, value in _list_pairs(root, ()):
        if not isinstance(value, yaml.MappingNode):
            yield _make(loader, _line(key), name, value)
            continue
        for field, inner, content in _list_pairs(value, (id(root),)):
            yield _make(loader, _line(inner), f"{name}.{field}", content)


def _make(loader: yaml.SafeLoader, line: int, name: str, node: yaml.Node | str) -> Entry:
    """The value of a field: one, or a list of them."""
    if isinstance(node, str):
        return Entry(line, name, fault=node)
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        return Entry(line, name, fault=f"{name}: expected a value or a list of values, found more inside it")
    try:
        made = [loader.construct_object(item) for item in items]
    except yaml.YAMLError as error:
        problem = " ".join(str(getattr(error, "problem", error)).split())
        return Entry(line, name, fault=f"{name}: {problem}; write the value without a tag")
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError):  # as yaml's own constructors fail
        made = [str(item.value) for item in items]  # neither a date nor a number, whatever it looks like or a tag says
    return Entry(line, name, made if isinstance(node, yaml.SequenceNode) else made[0])


def _list_pairs(node: yaml.MappingNode, above: tuple[int, ...]) -> Iterator[tuple[str, yaml.Node, yaml.Node | str]]:
    """Names with their keys and values, those that `<<` brings last; a text instead of a value is a fault."""
    found: dict[str, yaml.Node] = {}
    merged: list[yaml.Node] = []
    for key, value in node.value:
        if key.tag == _MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        elif not isinstance(key, yaml.ScalarNode):
            yield "", key, f"expected the name of a section or field, found {_describe(key)}"
        elif key.value in found:
            first = _line(found[key.value])
            yield key.value, key, f"{key.value} was given in line {first} already; keep one of the two"
        else:
            found[key.value] = key
            yield key.value, key, value
    for part in merged:
        if not isinstance(part, yaml.MappingNode) or any(key.tag == _MERGE for key, _ in part.value):
            yield "<<", part, "<< brings the fields of another section, and of no section that has << itself"
            continue
        if id(part) in above:
            continue
        for name, key, value in _list_pairs(part, (*above, id(node))):
            if name not in found:
                found[name] = key
                yield name, key, value
