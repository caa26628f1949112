"""Each rule about who may import whom fails when it is broken: the settings of the project on a small bad tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from run_checks import ban

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ("config", "ops", "model", "parallel", "checkpoint", "optim", "training")
BIN = Path(sys.executable).parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with the project's settings and empty packages in the project's places."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    packages = ["python/megaflow", "python/megaflow/cli", "trainer/megaflow_trainer"]
    for package in [*packages, *(f"trainer/megaflow_trainer/{layer}" for layer in LAYERS)]:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text('"""Empty."""\n')
    return tmp_path


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a checker of this environment in `tree`."""
    path = os.pathsep.join(str(tree / top) for top in ("python", "trainer"))
    words = [str(BIN / command[0]), *command[1:]]
    return subprocess.run(
        words, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    return run(tree, "lint-imports", "--no-cache")


def banned(tree: Path, file: str, code: str) -> bool:
    """Whether the project's ruff settings refuse `code` in `file` for a banned name."""
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(code)
    return "TID251" in run(tree, "ruff", "check", "--no-cache", "--output-format", "concise", file).stdout


def test_a_tree_that_keeps_the_rules_passes(tree: Path):
    (tree / "trainer/megaflow_trainer/model/gpt.py").write_text("import megaflow_trainer.ops\nimport torch\n")
    (tree / "python/megaflow/torch.py").write_text("import torch\n")
    done = lint_imports(tree)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("trainer/megaflow_trainer/ops/x.py", "import megaflow_trainer.model\n"),
        ("trainer/megaflow_trainer/model/x.py", "import megaflow_trainer.parallel\n"),
        ("trainer/megaflow_trainer/optim/x.py", "import megaflow_trainer.checkpoint\n"),
        ("trainer/megaflow_trainer/checkpoint/x.py", "import megaflow_trainer.optim\n"),
        ("trainer/megaflow_trainer/config/x.py", "from megaflow_trainer import training\n"),
        ("trainer/megaflow_trainer/config/x.py", "def f():\n    import torch.nn\n"),
        ("python/megaflow/cli/x.py", "import torch\n"),
        ("python/megaflow/x.py", "import megaflow_trainer.config\n"),
        ("trainer/megaflow_trainer/utils/__init__.py", ""),
    ],
    ids=[
        "ops imports model",
        "model imports parallel",
        "optim imports checkpoint",
        "checkpoint imports optim",
        "config imports training",
        "config imports torch",
        "megaflow imports torch",
        "megaflow imports the trainer",
        "a folder without a row",
    ],
)
def test_import_linter_refuses(tree: Path, file: str, code: str):
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(code)
    done = lint_imports(tree)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout or "not listed as layers" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("layer", ["config", "ops", "model", "optim"])
def test_torch_distributed_is_banned_below_parallel(tree: Path, layer: str):
    for code in ("import torch.distributed as dist\n", "from torch import distributed\n"):
        assert banned(tree, f"trainer/megaflow_trainer/{layer}/x.py", code)


@pytest.mark.parametrize("layer", ["parallel", "checkpoint", "training"])
def test_torch_distributed_is_allowed_where_ranks_communicate(tree: Path, layer: str):
    assert not banned(tree, f"trainer/megaflow_trainer/{layer}/x.py", "import torch.distributed as dist\n")


@pytest.mark.parametrize("file", ["trainer/megaflow_trainer/model/x.py", "tools/x.py", "trainer/pretrain.py"])
def test_the_extension_is_banned_outside_its_package(tree: Path, file: str):
    assert banned(tree, file, "from megaflow import _core\n")
    assert banned(tree, file, "from megaflow._core import open_pair\n")


def test_the_extension_is_allowed_inside_its_package(tree: Path):
    assert not banned(tree, "python/megaflow/x.py", "from megaflow import _core\n")


def test_the_extension_is_banned_where_the_exception_for_distributed_would_let_it_through(tree: Path):
    file = tree / "trainer/megaflow_trainer/parallel/x.py"
    file.write_text("from megaflow import _core\n")
    assert run(tree, *ban("megaflow._core", "private", ["trainer"])).returncode == 1
    file.write_text("import torch.distributed\n")
    assert run(tree, *ban("megaflow._core", "private", ["trainer"])).returncode == 0


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("from . import x\n", "TID252"),
        ("from os import *\n", "F403"),
        ("def f(a, b, c, d, e, g, h, i, j):\n    return a\n", "PLR0913"),
        ("def f(a):\n" + "    print(a)\n" * 61, "PLR0915"),
        ("def f(a):\n" + "".join(f"    if a == {i}:\n        a += 1\n" for i in range(13)), "C901"),
        ("def f():\n    return 1\n", "D103"),
        ("x = 1  # " + "a" * 120 + "\n", "E501"),
    ],
    ids=["relative import", "star import", "9 arguments", "61 statements", "14 paths", "no docstring", "long line"],
)
def test_ruff_refuses(tree: Path, code: str, rule: str):
    (tree / "python/megaflow/x.py").write_text(code)
    done = run(tree, "ruff", "check", "--no-cache", "--output-format", "concise", "python/megaflow/x.py")
    assert f" {rule} " in done.stdout, done.stdout + done.stderr
