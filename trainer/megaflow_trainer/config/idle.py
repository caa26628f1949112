"""Settings that were given and change nothing, because what they belong to is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megaflow_trainer.config.sections import TrainConfig


@dataclass(frozen=True, slots=True)
class Dependence:
    """Fields of a section that count only under a condition."""

    section: str
    names: tuple[str, ...]
    needs: str
    """The condition in words."""
    is_met: Callable[[TrainConfig], bool]


_DEPENDENCES = (
    Dependence(
        "model",
        ("rotary_base", "rotary_fraction", "rotary_interleaved", "rotary_scaling"),
        "--position-embedding-type rope",
        lambda config: config.model.position_kind == "rope",
    ),
    Dependence("model", ("rotary_fraction",), "heads that are not latent", lambda config: not config.model.is_latent),
    Dependence(
        "model",
        ("rotary_factor", "rotary_original_positions"),
        "--rotary-scaling",
        lambda config: config.model.rotary_scaling != "none",
    ),
    Dependence(
        "model",
        ("q_latent_dim", "kv_latent_dim", "qk_dim", "qk_rotary_dim", "v_dim"),
        "multi-latent attention",
        lambda config: config.model.is_latent,
    ),
    Dependence(
        "model",
        ("resets_positions",),
        "positions (--position-embedding-type is none)",
        lambda config: config.model.position_kind != "none",
    ),
    Dependence(
        "schedule",
        ("wsd_steps", "wsd_samples", "wsd_style"),
        "--lr-decay-style WSD",
        lambda config: config.schedule.style == "WSD",
    ),
    Dependence(
        "optim",
        ("start_weight_decay", "end_weight_decay"),
        "--weight-decay-incr-style linear or cosine",
        lambda config: config.optim.decay_style != "constant",
    ),
    Dependence(
        "step",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "--fp16",
        lambda config: config.step.dtype == "fp16",
    ),
)


def list_idle(config: TrainConfig) -> list[str]:
    """A line for each field that was given and has no effect."""
    return [
        f"{dependence.section}.{name} has no effect without {dependence.needs}"
        for dependence in _DEPENDENCES
        if not dependence.is_met(config)
        for name in dependence.names
        if _is_given(getattr(config, dependence.section), name)
    ]


def _is_given(section: object, name: str) -> bool:
    defaults = {field.name: field.default for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    return bool(getattr(section, name) != defaults[name])
