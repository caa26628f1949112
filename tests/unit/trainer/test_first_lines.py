"""What an error says first, where some say nothing."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow import Tokenizer, exporting, inputs, ray_executor, sentences
from megaflow.errors import ConfigError, first_line
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.ops.trial import try_kernel
from megaflow_trainer.training.sinks import TensorBoard, Wandb

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_line_of_an_error_that_says_nothing() -> None:
    assert first_line(ValueError("\none\ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError(" \n ")) == "no reason given"


def test_no_first_line_is_taken_of_what_may_be_empty() -> None:
    """`"".splitlines()[0]` raises: where a message is read, `first_line` is, or the list has something behind an or."""
    bare = re.compile(r"((error|stderr|stdout)\b|str\(\w+\))[\w.()]*\.splitlines\(\)\[")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("trainer", "python", "tools", "benches")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        if bare.search(line)
    ]
    assert found == []
    assert bare.search("str(error).splitlines()[0]")
    assert bare.search("str(lack).splitlines()[0]")
    assert bare.search("done.stderr.strip().splitlines()[-1]")


DOORS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "tensorboard": ("torch.utils.tensorboard", lambda folder: TensorBoard(folder), "pip install tensorboard`, or drop"),
    "wandb": ("wandb", lambda folder: Wandb(TrainConfig(), folder), "pip install wandb`, or drop"),
    "fsspec": ("fsspec", lambda folder: inputs._filesystem("s3://x"), "pip install 'megaflow"),
    "nltk": ("nltk", lambda folder: sentences.load_punkt("english", keep_newlines=False), "pip install 'megaflow"),
    "ray": ("ray", lambda folder: ray_executor.preprocess_on_ray(["x"], None, tokenizer=None), "pip install 'megaflow"),
    "pyarrow": (
        "pyarrow",
        lambda folder: exporting._write_parquet(None, iter(()), "text", None, False),
        "take --to",
    ),
    "huggingface_hub": ("huggingface_hub", lambda folder: Tokenizer.from_name("a/b"), "pip install huggingface_hub"),
}
"""What imports an optional package: the package, how to get there, and the remedy."""


DEEP = ModuleNotFoundError("No module named 'deep'", name="deep")
"""Of an installed package that lacks one of its own."""


@pytest.mark.parametrize("error", [AttributeError("no PyCapsule\nmore"), OSError(), SystemExit(3), DEEP], ids=repr)
@pytest.mark.parametrize("door", DOORS)
def test_an_optional_package_that_breaks_is_one_sentence(
    door: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, enter, remedy = DOORS[door]
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)

    class Breaking:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == package:
                raise error

    monkeypatch.setattr(sys, "meta_path", [Breaking, *sys.meta_path])
    said = f", which is there and does not load ({type(error).__name__}: {first_line(error)}): "
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        enter(tmp_path)
    assert remedy in str(caught.value)


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
