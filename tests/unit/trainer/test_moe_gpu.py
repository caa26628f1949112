"""Experts on a GPU: one grouped product against one product an expert, whole layers, and compiled blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.grouped import GROUPED, LOOP, ROWS_FOR_LOOP, Product, choose_product
from megaflow_trainer.ops.host_copy import HostCopy
from megaflow_trainer.parallel.fusion import compile_blocks

pytestmark = [
    pytest.mark.gpu,
    # torch says so when the first product of a process is one of backward's
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [128, 64, 0, 64], [1, 1, 1, 509], [0, 0, 0, 77]])
def test_groups_of_any_size_are_multiplied_alike(counts: list[int]) -> None:
    torch.manual_seed(1)
    rows = torch.randn(sum(counts), 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    matrices = torch.randn(4, 96, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    out_grad = torch.randn(sum(counts), 96, device=CUDA, dtype=torch.bfloat16)
    sizes, outcomes = torch.tensor(counts, device=CUDA), []
    for product in (LOOP, GROUPED):
        y = product.multiply(rows, matrices, product.prepare(sizes), is_transposed=True)
        outcomes.append((y, *torch.autograd.grad(y, (rows, matrices), out_grad)))
    for one, two in zip(*outcomes, strict=True):
        assert (one - two).abs().max() <= 0.02 * one.abs().max().clamp(min=1e-3)


def test_the_host_waits_for_numbers_and_not_for_what_follows() -> None:
    numbers = torch.arange(5, device=CUDA).cumsum(0)
    coming = HostCopy(numbers)
    numbers.zero_()
    torch.cuda._sleep(2_000_000_000)
    end = torch.cuda.Event()
    end.record()
    assert coming.read() == [0, 1, 3, 6, 10]
    assert not end.query(), "the device is still at what came after"
    torch.cuda.synchronize()


def run(product: Product, *, is_compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    config = ModelConfig(
        num_layers=2,
        hidden_dim=128,
        num_heads=4,
        max_positions=128,
        vocab_size=256,
        activation="swiglu",
        linear_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_experts=8,
        expert_dim=64,
        shared_dim=64,
        aux_loss_scale=0.01,
    )
    model: GPT = build_gpt(dataclasses.replace(config), Sockets(product=product), device=CUDA, dtype=torch.bfloat16)
    init_weights(model, config, seed=1)
    if is_compiled:
        compile_blocks(model, is_whole=True)
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(1)).to(CUDA)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.sum().backward()
    squares = [weight.grad.float().square().sum() for weight in model.parameters() if weight.grad is not None]
    return loss.mean(), torch.stack(squares).sum().sqrt()


def test_a_model_is_the_same_with_every_product_and_compiled() -> None:
    few, many = ROWS_FOR_LOOP / 2, 2 * ROWS_FOR_LOOP
    widths = (128, 64)
    assert choose_product("auto", CUDA, torch.bfloat16, rows_per_group=few, widths=widths) is GROUPED
    assert choose_product("auto", CUDA, torch.bfloat16, rows_per_group=many, widths=widths) is LOOP
    assert choose_product("auto", CUDA, torch.float32, rows_per_group=few, widths=widths) is LOOP
    loss, norm = run(LOOP)
    for other in (run(GROUPED), run(LOOP, is_compiled=True), run(GROUPED, is_compiled=True)):
        assert other[0].item() == pytest.approx(loss.item(), rel=1e-3)
        assert other[1].item() == pytest.approx(norm.item(), rel=2e-2)
