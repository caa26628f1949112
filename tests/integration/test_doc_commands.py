"""Every command in the documentation runs as it stands there, or says what it would need; flags named there exist."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- (run|run: ends with \d+|not run: [^\n]*?) -->\n)?[ ]*```(\w*)\n(.*?)\n?[ ]*```", re.DOTALL)
"""A block: what is said above it, its language (none: commands), its text."""
INLINE = re.compile(r"`([^`\n]+)`")
FLAG = re.compile(r"--[a-z][\w-]*")

SHORT = "--train-iters 6 --micro-batch-size 2 --global-batch-size 4 --eval-interval 3 --log-interval 1"
"""Of the recipe that the pages start: enough to see that every command works."""
TRAIN = (
    f"torchrun --standalone --nproc_per_node=1 trainer/pretrain.py --config trainer/recipes/gpt_tiny_cpu.yaml {SHORT}"
)
TEXTS = ("plays", "poems")
BEFORE = {
    "docs/inspect-and-merge.md": [
        *(f"megaflow-preprocess {name}.jsonl --output-prefix {name}" for name in TEXTS),
        "megaflow merge plays poems --output-prefix both",
        f"{TRAIN} --data-path both --run-dir runs/first",
        "cp plays_text_document.bin train.bin",
    ],
    "docs/report.md": [
        "megaflow-preprocess corpus.jsonl",
        f"{TRAIN} --data-path corpus --run-dir runs/first",
        "cp -r runs/first runs/second",
    ],
    "docs/training.md": ["megaflow-preprocess corpus.jsonl"],
}
"""What a page takes as given beside its texts."""


def list_blocks(page: str) -> list[tuple[str, str]]:
    """Mark and text of every block of commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(mark, body) for mark, language, body in FENCE.findall(text) if not language]


def list_commands(page: str) -> list[str]:
    """What the page asks a reader to type, of the blocks that are run; behind a "$ " where it shows the answers too."""
    lines: list[str] = []
    for mark, text in list_blocks(page):
        if not mark.startswith("run"):
            continue
        block = textwrap.dedent(text).splitlines()
        typed = [line[2:] for line in block if line.startswith("$ ")] or block
        if code := mark.removeprefix("run").removeprefix(": ends with "):
            typed[-1] = f"code=0; {typed[-1]} || code=$?; test $code -eq {code}"
        lines += typed
    return lines


def write_texts(folder: Path) -> None:
    """The inputs that the pages name."""
    text = "One document says that data come first, and that a loop of ten lines is enough to learn from them. "
    lines = [json.dumps({"text": f"{number}. {text * 4}"}) for number in range(1600)]
    (folder / "corpus.jsonl").write_text("\n".join(lines[:60]) + "\n")
    (folder / "plays.jsonl").write_text("\n".join(lines[:800]) + "\n")
    (folder / "poems.jsonl").write_text("\n".join(lines[800:]) + "\n")
    (folder / "data").mkdir()
    (folder / "data" / "part.jsonl").write_text(lines[0] + "\n")
    (folder / "out").mkdir()
    pq.write_table(pa.table({"content": [text, text]}), folder / "part-0.parquet")
    (folder / "dump.gz").write_bytes(gzip.compress(lines[0].encode()))
    (folder / "llama").symlink_to(ROOT / "python/megaflow/data/gpt2")


def test_there_are_pages_with_commands() -> None:
    assert {"README.md", "docs/five-minutes.md", *BEFORE} <= {page for page in PAGES if list_commands(page)}


@pytest.mark.parametrize("page", [page for page in PAGES if list_blocks(page)])
def test_every_command_runs_or_says_why_not(page: str) -> None:
    marks = [(mark, text.splitlines()[0]) for mark, text in list_blocks(page)]
    assert [line for mark, line in marks if not mark] == []
    reasons = {mark.removeprefix("not run: ") for mark, _ in marks if not mark.startswith("run")}
    assert all(why.startswith(("needs", "builds")) for why in reasons), reasons


@pytest.mark.parametrize("page", [page for page in PAGES if list_commands(page)])
def test_the_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    for name in ("trainer", "tools", "python"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_texts(tmp_path)
    commands = "\n".join(list_commands(page)).replace("gpt_tiny_cpu.yaml", f"gpt_tiny_cpu.yaml {SHORT}")
    program = "\n".join(["set -eu", *BEFORE.get(page, ()), commands])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    libraries = os.pathsep.join([str(ROOT / "python"), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": libraries, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@cache
def list_flags(program: str) -> frozenset[str]:
    """Flags of a command of ours; an AssertionError if there is no such command."""
    own = ["-m", *program.replace("megaflow-preprocess", "megaflow preprocess").split()]
    words = [sys.executable, *(own if program.startswith("megaflow") else [program])]
    libraries = os.pathsep.join([str(ROOT / "python"), str(ROOT / "trainer"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": libraries}
    done = subprocess.run([*words, "--help"], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program}: {done.stderr}"
    return frozenset(FLAG.findall(done.stdout))


def name_program(words: list[str]) -> str | None:
    """Which command of ours a line starts; None for others, and for names of packages and modules."""
    while words and "=" in words[0] and not words[0].startswith("-"):
        words = words[1:]
    scripts = [word for word in words if word.startswith(("tools/", "trainer/", "benches/")) and word.endswith(".py")]
    if words[:1] in (["python"], ["python3"], ["torchrun"], ["srun"]) and scripts:
        return scripts[0]
    if words[:1] == ["megaflow-preprocess"]:
        return words[0]
    return " ".join(words[:2]) if words[:1] == ["megaflow"] and len(words) > 1 and words[1].isidentifier() else None


def list_typed(page: str) -> list[str]:
    """Every command of a page, in blocks and in sentences."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "\n".join(body for _, language, body in FENCE.findall(text) if not language).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in blocks.splitlines()]
    return [line.partition(" #")[0] for line in [*lines, *INLINE.findall(FENCE.sub("", text))]]


@pytest.mark.parametrize("page", PAGES)
def test_the_flags_that_a_page_names_with_a_command_exist(page: str) -> None:
    unknown = []
    for line in list_typed(page):
        try:
            words = shlex.split(line)
        except ValueError:
            continue  # no command: half of a quotation
        program = name_program(words)
        if program is None:
            continue
        own = words[words.index(program.split()[-1]) + 1 :] if program.split()[-1] in words else words
        flags = {found[0] for word in own if (found := FLAG.match(word))}
        known = list_flags(program)
        extra = (
            list_flags("trainer/pretrain.py") if program in ("tools/plan.py", "trainer/pretrain.py") else frozenset()
        )
        unknown += [f"{program} {flag}" for flag in sorted(flags - known - extra)]
    assert unknown == []


def test_a_flag_that_does_not_exist_would_be_seen() -> None:
    assert (
        name_program(shlex.split("OMP_NUM_THREADS=1 torchrun --x=1 trainer/pretrain.py --lr 1"))
        == "trainer/pretrain.py"
    )
    assert name_program(["megaflow", "stats", "PREFIX"]) == "megaflow stats"
    assert name_program(["megaflow.torch"]) is None
    assert "--top" in list_flags("megaflow stats")
    assert "--bottom" not in list_flags("megaflow stats")
    assert "--lr" in list_flags("trainer/pretrain.py")
    with pytest.raises(AssertionError, match="invalid choice"):
        list_flags("megaflow dance")


WORKERS = {"benches/loader_side.py", "benches/tokenizer_worker.py"}
"""Halves of benchmarks, started by the other half."""
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tools", "trainer", "benches", "benches/gpu")
    for path in (ROOT / folder).glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in WORKERS])
def test_every_script_tells_its_flags_and_starts_nothing(script: str) -> None:
    assert "--help" in list_flags(script)
