"""Hugging Face folders to and from this trainer.

python trainer/convert_hf.py export CHECKPOINTS FOLDER      weights of the last checkpoint, for `transformers`
python trainer/convert_hf.py recipe FOLDER RECIPE.yaml      the model section of a recipe; train with --init-from FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megaflow.cli.start import INTERRUPTED, guard, unguard

if __name__ == "__main__":  # imports take a while
    guard("stopped by Ctrl-C")

import yaml

from megaflow import __version__
from megaflow.errors import MegaflowError
from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.hf import read_hf_config, write_hf
from megaflow_trainer.checkpoint.initial import read_weights
from megaflow_trainer.config.sections import ModelConfig


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="Hugging Face folders to and from this trainer.")
    version = f"megaflow {__version__}, torch {importlib.metadata.version('torch')}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    one = verbs.add_parser("export", help="weights of the last checkpoint, as a folder for `transformers`")
    one.add_argument("source", metavar="CHECKPOINTS", type=Path, help="what --save named")
    one.add_argument("target", metavar="FOLDER", type=Path, help="the folder to write")
    one.set_defaults(run=export)
    one = verbs.add_parser("recipe", help="the model section of a recipe; train with --init-from FOLDER")
    one.add_argument("source", metavar="FOLDER", type=Path, help="a Hugging Face folder")
    one.add_argument("target", metavar="RECIPE.yaml", type=Path, help="the file to write")
    one.set_defaults(run=write_recipe)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command line; 1 for a fault of the files, and a wrong command line ends the process with 2."""
    given = make_parser().parse_args(argv)
    unguard()
    try:
        given.run(given.source, given.target)
    except MegaflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    return 0


def export(source: Path, target: Path) -> None:
    """Write the last complete checkpoint of a `--save` folder as a Hugging Face folder."""
    weights, path = read_weights(source)
    write_hf(target, ModelConfig(**store.read_state(path)["config"]["model"]), weights)
    print(f"wrote {target} from {path}")


def write_recipe(source: Path, target: Path) -> None:
    """Write the shape of a Hugging Face folder as the model section of a recipe."""
    config, family = read_hf_config(source)
    defaults = dataclasses.asdict(ModelConfig())
    section = {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}
    target.write_text(yaml.safe_dump({"model": section}, sort_keys=False), encoding="utf-8")
    words = ["--config", str(target), "--init-from", str(source)]
    print(f"wrote {target}, a {family}; train with {shlex.join(words)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
