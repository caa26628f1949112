"""Checkpoints on disk: written aside, published by rename, the pointer moved last; nothing executable is loaded."""
