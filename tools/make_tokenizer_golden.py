"""Record the reference ids that tests/golden/test_tokenizer_families.py compares.

Needs the shared test data and what tools/fetch_tokenizers.py fetches. The ids come from the reference libraries alone.
Run it only when a reference library or a corpus is meant to change, and say so in the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import numpy as np  # noqa: E402

from doors import run_door  # noqa: E402
from fetch_tokenizers import DEFAULT_FOLDER, references_folder  # noqa: E402
from helpers.families import FETCHED, SHARED, corpora, digest, path_of, reference  # noqa: E402

TARGET = ROOT / "tests" / "golden" / "tokenizer_ids.json"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="the shared test data")
    parser.add_argument("--tokenizers", type=Path, default=DEFAULT_FOLDER, help="what fetch_tokenizers.py fetched")
    options = parser.parse_args()
    sys.path.insert(0, str(references_folder(options.tokenizers)))
    texts = corpora(options.shared)
    families: dict[str, Any] = {}
    for family in (*SHARED, *FETCHED):
        encode = reference(family, path_of(family, options.shared, options.tokenizers), options.tokenizers)
        rows = {name: encode(documents, "text") for name, documents in texts.items()}
        digests = {name: digest(np.concatenate(ids), [len(row) for row in ids]) for name, ids in rows.items()}
        families[family.name] = {"reference": family.reference, "corpora": digests}
        print(f"{family.name}: {sum(len(row) for row in rows['sample'])} ids in the sample", flush=True)
    record = {
        "versions": {name: version(name) for name in ("tokenizers", "tiktoken", "sentencepiece")},
        "documents": sum(len(documents) for name, documents in texts.items() if name != "sample"),
        "families": families,
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_door(main))
