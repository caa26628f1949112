"""Products in fp8 on a GPU: its kernels against rounding written out, compiled against eager, and loss curves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.fp8_rounding import DTYPES, is_same, list_cases, round_plainly
from helpers.pairs import write_pair
from helpers.runs import read_curve, read_metrics, run_tiny
from megaflow_trainer.ops import fp8_cast
from megaflow_trainer.ops.fp8 import (
    DelayedProduct,
    RowwiseProduct,
    TensorwiseProduct,
    add_fp8_product_,
    find_unit,
    multiply,
)
from megaflow_trainer.ops.fp8_cast import (
    E4M3,
    E5M2,
    find_largest,
    narrow,
    narrow_,
    narrow_both,
    narrow_both_,
    narrow_turned,
    turn,
)
from megaflow_trainer.ops.linear import Linear, Product
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no fp8"
    ),
]
CUDA = torch.device("cuda")
RECIPES = ("tensorwise", "rowwise", "delayed")
FORMATS = ("hybrid", "e4m3")


def one_gpu() -> Mesh:
    return build_mesh(Launch(), torch.device("cuda", 0), "nccl")


def make_product(recipe: str, kind: str) -> Product:
    if recipe == "delayed":
        product = DelayedProduct(kind, CUDA)
        for unit, largest, limit in zip(product.units, (5.0, 0.1, 4.0), product.limits, strict=True):
            unit.fill_(largest / limit)
        return product
    return (TensorwiseProduct if recipe == "tensorwise" else RowwiseProduct)(kind)


def make_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=CUDA, generator=generator).bfloat16()

    return draw(rows, 1024), draw(2048, 1024) * 0.02, draw(2048), draw(rows, 2048)


def widen(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """What fp8 holds of `x`, fp32."""
    return narrow(x, unit, dtype).float() * unit


def expect(product: Product, recipe: str, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
    """Result, gradients of inputs and of the weight, with products in fp32 of factors that are rounded one by one."""
    dim = 1 if recipe == "rowwise" else None
    turned = weight.t()
    grad_dtype = product.grad_dtype  # type: ignore[attr-defined]
    if isinstance(product, DelayedProduct):
        unit_x, unit_w, unit_g = product.units
        unit_turned = unit_w
    else:
        unit_x, unit_w, unit_g = find_unit(x, E4M3, dim), find_unit(weight, E4M3, dim), find_unit(grad, grad_dtype, dim)
        unit_turned = find_unit(turned, E4M3, dim)
    x8, g8 = widen(x, unit_x, E4M3), widen(grad, unit_g, grad_dtype)
    y = x8 @ widen(weight, unit_w, E4M3).t() + bias.float()
    grad_x = g8 @ widen(turned, unit_turned, E4M3).t()
    grad_w = grad.float().t() @ x.float() if recipe == "rowwise" else g8.t() @ x8
    return [y, grad_x, grad_w]


@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("rows", [512, 500])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_give_the_product_of_rounded_factors(recipe: str, kind: str, rows: int, has_main_grad: bool) -> None:
    """The largest difference over the largest value: results in bf16 round by 2^-9, quick sums by less."""
    product, (x, weight, bias, grad) = make_product(recipe, kind), make_inputs(rows)
    layer = Linear(1024, 2048).to(CUDA, torch.bfloat16)
    layer.product = product
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    main_grad = torch.ones(2048, 1024, device=CUDA)
    product.main_grad = main_grad if has_main_grad else None
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    wanted = expect(product, recipe, x.detach(), weight, bias, grad)
    assert (layer.weight.grad is None) == has_main_grad
    found_w = main_grad - 1 if has_main_grad else layer.weight.grad
    for found, own in zip((y, x.grad, found_w), wanted, strict=True):
        assert found is not None
        assert (found.float() - own).abs().max() <= 8e-3 * own.abs().max()
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


def test_the_kernel_rounds_bit_for_bit_as_a_cpu_does() -> None:
    """All dtypes, both formats, ragged sizes, odd units; what is not a number, infinite and -0."""
    every = ("plain", "turned", "largest", "sums")
    assert fp8_cast._find_kernel(torch.ones((2, 2), device=CUDA), E4M3, every) is not None
    wrong = []
    for name, x, unit, form in list_cases(CUDA):
        plain, turned, top = round_plainly(x.cpu(), unit.cpu(), form, 4.0)
        largest, again = torch.tensor([4.0, 4.0], device=CUDA).unbind()
        kept = narrow_both_(x, unit, largest, form)
        both = narrow_both(x, unit, form, has_sums=True)
        same = [is_same(own.cpu(), plain) for own in (kept[0], both[0], narrow_(x, unit, again, form))]
        same += [is_same(own.cpu(), turned) for own in (kept[1], both[1], narrow_turned(x, unit, form))]
        same += [is_same(own[None].cpu(), top[None]) for own in (largest, again)]
        same.append(torch.allclose(both[2].float(), x.float().sum(0), rtol=1e-2, atol=1e-3, equal_nan=True))
        if not all(same):
            wrong.append((name, same))
    assert not wrong


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_rounds_bit_for_bit_as_torch_does(dtype: torch.dtype, form: torch.dtype) -> None:
    """A thousand units for many numbers, among them those that lie just beside the middle of two of 8 bits."""
    generator = torch.Generator(CUDA).manual_seed(2)
    x = torch.randn(1000, 2048, device=CUDA, generator=generator).to(dtype)
    for _ in range(1000):
        unit = torch.rand((), device=CUDA, generator=generator) * 4 / torch.finfo(form).max
        largest = torch.zeros((), device=CUDA)
        plain, turned, sums = narrow_both_(x, unit, largest, form, has_sums=True)
        wanted = narrow(x, unit, form)
        assert torch.equal(plain.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(turned.view(torch.uint8), turn(wanted).view(torch.uint8))
        assert torch.equal(largest, find_largest(x))
    torch.testing.assert_close(sums, x.float().sum(0).to(dtype), rtol=1e-2, atol=1e-3)


def test_more_than_two_thousand_million_numbers() -> None:
    """Places beyond 2^31, either way."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("it needs 20 GiB")
    t, n = 262_160, 8208
    x = torch.zeros(t, n, device=CUDA, dtype=torch.bfloat16)
    x[-200:] = torch.randn(200, n, device=CUDA)
    unit, largest = torch.tensor(0.01, device=CUDA), torch.zeros((), device=CUDA)
    plain, turned, _ = narrow_both_(x, unit, largest, E4M3)
    wanted = narrow(x[-200:], unit, E4M3)
    assert torch.equal(plain[-200:].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(turned[:, -200:].contiguous().view(torch.uint8), wanted.t().contiguous().view(torch.uint8))
    assert not plain[:-200].view(torch.uint8).any()
    assert torch.equal(largest, find_largest(x[-200:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_to_a_main_gradient_of_any_width(dtype: torch.dtype) -> None:
    x, _, _, grad = make_inputs(512)
    unit_x, unit_grad = find_unit(x, E4M3), find_unit(grad, E5M2)
    turned = narrow_turned(grad, unit_grad, E5M2), narrow_turned(x, unit_x, E4M3)
    main_grad = torch.full((2048, 1024), 3.0, device=CUDA, dtype=dtype)
    add_fp8_product_(main_grad, *turned, unit_grad, unit_x)
    wanted = 3 + multiply(*turned, (unit_grad, unit_x), torch.float32)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert main_grad.dtype == dtype
    assert ((main_grad - wanted).abs() <= 2 * rounding * (wanted.abs() + 3)).all()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_layer_equals_an_eager_one(recipe: str, kind: str) -> None:
    x, weight, bias, grad = make_inputs(512)
    outcomes = []
    for is_compiled in (False, True):
        layer = Linear(1024, 2048).to(CUDA, torch.bfloat16)
        layer.product = make_product(recipe, kind)
        layer.product.main_grad = torch.zeros(2048, 1024, device=CUDA)
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        forward = torch.compile(layer.forward, fullgraph=True, dynamic=False) if is_compiled else layer.forward
        own = x.clone().requires_grad_()
        y = forward(own)
        y.backward(grad)
        outcomes.append([y.detach(), own.grad, layer.product.main_grad])
        if isinstance(layer.product, DelayedProduct):
            outcomes[-1] += list(layer.product.largest)
    for one, two in zip(*outcomes, strict=True):
        assert one is not None
        assert two is not None
        assert (one.float() - two.float()).abs().max() <= 4e-3 * one.float().abs().max()


MODEL = (
    *("--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "256"),
    *("--micro-batch-size", "8", "--global-batch-size", "16", "--train-iters", "30", "--lr", "3e-4", "--bf16"),
    *("--lr-decay-style", "constant", "--lr-warmup-iters", "5"),
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy", num_documents=400, document_tokens=600)


@pytest.fixture(scope="module")
def bf16(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float, float, int]]:
    folder = tmp_path_factory.mktemp("bf16")
    run_tiny(prefix, [*MODEL, "--run-dir", str(folder)], one_gpu())
    return read_curve(folder)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_curve_is_that_of_bf16(
    recipe: str,
    kind: str,
    is_compiled: bool,
    prefix: str,
    bf16: list[tuple[int, float, float, float, int]],
    tmp_path: Path,
) -> None:
    """30 steps, from 4.3 to 0.02 nats: the first loss within 5e-3, all within 0.02 or 8 %, the mean within 1 %."""
    flags = ["--fp8-format", kind, "--fp8-recipe", recipe, "--compile" if is_compiled else "--no-compile"]
    run_tiny(prefix, [*MODEL, *flags, "--run-dir", str(tmp_path)], one_gpu())
    plain, found = [line[1] for line in bf16], [line[1] for line in read_curve(tmp_path)]
    assert plain[-1] < plain[0] - 0.1, "something is learned"
    assert found[0] == pytest.approx(plain[0], abs=5e-3)
    assert found == pytest.approx(plain, rel=8e-2, abs=2e-2)
    assert sum(found) == pytest.approx(sum(plain), rel=1e-2)
    assert found != plain
    assert all(line["skipped_steps"] == 0 for line in read_metrics(tmp_path))


def test_a_resumed_run_goes_on_as_the_straight_one(prefix: str, tmp_path: Path) -> None:
    flags = [*MODEL, "--fp8-hybrid", "--fp8-recipe", "delayed", "--train-iters", "8", "--save-interval", "4"]
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "straight")], one_gpu())
    (tmp_path / "resumed").mkdir()
    (tmp_path / "straight" / "iter_0000004").rename(tmp_path / "resumed" / "iter_0000004")
    run_tiny(prefix, [*flags, "--save", str(tmp_path / "resumed")], one_gpu())
    for straight, resumed in zip(read_curve(tmp_path / "straight")[4:], read_curve(tmp_path / "resumed"), strict=True):
        assert resumed[1] == pytest.approx(straight[1], abs=2e-3)
