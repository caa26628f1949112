#!/usr/bin/env python3
"""Megatron-LM's merging command: the same flags, the same order, the same bytes, in constant memory."""

from megaflow.cli.merge import main_megatron

if __name__ == "__main__":
    raise SystemExit(main_megatron())
