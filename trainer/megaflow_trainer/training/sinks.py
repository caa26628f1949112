"""Where the values of a run go: metrics.jsonl always, TensorBoard and Weights & Biases if asked for."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megaflow.errors import ConfigError, FileAccessError, tell_break
from megaflow_trainer.config.fields import to_dict
from megaflow_trainer.config.sections import TrainConfig

METRICS = "metrics.jsonl"


class Sink(Protocol):
    """Takes the values of an iteration, and is closed at the end."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one row; `iteration` is among the values."""

    def close(self) -> None:
        """Nothing more will come."""


class JsonLines:
    """One JSON object a line, in full precision; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one row, at once."""
        try:
            self.file.write(json.dumps(make_strict(values), allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class TensorBoard:
    """Numbers as scalars of an iteration; events as text."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # only if chosen
        except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
            found = f"--tensorboard-dir needs the package tensorboard{tell_break(error, 'tensorboard')}"
            raise ConfigError(f"{found}: `pip install tensorboard`, or drop the flag") from None
        try:
            self.writer = SummaryWriter(str(folder))
        except OSError as error:
            raise FileAccessError(f"--tensorboard-dir {folder}: cannot be written: {error.strerror}") from None

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one row."""
        step = int(values["iteration"])
        if "event" in values:
            self.writer.add_text(str(values["event"]), json.dumps(make_strict(values)), step)
            return
        for name, value in values.items():
            if isinstance(value, int | float) and name != "iteration":
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class Wandb:
    """The same values, in a project of Weights & Biases."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            wandb = importlib.import_module("wandb")  # only if chosen
        except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
            found = f"--wandb-project needs the package wandb{tell_break(error, 'wandb')}"
            raise ConfigError(f"{found}: `pip install wandb`, or drop the flag") from None
        self.run = wandb.init(
            project=config.log.wandb_project,
            entity=config.log.wandb_entity,
            name=config.log.name,
            dir=str(folder),
            config=to_dict(config),
            resume="allow",
        )

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one row; what an event says of its samples stays in metrics.jsonl."""
        flat = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
        self.run.log(flat, step=int(values["iteration"]))

    def close(self) -> None:
        """Finish the run there."""
        self.run.finish()


def open_sinks(config: TrainConfig) -> list[Sink]:
    """The sinks that the configuration asks for; only the first rank opens them.

    Raises:
        ConfigError: if one needs a package that is not installed.
        FileAccessError: if one cannot be written.
    """
    assert config.log.run_dir is not None, "resolved"
    folder = Path(config.log.run_dir)
    sinks: list[Sink] = []
    if config.log.tensorboard_dir is not None:
        sinks.append(TensorBoard(Path(config.log.tensorboard_dir)))
    if config.log.wandb_project is not None:
        sinks.append(Wandb(config, folder))
    return [JsonLines(folder / METRICS), *sinks]  # last, because it cannot fail for want of a package


def prepare_metrics(folder: Path, *, keep_until: int | None) -> None:
    """Make the metrics file of a run folder ready to be written on; one rank calls it.

    Args:
        folder: the run folder; it exists.
        keep_until: the last iteration whose lines this run continues; None if it continues none.

    Raises:
        FileAccessError: if the file cannot be written.
    """
    path = folder / METRICS
    try:
        if keep_until is None:
            if path.is_file() and path.stat().st_size:
                number = next(number for number in itertools.count(1) if not _list_aside(path, number).exists())
                path.rename(_list_aside(path, number))
        elif path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _read_iteration(line) <= keep_until]
            if kept != lines:
                aside = path.with_suffix(".writing")
                aside.write_bytes(b"".join(kept))
                aside.replace(path)
        path.open("ab").close()
    except OSError as error:
        raise cannot_write(path, error) from None


def _list_aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _read_iteration(line: bytes) -> float:
    """The iteration of a line; infinite for one that was cut off when its writer was killed."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def make_strict(value: Any) -> Any:
    """A value of JSON without NaN and infinity, which JSON does not have: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: make_strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_strict(item) for item in value]
    return value


def cannot_write(path: Path, error: OSError) -> FileAccessError:
    """The error of a file in the run folder that refuses."""
    return FileAccessError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir")
