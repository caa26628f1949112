"""benches/gpu/extras.py without a GPU: what is timed is what a step does, and results are measured by another way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import fake_packages
from helpers.gpu_benches import import_benches

SIZES = {"batch": 2, "length": 16, "width": 32, "inner": 64, "heads": 2, "vocab": 128}


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, ModuleType]]:
    with import_benches("extras", "extras_cases", "extras_ways", "machine") as modules:
        yield modules


@pytest.fixture
def cases(benches: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The cases on this processor, uncompiled."""
    for name in ("extras_cases", "extras_ways"):
        monkeypatch.setattr(benches[name], "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return benches["extras_cases"]


class WritingGate(torch.autograd.Function):
    """As liger's: backward leaves its gradients where the inputs were."""

    handed: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        WritingGate.handed = [gate.data_ptr(), up.data_ptr()]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (x.detach() for x in ctx.saved_tensors)
        sigmoid = gate.float().sigmoid()
        by_up = slopes[0] * gate.float() * sigmoid
        gate.copy_(slopes[0] * up * sigmoid * (1 + gate.float() * (1 - sigmoid)))
        up.copy_(by_up)
        slopes[0].fill_(99.0)
        return gate, up


def test_a_kernel_may_write_into_what_it_is_handed_and_pays_for_no_copy(
    benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install(monkeypatch, liger_kernel__ops__swiglu__LigerSiLUMulFunction=WritingGate)
    ways = benches["extras_ways"]
    native, other, reference = cases.gate_case().make(SIZES)
    ways.warm_up(other)
    other.clear()
    other.go()
    assert WritingGate.handed == [x.data_ptr() for x in other.inputs]
    assert ways.compare(other, reference) < 1e-2
    assert ways.compare(native, reference) < 1e-2


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_a_norm_and_the_product_behind_it_are_compared_with_both(
    kind: str, benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages.install_engine(monkeypatch)
    case = cases.normed_case(getattr(cases, kind))
    native, other, reference = case.make(SIZES)
    for way in (native, other):
        assert benches["extras_ways"].compare(way, reference) < case.tolerance
    with torch.no_grad():
        other.weights[1].mul_(1.5)  # the norm's: the product has the norm's own weights
    assert benches["extras_ways"].compare(other, reference) > case.tolerance
    assert len(other.run()) == len(reference.run()) == (5 if kind == "LayerNorm" else 4)


def test_rotary_turns_parts_of_one_product(
    benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = fake_packages.install_liger(monkeypatch)
    native, other, reference = cases.rotary_case().make(SIZES)
    assert benches["extras_ways"].compare(other, reference) < 1e-2
    assert benches["extras_ways"].compare(native, reference) < 1e-2
    assert called == ["rope"]


def test_torchao_pays_for_its_sum_into_the_main_gradient(cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install_torchao(monkeypatch)
    named = {case.name: case for case in cases.list_cases()}
    for name in ("torchao: fp8 tensorwise", "torchao: fp8 rowwise"):
        native, other, reference = named[name].make(SIZES)
        for way in (native, other, reference):
            way.clear()
            way.go()
        (weight, _), (wide, _) = other.weights, reference.weights
        assert weight.grad is None
        for way in (native, other):
            assert way.main_grads[0].dtype == torch.float32
            assert torch.allclose(way.main_grads[0], wide.grad, rtol=2e-2, atol=2e-2 * wide.grad.abs().max().item())


def test_cross_entropy_is_the_chunked_one_of_a_compiled_run(
    benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = fake_packages.install_liger(monkeypatch)
    asked: list[torch.Size] = []
    make = cases.make_loss

    def make_loss(main_grad: Tensor, compiler: Any) -> Any:
        loss = make(main_grad, compiler)
        score = loss.score

        def count(scores: Tensor, *rest: Any) -> Any:
            asked.append(scores.shape)
            return score(scores, *rest)

        loss.score = count
        return loss

    monkeypatch.setattr(cases, "make_loss", make_loss)
    native, other, reference = cases.loss_case().make(SIZES)
    ways = benches["extras_ways"]
    assert ways.compare(native, reference) < 1e-2
    assert asked == [(32, 128)]
    assert ways.compare(other, reference) < 1e-2
    assert called == ["loss"]
    for way in (native, other):
        way.clear()
        way.go()
        assert way.weights[0].grad is None
        assert way.main_grads[0].abs().max() > 0


def test_adamw_is_measured_by_one_written_out(
    benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = fake_packages.install_apex(monkeypatch)
    ways = benches["extras_ways"]
    native, other, reference = cases.adam_case().make(SIZES)
    for way in (native, other):
        ways.warm_up(way)
        assert ways.compare(way, reference) < 1e-5
        way.clear()
        assert way.go() == []  # nothing but the step is timed
    assert set(called) == {"adam"}


@pytest.mark.parametrize("wrong", [{"adam_beta2": 0.9}, {"adam_eps": 1e-2}, {"adam_beta1": 0.5}])
def test_an_adamw_that_computes_something_else_is_found(
    benches: dict[str, ModuleType], cases: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float]
) -> None:
    """Both sides come from one class, so that a slip of it shows against the reference alone."""
    right, make = cases.OptimConfig(), cases.write_adam
    monkeypatch.setattr(cases, "OptimConfig", lambda: type(right)(**wrong))
    monkeypatch.setattr(cases, "write_adam", lambda w, g, config, **rates: make(w, g, right, **rates))
    native, _, reference = cases.adam_case().make(SIZES)
    assert benches["extras_ways"].compare(native, reference) > 1e-3


def test_results_say_on_what_they_were_measured(benches: dict[str, ModuleType]) -> None:
    found = json.loads(json.dumps(benches["extras"].describe([{"entry": "x"}], 20)))
    assert found["rows"] == [{"entry": "x"}]
    assert found["repeats"] == 20
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert {"gpu", "uuid", "commit", "date"} <= set(found["machine"])
