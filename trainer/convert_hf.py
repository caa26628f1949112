"""Hugging Face folders to and from this trainer.

python trainer/convert_hf.py export CHECKPOINTS FOLDER      weights of the last checkpoint, for `transformers`
python trainer/convert_hf.py recipe FOLDER RECIPE.yaml      the model section of a recipe; train with --init-from FOLDER
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from megaflow.errors import MegaflowError
from megaflow_trainer.checkpoint import store
from megaflow_trainer.checkpoint.hf import read_hf_config, write_hf
from megaflow_trainer.checkpoint.initial import read_weights
from megaflow_trainer.config.sections import ModelConfig


def main(argv: Sequence[str]) -> int:
    """Run the command line; 2 for a wrong one, 1 for a fault of the files."""
    if len(argv) != 3 or argv[0] not in ("export", "recipe"):
        print(__doc__, file=sys.stderr)
        return 2
    verb, source, target = argv[0], Path(argv[1]), Path(argv[2])
    try:
        export(source, target) if verb == "export" else write_recipe(source, target)
    except MegaflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
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
    print(f"wrote {target}, a {family}; train with --config {target} --init-from {source}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
