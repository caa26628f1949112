"""The run: data in, steps, log, checkpoints, and what happens when something goes wrong."""
