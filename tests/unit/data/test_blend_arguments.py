"""Megatron's ways of naming data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow.blend_arguments import BlendSpec, DataSpec, parse_blend, read_data_arguments, read_phases
from megaflow.errors import ConfigError, MissingFileError
from unit.data.oracle import write_documents


@pytest.mark.parametrize(
    "words, expected",
    [
        (["a"], BlendSpec(("a",))),
        (["a", "b"], BlendSpec(("a", "b"))),
        (["a", "b", "c"], BlendSpec(("a", "b", "c"))),
        (["0.3", "a"], BlendSpec(("a",), (0.3,))),
        (["0.3", "a", "7e-1", "b"], BlendSpec(("a", "b"), (0.3, 0.7))),
        (["1", "a", "2"], BlendSpec(("1", "a", "2"))),
        (["a", "1", "b", "2"], BlendSpec(("a", "1", "b", "2"))),
    ],
)
def test_lists_are_read_as_megatron_reads_them(words: list[str], expected: BlendSpec) -> None:
    assert parse_blend(words) == expected


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--data-path is empty"),
        (["1", "a", "b", "c"], "'b' stands where other entries have a weight"),
        (["nan", "a", "1", "b"], "weight 1 of a is nan"),
        (["-1", "a", "1", "b"], "weight 1 of a is -1.0"),
        (["0", "a", "0", "b"], "all weights of the blend are 0"),
    ],
)
def test_lists_without_meaning_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(words)


def test_a_prefix_that_looks_like_a_weight_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2023", "2024"):
        write_documents(tmp_path / name, [[1, 2, 3]])
    with pytest.raises(
        ConfigError, match=r"'2023' is a weight by its place, and also the prefix of a pair; write ./2023"
    ):
        parse_blend(["2023", "2024"])
    assert parse_blend(["./2023", "./2024"]) == BlendSpec(("./2023", "./2024"))


def test_files_hold_what_the_command_line_would(tmp_path: Path) -> None:
    (tmp_path / "args").write_text("0.25 a\n  0.75 b\n")
    assert read_data_arguments(data_args_path=tmp_path / "args") == DataSpec(BlendSpec(("a", "b"), (0.25, 0.75)))
    parts = {"train": ["1", "a", "3", "b"], "valid": "c", "test": None}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    expected = (BlendSpec(("a", "b"), (1.0, 3.0)), BlendSpec(("c",)), None)
    assert read_data_arguments(per_split_data_args_path=tmp_path / "parts.json") == DataSpec(per_split=expected)
    named = read_data_arguments(per_split=(["1", "a", "3", "b"], ["c"], []))
    assert named == DataSpec(per_split=expected)
    assert named.prefixes == ("a", "b", "c")


def test_data_are_named_in_one_way() -> None:
    with pytest.raises(ConfigError, match="none of them is given"):
        read_data_arguments()
    with pytest.raises(ConfigError, match="got --data-path and --train-data-path"):
        read_data_arguments(data_path=["a"], per_split=(["b"], [], []))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object with train, valid, test"),
        ('{"dev": "a"}', "expected a JSON object with train, valid, test"),
        ('{"train": 3}', "train is 3"),
        ('{"train": ["1", "a", "b", "c"]}', "train: 'b' stands where"),
    ],
)
def test_a_file_of_parts_that_holds_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "parts.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_data_arguments(per_split_data_args_path=tmp_path / "parts.json")
    with pytest.raises(MissingFileError, match="no such file"):
        read_data_arguments(per_split_data_args_path=tmp_path / "none.json")


@pytest.mark.parametrize(
    "entries, message",
    [
        ({}, "expected a JSON list"),
        ([], "expected a JSON list"),
        ([{"from": 0, "weights": [1, 2]}], "entry 1: expected a JSON list"),
        ([{"from_sample": 1.5, "weights": [1, 2]}], "from_sample is 1.5"),
        ([{"from_sample": 0, "weights": [1]}], "expected 2 numbers, one a dataset"),
        ([{"from_sample": 0, "weights": [1, True]}], "expected 2 numbers, one a dataset"),
    ],
)
def test_a_schedule_that_holds_something_else_is_refused(tmp_path: Path, entries: object, message: str) -> None:
    (tmp_path / "phases.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=message):
        read_phases(tmp_path / "phases.json", 2)
    (tmp_path / "phases.json").write_text('[{"from_sample": 0, "weights": [1, 2.5]}]')
    assert read_phases(tmp_path / "phases.json", 2) == [(0, [1.0, 2.5])]
