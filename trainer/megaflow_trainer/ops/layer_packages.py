"""Parts of a block by optional packages: linear layers, norms, the gate's product, rotary positions; and cross entropy.

Each lies behind the signature of the native part. Those that a compiled graph cannot hold cut blocks in two.

Legend: t tokens, i inputs, o outputs, b micro-batch, n heads, s sequence, d head dim, v vocabulary (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.ops.linear import Product, multiply, multiply_back
from megaflow_trainer.ops.packages import APEX, ENGINE, LIGER, TORCHAO, Package

_ENGINE_LINEAR = "transformer_engine.pytorch.Linear"
_ENGINE_NORMED = "transformer_engine.pytorch.LayerNormLinear"
_ENGINE_AUTOCAST = "transformer_engine.pytorch.autocast"
_ENGINE_RECIPES = "transformer_engine.common.recipe"
_ENGINE_NORMS = {"RMSNorm": "transformer_engine.pytorch.RMSNorm", "LayerNorm": "transformer_engine.pytorch.LayerNorm"}
_LIGER_NORMS = {
    "RMSNorm": "liger_kernel.ops.rms_norm.LigerRMSNormFunction",
    "LayerNorm": "liger_kernel.ops.layer_norm.LigerLayerNormFunction",
}
_APEX_NORMS = {
    "RMSNorm": "apex.normalization.fused_layer_norm.fused_rms_norm_affine",
    "LayerNorm": "apex.normalization.fused_layer_norm.fused_layer_norm_affine",
}
_LIGER_GATE = "liger_kernel.ops.swiglu.LigerSiLUMulFunction"
_LIGER_ROTARY = "liger_kernel.ops.rope.LigerRopeFunction"
_LIGER_LOSS = "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction"
_TORCHAO_LINEAR = "torchao.float8.float8_linear.Float8Linear"
_TORCHAO_CONFIG = "torchao.float8.Float8LinearConfig"

_APEX_SUMS = {
    4: "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32",
    2: "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16",
}
"""By bytes of an element of the main gradient."""
APEX_ADAM = ("apex.multi_tensor_apply.multi_tensor_applier", "amp_C.multi_tensor_adam_capturable")

NormKernel = Callable[[Tensor, Tensor, "Tensor | None", float], Tensor]
"""Input `[..., h]`, weight `[h]`, bias `[h]` or None, epsilon, to `[..., h]`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model by a package: what must load, and whether a compiled graph can hold it."""

    package: Package
    paths: tuple[str, ...]
    is_traceable: bool = False

    def find_obstacle(self, device: torch.device) -> str | None:
        """Why it cannot serve on a device, or None."""
        if device.type != "cuda":
            return f"{self.package.name} needs a CUDA GPU and this machine's device is {device.type}"
        return self.package.find_obstacle(*self.paths)


PARTS: dict[tuple[str, str], Part] = {
    ("layers", "transformer_engine"): Part(
        ENGINE,
        (
            _ENGINE_LINEAR,
            _ENGINE_NORMED,
            _ENGINE_AUTOCAST,
            f"{_ENGINE_RECIPES}.Float8CurrentScaling",
            f"{_ENGINE_RECIPES}.DelayedScaling",
            f"{_ENGINE_RECIPES}.Format",
        ),
    ),
    ("norm", "transformer_engine"): Part(ENGINE, tuple(_ENGINE_NORMS.values())),
    ("norm", "liger"): Part(LIGER, tuple(_LIGER_NORMS.values())),
    ("norm", "apex"): Part(APEX, (*_APEX_NORMS.values(), "fused_layer_norm_cuda.forward_affine")),
    ("adam", "apex"): Part(APEX, APEX_ADAM, is_traceable=True),  # outside of blocks
    ("sums", "apex"): Part(APEX, (APEX_ADAM[0], *_APEX_SUMS.values()), is_traceable=True),
    ("gate", "liger"): Part(LIGER, (_LIGER_GATE,)),
    ("rotary", "liger"): Part(LIGER, (_LIGER_ROTARY,)),
    ("loss", "liger"): Part(LIGER, (_LIGER_LOSS,), is_traceable=True),  # outside of blocks
    ("fp8", "torchao"): Part(TORCHAO, (_TORCHAO_LINEAR, _TORCHAO_CONFIG), is_traceable=True),
}
"""By field of the configuration's section and value."""


class EngineProduct(Product):
    """Transformer Engine's linear layer around a weight that stays where it is; the bias is added behind it.

    It adds to a main gradient itself, and is in fp8 where `make_engine_scope` is entered around forward.
    """

    def __init__(self, weight: Tensor) -> None:
        o, i = weight.shape
        make = ENGINE.load(_ENGINE_LINEAR)
        self.weight, self.layer = weight, make(i, o, bias=False, params_dtype=weight.dtype, device=weight.device)
        self.layer.weight = weight  # a parameter of its module

    @property
    def main_grad(self) -> Tensor | None:
        """As in `Product`."""
        return getattr(self.weight, "main_grad", None)

    @main_grad.setter
    def main_grad(self, value: Tensor | None) -> None:
        self.weight.main_grad = value  # type: ignore[attr-defined]
        self.layer.fuse_wgrad_accumulation = value is not None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`; the weight is the one that it was made for."""
        y = self._run(x)
        return y if bias is None else y + bias

    @torch.compiler.disable
    def _run(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class EngineNormedProduct(EngineProduct):
    """Transformer Engine's norm and the linear layer behind it in one, around weights that stay where they are.

    Args:
        weight: of the linear layer, `[o, i]`.
        norm: whose weights are over `i` channels; it is not run itself any more.
        returns_normed: whether `run_both` will be asked for what the norm gives.
    """

    def __init__(self, weight: Tensor, norm: nn.LayerNorm | nn.RMSNorm, *, returns_normed: bool = False) -> None:
        o, i = weight.shape
        self.weight = weight
        self.layer = ENGINE.load(_ENGINE_NORMED)(
            i,
            o,
            eps=norm.eps,
            bias=False,
            normalization="RMSNorm" if isinstance(norm, nn.RMSNorm) else "LayerNorm",
            params_dtype=weight.dtype,
            return_layernorm_output=returns_normed,
            device=weight.device,
        )
        self.layer.weight, self.layer.layer_norm_weight = weight, norm.weight
        if isinstance(norm, nn.LayerNorm):
            self.layer.layer_norm_bias = norm.bias

    @torch.compiler.disable
    def run_both(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """What lies before the norm, `[..., i]`, to the product `[..., o]` and what the norm gives, `[..., i]`."""
        y, normed = self.layer(x)
        return y if bias is None else y + bias, normed


def pass_on(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """In the place of a norm's kernel, where the product behind it computes the norm."""
    return x


@torch.library.custom_op("megaflow::add_product_apex_", mutates_args={"main_grad"})
def add_product_apex_(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """`main_grad += grad^T x` by apex: `[o, i]` in fp32 or 16 bits, `[t, o]`, `[t, i]`."""
    APEX.load(_APEX_SUMS[main_grad.element_size()])(x.contiguous(), grad.contiguous(), main_grad)


@add_product_apex_.register_fake
def _(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    return None


class _AddingByApex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor) -> Tensor:
        return multiply(ctx, x, weight, bias, main_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        return multiply_back(ctx, grad, add_product_apex_)


class ApexProduct(Product):
    """torch's product whose weight gradient apex adds to the main gradient."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`."""
        if self.main_grad is None or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        y: Tensor = _AddingByApex.apply(x, weight, bias, self.main_grad)
        return y


def make_engine_scope(recipe: str, kind: str, group: Any, **options: Any) -> Callable[[], Any]:
    """What is entered around forward for Transformer Engine's products to be in fp8.

    Args:
        recipe: tensorwise or delayed.
        kind: hybrid or e4m3.
        group: ranks that agree on what tensors reach, for delayed scales.
        options: of delayed scales.
    """
    autocast, form = ENGINE.load(_ENGINE_AUTOCAST), ENGINE.load(f"{_ENGINE_RECIPES}.Format")[kind.upper()]
    if recipe == "delayed":
        scaling = ENGINE.load(f"{_ENGINE_RECIPES}.DelayedScaling")(fp8_format=form, **options)
        return lambda: autocast(enabled=True, recipe=scaling, amax_reduction_group=group)
    scaling = ENGINE.load(f"{_ENGINE_RECIPES}.Float8CurrentScaling")(fp8_format=form)
    return lambda: autocast(enabled=True, recipe=scaling)


class TorchaoProduct(Product):
    """torchao's fp8 linear layer around a weight that stays where it is. It leaves the weight's gradient in the dtype
    of the weight, which is then added to the main gradient.
    """

    def __init__(self, weight: Tensor, recipe: str) -> None:
        o, i = weight.shape
        plain = nn.Linear(i, o, bias=False, device="meta")
        assert isinstance(weight, nn.Parameter)
        plain.weight = weight
        config = TORCHAO.load(_TORCHAO_CONFIG).from_recipe_name(recipe)
        self.layer = TORCHAO.load(_TORCHAO_LINEAR).from_float(plain, config=config)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Product`; the weight is the one that it was made for."""
        y: Tensor = self.layer(x)
        return y if bias is None else y + bias


def make_norm_kernel(name: str, norm: nn.LayerNorm | nn.RMSNorm) -> NormKernel:
    """The kernel of a package for one norm, whose weights have memory."""
    kind = "RMSNorm" if isinstance(norm, nn.RMSNorm) else "LayerNorm"
    if name == "liger":
        return _make_liger_norm(LIGER.load(_LIGER_NORMS[kind]), has_bias=kind == "LayerNorm")
    if name == "apex":
        return _make_apex_norm(APEX.load(_APEX_NORMS[kind]), has_bias=kind == "LayerNorm")
    return _make_engine_norm(ENGINE.load(_ENGINE_NORMS[kind]), norm)


def _make_liger_norm(function: Any, *, has_bias: bool) -> NormKernel:
    @torch.compiler.disable
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        # The casting mode in which all is in fp32 inside; gradients get memory of their own.
        rest = (bias, eps) if has_bias else (eps, 0.0, "gemma", False)
        y: Tensor = function.apply(x, weight, *rest)
        return y

    return run


def _make_apex_norm(function: Any, *, has_bias: bool) -> NormKernel:
    @torch.compiler.disable
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        weights = (weight, bias) if has_bias else (weight,)
        y: Tensor = function(x, *weights, tuple(weight.shape), eps)
        return y

    return run


def _make_engine_norm(make: Any, norm: nn.LayerNorm | nn.RMSNorm) -> NormKernel:
    layer = make(norm.weight.shape[0], eps=norm.eps, device=norm.weight.device, dtype=norm.weight.dtype)
    layer.weight = norm.weight
    if isinstance(norm, nn.LayerNorm):
        layer.bias = norm.bias

    @torch.compiler.disable
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y: Tensor = layer(x)
        return y

    return run


@torch.compiler.disable
def gate_liger(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) up`."""
    y: Tensor = LIGER.load(_LIGER_GATE).apply(gate, up)
    return y


@torch.compiler.disable
def rotate_liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[b, n, s, d]` and keys `[b, g, s, d]`, the first channels turned, channels paired by halves.

    Args:
        q: queries.
        k: keys.
        cos: cosines of each pair's angle, `[s, r/2]` or `[b, 1, s, r/2]` fp32.
        sin: sines.
    """
    cos, sin = ((table.squeeze(1) if table.dim() == 4 else table[None]) for table in (cos, sin))
    turned: tuple[Tensor, Tensor] = LIGER.load(_LIGER_ROTARY).apply(q, k, cos, sin, None, 1, 2 * cos.shape[-1])
    return turned


def loss_liger(x: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int, scale: float) -> Tensor:
    """Cross entropy of the scores `scale * x weight^T`, as `ops.cross_entropy.linear_cross_entropy`; scores are widened
    to fp32, since the kernel's losses are in the dtype of the scores.
    """
    scores = F.linear(x, weight)[..., :vocab_size].float()
    scores = scores if scale == 1 else scores * scale
    found = LIGER.load(_LIGER_LOSS).apply(scores.flatten(0, 1), target.flatten(), None, -100, 0.0, 0.0, "none")
    losses: Tensor = found[0]
    return losses.view(target.shape)
