"""Code in the documentation runs as it stands there, and links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import build_docs
import make_pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TESTED = re.compile(r"<!-- test: run -->\n```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `corpus_text_document.*`, made by the command that the page names."""
    folder = tmp_path_factory.mktemp("docs")
    text = "One document says that data come first, and that a loop of ten lines is enough to learn from them. "
    lines = [json.dumps({"text": f"{number}. {text * 4}"}) for number in range(60)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    command = [str(Path(sys.executable).parent / "megaflow-preprocess"), "corpus.jsonl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_plain_pytorch_loop_runs_and_learns(corpus: Path):
    (code,) = TESTED.findall((ROOT / "docs/plain-pytorch-loop.md").read_text())
    variables = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=corpus, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loss = float(done.stdout.split()[-1])
    assert loss < 9.0  # it starts above 10.8, a guess among 50,257 tokens


def test_pages_made_from_sources_are_fresh() -> None:
    assert [name for name, make in make_pages.PAGES.items() if make_pages.read(name) != make()] == []


def test_the_list_of_messages_holds_those_of_all_parts() -> None:
    text = make_pages.make_errors()
    for part in (
        "is not divisible by",
        "a blend needs at least one dataset",
        "## `crates/megaflow-indexed`",
        "## `tools/doctor_checks.py`",
        "## `tools/plan.py`",
        "--ranks must be >= 1, got {...}",
        "at least 3.10 is needed",
        "write the value without a tag",
        "{...} is not a flag of this trainer",
        "x accumulation has no solution",
        "{...}: not YAML: {...}; {...}",
        "nothing fits on {...} GPUs",
        "## `python/megaflow/__init__.py`",  # without the quotes a page shows "init.py" in bold
        "parallel.zero 3",
    ):
        assert part in text


def test_every_page_is_in_a_table_of_the_index() -> None:
    """The site takes its contents from there."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[[^\]]*\]\(([\w-]+\.md)\)", index, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md", "errors.md"}
    assert sorted(listed) == sorted(pages)


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    python = os.environ.get("MEGAFLOW_DOCS_VENV", str(ROOT / ".venv-docs")) + "/bin/python"
    if not Path(python).exists():
        pytest.skip("no environment with Sphinx: make docs makes it")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = build_docs.list_command(python, tmp_path)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "class" in (tmp_path / "api.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str):
    links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    missing = [to for to in links if to != "errors.md" and "://" not in to and not ((ROOT / page).parent / to).exists()]
    assert missing == []
