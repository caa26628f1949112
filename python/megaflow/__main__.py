"""`python -m megaflow` is `megaflow`."""

from megaflow.cli.start import megaflow

raise SystemExit(megaflow())
