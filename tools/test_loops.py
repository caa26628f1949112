#!/usr/bin/env python3
"""Runs every loop of docs/loops.md, none skipped: `make test-loops`.

Lightning, transformers, accelerate and JAX go into an environment of their own, `.venv-loops` (or the folder that
`MEGAFLOW_LOOPS_VENV` names), which sees the packages of the usual one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from doors import run_door
from setup_env import ROOT, Environment, output_of, prepare_or_exit, say

PACKAGES = ("lightning>=2.4", "transformers>=4.45", "accelerate>=1.0", "jax>=0.4.30")
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
PATHS = (
    "import sys, sysconfig; own = sysconfig.get_path('stdlib'); "
    "print(*(path for path in sys.path if path and not path.endswith('.zip') and not path.startswith(own + '/lib-dyn') "
    "and path != own), sep=chr(10))"
)
"""Where an environment finds packages: its own folder, and those that its .pth files name, which no .pth of another
environment leads on to."""


def make_environment(base: Environment) -> Environment:
    """The environment of the loops on top of `base`; a second call only asks pip whether all is there."""
    loops = Environment(Path(os.environ.get("MEGAFLOW_LOOPS_VENV") or ROOT / ".venv-loops").absolute())
    if not loops.python.exists():
        subprocess.run([str(base.python), "-m", "venv", str(loops.folder)], check=True)
    own, parents = output_of([str(loops.python), "-c", SITE]), output_of([str(base.python), "-c", PATHS])
    if not own or not parents:
        raise SystemExit(f"{loops.folder}: this environment does not run; remove it and start again")
    Path(own, "megaflow_parent_environment.pth").write_text(f"{parents}\n")
    say("installing Lightning, transformers, accelerate and JAX (network; a minute or two)")
    loops.run(loops.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
    return loops


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Other arguments are handed to pytest."
    )
    options = parser.parse_known_args()[1]
    loops = make_environment(prepare_or_exit())
    command = [str(loops.python), "-m", "pytest", "tests/integration/test_loops.py", "-v", *options]
    variables = {**loops.variables(), "MEGAFLOW_ALL_LOOPS": "1", "PYTHONPATH": str(ROOT / "python")}
    sys.exit(subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode)


if __name__ == "__main__":
    sys.exit(run_door(main))
