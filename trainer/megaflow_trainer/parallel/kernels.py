"""Parts of a model that optional packages compute, put on it from outside; their weights must have memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from megaflow_trainer.config.sections import KernelConfig, PrecisionConfig
from megaflow_trainer.model.attention import Attention
from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.model.mlp import Mlp
from megaflow_trainer.model.norm import LayerNorm, RMSNorm
from megaflow_trainer.ops.layer_packages import (
    PARTS,
    ApexProduct,
    EngineNormedProduct,
    EngineProduct,
    gate_liger,
    loss_liger,
    make_engine_scope,
    make_norm_kernel,
    pass_on,
    rotate_liger,
)
from megaflow_trainer.ops.linear import Linear
from megaflow_trainer.parallel.mesh import Mesh


def list_parts(config: KernelConfig) -> list[tuple[str, str]]:
    """The parts that packages compute: field and value."""
    pairs = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [pair for pair in pairs if pair in PARTS]


def is_traceable(config: KernelConfig) -> bool:
    """Whether compiled graphs can hold all of them."""
    return all(PARTS[pair].is_traceable for pair in list_parts(config))


def apply_kernels(model: GPT, config: KernelConfig, *, has_fp8: bool) -> None:
    """Let packages compute what the configuration says. Linear layers in fp8 are `apply_fp8`'s, whosever they are."""
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        for layer in [module for module in block.modules() if isinstance(module, Linear)]:
            if config.layers == "transformer_engine" and not has_fp8:
                layer.product = EngineProduct(layer.weight)
            elif config.sums == "apex":
                layer.product = ApexProduct()
    for module in model.modules():
        if config.norm != "torch" and isinstance(module, LayerNorm | RMSNorm):
            module.kernel = make_norm_kernel(config.norm, module)
        if config.gate == "liger" and isinstance(module, Mlp):
            module.multiply_gate = gate_liger
        if config.rotary == "liger" and isinstance(module, Attention):
            module.turn = lambda q, k, rotary: rotate_liger(q, k, rotary.cos, rotary.sin)
    if config.loss == "liger":
        model.loss = loss_liger


def join_norms(model: GPT, config: KernelConfig) -> None:
    """Let Transformer Engine compute a norm together with the first product behind it, where that is its product and no
    rank shares it, and where no other kernel is named for norms. To be called when all products are in place.
    """
    if config.layers != "transformer_engine" or config.norm != "torch":
        return
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if isinstance(block.attention, Attention) and _can_join(block.attention.qkv):
            _join(block.attention_norm, block.attention.qkv)
        if isinstance(block.mlp, Mlp) and block.mlp.gate is None and _can_join(block.mlp.up):
            _join(block.mlp_norm, block.mlp.up)
        elif isinstance(block.mlp, Mlp) and _can_join(block.mlp.up) and _can_join(block.mlp.gate):
            _join(block.mlp_norm, block.mlp.up, returns_normed=True)
            block.mlp.widen = _widen_normed


def _can_join(layer: nn.Module | None) -> bool:
    return isinstance(layer, Linear) and type(layer.product) is EngineProduct and layer.sharing is None


def _join(norm: nn.Module, layer: nn.Module, *, returns_normed: bool = False) -> None:
    assert isinstance(norm, LayerNorm | RMSNorm)
    assert isinstance(layer, Linear)
    layer.product = EngineNormedProduct(layer.weight, norm, returns_normed=returns_normed)
    norm.kernel = pass_on


def _widen_normed(up: nn.Module, gate: nn.Module | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`Mlp.widen` of what lies before the norm: the first product computes it for both."""
    assert isinstance(up, Linear)
    assert isinstance(up.product, EngineNormedProduct)
    assert gate is not None
    y, normed = up.product.run_both(x, up.bias)
    return y, gate(normed)


def make_scope(
    kind: str, kernels: KernelConfig, precision: PrecisionConfig, mesh: Mesh
) -> Callable[[], AbstractContextManager[Any]]:
    """What is entered around a forward of the model: Transformer Engine's fp8, or nothing."""
    if kernels.layers != "transformer_engine" or kind == "none":
        return nullcontext
    options = {}
    if precision.recipe == "delayed":
        options = {
            "margin": precision.margin,
            "amax_history_len": precision.history_len,
            "amax_compute_algo": precision.history_algo,
        }
    return make_engine_scope(precision.recipe, kind, mesh.world_group, **options)
