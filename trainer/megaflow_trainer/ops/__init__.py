"""Kernels behind one registry: each op has a torch default and optional entries that say where they can run."""
