"""Sphinx: the pages as they are in the checkout, an API reference from docstrings, and the pages that sources make.

`make docs` builds them; a warning is an error. Links into the checkout become the file's name here, links between pages
are checked by Sphinx, both by a test.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]

import make_pages  # noqa: E402

project, author, html_title = "megaflow", "the megaflow authors", "megaflow"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "Dockerfile", "measured"]
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
myst_heading_anchors = 3
autodoc_mock_imports = ["torch"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False

MADE = {"Training": ["errors"], "Inside": ["decisions/*", "notes/*"]}
"""Pages of a section that its table in index.md does not link one by one."""
API = {
    "megaflow": (
        *("preprocess", "PreprocessOptions", "PreprocessReport", "Tokenizer", "IndexedDataset", "resolve_prefix"),
        *("read_sidecar", "GPTDataset", "BlendedDataset", "MockGPTDataset", "FillInMiddle", "EvalSets", "Loader"),
        *("Batch", "StreamingDataset", "StreamBlend", "merge", "MergeReport", "verify", "VerifyReport"),
    )
}
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./[^)]*|[^):]*/)\)")


def write_errors(app: Any) -> None:
    """The list of messages, which no checkout holds."""
    (ROOT / "docs" / "errors.md").write_text(make_pages.make_errors(), encoding="utf-8")


def change_page(app: Any, name: str, content: list[str]) -> None:
    """Links out of docs/ become text; the index gets the table of contents, the API page its docstrings."""
    content[0] = _OUTSIDE.sub(r"\1", content[0])
    if name == "index":
        content[0] += "".join(make_contents(title, pages) for title, pages in read_sections().items())
    if name == "api":
        content[0] += "\n```{eval-rst}\n" + "\n".join(list_api()) + "\n```\n"


def read_sections() -> dict[str, list[str]]:
    """Pages of each section, as the tables of index.md list them."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    sections = {}
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        if pages := re.findall(r"^\| \[[^\]]*\]\(([\w-]+)\.md\)", body, re.MULTILINE):
            sections[title] = pages + MADE.get(title, [])
    return sections


def make_contents(title: str, pages: list[str]) -> str:
    """A hidden table of contents, for the sidebar."""
    return "\n".join(["", "```{toctree}", ":hidden:", ":glob:", f":caption: {title}", "", *pages, "```", ""])


def list_api() -> list[str]:
    """Directives of every public name."""
    import megaflow

    lines = []
    for module, names in API.items():
        for name in names:
            is_class = isinstance(getattr(megaflow, name), type)
            lines += [f".. auto{'class' if is_class else 'function'}:: {module}.{name}"]
            lines += ["   :members:", ""] if is_class else [""]
    return lines


def change_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Single backticks are code; an indented block below a sentence is an example."""
    changed: list[str] = []
    for line in lines:
        before = next((text for text in reversed(changed) if text), "")
        is_example = line.startswith("    ") and changed[-1:] == [""] and re.match(r"\w", before) is not None
        changed += ["::", ""] if is_example else []
        changed.append(re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    lines[:] = changed


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("builder-inited", write_errors)
    app.connect("source-read", change_page)
    app.connect("autodoc-process-docstring", change_docstring, priority=900)
