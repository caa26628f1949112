#!/usr/bin/env python3
"""Builds the documentation as a site into docs/_build; a warning ends it: `make docs`.

Sphinx and its parts go into an environment of their own, `.venv-docs` (or the folder that `MEGAFLOW_DOCS_VENV` names),
which sees the packages of the usual one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from doors import run_door
from setup_env import ROOT, Environment, output_of, prepare_or_exit, say

SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


def make_environment(base: Environment) -> Environment:
    """The environment of the documentation on top of `base`."""
    docs = Environment(Path(os.environ.get("MEGAFLOW_DOCS_VENV") or ROOT / ".venv-docs").absolute())
    if not docs.python.exists():
        subprocess.run([str(base.python), "-m", "venv", str(docs.folder)], check=True)
    own, parent = (output_of([str(each.python), "-c", SITE]) for each in (docs, base))
    if not own or not parent:
        raise SystemExit(f"{docs.folder}: this environment does not run; remove it and start again")
    Path(own, "megaflow_parent_environment.pth").write_text(f"{parent}\n")
    say("installing Sphinx and its parts (network; a minute)")
    docs.run(docs.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pip>=25.1")
    docs.run(docs.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--group", "docs")
    return docs


def list_command(python: str | Path, target: Path) -> list[str]:
    """Sphinx's command: every warning is an error."""
    return [str(python), "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(target)]


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    docs, target = make_environment(prepare_or_exit()), ROOT / "docs" / "_build"
    variables = {**docs.variables(), "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(list_command(docs.python, target), cwd=ROOT, env=variables, check=False)
    if done.returncode == 0:
        print(f"open {target / 'index.html'}")
    sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(run_door(main))
