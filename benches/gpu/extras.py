#!/usr/bin/env python3
"""Kernels of optional packages beside the native ones: forward and backward on one GPU, result and time.

    python3 benches/gpu/extras.py                  # every entry that loads
    python3 benches/gpu/extras.py liger torchao    # those whose name holds one of the words

Shapes are those of GPT 1.3B, 16,384 tokens in bf16. The error is the largest difference over the largest value, of
result and gradients, against the same in fp32; times are medians. Native parts are compiled as blocks are, entries
where a compiled graph can hold them. Prints a table, and a line for each entry that cannot run here. Writes JSON to
`benches/results/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow.errors import first_line  # noqa: E402
from megaflow_trainer.config.sections import OptimConfig  # noqa: E402
from megaflow_trainer.model.mlp import multiply_gate  # noqa: E402
from megaflow_trainer.model.norm import LayerNorm, RMSNorm  # noqa: E402
from megaflow_trainer.model.rope import Rotary, rotate_both  # noqa: E402
from megaflow_trainer.ops.attention import attend_math, attend_sdpa, prefer_kernels  # noqa: E402
from megaflow_trainer.ops.attention_packages import PACKAGES  # noqa: E402
from megaflow_trainer.ops.attention_timing import keep_busy, measure_difference  # noqa: E402
from megaflow_trainer.ops.cross_entropy import linear_cross_entropy  # noqa: E402
from megaflow_trainer.ops.fp8 import DelayedProduct, RowwiseProduct, TensorwiseProduct  # noqa: E402
from megaflow_trainer.ops.layer_packages import (  # noqa: E402
    PARTS,
    ApexProduct,
    EngineProduct,
    TorchaoProduct,
    gate_liger,
    loss_liger,
    make_engine_scope,
    make_norm_kernel,
    rotate_liger,
)
from megaflow_trainer.ops.linear import Linear, Product  # noqa: E402
from megaflow_trainer.ops.registry import Entry, Need  # noqa: E402
from megaflow_trainer.optim.optimizer import Optimizer  # noqa: E402
from megaflow_trainer.parallel.buckets import MainParameter  # noqa: E402

DEVICE = torch.device("cuda", 0)
WIDE = {"batch": 8, "length": 2048, "width": 2048, "inner": 8192, "heads": 16, "vocab": 50304}
SMALL = {"batch": 2, "length": 256, "width": 1024, "inner": 2048, "heads": 8, "vocab": 1024}
"""For tests."""


@dataclass(slots=True)
class Way:
    """One way to compute a part.

    Args:
        forward: from inputs to the result.
        inputs: what it is called with; those that require gradients get them.
        weights: gradients of these are compared too, taken from `main_grads` where they are added there.
        main_grads: by position of the weight.
        scope: what is entered around forward.
        prepare: is called after a first forward and backward.
        reset: takes back what forward has changed.
    """

    forward: Callable[..., Any]
    inputs: list[Tensor]
    weights: list[Tensor] = field(default_factory=list)
    main_grads: dict[int, Tensor] = field(default_factory=dict)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None

    def run(self) -> list[Tensor]:
        """Result and gradients, after `clear`."""
        with self.scope():
            found = self.forward(*self.inputs)
        results = list(found) if isinstance(found, tuple) else [found]
        torch.autograd.backward(results, [make_grad(y) for y in results])
        grads = [x.grad for x in self.inputs if x.requires_grad]
        grads += [self.main_grads.get(place, weight.grad) for place, weight in enumerate(self.weights)]
        assert all(grad is not None for grad in grads)
        return [*(y.detach() for y in results), *grads]  # type: ignore[list-item]

    def clear(self) -> None:
        """Forget gradients and what forward has changed."""
        self.reset()
        for tensor in [*self.inputs, *self.weights]:
            tensor.grad = None
        for grad in self.main_grads.values():
            grad.zero_()


def make_grad(y: Tensor) -> Tensor:
    """The same gradient for every way: any numbers, in the dtype of the result."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    return torch.randn(y.shape, device=DEVICE, generator=generator).bfloat16().to(y.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """An entry beside the native part.

    Args:
        name: of the entry.
        tolerance: largest difference over largest value, against fp32.
        find_obstacle: why it cannot run here, or None.
        make: native way, the entry's, and the reference in fp32, for some sizes.
    """

    name: str
    tolerance: float
    find_obstacle: Callable[[dict[str, int]], str | None]
    make: Callable[[dict[str, int]], tuple[Way, Way, Way]]


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
            main_grads = {}
            if not isinstance(layer.product, TorchaoProduct):
                main_grads = {0: torch.zeros(layer.weight.shape, device=DEVICE)}
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


def gate_case() -> Case:
    """The product with SwiGLU's gate."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        leaves = [draw(sizes["batch"], sizes["length"], sizes["inner"], seed=seed) for seed in range(2)]
        copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]  # its backward writes into its inputs
        wide = Way(multiply_gate, [widen(x) for x in leaves])
        fresh = Way(lambda gate, up: gate_liger(gate.clone(), up.clone()), copies)
        return Way(compiled(multiply_gate), leaves), fresh, wide

    return Case("liger: gate", 1e-2, lambda _: PARTS["gate", "liger"].find_obstacle(DEVICE), make)


def make_tables(length: int, width: int) -> Rotary:
    """Cosines and sines, channels paired by halves."""
    positions = torch.arange(length, device=DEVICE, dtype=torch.float32)
    angles = torch.outer(positions, 10000.0 ** -(torch.arange(0, width, 2, device=DEVICE) / width))
    return Rotary(angles.cos(), angles.sin(), is_interleaved=False)


def rotary_case() -> Case:
    """Turning queries and keys."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        width = sizes["width"] // sizes["heads"]
        leaves = [draw(sizes["batch"], sizes["length"], sizes["heads"], width, seed=seed) for seed in range(2)]
        rotary = make_tables(sizes["length"], width)

        def native(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return rotate_both(q.transpose(1, 2), k.transpose(1, 2), rotary)

        def other(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return rotate_liger(q.transpose(1, 2).clone(), k.transpose(1, 2).clone(), rotary.cos, rotary.sin)

        return Way(compiled(native), leaves), Way(other, leaves), Way(native, [widen(x) for x in leaves])

    return Case("liger: rotary", 1e-2, lambda _: PARTS["rotary", "liger"].find_obstacle(DEVICE), make)


def adam_case() -> Case:
    """A step of AdamW: masters, gradients and moments in fp32, the weights of one block."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        h, f = sizes["width"], sizes["inner"]
        shapes = [(3 * h, h), (h, h), (f, h), (h, f), (h,), (f,)]

        def build(kernel: str) -> Way:
            weights = [draw(*shape, scale=0.02, seed=seed).detach().float() for seed, shape in enumerate(shapes)]
            grads = [draw(*shape, seed=9 + seed).detach().float() for seed, shape in enumerate(shapes)]
            named = zip(weights, grads, strict=True)
            mains = [MainParameter(f"blocks.{n}.weight", w, g, w.dim() > 1) for n, (w, g) in enumerate(named)]
            optimizer = Optimizer(mains, OptimConfig(), kernel=kernel)

            def step() -> tuple[Tensor, ...]:
                optimizer.step(1e-3, 0.1)
                return tuple(w.clone().requires_grad_() for w in weights)

            first = [weight.clone() for weight in weights]

            def reset() -> None:
                torch._foreach_copy_(weights, first)
                torch._foreach_zero_(list(optimizer.list_tensors().values()))

            return Way(step, [], reset=reset)

        return build("native"), build("apex"), build("native")

    return Case("apex: AdamW", 1e-5, lambda _: PARTS["adam", "apex"].find_obstacle(DEVICE), make)


def loss_case() -> Case:
    """Cross entropy with the output projection."""

    def make(sizes: dict[str, int]) -> tuple[Way, Way, Way]:
        x = draw(sizes["batch"], sizes["length"], sizes["width"])
        weight = draw(sizes["vocab"], sizes["width"], scale=0.02, seed=2)
        generator = torch.Generator(DEVICE).manual_seed(7)
        shape = (sizes["batch"], sizes["length"])
        target = torch.randint(sizes["vocab"] - 47, shape, device=DEVICE, generator=generator)
        options = {"vocab_size": sizes["vocab"] - 47, "scale": 1.0}
        wide = partial(linear_cross_entropy, target=target, **options)
        other = partial(loss_liger, target=target, **options)
        native = Way(lambda a, b: linear_cross_entropy(a, b, target, **options), [x, weight])
        return native, Way(other, [x, weight]), Way(wide, [widen(x), widen(weight)])

    return Case("liger: cross entropy", 1e-2, lambda _: PARTS["loss", "liger"].find_obstacle(DEVICE), make)


def list_cases() -> Iterator[Case]:
    """Every entry."""
    yield from (attention_case(entry) for entry in PACKAGES)
    for entry in PACKAGES:
        if entry.joined is not None:
            yield from (joined_case(entry, is_turned=is_turned) for is_turned in (False, True))
    engine = ("layers", "transformer_engine")
    yield linear_case("transformer_engine: linear", 1e-2, EngineProduct, engine)
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


def compare(way: Way, reference: Way) -> float:
    """The largest difference over the largest value, of results and gradients; infinite where one is not finite."""
    outcomes = []
    for one in (way, reference):
        one.clear()
        outcomes.append([tensor.float().clone() for tensor in one.run()])
        one.clear()
    return measure_difference(*outcomes)


def warm_up(way: Way) -> None:
    """Compile, and learn scales."""
    for _ in range(3):
        way.clear()
        way.run()
        way.prepare()


def time_way(way: Way, repeats: int) -> float:
    """Median milliseconds of forward and backward on a GPU that has other work until the host has launched them: in a
    step the host is ahead.
    """
    found = []
    for _ in range(repeats):
        for tensor in [*way.inputs, *way.weights]:
            tensor.grad = None
        keep_busy(torch.bfloat16, DEVICE)
        with way.scope():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            results = way.forward(*way.inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended))
    return statistics.median(found)


def run_case(case: Case, sizes: dict[str, int], repeats: int) -> dict[str, Any]:
    """A row; `reason` in place of figures if the entry cannot run."""
    row: dict[str, Any] = {"entry": case.name, "tolerance": case.tolerance}
    reason = case.find_obstacle(sizes)
    if reason is not None:
        return row | {"reason": reason}
    native, other, reference = case.make(sizes)
    warm_up(native)
    warm_up(other)
    row |= {"native_error": compare(native, reference), "error": compare(other, reference)}
    del reference
    if repeats:
        row |= {"native_ms": time_way(native, repeats), "ms": time_way(other, repeats)}
    return row


def show(rows: list[dict[str, Any]]) -> str:
    """The table, and reasons below it."""
    lines = ["| entry | error (native) | tolerance | ms (native) | speed |", "|---|---|---|---|---|"]
    for row in rows:
        if "ms" in row:
            ratio = row["native_ms"] / row["ms"]
            lines.append(
                f"| {row['entry']} | {row['error']:.1e} ({row['native_error']:.1e}) | {row['tolerance']:.0e} | "
                f"{row['ms']:.3f} ({row['native_ms']:.3f}) | {ratio:.2f} x |"
            )
    return "\n".join([*lines, *(f"{row['entry']}: {row['reason']}" for row in rows if "reason" in row)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="entries whose name holds one (default: all)")
    parser.add_argument("--repeats", type=int, default=20, help="timed passes of an entry (default: 20)")
    parser.add_argument("--out", type=Path, default=ROOT / "benches" / "results" / "extras.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    rows = []
    for case in list_cases():
        if options.words and not any(word in case.name for word in options.words):
            continue
        try:
            rows.append(run_case(case, WIDE, options.repeats))
        except Exception as error:  # whatever a package raises: the others are still to be seen
            reason = f"{type(error).__name__}: {first_line(error)}"
            rows.append({"entry": case.name, "tolerance": case.tolerance, "reason": reason})
        print(json.dumps(rows[-1]), flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1), encoding="utf-8")
    print(show(rows))


if __name__ == "__main__":
    main()
