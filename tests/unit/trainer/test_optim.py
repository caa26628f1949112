"""AdamW against its equations, its masters in bf16, and clipping."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from helpers.runs import TINY, one_rank
from megaflow_trainer.config import read_command
from megaflow_trainer.config.arithmetic import count_state_bytes
from megaflow_trainer.config.sections import ModelConfig, OptimConfig, StepConfig
from megaflow_trainer.model.experts import count_stacked
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.optim.clip import clip_factor
from megaflow_trainer.optim.optimizer import DTYPES, Optimizer
from megaflow_trainer.optim.rules import orthogonalise
from megaflow_trainer.optim.scaler import LossScaler
from megaflow_trainer.parallel.data import DataOptions, MainGradients
from megaflow_trainer.training.build import build_model, build_optimizer

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
SHAPE = ModelConfig(num_layers=1, hidden_dim=8, num_heads=2, max_positions=4, vocab_size=16, vocab_multiple=16)


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, MainGradients, Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3)).to(dtype)
    gradients = MainGradients(model, one_rank())
    return model, gradients, Optimizer(gradients.parameters, CONFIG)


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
    gradients.kept[0].fill_(1.0)
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


@pytest.mark.parametrize("forget", ["forget_loose", "start"])
def test_gradients_of_biases_and_norms_are_added_together_also_after_a_backward_that_failed(
    forget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda mains, grads: (sizes.append(len(mains)), add(mains, grads)))
    model, gradients, _ = make(torch.bfloat16)

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    hidden = model[0](torch.ones(1, 5, dtype=torch.bfloat16))  # type: ignore[index]
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model[1](hidden).sum().backward()  # type: ignore[index]
    getattr(gradients, forget)()
    gradients.kept[0].zero_()
    loss = (model(torch.ones(1, 5, dtype=torch.bfloat16)) * torch.tensor([1.0, 2.0, 4.0])).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()  # type: ignore[no-untyped-call]
    assert sizes[-1] == 3  # one bias, and the norm's two
    for main, grad in zip(gradients.parameters, expected, strict=True):
        assert torch.equal(main.main_grad, grad.float()), main.name
        assert main.weight.grad is None


def test_norm_is_that_of_all_gradients_once() -> None:
    model, gradients, _ = make()
    model(torch.randn(4, 5)).square().sum().backward()
    flat = torch.cat([main.main_grad.flatten() for main in gradients.parameters])
    assert gradients.norm().item() == pytest.approx(flat.norm().item(), rel=1e-6)


def run_rule(
    kind: str, config: OptimConfig, dtype: torch.dtype = torch.float32
) -> tuple[Optimizer, list[torch.Tensor]]:
    """Three steps of an optimizer on a matrix and a bias, and the gradients of the matrix."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4))
    gradients = MainGradients(model, one_rank())
    optimizer = Optimizer(gradients.parameters, dataclasses.replace(config, kind=kind))
    given = []
    for _ in range(3):
        gradients.kept[0].normal_()
        given.append(gradients.parameters[0].main_grad.double().clone())
        optimizer.step(1e-2)
    return optimizer, given


def start_matrix() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 4).weight.detach().double()


def test_lion_follows_its_equations() -> None:
    optimizer, given = run_rule("lion", CONFIG)
    w, m = start_matrix(), torch.zeros(4, 6, dtype=torch.float64)
    for g in given:
        w, m = w * (1 - 1e-3) - 1e-2 * (0.9 * m + 0.1 * g).sign(), 0.95 * m + 0.05 * g
    torch.testing.assert_close(optimizer.masters["0.weight"].double(), w, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_follows_its_equations(momentum: float) -> None:
    optimizer, given = run_rule("sgd", dataclasses.replace(CONFIG, sgd_momentum=momentum))
    w, m = start_matrix(), torch.zeros(4, 6, dtype=torch.float64)
    for g in given:
        m = momentum * m + g
        w = w * (1 - 1e-3) - 1e-2 * m
    torch.testing.assert_close(optimizer.masters["0.weight"].double(), w, atol=1e-6, rtol=1e-5)
    assert ("momentum.0.weight" in optimizer.list_tensors()) == (momentum > 0)


def test_orthogonalising_keeps_directions_and_evens_singular_values() -> None:
    for shape in ((8, 24), (24, 8)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ orthogonalise(matrix) @ vh.T
        assert ((inner.diagonal() > 0.6) & (inner.diagonal() < 1.25)).all()
        assert (inner - inner.diagonal().diag()).abs().max() < 1e-3


def test_muon_moves_inner_matrices_and_adamw_the_rest() -> None:
    optimizer, given = run_rule("muon", CONFIG)
    saved = optimizer.list_tensors()
    assert {"momentum.0.weight", "exp_avg.0.bias", "exp_avg_sq.0.bias", "step.0.bias"} == set(saved)
    w, m = start_matrix().float(), torch.zeros(4, 6)
    for g in given:
        m = 0.95 * m + g.float()
        w = w * (1 - 1e-3) - 1e-2 * 0.2 * 6**0.5 * orthogonalise(g.float() + 0.95 * m)
    torch.testing.assert_close(optimizer.masters["0.weight"], w)


def test_muon_leaves_embeddings_and_the_head_to_adamw() -> None:
    config = dataclasses.replace(SHAPE, tied_embeddings=False)
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=torch.float32)
    saved = Optimizer(
        MainGradients(model, one_rank()).parameters, dataclasses.replace(CONFIG, kind="muon")
    ).list_tensors()
    by_muon = {name.removeprefix("momentum.") for name in saved if name.startswith("momentum.")}
    matrices = {name for name, weight in model.named_parameters() if weight.dim() > 1}
    assert matrices - by_muon == {"embedding.weight", "positions.weight", "head.weight"}


def test_muon_makes_each_expert_orthogonal_by_itself() -> None:
    config = dataclasses.replace(SHAPE, num_experts=3, expert_dim=20)
    model = build_gpt(config, Sockets(), device=torch.device("cpu"), dtype=torch.float32)
    init_weights(model, config, seed=1)
    gradients, muon = MainGradients(model, one_rank()), dataclasses.replace(CONFIG, kind="muon")
    optimizer = Optimizer(gradients.parameters, muon, stacks=count_stacked(model))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    given = {main.name: main.main_grad.normal_().clone() for main in gradients.parameters}
    optimizer.step(1e-2)
    stacked = [name for name in before if ".experts." in name and name.endswith(".weight")]
    assert len(stacked) == 2
    for name in stacked:
        weight, found = before[name].view(3, 20, 8), model.get_parameter(name).detach().view(3, 20, 8)
        for own, grad, moved in zip(weight, given[name].view(3, 20, 8), found, strict=True):
            w = own * (1 - 1e-3) - 1e-2 * 0.2 * 20**0.5 * orthogonalise(1.95 * grad)
            torch.testing.assert_close(moved, w)
    by_adam = {name.removeprefix("exp_avg.") for name in optimizer.list_tensors() if name.startswith("exp_avg.")}
    assert {name for name in before if ".experts." in name} - by_adam == set(stacked)  # biases: a row an expert
    assert "momentum.blocks.0.mlp.router.weight" in optimizer.list_tensors()


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd", "muon"])
def test_offloaded_states_lie_on_the_cpu_and_give_the_same_bits(kind: str) -> None:
    plain, _ = run_rule(kind, CONFIG)
    away, _ = run_rule(kind, dataclasses.replace(CONFIG, is_offloaded=True))
    for name, weight in away.weights.items():
        assert torch.equal(weight, plain.weights[name])
        assert away.masters[name].data_ptr() != weight.data_ptr()
    assert all(tensor.device.type == "cpu" for tensor in away.list_tensors().values())


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd", "muon"])
def test_states_in_16_bits_are_half_the_memory_and_nearly_the_same_step(kind: str) -> None:
    wide, _ = run_rule(kind, CONFIG)
    narrow, _ = run_rule(kind, dataclasses.replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"))
    for key, value in narrow.list_tensors().items():
        assert value.dtype == (torch.float32 if key.startswith("step") else torch.bfloat16)
    if kind != "lion":  # where a sign may turn
        start = start_matrix().float()
        moved = (wide.weights["0.weight"] - start).norm()
        assert (wide.weights["0.weight"] - narrow.weights["0.weight"]).norm() < 0.02 * moved


def test_all_bf16_keeps_nothing_in_fp32() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--bf16", "--all-bf16"]
    config = read_command(words, world_size=1)[0]
    model = build_model(config, one_rank())
    gradients, optimizer = model.gradients, build_optimizer(model, config)
    assert isinstance(gradients, MainGradients)
    assert {kept.dtype for kept in gradients.kept} == {torch.bfloat16}
    weights = dict(model.module.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for kept in gradients.kept:
        kept.fill_(1.0)
    optimizer.step(1e-2)
    assert not any(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(optimizer.masters[name].data_ptr() == weight.data_ptr() for name, weight in weights.items())
    assert {value.dtype for key, value in optimizer.list_tensors().items() if not key.startswith("step")} == {
        torch.bfloat16
    }


def test_named_weights_are_spared_from_decay() -> None:
    spared, _ = run_rule("sgd", dataclasses.replace(CONFIG, no_decay=("0.w*",), sgd_momentum=0.0, weight_decay=0.5))
    decayed, _ = run_rule("sgd", dataclasses.replace(CONFIG, sgd_momentum=0.0, weight_decay=0.5))
    plain, _ = run_rule("sgd", dataclasses.replace(CONFIG, sgd_momentum=0.0, weight_decay=0.0))
    assert torch.equal(spared.weights["0.weight"], plain.weights["0.weight"])
    assert not torch.equal(spared.weights["0.weight"], decayed.weights["0.weight"])


def test_mu_p_moves_inner_matrices_at_a_part_of_the_rate() -> None:
    names = ("blocks", "further", "head")  # `further` predicts later tokens
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
    gradients = MainGradients(model, one_rank())
    optimizer = Optimizer(gradients.parameters, CONFIG, mup_ratio=0.25)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    gradients.kept[0].fill_(1.0)
    optimizer.step(1e-2, 0.0)
    moved = {name: (before[name] - weight).mean().item() for name, weight in model.named_parameters()}
    assert moved["blocks.weight"] == pytest.approx(moved["head.weight"] / 4, rel=1e-3)
    assert moved["further.weight"] == pytest.approx(moved["head.weight"] / 4, rel=1e-3)


def test_the_history_of_a_dynamic_scale() -> None:
    scaler = LossScaler(StepConfig(dtype="fp16", initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2))
    history = []
    for is_finite in (False, False, False, True, True, True, False, True, True, True, False):
        scaler.update(is_finite=is_finite)
        history.append(scaler.scale)
    assert history == [64, 32, 16, 16, 16, 32, 32, 32, 32, 64, 64]
    assert scaler.num_skipped == 5
    again = LossScaler(StepConfig(dtype="fp16"))
    again.load_state_dict(scaler.state_dict())
    again.update(is_finite=False)
    assert again.scale == 32


def test_a_scale_stops_at_its_minimum_and_a_static_one_never_moves() -> None:
    low = LossScaler(StepConfig(dtype="fp16", initial_loss_scale=2.0, min_loss_scale=1.0, hysteresis=1))
    static = LossScaler(StepConfig(dtype="fp16", loss_scale=128.0, loss_scale_window=1))
    for scaler in (low, static):
        for is_finite in (False, False, False, False):
            scaler.update(is_finite=is_finite)
    static.update(is_finite=True)
    assert (low.scale, static.scale, static.num_skipped) == (1.0, 128.0, 4)


@pytest.mark.parametrize("norm, largest, factor", [(0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 0.0, 1.0), (0.0, 1.0, 1.0)])
def test_clipping_limits_the_norm_and_leaves_small_ones(norm: float, largest: float, factor: float) -> None:
    assert clip_factor(torch.tensor(norm), largest).item() == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize(
    "step, optim",
    [
        ({}, {}),
        ({"dtype": "bf16"}, {}),
        ({"dtype": "fp16"}, {"exp_avg_dtype": "bf16"}),
        ({"dtype": "bf16"}, {"main_dtype": "bf16", "main_grad_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        ({}, {"kind": "lion", "is_offloaded": True}),
        ({}, {"kind": "sgd", "sgd_momentum": 0.0}),
        ({"dtype": "fp64"}, {}),
    ],
)
def test_memory_by_formula_is_that_of_the_real_tensors(step: dict[str, str], optim: dict[str, Any]) -> None:
    shape = ModelConfig(num_layers=1, hidden_dim=32, num_heads=4, max_positions=32, vocab_size=64, vocab_multiple=64)
    asked, own = StepConfig(**step), OptimConfig(**optim)
    dtype = torch.float64 if asked.dtype == "fp64" else DTYPES[asked.dtype]
    model = build_gpt(shape, Sockets(), device=torch.device("cpu"), dtype=dtype)
    gradients = MainGradients(model, one_rank(), options=DataOptions(dtype=DTYPES[own.main_grad_dtype]))
    optimizer = Optimizer(gradients.parameters, own)
    apart = [m for name, m in optimizer.masters.items() if m.data_ptr() != optimizer.weights[name].data_ptr()]
    states = [value for slot in optimizer.slots.values() for key, value in slot.state.items() if key != "step"]
    assert count_state_bytes(shape, asked, own) == {
        "weights": sum(weight.nbytes for weight in model.parameters()),
        "gradients": gradients.kept[0].nbytes,
        "optimizer": sum(tensor.nbytes for tensor in [*apart, *states]),
    }
