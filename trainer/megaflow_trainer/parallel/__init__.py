"""Parallelism, put on a plain model from outside. Every function that communicates takes the group it uses."""
