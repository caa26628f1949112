"""Products in fp8 on a CPU: against autograd through rounding written out, whole runs, and what delayed scales keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from helpers.fake_ranks import fake_mesh, find_layout
from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, read_metrics, read_tensors, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.ops.fp8 import DelayedProduct, RowwiseProduct, TensorwiseProduct
from megaflow_trainer.ops.linear import Linear, Product
from megaflow_trainer.optim.optimizer import Optimizer
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.training import build, resume
from megaflow_trainer.training import run as run_module

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = ["--bf16", "--fp8-hybrid"]
LENGTH = ["--train-iters", "6", "--global-batch-size", "8", "--micro-batch-size", "4", "--lr-decay-style", "constant"]


def round_to(x: Tensor, dtype: torch.dtype, dim: int | None = None, largest: float | None = None) -> Tensor:
    """`x` as fp8 holds it, with a scale for the tensor, for each row along `dim`, or for a given largest value."""
    top = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    unit = (top if largest is None else torch.tensor(largest)) / LARGEST[dtype]
    return (x / unit).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() * unit


class Reference(torch.autograd.Function):
    """A linear layer whose factors are rounded one by one, products in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grad_dtype: torch.dtype, dim: int | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = grad_dtype, dim, bias is not None
        y = round_to(x, E4M3, dim) @ round_to(weight, E4M3, dim).t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_dtype, dim, has_bias = ctx.options
        rounded = round_to(grad, grad_dtype, dim)
        grad_x = rounded @ round_to(weight.t(), E4M3, dim).t()
        grad_w = grad.t() @ x if dim is not None else rounded.t() @ round_to(x, E4M3)
        return grad_x, grad_w, grad.sum(0) if has_bias else None, None, None


def make_layer(product: Product, has_bias: bool, rows: int = 6) -> tuple[Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = Linear(32, 48, bias=has_bias)
    layer.product = product
    return layer, torch.randn(2, rows // 2, 32, requires_grad=True), torch.randn(2, rows // 2, 48)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind, grad_dtype", [("hybrid", E5M2), ("e4m3", E4M3)])
@pytest.mark.parametrize("recipe, dim", [(TensorwiseProduct, None), (RowwiseProduct, 1)])
def test_a_product_is_that_of_rounded_factors(
    recipe: type[TensorwiseProduct | RowwiseProduct],
    dim: int | None,
    kind: str,
    grad_dtype: torch.dtype,
    has_bias: bool,
) -> None:
    layer, x, grad = make_layer(recipe(kind), has_bias)
    other, bias = x.detach().reshape(-1, 32).requires_grad_(), layer.bias
    expected = Reference.apply(other, layer.weight, bias, grad_dtype, dim)
    expected.backward(grad.reshape(-1, 48))
    wanted = [other.grad, layer.weight.grad] + ([layer.bias.grad] if has_bias else [])
    layer.zero_grad()
    y = layer(x)
    torch.testing.assert_close(y.reshape(-1, 48), expected, rtol=1e-6, atol=1e-6)
    y.backward(grad)
    assert x.grad is not None
    found = [x.grad.reshape(-1, 32), layer.weight.grad] + ([layer.bias.grad] if has_bias else [])
    for one, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, own, rtol=1e-5, atol=1e-5)
    exact = x.detach().reshape(-1, 32) @ layer.weight.t() + (0 if bias is None else bias)
    error = ((y.reshape(-1, 48) - exact).norm() / exact.norm()).item()
    assert 5e-3 < error < 6e-2, "8 bits were kept, and as many as they are"


@pytest.mark.parametrize("recipe", [TensorwiseProduct, RowwiseProduct])
def test_a_weights_gradient_is_added_to_its_main_gradient(recipe: type[TensorwiseProduct | RowwiseProduct]) -> None:
    layer, x, grad = make_layer(recipe("hybrid"), False, rows=34)  # no multiple of 16: tokens are filled up
    layer(x).backward(grad)
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad.clone(), None
    layer.product.main_grad = torch.ones(48, 32)
    for _ in range(2):
        layer(x).backward(grad)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.product.main_grad, 1 + 2 * expected, rtol=1e-5, atol=1e-5)
    for dtype, rounding in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        layer.to(dtype)
        found = []
        for main_grad in (None, torch.full((48, 32), 2.0, dtype=dtype), torch.full((48, 32), 2.0)):
            layer.product.main_grad = main_grad
            layer(x.to(dtype)).backward(grad.to(dtype))
            own = layer.weight.grad if main_grad is None else main_grad
            assert own is not None
            found.append(own.float() + (2 if main_grad is None else 0))
        for own in found[:2]:
            torch.testing.assert_close(own, found[2], rtol=rounding, atol=rounding * expected.abs().max().item())
        layer.weight.grad = None


@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("recipe", [TensorwiseProduct, RowwiseProduct])
def test_sums_are_quick_in_forward_alone(
    recipe: type[TensorwiseProduct | RowwiseProduct], has_main_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gradients are exact, however they reach their place."""
    quick: list[bool] = []
    multiply = torch._scaled_mm

    def see(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, use_fast_accum: bool, **options: Any) -> Tensor:
        quick.append(use_fast_accum)
        scales = (scale_a, scale_b) if scale_a.dim() == 0 else (torch.ones(()), torch.ones(()))  # a GPU's alone
        return multiply(a, b, scale_a=scales[0], scale_b=scales[1], use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", see)
    monkeypatch.setattr(Tensor, "is_cuda", recipe is RowwiseProduct, raising=False)
    layer, x, grad = make_layer(recipe("hybrid"), False, rows=32)
    layer.product.main_grad = torch.zeros(48, 32) if has_main_grad else None
    layer(x).backward(grad)
    assert quick == [True, False, False][: 3 if recipe is TensorwiseProduct else 2]


class Counts(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each op of this project was run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megaflow":
            self.counts[func._opname] = self.counts.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_is_kept_is_the_turned_input_and_only_where_gradients_are_wanted(recipe: str) -> None:
    product = TensorwiseProduct("hybrid") if recipe == "tensorwise" else DelayedProduct("hybrid", torch.device("cpu"))
    layer, x, grad = make_layer(product, True, rows=34)
    kept: list[Tensor] = []
    with (
        Counts() as seen,
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
    ):
        y = layer(x)
    wide = [(tuple(one.shape), one.dtype) for one in kept if one.dim() and one is not layer.weight]
    assert wide == [((32, 48), E4M3)], "34 tokens filled up"
    assert seen.counts == ({"narrow_both": 1} if recipe == "tensorwise" else {"narrow_both_": 1, "narrow_": 1})
    with Counts() as seen:
        y.backward(grad)
    assert seen.counts == {"narrow_both" if recipe == "tensorwise" else "narrow_both_": 1, "narrow_turned": 1}
    with torch.no_grad(), Counts() as seen:
        torch.testing.assert_close(layer(x), y)
    assert not seen.counts


def test_rows_have_scales_of_their_own() -> None:
    """A row of small numbers beside a row of large ones: lost with one scale, kept with two."""
    x = torch.stack([torch.full((32,), 1e-4), torch.full((32,), 100.0)])
    weight = torch.eye(32)
    assert TensorwiseProduct("hybrid")(x, weight, None)[0].abs().max() == 0
    torch.testing.assert_close(RowwiseProduct("hybrid")(x, weight, None)[0], x[0], rtol=5e-2, atol=0.0)


def test_what_is_not_a_number_stays_so() -> None:
    """A run that has come to grief must see it in its loss."""
    for value in (float("nan"), float("inf")):
        x = torch.randn(4, 32)
        x[1, 2] = value
        for product in (TensorwiseProduct("hybrid"), RowwiseProduct("hybrid")):
            assert not product(x, torch.randn(48, 32), None)[1].isfinite().any()


def test_delayed_units_are_those_that_are_set_and_what_is_reached_is_kept() -> None:
    product = DelayedProduct("hybrid", torch.device("cpu"))
    layer, x, grad = make_layer(product, False)
    product.unit_x.fill_(2.0 / 448)
    product.unit_w.fill_(0.1 / 448)
    product.unit_g.fill_(5.0 / 57344)
    y = layer(x)
    y.backward(grad)
    rows = x.detach().reshape(-1, 32)
    given = round_to(rows, E4M3, largest=2.0)
    assert given.abs().max() == 2 < rows.abs().max(), "what is beyond is cut off"
    torch.testing.assert_close(y.detach().reshape(-1, 48), given @ round_to(layer.weight, E4M3, largest=0.1).t())
    rounded = round_to(grad.reshape(-1, 48), E5M2, largest=5.0)
    torch.testing.assert_close(layer.weight.grad, rounded.t() @ given, rtol=1e-5, atol=1e-5)
    reached = [one.item() for one in product.largest]
    assert reached == [rows.abs().max(), layer.weight.abs().max(), grad.abs().max()]
    with torch.no_grad():
        layer(100 * x)
    assert [one.item() for one in product.largest] == reached, "evaluation is not counted"


def see_model(flags: str, monkeypatch: pytest.MonkeyPatch) -> ParallelModel:
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--bf16", *flags.split()]
    return build.build_model(read_command(words, world_size=1)[0], one_rank())


def list_layers(flags: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    model = see_model(flags, monkeypatch)
    return {} if model.fp8 is None else {name: type(layer.product).__name__ for name, layer in model.fp8.layers.items()}


BLOCK = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def test_the_linear_layers_of_blocks_have_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_layers("", monkeypatch) == {}
    every = [f"blocks.{number}.{name}" for number in range(2) for name in BLOCK]
    for recipe, kind in (("tensorwise", "Tensorwise"), ("delayed", "Delayed"), ("rowwise", "Rowwise")):
        found = list_layers(f"--fp8-hybrid --fp8-recipe {recipe}", monkeypatch)
        assert found == dict.fromkeys(every, f"{kind}Product")
    flags = "--fp8-format e4m3 --swiglu --ffn-hidden-size 64 --untie-embeddings-and-output-weights --num-experts 2"
    assert sorted(list_layers(f"{flags} --moe-shared-expert-intermediate-size 64", monkeypatch)) == [
        f"blocks.{number}.{name}"
        for number in range(2)
        for name in ("attention.proj", "attention.qkv", "mlp.shared.down", "mlp.shared.gate", "mlp.shared.up")
    ]
    model = see_model("--fp8-hybrid", monkeypatch)
    assert type(model.module.blocks[0].mlp.up.product.grad_dtype) is torch.dtype  # type: ignore[union-attr,index]


def test_small_layers_and_odd_widths_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name.rpartition(".")[2] for name in list_layers("--fp8-hybrid --ffn-hidden-size 72", monkeypatch)}
    assert names == {"qkv", "proj"}, "72 is no multiple of 16"
    monkeypatch.undo()
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *FP8]
    fp8 = build.build_model(read_command(words, world_size=1)[0], one_rank()).fp8
    assert fp8 is not None
    assert fp8.describe() == (
        "products in fp8 in 0 of 8 linear layers of blocks: none is 1024 wide both ways, below which fp8 does not pay, "
        "and a multiple of 16"
    )


def test_the_first_and_last_blocks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def number(flags: str) -> list[int]:
        names = list_layers(f"--fp8-hybrid --num-layers 5 --mtp-num-layers 1 {flags}", monkeypatch)
        return sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks.")}) + [
            10 for name in names if name == "further.0.block.mlp.up"
        ]

    assert number("") == [0, 1, 2, 3, 4, 10]
    assert number("--first-last-layers-bf16") == [1, 2, 3]
    assert number("--first-last-layers-bf16 --num-layers-at-start-in-bf16 2") == [2, 3]
    assert number("--first-last-layers-bf16 --num-layers-at-end-in-bf16 0") == [1, 2, 3, 4, 10]


def test_no_block_left_for_fp8_is_refused_and_a_stage_without_one_says_so() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *FP8, "--first-last-layers-bf16", "--num-layers"]
    for extra in (["2"], ["5", "--num-layers-at-start-in-bf16", "99"], ["3", "--num-layers-at-end-in-bf16", "2"]):
        with pytest.raises(ConfigError, match=r"keep all of model.num_layers .* in 16 bits, which leaves step.fp8 "):
            read_command([*words, *extra], world_size=1)
    config = read_command([*words, "4", "--pipeline-model-parallel-size", "4"], world_size=4)[0]
    with fake_mesh(find_layout(config, 4), rank=0) as mesh:
        fp8 = build.build_model(config, mesh).fp8
    assert fp8 is not None
    assert fp8.describe() == (
        "products in fp8 in 0 of 4 linear layers of blocks: all blocks of this rank stay in 16 bits "
        "(--first-last-layers-bf16)"
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine's CPU run what a GPU would, in layers however small."""
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    monkeypatch.setattr(run_module, "refuse_device", lambda *_: None)


SPREAD = (
    *("--num-layers", "8", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "64", "--swiglu"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"),
    "--untie-embeddings-and-output-weights",
)
"""A model whose gradients reach further than 1."""
RECIPES = {
    "tensorwise": ["--fp8-hybrid"],
    "e4m3": ["--fp8-format", "e4m3"],
    "delayed": ["--fp8-hybrid", "--fp8-recipe", "delayed"],
    "rowwise": ["--fp8-hybrid", "--fp8-recipe", "rowwise"],
    "ends": ["--fp8-hybrid", "--first-last-layers-bf16", "--num-layers", "4"],
    "recompute": ["--fp8-hybrid", "--recompute-granularity", "full"],
}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_in_fp8_is_near_the_run_in_bf16(recipe: str, prefix: str, tmp_path: Path) -> None:
    words = RECIPES[recipe]
    plain = [word for word in words if "fp8" not in word and word not in ("e4m3", "delayed", "rowwise")]
    plain = [word for word in plain if word != "--first-last-layers-bf16"]
    run_tiny(prefix, [*LENGTH, "--bf16", *plain, "--run-dir", str(tmp_path / "bf16")])
    run_tiny(prefix, [*LENGTH, "--bf16", *words, "--run-dir", str(tmp_path / "fp8")])
    one, other = read_metrics(tmp_path / "bf16"), read_metrics(tmp_path / "fp8")
    assert [line["lm_loss"] for line in other] == pytest.approx([line["lm_loss"] for line in one], rel=1e-3)
    assert [line["grad_norm"] for line in other] == pytest.approx([line["grad_norm"] for line in one], rel=5e-2)
    assert [line["lm_loss"] for line in other] != [line["lm_loss"] for line in one]


@pytest.mark.usefixtures("tiny")
def test_the_first_gradients_of_delayed_scales_are_as_near_as_those_of_others(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of small inputs widen gradients; cut off at 1, those of a weight of this model were a third too small."""
    found: list[dict[str, Tensor]] = []
    step = Optimizer.step

    def see(self: Optimizer, *given: Any, **options: Any) -> Any:
        found.append({name: grad.flatten().clone() for name, grad in self.main_grads.items()})
        return step(self, *given, **options)

    monkeypatch.setattr(Optimizer, "step", see)
    words = [*SPREAD, "--bf16", "--train-iters", "1"]
    kinds, delayed = ([], ["--fp8-hybrid"], ["--fp8-format", "e4m3"]), ["--fp8-recipe", "delayed"]
    for recipe in (kinds[0], kinds[1], [*kinds[1], *delayed], kinds[2], [*kinds[2], *delayed]):
        run_tiny(prefix, [*LENGTH, *words, *recipe, "--run-dir", str(tmp_path / str(len(found)))])
    plain = found.pop(0)
    for name, grad in plain.items():
        near = [torch.cosine_similarity(other[name], grad, 0).item() for other in found]
        norms = [(other[name].norm() / grad.norm()).item() for other in found]
        assert min(near) > 0.97, name
        assert norms == pytest.approx([1.0] * 4, abs=0.05), name


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recompute_changes_no_bit(recipe: str, prefix: str, tmp_path: Path) -> None:
    curves = []
    for name, extra in (("plain", []), ("again", ["--recompute-granularity", "full"])):
        words = [*LENGTH, *FP8, "--fp8-recipe", recipe, *extra, "--run-dir", str(tmp_path / name)]
        run_tiny(prefix, words)
        curves.append([(line["lm_loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)])
    assert curves[0] == curves[1]


DELAYED = [*FP8, "--fp8-recipe", "delayed", "--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"]


@pytest.mark.usefixtures("tiny")
def test_a_resumed_run_has_the_scales_of_the_straight_one(prefix: str, tmp_path: Path) -> None:
    flags = [*LENGTH, *DELAYED, "--save-interval", "3"]
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "straight")])
    (tmp_path / "resumed").mkdir()
    (tmp_path / "straight" / "iter_0000003").rename(tmp_path / "resumed" / "iter_0000003")
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "resumed")])
    straight, resumed = read_metrics(tmp_path / "straight"), read_metrics(tmp_path / "resumed")
    assert [line["iteration"] for line in resumed] == [4, 5, 6]
    assert [line["lm_loss"] for line in resumed] == [line["lm_loss"] for line in straight[3:]]
    saved = read_tensors(tmp_path / "resumed", 6)
    histories = {name: value for name, value in saved.items() if name.startswith("fp8/")}
    assert sorted(histories) == sorted(f"fp8/blocks.{number}.{name}" for number in range(2) for name in BLOCK)
    assert all(value.shape == (3, 3) and (value > 0).all() for value in histories.values())
    run_tiny(prefix, [*flags, "--fp8-amax-history-len", "2", "--train-iters", "8", "--save", str(tmp_path / "resumed")])
    assert read_metrics(tmp_path / "resumed")[-1]["iteration"] == 8, "another length begins a history anew"


@pytest.mark.usefixtures("tiny")
def test_weights_from_elsewhere_bring_their_own_scale(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights ten times as large as the initial ones, of which the scales in use until then were made."""
    run_tiny(prefix, [*LENGTH, "--bf16", "--init-method-std", "0.2", "--save", str(tmp_path / "large")])
    found = []
    keep = resume.resume_or_start

    def see(config: Any, state: Any, mesh: Any) -> Any:
        start = keep(config, state, mesh)
        (product,) = [state.model.module.blocks[0].mlp.up.product]
        found.append((product.unit_w.item() * 448, state.model.module.blocks[0].mlp.up.weight.abs().max().item()))
        return start

    monkeypatch.setattr(build, "resume_or_start", see)
    run_tiny(
        prefix, [*LENGTH, *DELAYED, "--finetune", "--load", str(tmp_path / "large"), "--run-dir", str(tmp_path / "r")]
    )
    ((unit, largest),) = found
    assert unit == pytest.approx(largest)
    assert largest > 0.5


def advance(flags: str, reached: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """The unit of a layer's inputs, times 448, after steps in which they reached these values."""
    model = see_model(f"--fp8-hybrid --fp8-recipe delayed {flags}", monkeypatch)
    assert model.fp8 is not None
    assert model.fp8.scales is not None
    product = model.fp8.scales.products[3]
    for value in reached:
        product.largest_x.copy_(torch.maximum(product.largest_x, torch.tensor(value)))  # as a product does
        model.fp8.scales.advance()
    return product.unit_x.item() * 448


def test_what_a_delayed_scale_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    for flags, reached, expected in (
        ("", [], 64.0),
        ("", [3.0, 8.0, 5.0], 5.0),
        ("", [3.0, 0.0], 3.0),
        ("", [3.0, nan], 3.0),
        ("", [3.0, float("inf")], 3.0),
        ("", [3.0, nan, 2.0], 2.0),
        ("--fp8-amax-history-len 2 --fp8-amax-compute-algo max", [3.0, nan, 5.0], 5.0),
        ("--fp8-margin 2", [3.0], 12.0),
        ("--fp8-amax-history-len 2", [8.0, 3.0, 5.0], 5.0),
        ("--fp8-amax-history-len 2 --fp8-amax-compute-algo max", [8.0, 6.0, 5.0], 6.0),
        ("--fp8-amax-history-len 3 --fp8-amax-compute-algo max", [8.0, 6.0, 5.0], 8.0),
    ):
        assert advance(flags, reached, monkeypatch) == pytest.approx(expected), (flags, reached)


def test_what_does_not_go_together_is_one_sentence() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x"]
    with pytest.raises(
        ConfigError, match=r"step.fp8 \(--fp8-format\) is beside bf16, and this run is fp32; give --bf16"
    ):
        read_command([*words, "--fp8-hybrid"], world_size=1)
    with pytest.raises(ConfigError, match="must be one of tensorwise, delayed, rowwise, got 'mxfp8'"):
        read_command([*words, *FP8, "--fp8-recipe", "mxfp8"], world_size=1)
    for margin, said in (("17", "<= 16, got 17; lower it"), ("2000", "<= 16, got 2,000"), ("-1", ">= 0, got -1")):
        with pytest.raises(ConfigError, match=rf"precision.margin \(--fp8-margin\) must be {said}"):
            read_command([*words, *FP8, "--fp8-recipe", "delayed", "--fp8-margin", margin], world_size=1)
    read_command([*words, *FP8, "--fp8-recipe", "delayed", "--fp8-margin", "16"], world_size=1)
    _, notes = read_command([*words, *FP8, "--fp8-margin", "1", "--num-layers-at-end-in-bf16", "2"], world_size=1)
    assert notes[-2:] == [
        "precision.margin (--fp8-margin) has no effect without --fp8-recipe delayed",
        "precision.end_layers (--num-layers-at-end-in-bf16) has no effect without --first-last-layers-bf16",
    ]


@pytest.mark.slow  # tracing takes half a minute
@pytest.mark.usefixtures("tiny")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_compiled_blocks_are_whole_and_share_one_graph(
    recipe: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients that products add to main gradients; kernels are torch's own, so that nothing is fused."""
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiler(function, backend="aot_eager", **options)
    )
    monkeypatch.setattr(build, "_can_accumulate", lambda config, mesh: True)
    torch._dynamo.reset()
    counters.clear()
    for name, extra in (("eager", []), ("compiled", ["--compile"])):
        run_tiny(prefix, [*LENGTH, *FP8, "--fp8-recipe", recipe, *extra, "--run-dir", str(tmp_path / name)])
    assert counters["stats"]["unique_graphs"] == 2, "one of all blocks, one of the loss"
    assert not counters["graph_break"]
    one, other = read_metrics(tmp_path / "eager"), read_metrics(tmp_path / "compiled")
    assert [line["lm_loss"] for line in other] == pytest.approx([line["lm_loss"] for line in one], rel=5e-4)
    assert [line["grad_norm"] for line in other] == pytest.approx([line["grad_norm"] for line in one], rel=1e-2)
