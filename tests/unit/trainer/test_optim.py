"""AdamW against its equations, its masters in bf16, and clipping."""

from __future__ import annotations

import pytest
import torch

from megaflow_trainer.config.sections import OptimConfig
from megaflow_trainer.optim.adamw import AdamW
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.parallel.data import MainGradients

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, MainGradients, AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)).to(dtype)
    gradients = MainGradients(model, None)
    return model, gradients, AdamW(gradients.parameters, CONFIG)


def step_by_hand(weight: torch.Tensor, grads: list[torch.Tensor], decay: float) -> torch.Tensor:
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - 1e-2 * decay) - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    return w


def test_steps_follow_the_equations_and_spare_biases_and_norms_from_decay() -> None:
    model, gradients, optimizer = make()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given: dict[str, list[torch.Tensor]] = {name: [] for name in before}
    for _ in range(3):
        for main in gradients.parameters:
            main.main_grad.normal_()
            given[main.name].append(main.main_grad.clone())
        optimizer.step(1e-2)
    for name, weight in model.named_parameters():
        decay = 0.1 if name == "0.weight" else 0.0
        torch.testing.assert_close(
            weight.double(), step_by_hand(before[name], given[name], decay), atol=1e-6, rtol=1e-5
        )


def test_bf16_masters_collect_steps_too_small_for_the_weights() -> None:
    model, gradients, optimizer = make(torch.bfloat16)
    start = model[0].weight.detach().clone()  # type: ignore[index]
    gradients.buffer.fill_(1.0)
    optimizer.step(1e-6)
    assert torch.equal(model[0].weight, start)  # type: ignore[index]
    assert not torch.equal(optimizer.masters["0.weight"], start.float())
    for _ in range(3000):
        optimizer.step(1e-6)
    assert not torch.equal(model[0].weight, start)  # type: ignore[index]
    assert torch.equal(model[0].weight, optimizer.masters["0.weight"].bfloat16())  # type: ignore[index]


def test_gradients_accumulate_in_fp32_whatever_the_weights_are() -> None:
    model, gradients, _ = make(torch.bfloat16)
    inputs = torch.ones(1, 5, dtype=torch.bfloat16)
    model[0](inputs).sum().backward()  # type: ignore[index]
    for _ in range(256):
        (model[0](inputs).sum() / 256).backward()  # type: ignore[index]
    bias = next(main for main in gradients.parameters if main.name == "0.bias")
    assert bias.main_grad.dtype == torch.float32
    assert bias.main_grad.tolist() == [2.0, 2.0, 2.0]  # bf16 would stay at 1: it cannot add 1/256 to 1
    assert bias.weight.grad is None


def test_norm_is_that_of_all_gradients_once() -> None:
    model, gradients, _ = make()
    model(torch.randn(4, 5)).square().sum().backward()
    flat = torch.cat([main.main_grad.flatten() for main in gradients.parameters])
    assert gradients.norm().item() == pytest.approx(flat.norm().item(), rel=1e-6)


@pytest.mark.parametrize("norm, largest, factor", [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)])
def test_clipping_limits_the_norm_and_leaves_small_ones(norm: float, largest: float, factor: float) -> None:
    assert clip_factor(torch.tensor(norm), largest).item() == pytest.approx(factor, rel=1e-5)
