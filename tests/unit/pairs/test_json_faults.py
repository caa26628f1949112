"""A command that was asked for JSON answers in JSON, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.pairs import write_pair
from megaflow.cli.main import main


@pytest.mark.parametrize(
    "command",
    [
        "stats",
        "inspect",
        "verify",
        "bench-loader",
        "merge --output-prefix PREFIX",
        "import --from nanogpt --output-prefix PREFIX",
    ],
)
@pytest.mark.parametrize("flags", ["--bottom 3", "GONE", ""])
def test_a_fault_is_one_object_with_the_sentence(
    command: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("PREFIX", str(tmp_path / "out")) for word in f"{command} {flags}".split()]
    codes = [main(words), main([*words, "--json"])]
    out, err = capsys.readouterr()
    assert codes[0] == codes[1] != 0
    assert list(answer := json.loads(out)) == ["error"]
    said = err.strip().splitlines()
    assert said[0] == said[1]
    assert said[1].endswith(answer["error"])


def test_a_report_with_faults_is_the_only_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_pair(tmp_path / "toy")
    with Path(f"{prefix}.idx").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert main(["verify", prefix, "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["num_faults"] == 1
    assert err.startswith("megaflow verify: ")
