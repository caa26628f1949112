"""The schedule that a checkpoint was trained by, against that of the command line.

Rate and weight decay are pure functions of the samples consumed, so what has to be kept is the function: the numbers
that `optim.schedule` makes it of. After a resume the two must agree, or one of them is named as the one that holds,
from the first step on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow.errors import ConfigError
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.optim.schedule import build_planner

_SPELLINGS = {
    "rate.style": "--lr-decay-style",
    "rate.peak": "--lr",
    "rate.low": "--min-lr",
    "rate.init": "--lr-warmup-init",
    "rate.warmup": "samples of warm-up",
    "rate.decay": "samples of the decay (--lr-decay-iters, or the length of the run)",
    "rate.wsd": "samples of the WSD decay",
    "rate.wsd_style": "--lr-wsd-decay-style",
    "decay.style": "--weight-decay-incr-style",
    "decay.start": "--start-weight-decay",
    "decay.end": "--weight-decay",
    "decay.length": "samples of the weight-decay ramp (the length of the run)",
}
"""What the numbers are called for a user."""


def describe_schedule(config: TrainConfig) -> dict[str, Any]:
    """Every number that decides about rate and weight decay, and the settings that give them."""
    planner = build_planner(config)
    rate = {f"rate.{name}": value for name, value in dataclasses.asdict(planner.rate).items()}
    decay = {f"decay.{name}": value for name, value in dataclasses.asdict(planner.decay).items()}
    return {"numbers": {**rate, **decay}, "settings": _list_settings(config)}


def _list_settings(config: TrainConfig) -> dict[str, Any]:
    """Fields that give the same schedule in a run of another length or batch."""
    rate, own = build_planner(config).rate, dataclasses.asdict(config.schedule)
    own |= {"decay_steps": None, "decay_samples": rate.decay, "warmup_steps": None}
    if own["warmup_fraction"] is None:
        own["warmup_samples"] = int(rate.warmup)
    if own["style"] == "WSD":
        own |= {"wsd_steps": None, "wsd_samples": int(rate.wsd)}
    names = ("lr", "weight_decay", "start_weight_decay", "end_weight_decay", "decay_style")
    return {"schedule": own, "optim": {name: getattr(config.optim, name) for name in names}}


def settle_schedule(config: TrainConfig, saved: Mapping[str, Any], path: Path) -> TrainConfig:
    """The configuration with the schedule that holds after a resume.

    Raises:
        ConfigError: if the two differ and `checkpoint.schedule_from` is both; it names both values of each difference.
    """
    theirs = saved.get("schedule")
    wanted = config.checkpoint.schedule_from
    if theirs is None or wanted == "command":  # the first format kept none
        return config
    if wanted == "checkpoint":
        settings = theirs["settings"]
        config = dataclasses.replace(
            config,
            schedule=dataclasses.replace(config.schedule, **settings["schedule"]),
            optim=dataclasses.replace(config.optim, **settings["optim"]),
        )
    own = describe_schedule(config)["numbers"]
    differences = list_differences(theirs["numbers"], own)
    if differences:
        both = ", or --use-checkpoint-opt_param-scheduler to go on by the checkpoint" if wanted == "both" else ""
        raise ConfigError(
            f"{path}: the schedule of the checkpoint is not that of the command line: {'; '.join(differences)}; give "
            f"--override-opt_param-scheduler to go on by the command line{both}"
        )
    return config


def list_differences(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """A line for each number that differs and matters."""
    is_constant = own.get("decay.style") == theirs.get("decay.style") == "constant"
    skipped = {"decay.length", "decay.start"} if is_constant else set()
    skipped |= {"rate.batch"} if own.get("rate.style") != "inverse-square-root" else set()
    skipped |= {"rate.wsd", "rate.wsd_style"} if own.get("rate.style") != "WSD" else set()
    skipped |= {"rate.decay"} if own.get("rate.style") == theirs.get("rate.style") == "constant" else set()
    return [
        f"{_SPELLINGS.get(name, name)} was {theirs.get(name)} and is {value}"
        for name, value in own.items()
        if name not in skipped and theirs.get(name) != value
    ]
