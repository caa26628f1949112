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
        "model",
        (
            *("expert_layers", "expert_dim", "shared_dim", "router_top_k", "router_score", "router_pre_softmax"),
            *("router_groups", "router_group_top_k", "router_scale", "router_jitter", "has_expert_bias"),
            *("balance_kind", "aux_loss_scale", "z_loss_scale", "capacity_factor", "drop_policy"),
            *("pads_to_capacity", "expert_kernel", "is_router_random"),
        ),
        "--num-experts",
        lambda config: config.model.num_experts is not None,
    ),
    Dependence(
        "model",
        ("expert_bias_rate",),
        "--moe-router-enable-expert-bias",
        lambda config: config.model.has_expert_bias,
    ),
    Dependence(
        "model",
        ("drop_policy",),
        "--moe-expert-capacity-factor",
        lambda config: config.model.capacity_factor is not None,
    ),
    Dependence(
        "model",
        ("aux_loss_scale",),
        "a --moe-router-load-balancing-type other than none",
        lambda config: config.model.balance_kind != "none",
    ),
    Dependence(
        "model",
        ("balance_kind",),
        "--moe-aux-loss-coeff",
        lambda config: config.model.aux_loss_scale > 0 or config.model.balance_kind == "none",
    ),
    Dependence(
        "model",
        ("attention",),
        "--cp-comm-type a2a: ranks that share sequences have a core of their own otherwise",
        lambda config: config.parallel.cp == 1 or config.parallel.cp_kind == "a2a",
    ),
    Dependence(
        "parallel",
        ("dispatcher",),
        "ranks that share experts",
        lambda config: config.parallel.ep * (config.parallel.etp or config.parallel.tp) > 1,
    ),
    Dependence(
        "parallel",
        ("overlaps_shared",),
        "--moe-shared-expert-intermediate-size",
        lambda config: config.model.shared_dim is not None,
    ),
    Dependence(
        "parallel",
        ("overlaps_shared",),
        "--moe-token-dispatcher-type alltoall among ranks that share experts",
        lambda config: (
            config.parallel.ep * (config.parallel.etp or config.parallel.tp) > 1
            and config.parallel.dispatcher == "alltoall"
        ),
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
        "precision",
        ("recipe", "history_len", "history_algo", "margin", "keeps_ends"),
        "--fp8-format",
        lambda config: config.step.fp8 != "none",
    ),
    Dependence(
        "precision",
        ("history_len", "history_algo", "margin"),
        "--fp8-recipe delayed",
        lambda config: config.precision.recipe == "delayed" or config.step.fp8 == "none",
    ),
    Dependence("kernels", ("fp8",), "--fp8-format", lambda config: config.step.fp8 != "none"),
    Dependence(
        "precision",
        ("start_layers", "end_layers"),
        "--first-last-layers-bf16",
        lambda config: config.precision.keeps_ends,
    ),
    Dependence(
        "step",
        ("graph_warmup",),
        "--cuda-graph-impl local",
        lambda config: config.step.cuda_graph != "none",
    ),
    Dependence(
        "step",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "--fp16",
        lambda config: config.step.dtype == "fp16",
    ),
    Dependence("log", ("profiles_kernels_only",), "--profile", lambda config: config.log.is_profiled),
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
