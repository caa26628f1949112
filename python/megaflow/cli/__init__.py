"""The commands `megaflow` and `megaflow-preprocess`."""
