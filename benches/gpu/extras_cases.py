"""The cases of `extras.py`: kernels of optional packages beside the native parts, each as the trainer runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from extras_ways import DEVICE, Case, Way
from torch import Tensor, nn

from megaflow_trainer.config.sections import OptimConfig
from megaflow_trainer.model.mlp import multiply_gate
from megaflow_trainer.model.norm import LayerNorm, RMSNorm
from megaflow_trainer.model.rope import Rotary, rotate_both
from megaflow_trainer.ops.attention import attend_math, attend_sdpa, prefer_kernels
from megaflow_trainer.ops.attention_packages import PACKAGES
from megaflow_trainer.ops.cross_entropy import linear_cross_entropy
from megaflow_trainer.ops.fp8 import DelayedProduct, RowwiseProduct, TensorwiseProduct
from megaflow_trainer.ops.layer_packages import (
    PARTS,
    ApexProduct,
    EngineNormedProduct,
    EngineProduct,
    TorchaoProduct,
    gate_liger,
    loss_liger,
    make_engine_scope,
    make_norm_kernel,
    pass_on,
    rotate_liger,
)
from megaflow_trainer.ops.linear import Linear, Product
from megaflow_trainer.ops.registry import Entry, Need
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.parallel.buckets import MainParameter
from megaflow_trainer.parallel.fusion import Compiler, make_loss

WIDE = {"batch": 8, "length": 2048, "width": 2048, "inner": 8192, "heads": 16, "vocab": 50304}
SMALL = {"batch": 2, "length": 256, "width": 1024, "inner": 2048, "heads": 8, "vocab": 1024}
"""For tests."""


def draw(*shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    """A leaf in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, device=DEVICE, generator=generator) * scale
    return x.bfloat16().requires_grad_()


def widen(x: Tensor) -> Tensor:
    """The same leaf in fp32."""
    return x.detach().float().requires_grad_(x.requires_grad)


def compiled(function: Callable[..., Any], *, is_traceable: bool = True) -> Callable[..., Any]:
    """As blocks hold it; what cannot be traced runs as it is."""
    return torch.compile(function, fullgraph=True, dynamic=False) if is_traceable else function


def attention_case(entry: Entry) -> Case:
    """Causal attention."""

    def find_obstacle(sizes: dict[str, int]) -> str | None:
        return entry.obstacle(Need(device=DEVICE, dtype=torch.bfloat16, head_dim=sizes["width"] // sizes["heads"]))

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        shape = sizes["batch"], sizes["length"], sizes["heads"], sizes["width"] // sizes["heads"]
        leaves = [draw(*shape, seed=seed) for seed in range(3)]

        def wrap(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(*parts: Tensor) -> Tensor:
                return attend(*(part.transpose(1, 2) for part in parts), dropout=0.0)

            return run

        native = Way(compiled(wrap(attend_sdpa)), leaves, scope=partial(prefer_kernels, DEVICE))
        other = Way(compiled(wrap(entry.function), is_traceable=entry.is_traceable), leaves)
        return native, other, Way(wrap(attend_math), [widen(x) for x in leaves])

    return Case(f"{entry.name}: attention", 2e-2, find_obstacle, make)


def joined_case(entry: Entry, *, is_turned: bool) -> Case:
    """The same of queries, keys and values that one product makes, with the gradient that its backward reads."""
    joined, plain = entry.joined, attention_case(entry)
    assert joined is not None

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        n, width = sizes["heads"], sizes["width"] // sizes["heads"]
        heads = draw(sizes["batch"], sizes["length"], 3 * n, width)
        rotary = make_tables(sizes["length"], width) if is_turned else None
        tables = None if rotary is None else (rotary.cos, rotary.sin, rotary.is_interleaved)

        def apart(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(x: Tensor) -> Tensor:
                q, k, v = x.transpose(1, 2).split([n, n, n], dim=1)
                q, k = (q, k) if rotary is None else rotate_both(q, k, rotary)
                return attend(q, k, v, dropout=0.0)

            return run

        native = Way(compiled(apart(entry.function)), [heads])
        other = Way(compiled(lambda x: joined(x, n, tables, dropout=0.0)), [heads])
        return native, other, Way(apart(attend_math), [widen(heads)])

    name = f"{entry.name}: heads side by side{', turned' if is_turned else ''} (beside three tensors)"
    return dataclasses.replace(plain, name=name, make=make)


def linear_case(
    name: str,
    tolerance: float,
    product: Callable[[nn.Parameter], Product],
    part: tuple[str, str] | None = None,
    scope: Callable[[], Callable[[], AbstractContextManager[Any]]] = lambda: nullcontext,
) -> Case:
    """A linear layer with bias that adds to its main gradient."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        x = draw(sizes["batch"], sizes["length"], sizes["width"])
        weight, bias = draw(sizes["inner"], sizes["width"], scale=0.02, seed=2), draw(sizes["inner"], seed=3)

        def build(made: Callable[[nn.Parameter], Product], *, is_traceable: bool) -> Way:
            layer = Linear(sizes["width"], sizes["inner"]).to(DEVICE, torch.bfloat16)
            layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
            layer.product = made(layer.weight)
            main_grads = {0: torch.zeros(layer.weight.shape, device=DEVICE)}
            if not isinstance(layer.product, TorchaoProduct):  # whose gradient is added behind it
                layer.product.main_grad = main_grads[0]
            own = x.detach().clone().requires_grad_()
            forward = compiled(layer.forward, is_traceable=is_traceable)
            way = Way(forward, [own], [layer.weight, layer.bias], main_grads)
            if isinstance(layer.product, DelayedProduct):
                way.prepare = partial(set_units, layer.product)
            return way

        other = build(product, is_traceable=part is None or PARTS[part].is_traceable)
        other.scope = scope()
        reference = nn.Linear(sizes["width"], sizes["inner"]).to(DEVICE)
        reference.weight, reference.bias = nn.Parameter(weight.detach().float()), nn.Parameter(bias.detach().float())
        wide = Way(reference, [widen(x)], [reference.weight, reference.bias])
        return build(lambda _: Product(), is_traceable=True), other, wide

    return Case(name, tolerance, lambda _: None if part is None else PARTS[part].find_obstacle(DEVICE), make)


def set_units(product: DelayedProduct) -> None:
    """Units from what a first pass has reached."""
    for unit, largest, limit in zip(product.units, product.largest, product.limits, strict=True):
        unit.copy_(largest / limit)


def norm_case(package: str, kind: type[LayerNorm | RMSNorm]) -> Case:
    """A norm."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        x = draw(sizes["batch"], sizes["length"], sizes["width"])

        def build(dtype: torch.dtype, own: Tensor) -> tuple[Any, Way]:
            norm = kind(sizes["width"], eps=1e-5).to(DEVICE, dtype)
            with torch.no_grad():
                norm.weight.copy_(draw(sizes["width"], seed=4).to(dtype))
            return norm, Way(norm, [own], list(norm.parameters()))

        native, other = build(torch.bfloat16, x)[1], build(torch.bfloat16, x)
        native.forward = compiled(native.forward)
        other[0].kernel = make_norm_kernel(package, other[0])
        return native, other[1], build(torch.float32, widen(x))[1]

    obstacle = partial(PARTS["norm", package].find_obstacle, DEVICE)
    return Case(f"{package}: {kind.__name__}", 3e-2, lambda _: obstacle(), make)


def normed_case(kind: type[LayerNorm | RMSNorm]) -> Case:
    """A norm and the linear layer behind it, which adds to its main gradient."""
    engine = PARTS["layers", "transformer_engine"]

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        x = draw(sizes["batch"], sizes["length"], sizes["width"])
        weight = draw(sizes["inner"], sizes["width"], scale=0.02, seed=2)

        def build(*, is_joined: bool) -> Way:
            norm = kind(sizes["width"], eps=1e-5).to(DEVICE, torch.bfloat16)
            layer = Linear(sizes["width"], sizes["inner"], bias=False).to(DEVICE, torch.bfloat16)
            layer.weight = nn.Parameter(weight.detach().clone())
            if is_joined:
                layer.product, norm.kernel = EngineNormedProduct(layer.weight, norm), pass_on
            layer.product.main_grad = torch.zeros(layer.weight.shape, device=DEVICE)
            forward = compiled(lambda x: layer(norm(x)), is_traceable=not is_joined)
            own = x.detach().clone().requires_grad_()
            return Way(forward, [own], [layer.weight, *norm.parameters()], {0: layer.product.main_grad})

        norm, wide = kind(sizes["width"], eps=1e-5).to(DEVICE), widen(weight)
        reference = Way(lambda x: norm(x) @ wide.T, [widen(x)], [wide, *norm.parameters()])
        return build(is_joined=False), build(is_joined=True), reference

    name = f"transformer_engine: {kind.__name__} and linear"
    return Case(name, 2e-2, lambda _: engine.find_obstacle(DEVICE), make)


def gate_case() -> Case:
    """The product with SwiGLU's gate."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        leaves = [draw(sizes["batch"], sizes["length"], sizes["inner"], seed=seed) for seed in range(2)]
        wide = Way(multiply_gate, [widen(x) for x in leaves])
        return Way(compiled(multiply_gate), leaves), Way(gate_liger, leaves), wide

    return Case("liger: gate", 1e-2, lambda _: PARTS["gate", "liger"].find_obstacle(DEVICE), make)


def make_tables(length: int, width: int) -> Rotary:
    """Cosines and sines, channels paired by halves."""
    positions = torch.arange(length, device=DEVICE, dtype=torch.float32)
    angles = torch.outer(positions, 10000.0 ** -(torch.arange(0, width, 2, device=DEVICE) / width))
    return Rotary(angles.cos(), angles.sin(), is_interleaved=False)


def rotary_case() -> Case:
    """Turning queries and keys where they lie beside the values, as their product wrote them."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        n, width = sizes["heads"], sizes["width"] // sizes["heads"]
        heads = draw(sizes["batch"], sizes["length"], 3 * n, width)
        rotary = make_tables(sizes["length"], width)

        def apart(turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
            def run(x: Tensor) -> tuple[Tensor, ...]:
                q, k, v = x.transpose(1, 2).split([n, n, n], dim=1)
                return *turn(q, k), v

            return run

        native = apart(lambda q, k: rotate_both(q, k, rotary))
        other = apart(lambda q, k: rotate_liger(q, k, rotary.cos, rotary.sin))
        return Way(compiled(native), [heads]), Way(other, [heads]), Way(native, [widen(heads)])

    return Case("liger: rotary", 1e-2, lambda _: PARTS["rotary", "liger"].find_obstacle(DEVICE), make)


def adam_case() -> Case:
    """A step of AdamW: weights of one block in bf16, masters, gradients and moments in fp32; gradients are scaled."""
    rates = {"lr": 1e-3, "decay": 0.1}

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        h, f = sizes["width"], sizes["inner"]
        shapes = [(3 * h, h), (h, h), (f, h), (h, f), (h,), (f,)]
        weights = [draw(*shape, scale=0.02, seed=seed).detach() for seed, shape in enumerate(shapes)]
        grads = [draw(*shape, seed=9 + seed).detach().float() for seed, shape in enumerate(shapes)]
        factor, config = torch.full((), 0.5, device=DEVICE), OptimConfig()

        def build(kernel: str) -> Way:
            own, first = [weight.clone() for weight in weights], [grad.clone() for grad in grads]
            named = enumerate(zip(own, first, strict=True))
            mains = [MainParameter(f"blocks.{n}.weight", w, g, w.dim() > 1) for n, (w, g) in named]
            optimizer = Optimizer(mains, config, kernel=kernel)
            states = list_moments(optimizer)
            no = torch.zeros((), device=DEVICE) if DEVICE.type == "cuda" else None

            def step() -> tuple[()]:
                optimizer.step(rates["lr"], rates["decay"], factor=factor, found_inf=no)
                return ()

            def reset() -> None:
                torch._foreach_zero_(
                    [state for name in optimizer.masters for state in optimizer.slots[name].state.values()]
                )
                for place, name in enumerate(optimizer.masters):
                    optimizer.masters[name].copy_(weights[place])
                    optimizer.main_grads[name].copy_(grads[place])
                optimizer.copy_to_weights()

            return Way(step, [], states=states, reset=reset)

        wide = write_adam([w.double() for w in weights], [g.double() * 0.5 for g in grads], config, **rates)
        return build("native"), build("apex"), Way(lambda: (), [], states=wide)

    return Case("apex: AdamW", 1e-5, lambda _: PARTS["adam", "apex"].find_obstacle(DEVICE), make)


def list_moments(optimizer: Optimizer) -> list[Tensor]:
    """Master and both moments of each weight."""
    found = []
    for name, master in optimizer.masters.items():
        state = optimizer.slots[name].state
        found += [master, state["exp_avg"], state["exp_avg_sq"]]
    return found


def write_adam(
    weights: list[Tensor], grads: list[Tensor], config: OptimConfig, *, lr: float, decay: float
) -> list[Tensor]:
    """What the first step of AdamW makes of weights, fp64, written out: each with both of its moments."""
    found = []
    for w, g in zip(weights, grads, strict=True):
        m, v = (1 - config.adam_beta1) * g, (1 - config.adam_beta2) * g.square()
        unbiased, spread = m / (1 - config.adam_beta1), (v / (1 - config.adam_beta2)).sqrt()
        shrunk = w - lr * decay * w if w.dim() > 1 else w  # neither biases nor norms decay
        found += [shrunk - lr * unbiased / (spread + config.adam_eps), m, v]
    return found


def loss_case() -> Case:
    """Cross entropy with the output projection, whose gradient comes into its main gradient."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        x = draw(sizes["batch"], sizes["length"], sizes["width"])
        weight = draw(sizes["vocab"], sizes["width"], scale=0.02, seed=2)
        generator = torch.Generator(DEVICE).manual_seed(7)
        shape = (sizes["batch"], sizes["length"])
        target = torch.randint(sizes["vocab"] - 47, shape, device=DEVICE, generator=generator)
        weights = torch.rand(shape, device=DEVICE, generator=generator)  # of tokens in the sum
        options = {"vocab_size": sizes["vocab"] - 47, "scale": 1.0}
        main_grads = [torch.zeros(weight.shape, device=DEVICE) for _ in range(2)]
        chunked = make_loss(main_grads[0], Compiler())

        def build(loss: Callable[[Tensor], Tensor], own: Tensor, of: Tensor, main_grad: Tensor | None) -> Way:
            main = {} if main_grad is None else {0: main_grad}
            return Way(loss, [own], [of], main, slope=lambda y: weights.clone())

        wide = widen(weight)
        native = build(lambda a: chunked(a, weight, target, weights, **options), x, weight, main_grads[0])
        other = build(lambda a: loss_liger(a, weight, target, **options), x, weight, main_grads[1])
        reference = build(lambda a: linear_cross_entropy(a, wide, target, **options), widen(x), wide, None)
        return native, other, reference

    return Case("liger: cross entropy", 1e-2, lambda _: PARTS["loss", "liger"].find_obstacle(DEVICE), make)


def list_cases() -> Iterator[Case]:
    """Every entry."""
    yield from (attention_case(entry) for entry in PACKAGES)
    for entry in PACKAGES:
        if entry.joined is not None:
            yield from (joined_case(entry, is_turned=is_turned) for is_turned in (False, True))
    engine = ("layers", "transformer_engine")
    yield linear_case("transformer_engine: linear", 1e-2, EngineProduct, engine)
    yield normed_case(RMSNorm)
    yield normed_case(LayerNorm)
    for recipe in ("tensorwise", "delayed"):
        scope = partial(make_engine_scope, recipe, "hybrid", None)
        yield linear_case(f"transformer_engine: fp8 {recipe}", 8e-2, EngineProduct, engine, scope)
    yield linear_case("apex: sums of weight gradients", 1e-2, lambda _: ApexProduct(), ("sums", "apex"))
    for recipe in ("tensorwise", "rowwise"):
        torchao = partial(TorchaoProduct, recipe=recipe)
        yield linear_case(f"torchao: fp8 {recipe}", 8e-2, torchao, ("fp8", "torchao"))
    yield linear_case("native: fp8 tensorwise", 8e-2, lambda _: TensorwiseProduct("hybrid"))
    yield linear_case("native: fp8 delayed", 8e-2, lambda _: DelayedProduct("hybrid", DEVICE))
    yield linear_case("native: fp8 rowwise", 8e-2, lambda _: RowwiseProduct("hybrid"))
    yield linear_case("native: fp8 rowwise e4m3", 8e-2, lambda _: RowwiseProduct("e4m3"))
    for package in ("transformer_engine", "liger", "apex"):
        yield norm_case(package, RMSNorm)
        yield norm_case(package, LayerNorm)
    yield gate_case()
    yield rotary_case()
    yield adam_case()
    yield loss_case()
