"""The section of kernels from optional packages, and what each of them asks of the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaflow_trainer.config.limits import one_of, raise_faults

if TYPE_CHECKING:
    from megaflow_trainer.config.sections import TrainConfig

ENGINE = "transformer_engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Kernels that are not the native ones."""

    layers: str = "local"
    """Linear layers of blocks: local, or transformer_engine, with its fp8 where fp8 is asked for."""
    norm: str = "torch"
    """Norms: torch, liger, apex or transformer_engine."""
    gate: str = "torch"
    """The product with SwiGLU's gate: torch or liger."""
    rotary: str = "torch"
    """Turning queries and keys by their positions: torch or liger."""
    loss: str = "native"
    """Cross entropy of scores: native or liger."""
    fp8: str = "native"
    """Products in fp8: native or torchao."""
    adam: str = "native"
    """AdamW: native or apex."""
    sums: str = "native"
    """Products of linear layers that add weight gradients to main gradients: native or apex."""

    def __post_init__(self) -> None:
        raise_faults(
            one_of("kernels", ("local", ENGINE), layers=self.layers)
            + one_of("kernels", ("torch", "liger", "apex", ENGINE), norm=self.norm)
            + one_of("kernels", ("torch", "liger"), gate=self.gate, rotary=self.rotary)
            + one_of("kernels", ("native", "liger"), loss=self.loss)
            + one_of("kernels", ("native", "torchao"), fp8=self.fp8)
            + one_of("kernels", ("native", "apex"), adam=self.adam, sums=self.sums)
        )


def check_kernels(config: TrainConfig) -> list[str]:
    """What a kernel of a package asks of the rest of the run."""
    return [*_check_layers(config), *_check_shapes(config), *_check_torchao(config), *_check_sums(config)]


def list_keepers(config: TrainConfig) -> list[str]:
    """The fields whose kernels hold on to the weights that they were made for; others are handed them at each call."""
    own = config.kernels
    keepers = {
        "layers": own.layers == ENGINE,
        "norm": own.norm == ENGINE,
        "fp8": own.fp8 == "torchao" and config.step.fp8 != "none",
    }
    return [name for name, keeps in keepers.items() if keeps]


def _check_layers(config: TrainConfig) -> Iterator[str]:
    own, parallel, precision = config.kernels, config.parallel, config.precision
    for name in list_keepers(config) if parallel.zero == 3 else ():
        kernel = getattr(own, name)
        yield f"kernels.{name} {kernel} keeps its weights, which parallel.zero 3 exchanges; give zero 1 or 2 or drop it"
    if own.layers != ENGINE:
        return
    if parallel.pp > 1:
        yield f"kernels.layers transformer_engine does not go with parallel.pp {parallel.pp} here; give local"
    if config.step.fp8 == "none":
        return
    if precision.recipe == "rowwise":
        yield "kernels.layers transformer_engine has no precision.recipe rowwise; give tensorwise or delayed"
    if config.recompute.granularity != "none":
        yield (
            "kernels.layers transformer_engine in fp8 does not go with recompute.granularity "
            f"{config.recompute.granularity} here; give kernels.layers local"
        )


def _check_shapes(config: TrainConfig) -> Iterator[str]:
    own, model = config.kernels, config.model
    if own.gate != "torch" and model.activation != "swiglu":
        yield f"kernels.gate {own.gate} is for model.activation swiglu, and it is {model.activation}; drop it"
    if own.rotary != "torch" and (model.position_kind != "rope" or model.is_latent):
        yield f"kernels.rotary {own.rotary} is for model.position_kind rope without latent attention; drop it"
    elif own.rotary != "torch" and model.rotary_interleaved:
        yield f"kernels.rotary {own.rotary} pairs channels by halves; drop it or model.rotary_interleaved"
    if own.adam != "native" and (config.optim.kind not in ("adam", "adamw") or config.optim.is_offloaded):
        yield f"kernels.adam {own.adam} is for optim.kind adamw whose states lie on the GPU; drop it"
    narrow = _find_narrow(config)
    if own.adam == "apex" and narrow is not None:
        yield f"kernels.adam apex takes weights, gradients and moments in fp32, and there is {narrow}; drop one of them"
    if own.loss != "native" and config.parallel.tp > 1:
        yield f"kernels.loss {own.loss} needs whole scores, and parallel.tp {config.parallel.tp} divides them; drop it"


def _find_narrow(config: TrainConfig) -> str | None:
    """What keeps a part of the optimizer's state in another dtype than fp32, or None."""
    if config.step.is_all_bf16:
        return "step.is_all_bf16"
    if config.step.dtype == "fp64":
        return "step.dtype fp64"
    for name in ("main_dtype", "main_grad_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config.optim, name) != "fp32":
            return f"optim.{name} {getattr(config.optim, name)}"
    return None


def _check_sums(config: TrainConfig) -> Iterator[str]:
    own, parallel, recompute, step = config.kernels, config.parallel, config.recompute, config.step
    is_chained = recompute.method == "uniform" and (recompute.num_layers or 1) > 1
    obstacles = [
        (own.layers == ENGINE, f"kernels.layers {ENGINE} adds them by itself"),
        (step.fp8 != "none", "step.fp8 has products of its own"),
        (step.dtype not in ("bf16", "fp16"), f"in step.dtype {step.dtype} gradients are as wide as their sums"),
        (
            config.optim.main_grad_dtype not in ("fp32", step.dtype),
            f"optim.main_grad_dtype {config.optim.main_grad_dtype} is neither fp32 nor step.dtype {step.dtype}",
        ),
        (not step.accumulates_in_products, "step.accumulates_in_products is off"),
        (parallel.zero > 1, f"parallel.zero {parallel.zero} does not keep whole sums"),
        (parallel.tp > 1, f"parallel.tp {parallel.tp} sends while it multiplies"),
        (parallel.schedule in ("zero_bubble", "zbv"), f"parallel.schedule {parallel.schedule} takes backward apart"),
        (is_chained, "recompute.method uniform goes through several layers at once"),
    ]
    for is_in, why in obstacles if own.sums != "native" else ():
        if is_in:
            yield f"kernels.sums {own.sums} adds weight gradients in the products of linear layers, and {why}; drop one"


def _check_torchao(config: TrainConfig) -> Iterator[str]:
    own, kind, recipe = config.kernels, config.step.fp8, config.precision.recipe
    if own.fp8 != "torchao" or kind == "none":
        return
    if own.layers == ENGINE:
        yield "kernels.layers transformer_engine brings its own fp8; drop kernels.fp8 torchao"
    elif (recipe, kind) not in (("tensorwise", "hybrid"), ("rowwise", "e4m3")):
        yield (
            f"kernels.fp8 torchao has tensorwise with hybrid and rowwise with e4m3, not {recipe} with {kind}; give "
            "precision.recipe and step.fp8 so, or drop it"
        )
