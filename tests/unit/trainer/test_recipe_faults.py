"""A recipe that is broken ends in sentences with file, line, what is wrong and what to do, whatever is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow.errors import ConfigError, FileAccessError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.command import parse_flags

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MAPS = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{{', '.join(f'{key}: *{before}' for key in 'pqrstuvwx')}}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("model:\n\tnum_layers: 2\n", ", line 2, column 1: not YAML: found character '\\t'"),
        ("model:\n\tnum_layers: 2\n", "indent by spaces, not tabs"),
        ("model: {num_layers: 2\nstep:\n", "a bracket opens in line 1, column 8: close it"),
        ('{"model": {"num_layers": 2,}\n', "a bracket opens in line 1, column 1: close it"),
        ("log:\n  name: 'tiny\n", "a quote opens in line 2, column 9: close it"),
        ("model:\n  num_layers: 2\n num_heads: 3\n", "line 3, column 2: not YAML: expected <block end>"),
        ("model:\n  num_layers: *two\n", "put quotes round a text that begins with *"),
        ("model: {}\n---\nstep: {}\n", "keep one document"),
        ("- model\n", ", line 1: expected sections with fields, found a list; write `section:`"),
        ("llama\n", ", line 1: expected sections with fields, found a single value"),
        ("", "found nothing in it; recipes of every kind are in trainer/recipes"),
        ("# model:\n", "found nothing in it"),
        ("model: 7\n", ", line 1: model is a section: expected its fields in the lines below it"),
        ("model:\n", ", line 1: model is a section"),
        ("model: &m\n  num_layers: 2\n  self: *m\n", ", line 3: model.self: expected a value or a list of values"),
        ("model:\n  num_layerz: 2\n", ", line 2: model.num_layerz is not a field; the nearest known one is"),
        ("zzz: 1\n", ", line 1: zzz is not a field; drop it, or look it up in docs/flags.md"),
        ("model:\n  num_layers: 2\n  num_layers: 3\n", ", line 3: num_layers was given in line 2 already; keep one"),
        ("model:\n  num_layers: two\n", ", line 2: model.num_layers (--num-layers) takes a whole number, got 'two'"),
        ("model:\n  num_layers: 2024-13-45\n", ", line 2: model.num_layers (--num-layers) takes a whole number"),
        (f"model:\n  num_layers: {'9' * 5000}\n", "999... (5,002 characters)"),
        (
            "model:\n  num_layers: !!float ''\n",
            ", line 2: model.num_layers (--num-layers) takes a whole number, got ''",
        ),
        (
            "model:\n  num_layers: !!int '__'\n",
            ", line 2: model.num_layers (--num-layers) takes a whole number, got '__'",
        ),
        ("model:\n  num_layers: !!timestamp x\n", ", line 2: model.num_layers (--num-layers) takes a whole number"),
        ("model:\n  qk_norm: !!bool ''\n", ", line 2: model.qk_norm takes true or false, got ''"),
        ("step:\n  micro_batch_size: [1, 2]\n", ", line 2: step.micro_batch_size (--micro-batch-size) takes a whole"),
        ("log:\n  name: 7\n", "got 7; put quotes round it"),
        ("model:\n  num_layers: !!python/name:os.system 1\n", "tag"),
        ("model:\n  [1, 2]: 3\n", ", line 2: expected the name of a section or field, found a list"),
        ("model:\n  <<: 7\n", "<< brings the fields of another section"),
        ("model: " + "[" * 5000, "nested deeper than any recipe"),
        ("[" * 3000 + "]" * 3000, "nested deeper than any recipe"),
        ("model: " + "{a: " * 900 + "1" + "}" * 900, "nested deeper than any recipe"),
        ("model: " + "{a: " * 64 + "1" + "}" * 64, "nested deeper than any recipe"),
        ("model: " + "{a: " * 60 + "1" + "}" * 60, ", line 1: model.a: expected a value"),
        (BOMB, ", line 2: b: expected a value or a list of values, found more inside it"),
        (MAPS, ", line 2: b.p: expected a value or a list of values, found more inside it"),
        (MERGES, ", line 3: "),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "byte 8 is not UTF-8; save it as UTF-8"),
        (b"\0" * 100, "position 0 holds a character that no text has"),
        (b"model: {}\n" + b"#" * (1 << 20), "found a file of more than 1 MiB"),
    ],
    ids=lambda part: ascii(part)[:30],
)
def test_a_broken_recipe_is_told_in_words(content: str | bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as fault:
        read_command(["--config", str(path)], world_size=1)
    assert str(path) in str(fault.value)
    assert sentence in str(fault.value)


def test_a_recipe_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileAccessError, match="Is a directory; name a file that can be read"):
        read_command(["--config", str(tmp_path)], world_size=1)
    (tmp_path / "own.yaml").write_text("model: {num_layers: 2}\n")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # file modes say nothing to root
    with pytest.raises(FileAccessError, match=r"own\.yaml: expected a YAML recipe, but: Permission denied"):
        read_command(["--config", str(tmp_path / "own.yaml")], world_size=1)


def test_what_a_recipe_may_say_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: &base {num_layers: 2, hidden_dim: 64}\n"
        "data: {path: &corpus [a, b], seq_len: 0x40}\n"
        "optim: {lr: 1e-3, no_decay: *corpus}\n"
        "num_steps: 7\n"
    )
    parsed = parse_flags(["--config", str(path)])
    assert parsed.faults == []
    assert parsed.values["data.path"] == parsed.values["optim.no_decay"] == ("a", "b")
    assert [parsed.values[name] for name in ("model.num_layers", "data.seq_len", "optim.lr", "num_steps")] == [
        2,
        64,
        1e-3,
        7,
    ]
    path.write_text("data: &base {seq_len: 8, split: '9,1,0'}\nmodel: {<<: *base, num_layers: 3}\n")
    merged = parse_flags(["--config", str(path)])
    assert merged.values["model.num_layers"] == 3  # read anew
    assert [fault.partition(": ")[2].split(" is ")[0] for fault in merged.faults] == ["model.seq_len", "model.split"]
    path.write_text('{"model": {"num_layers": 4}, "log": {"run_dir": null}}')
    assert parse_flags(["--config", str(path)]).values == {"model.num_layers": 4, "log.run_dir": None}
