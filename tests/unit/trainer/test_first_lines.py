"""What an error says first, where some say nothing."""

from __future__ import annotations

import builtins
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megaflow.errors import first_line
from megaflow_trainer.ops.trial import try_kernel

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_line_of_an_error_that_says_nothing() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError(" \n ")) == "no reason given"


def test_no_first_line_is_taken_of_what_may_be_empty() -> None:
    """`"".splitlines()[0]` raises: where a message is read, `first_line` is, or the list has something behind an or."""
    bare = re.compile(r"(error|stderr|stdout)\b[\w.()]*\.splitlines\(\)\[")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("trainer", "python", "tools", "benches")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        if bare.search(line)
    ]
    assert found == []
    assert bare.search("str(error).splitlines()[0]")
    assert bare.search("done.stderr.strip().splitlines()[-1]")


@pytest.mark.parametrize("error", [AttributeError("no PyCapsule"), NameError(), SystemExit(3)], ids=repr)
def test_a_triton_that_breaks_is_no_kernel(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("triton"):
            raise error
        return keep(name, *rest)

    monkeypatch.delitem(sys.modules, "triton.errors", raising=False)
    monkeypatch.setattr(builtins, "__import__", fail)
    made, why = try_kernel(lambda: 1)
    assert made is None
    assert why == f"{type(error).__name__}: {error if str(error) else 'no reason given'}"
