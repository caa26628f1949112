"""Stand-ins for parts of optional packages, with the arguments of the versions that were read, written with torch."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def install(monkeypatch: pytest.MonkeyPatch, **objects: Any) -> None:
    """Put fake modules in place: `a__b__c` is the object c of the module a.b."""
    for path, value in objects.items():
        *parents, name = path.split("__")
        for count in range(1, len(parents) + 1):
            full = ".".join(parents[:count])
            if not getattr(sys.modules.get(full), "is_fake", False):
                module = ModuleType(full)
                module.is_fake = True  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, full, module)
        setattr(sys.modules[".".join(parents)], name, value)


class EngineLinear(nn.Module):
    """transformer_engine.pytorch.Linear 2.20: adds to `weight.main_grad` if it is told to."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        assert not bias
        self.fuse_wgrad_accumulation = False
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., i]` to `[..., o]`."""
        if not self.fuse_wgrad_accumulation:
            return F.linear(x, self.weight)
        y: Tensor = _Fused.apply(x, self.weight)
        return y


class EngineNormedLinear(EngineLinear):
    """transformer_engine.pytorch.LayerNormLinear 2.20."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        bias: bool,
        normalization: str,
        params_dtype: torch.dtype,
        return_layernorm_output: bool,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, params_dtype=params_dtype, device=device)
        self.eps, self.normalization, self.returns_normed = eps, normalization, return_layernorm_output
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features, dtype=params_dtype, device=device))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Any:
        """`[..., i]` to `[..., o]`, and what the norm gives if that was asked for."""
        shape, weight = tuple(self.layer_norm_weight.shape), self.layer_norm_weight
        if self.normalization == "RMSNorm":
            normed = F.rms_norm(x, shape, weight, self.eps)
        else:
            normed = F.layer_norm(x, shape, weight, self.layer_norm_bias, self.eps)
        y = super().forward(normed)
        return (y, normed) if self.returns_normed else y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ ctx.weight, None


def install_engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Transformer Engine; the list says which recipes were entered."""
    entered: list[Any] = []

    @contextmanager
    def autocast(*, enabled: bool, recipe: Any, amax_reduction_group: Any = None) -> Any:
        assert enabled
        entered.append(recipe)
        yield

    def make_norm(kind: type[nn.LayerNorm | nn.RMSNorm]) -> Any:
        return lambda width, *, eps, device, dtype: kind(width, eps=eps, device=device, dtype=dtype)

    def recipe(name: str, *known: str) -> Any:
        def make(**options: Any) -> Any:
            assert set(options) <= {"fp8_format", *known}
            return SimpleNamespace(name=name, **options)

        return make

    install(
        monkeypatch,
        transformer_engine__pytorch__Linear=EngineLinear,
        transformer_engine__pytorch__LayerNormLinear=EngineNormedLinear,
        transformer_engine__pytorch__autocast=autocast,
        transformer_engine__pytorch__RMSNorm=make_norm(nn.RMSNorm),
        transformer_engine__pytorch__LayerNorm=make_norm(nn.LayerNorm),
        transformer_engine__common__recipe__Format={"HYBRID": "hybrid format", "E4M3": "e4m3 format"},
        transformer_engine__common__recipe__Float8CurrentScaling=recipe("current"),
        transformer_engine__common__recipe__DelayedScaling=recipe(
            "delayed", "margin", "amax_history_len", "amax_compute_algo"
        ),
    )
    return entered


def install_liger(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """liger-kernel 0.8; the list says what was called."""
    called: list[str] = []

    def rms(x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Tensor:
        assert (offset, mode, in_place) == (0.0, "gemma", False)
        called.append("rms")
        return F.rms_norm(x, tuple(weight.shape), weight, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        called.append("layer")
        return F.layer_norm(x, tuple(weight.shape), weight, bias, eps)

    def gate(a: Tensor, b: Tensor) -> Tensor:
        called.append("gate")
        return F.silu(a) * b

    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, places: None, unsqueeze: int, width: int
    ) -> tuple[Tensor, Tensor]:
        assert cos.dim() == 3
        assert cos.shape[-1] * 2 == width
        called.append("rope")
        cos, sin = cos.unsqueeze(unsqueeze), sin.unsqueeze(unsqueeze)
        return turn(q, cos, sin), turn(k, cos, sin)

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def entropy(
        scores: Tensor, target: Tensor, weight: None, ignored: int, square: float, smoothing: float, reduction: str
    ) -> tuple[Tensor, None, None, None]:
        assert (ignored, square, smoothing, reduction) == (-100, 0.0, 0.0, "none")
        assert scores.dim() == 2
        called.append("loss")
        return F.cross_entropy(scores, target, reduction="none"), None, None, None

    install(
        monkeypatch,
        liger_kernel__ops__rms_norm__LigerRMSNormFunction=SimpleNamespace(apply=rms),
        liger_kernel__ops__layer_norm__LigerLayerNormFunction=SimpleNamespace(apply=layer),
        liger_kernel__ops__swiglu__LigerSiLUMulFunction=SimpleNamespace(apply=gate),
        liger_kernel__ops__rope__LigerRopeFunction=SimpleNamespace(apply=rope),
        liger_kernel__ops__cross_entropy__LigerCrossEntropyFunction=SimpleNamespace(apply=entropy),
    )
    return called


def install_apex(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """apex's norms, its AdamW and its sums of weight gradients; the list says what was called."""
    called: list[str] = []

    def rms(x: Tensor, weight: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        called.append("rms")
        return F.rms_norm(x, shape, weight, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        called.append("layer")
        return F.layer_norm(x, shape, weight, bias, eps)

    def adam(
        chunk: int,
        skip: Tensor,
        lists: list[list[Tensor]],
        lr: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        *rest: Any,
    ) -> None:
        step, decoupled, corrected, decay, scale = rest
        assert (skip.dtype, step.dtype, decoupled, corrected, scale.item()) == (torch.int32, torch.int32, 1, 1, 1.0)
        called.append("adam")
        if skip.item():
            return
        for g, p, m, v in zip(*lists, strict=True):
            m.lerp_(g, 1 - beta1)
            v.lerp_(g * g, 1 - beta2)
            root = (v / (1 - beta2 ** step.item())).sqrt() + eps
            p.copy_(p * (1 - lr * decay) - lr * (m / (1 - beta1 ** step.item())) / root)

    def add(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        called.append("sums")
        main_grad.add_(grad.t() @ x)

    install(
        monkeypatch,
        fused_weight_gradient_mlp_cuda__wgrad_gemm_accum_fp32=add,
        fused_weight_gradient_mlp_cuda__wgrad_gemm_accum_fp16=add,
        amp_C__multi_tensor_adam_capturable=adam,
        apex__multi_tensor_apply__multi_tensor_applier=lambda op, *args: op(65536, *args),
        fused_layer_norm_cuda__forward_affine=None,
        apex__normalization__fused_layer_norm__fused_rms_norm_affine=rms,
        apex__normalization__fused_layer_norm__fused_layer_norm_affine=layer,
    )
    return called


def install_torchao(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torchao's fp8 linear layer, without rounding; the list says which recipes were asked for."""
    asked: list[str] = []

    class Config:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            asked.append(name)
            return name

    class Float8Linear(nn.Module):
        weight: nn.Parameter

        @classmethod
        def from_float(cls, plain: nn.Linear, *, config: str) -> Float8Linear:
            assert plain.bias is None
            made = cls()
            made.weight = plain.weight
            return made

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    install(
        monkeypatch,
        torchao__float8__float8_linear__Float8Linear=Float8Linear,
        torchao__float8__Float8LinearConfig=Config,
    )
    return asked
