#!/usr/bin/env python3
"""Megatron-LM's preprocessing command: the same flags, the same defaults, the same bytes.

It differs from `megaflow-preprocess` in its defaults alone: the end of document is appended only with --append-eod,
text that spells a special token becomes the token, and an input without documents gives an empty pair.
"""

import sys

try:
    from megaflow.cli.preprocess import main
except ImportError as missing:
    sys.exit(f"preprocess_data.py: {missing}; run `make build` and `. .venv/bin/activate`, or pip install megaflow")

if __name__ == "__main__":
    raise SystemExit(main(prog="preprocess_data.py", megatron_defaults=True))
