"""Parts of blocks by optional packages: stand-ins give the losses and gradients of the native parts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fake_packages import install_apex, install_engine, install_liger, install_torchao
from helpers.pairs import write_pair
from helpers.runs import TINY, one_rank, read_metrics, run_tiny
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.sections import KernelConfig, PrecisionConfig
from megaflow_trainer.model.norm import LayerNorm
from megaflow_trainer.model.rope import Rotary, rotate_both
from megaflow_trainer.ops import packages
from megaflow_trainer.ops.layer_packages import (
    PARTS,
    EngineNormedProduct,
    EngineProduct,
    TorchaoProduct,
    rotate_liger,
)
from megaflow_trainer.ops.linear import Linear
from megaflow_trainer.parallel import apply as apply_module
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.kernels import join_norms, make_scope
from megaflow_trainer.training import build, preflight
from megaflow_trainer.training import run as run_module

LLAMA = [
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-percent", "0.5"),
    *("--disable-bias-linear", "--num-query-groups", "2", "--qk-layernorm"),
]
LENGTH = ["--train-iters", "3", "--global-batch-size", "8", "--micro-batch-size", "4", "--lr-decay-style", "constant"]
ENGINE = ["--transformer-impl", "transformer_engine"]


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    packages._load.cache_clear()
    yield
    packages._load.cache_clear()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine's CPU pass for a GPU where a device is asked for."""
    monkeypatch.setattr(run_module, "refuse_device", lambda *_: None)
    monkeypatch.setattr(preflight, "PARTS", {})
    monkeypatch.setattr(preflight, "list_parts", lambda config: [])


CASES: dict[str, tuple[list[str], list[str], Callable[[pytest.MonkeyPatch], list[Any]], set[str]]] = {
    "engine": (ENGINE, [], install_engine, set()),
    "engine llama": (ENGINE, LLAMA, install_engine, set()),
    "engine norms": (["--norm-kernel", "transformer_engine"], [], install_engine, set()),
    "engine rms norms": (["--norm-kernel", "transformer_engine"], LLAMA, install_engine, set()),
    "liger norms": (["--norm-kernel", "liger"], [], install_liger, {"layer"}),
    "liger rms norms": (["--norm-kernel", "liger"], LLAMA, install_liger, {"rms"}),
    "liger gate": (["--gate-kernel", "liger"], LLAMA, install_liger, {"gate"}),
    "liger rotary": (["--rotary-kernel", "liger"], LLAMA, install_liger, {"rope"}),
    "liger loss": (["--loss-kernel", "liger"], LLAMA, install_liger, {"loss"}),
    "apex norms": (["--norm-kernel", "apex"], [], install_apex, {"layer"}),
    "apex adam": (["--adam-kernel", "apex"], [], install_apex, {"adam"}),
    "apex adam bf16": (["--adam-kernel", "apex"], ["--bf16"], install_apex, {"adam"}),
    "apex rms norms": (["--norm-kernel", "apex"], LLAMA, install_apex, {"rms"}),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_package_gives_the_native_run(
    name: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, model, put, calls = CASES[name]
    run_tiny(prefix, [*LENGTH, *model, "--run-dir", str(tmp_path / "native")])
    called = put(monkeypatch)
    run_tiny(prefix, [*LENGTH, *model, *flags, "--run-dir", str(tmp_path / "package")])
    assert set(called) == calls
    for one, other in zip(*(read_metrics(tmp_path / kind) for kind in ("native", "package")), strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_positions_that_begin_again_are_turned_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    install_liger(monkeypatch)
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    angles = torch.randn(2, 1, 6, 4)
    expected = rotate_both(q, k, Rotary(angles.cos(), angles.sin(), is_interleaved=False))
    for one, other in zip(rotate_liger(q, k, angles.cos(), angles.sin()), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("on_cpu")
def test_the_engine_adds_to_main_gradients(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_tiny(prefix, [*LENGTH, "--run-dir", str(tmp_path / "native")])
    install_engine(monkeypatch)
    monkeypatch.setattr(build, "_can_accumulate", lambda config, mesh: True)
    monkeypatch.setattr(apply_module, "can_accumulate", lambda gradients: True)
    run_tiny(prefix, [*LENGTH, *ENGINE, "--run-dir", str(tmp_path / "package")])
    for one, other in zip(*(read_metrics(tmp_path / kind) for kind in ("native", "package")), strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("flags", [["--bf16"], ["--bf16", "--all-bf16"]])
def test_apex_adds_to_main_gradients(
    flags: list[str], prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each of the linear layers of two blocks, in each micro-batch."""
    called = install_apex(monkeypatch)
    monkeypatch.setattr(build, "_can_accumulate", lambda config, mesh: True)
    run_tiny(prefix, [*LENGTH, *flags, "--run-dir", str(tmp_path / "native")])
    assert not called
    run_tiny(prefix, [*LENGTH, *flags, "--wgrad-kernel", "apex", "--run-dir", str(tmp_path / "package")])
    assert set(called) == {"sums"}
    curves = [read_metrics(tmp_path / kind) for kind in ("native", "package")]
    assert len(called) % (2 * 4 * len(curves[0])) == 0
    loose = 1e-3 if "--all-bf16" in flags else 1e-4  # sums in 16 bits are rounded at another place
    for one, other in zip(*curves, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=loose)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=loose)


@pytest.mark.usefixtures("on_cpu")
def test_the_engines_fp8_is_entered_around_each_forward(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    entered = install_engine(monkeypatch)
    flags = [*LENGTH, *ENGINE, "--bf16", "--fp8-hybrid"]
    run_tiny(prefix, [*flags, "--run-dir", str(tmp_path / "a")])
    assert [(one.name, one.fp8_format) for one in entered] == [("current", "hybrid format")] * 6
    entered.clear()
    delayed = ["--fp8-recipe", "delayed", "--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max"]
    run_tiny(prefix, [*flags, *delayed, "--fp8-margin", "1", "--run-dir", str(tmp_path / "b")])
    assert len(entered) == 6
    assert vars(entered[0]) == {
        "name": "delayed",
        "fp8_format": "hybrid format",
        "margin": 1,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    }
    entered.clear()
    run_tiny(prefix, [*LENGTH, *ENGINE, "--bf16", "--run-dir", str(tmp_path / "c")])
    assert entered == []


def test_the_engine_is_told_where_a_main_gradient_is(monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(monkeypatch)
    weight, x = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4)
    product = EngineProduct(weight)
    product(x, weight, None).sum().backward()
    expected, weight.grad = weight.grad, None
    product.main_grad = torch.ones(3, 4)
    for _ in range(2):
        product(x, weight, None).sum().backward()
    assert weight.grad is None, "it adds the gradient itself"
    torch.testing.assert_close(product.main_grad, 1 + 2 * expected)
    product.main_grad = None
    product(x, weight, None).sum().backward()
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize(
    "model, flags, joined",
    [
        ([], [], ["attention.qkv", "mlp.up"]),
        (["--swiglu", "--normalization", "RMSNorm"], [], ["attention.qkv", "mlp.up"]),
        ([], ["--norm-kernel", "transformer_engine"], []),
        (["--num-experts", "4"], [], ["attention.qkv"]),  # a router reads what the second norm gives, too
    ],
)
def test_the_engine_computes_a_norm_with_the_product_behind_it(
    model: list[str], flags: list[str], joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(monkeypatch)
    monkeypatch.setattr(build, "refuse_parts", lambda *_: None)
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *model]
    native, built = (
        build.build_model(read_command([*words, *more], world_size=1)[0], one_rank()).module
        for more in ([], [*ENGINE, *flags])
    )
    block = built.blocks[0]
    layers = dict(block.named_modules())
    assert [name for name, one in layers.items() if type(getattr(one, "product", 0)) is EngineNormedProduct] == joined
    assert {name for name, _ in native.named_parameters()} == {name for name, _ in built.named_parameters()}
    x = torch.randn(2, 3, block.attention.qkv.in_features)
    is_passed = torch.equal(block.attention_norm(x), x)
    assert is_passed == ("attention.qkv" in joined)


def test_a_norm_before_a_product_that_ranks_share_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are gathered between the two."""
    install_engine(monkeypatch)
    monkeypatch.setattr(build, "refuse_parts", lambda *_: None)
    model = build.build_model(
        read_command([*TINY, "--train-iters", "1", "--data-path", "x"], world_size=1)[0], one_rank()
    )
    for layer in [module for module in model.module.modules() if isinstance(module, Linear)]:
        layer.product = EngineProduct(layer.weight)
    first, second = model.module.blocks
    first.attention.qkv.sharing = lambda *_: None
    join_norms(model.module, KernelConfig(layers="transformer_engine"))
    assert type(first.attention.qkv.product) is EngineProduct
    assert first.attention_norm.kernel is None
    assert type(second.attention.qkv.product) is EngineNormedProduct


def test_the_engines_norm_has_the_weights_and_the_width_of_the_one_it_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_engine(monkeypatch)
    weight, norm, x = torch.nn.Parameter(torch.randn(3, 4)), LayerNorm(4, eps=0.5), torch.randn(2, 4)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    bias, expected = torch.randn(3), norm(x)
    y = EngineNormedProduct(weight, norm)(x, weight, bias)
    torch.testing.assert_close(y, expected @ weight.T + bias)
    y, normed = EngineNormedProduct(weight, norm, returns_normed=True).run_both(x, bias)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, expected @ weight.T + bias)
    found = torch.autograd.grad(y.sum() + normed.square().sum(), (weight, norm.weight, norm.bias))
    wanted = torch.autograd.grad((norm(x) @ weight.T).sum() + norm(x).square().sum(), (weight, norm.weight, norm.bias))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recipe, groups", [("delayed", ["all ranks"]), ("tensorwise", [None])])
def test_ranks_agree_on_the_engines_delayed_scales(
    recipe: str, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(monkeypatch)
    seen: list[Any] = []

    def autocast(*, amax_reduction_group: Any = None, **_: Any) -> Any:
        seen.append(amax_reduction_group)
        return nullcontext()

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "autocast", autocast)
    mesh = dataclasses.replace(one_rank(), world_group="all ranks")  # type: ignore[arg-type]
    scope = make_scope("hybrid", KernelConfig(layers="transformer_engine"), PrecisionConfig(recipe=recipe), mesh)
    with scope():
        assert seen == groups


def test_a_bad_step_changes_nothing_by_apex_either(monkeypatch: pytest.MonkeyPatch) -> None:
    called = install_apex(monkeypatch)
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--adam-kernel", "apex"]
    monkeypatch.setattr(build, "refuse_parts", lambda *_: None)
    config = read_command(words, world_size=1)[0]
    model = build.build_model(config, one_rank())
    optimizer = build.build_optimizer(model, config)
    assert optimizer.skips_on_device
    before = [weight.detach().clone() for weight in model.module.parameters()]
    for skip in (1.0, 0.0):
        for gradient in model.gradients.kept:  # type: ignore[union-attr]
            gradient.fill_(1.0)
        optimizer.step(1e-2, 0.1, found_inf=torch.tensor(skip))
        same = [torch.equal(old, new) for old, new in zip(before, model.module.parameters(), strict=True)]
        assert same == [bool(skip)] * len(same)
    assert {value.item() for name, value in optimizer.list_tensors().items() if name.startswith("step.")} == {1.0}
    assert called == ["adam"] * 4, "two groups, with and without decay"


@pytest.mark.usefixtures("on_cpu")
def test_torchao_takes_the_layers_that_fp8_is_for(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    asked = install_torchao(monkeypatch)
    run_tiny(prefix, [*LENGTH, "--bf16", "--run-dir", str(tmp_path / "native")])
    flags = [*LENGTH, "--bf16", "--fp8-hybrid", "--fp8-kernel", "torchao", "--run-dir", str(tmp_path / "package")]
    run_tiny(prefix, flags)
    assert asked == ["tensorwise"] * 8
    one, other = (read_metrics(tmp_path / kind) for kind in ("native", "package"))
    assert [line["lm_loss"] for line in other] == pytest.approx([line["lm_loss"] for line in one], rel=1e-3)


def see_products(flags: list[str]) -> set[type]:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *flags]
    model = build.build_model(read_command(words, world_size=1)[0], one_rank())
    return {type(layer.product) for layer in model.module.modules() if hasattr(layer, "product")}


@pytest.mark.usefixtures("on_cpu")
def test_small_layers_stay_native_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(monkeypatch)
    install_torchao(monkeypatch)
    engine = {EngineProduct, EngineNormedProduct}
    assert see_products(ENGINE) == engine
    assert not engine & see_products([*ENGINE, "--bf16", "--fp8-hybrid"])
    assert TorchaoProduct not in see_products(["--fp8-kernel", "torchao", "--bf16", "--fp8-hybrid"])
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    assert see_products([*ENGINE, "--bf16", "--fp8-hybrid"]) == engine
    assert see_products(["--fp8-kernel", "torchao", "--bf16", "--fp8-hybrid"]) == {TorchaoProduct}


FLAGS = {
    ("layers", "transformer_engine"): ENGINE,
    ("norm", "transformer_engine"): ["--norm-kernel", "transformer_engine"],
    ("norm", "liger"): ["--norm-kernel", "liger"],
    ("norm", "apex"): ["--norm-kernel", "apex"],
    ("gate", "liger"): ["--gate-kernel", "liger", *LLAMA],
    ("rotary", "liger"): ["--rotary-kernel", "liger", *LLAMA],
    ("loss", "liger"): ["--loss-kernel", "liger"],
    ("adam", "apex"): ["--adam-kernel", "apex"],
    ("sums", "apex"): ["--bf16", "--wgrad-kernel", "apex"],
    ("fp8", "torchao"): ["--fp8-kernel", "torchao", "--bf16", "--fp8-hybrid"],
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("part", [part for part in PARTS if part[0] != "sums"], ids=" ".join)  # for ZeRO 0 and 1 alone
def test_what_zero_3_allows_takes_the_weight_that_it_is_handed(
    part: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO 3 puts another tensor in a weight's place; a kernel that held on to the first one would never train it."""
    for put in (install_engine, install_liger, install_apex, install_torchao):
        put(monkeypatch)
    monkeypatch.setattr(precision, "FP8_WIDTH", 32)
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--attention-dropout", "0", *FLAGS[part]]
    model = build.build_model(read_command(words, world_size=1)[0], one_rank()).module
    new: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        if type(module).__module__.startswith("megaflow_trainer"):
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = new.setdefault(weight, torch.nn.Parameter(weight.detach().clone()))
    tokens = torch.arange(16)[None] % 64
    model(tokens, tokens).sum().backward()
    has_new = all(weight.grad is not None for weight in new.values())
    if has_new:
        assert read_command([*words, "--zero-stage", "3"], world_size=1)[0].parallel.zero == 3
        return
    with pytest.raises(ConfigError, match="keeps its weights"):
        read_command([*words, "--zero-stage", "3"], world_size=1)


@pytest.mark.parametrize("part", PARTS, ids=" ".join)
def test_a_part_that_cannot_be_had_is_refused_before_data_are_opened(
    part: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "/nowhere", *FLAGS[part]]
    config = read_command(words, world_size=1)[0]
    with pytest.raises(
        ConfigError, match=r"--[a-z0-9-]+ \w+ cannot run here: \S+ needs a CUDA GPU and .* is cpu; drop --"
    ):
        preflight.refuse_parts(config.kernels, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"the package .* is not installed .*; drop --"):
        preflight.refuse_parts(config.kernels, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"needs a CUDA GPU|needs a GPU"):
        run_module.train(config, one_rank())


@pytest.mark.parametrize(
    "flags, words",
    [
        ([*ENGINE, "--zero-stage", "3"], r"keeps its weights, which parallel.zero \(--zero-stage\) 3 exchanges"),
        (["--norm-kernel", "transformer_engine", "--zero-stage", "3"], r"kernels.norm .* keeps its weights, which par"),
        (
            ["--bf16", "--fp8-hybrid", "--fp8-kernel", "torchao", "--zero-stage", "3"],
            r"kernels.fp8 \(--fp8-kernel\) torchao keeps its weights, which parallel.zero .* 3 exchanges; give zero 1",
        ),
        ([*ENGINE, "--bf16", "--fp8-hybrid", "--fp8-recipe", "rowwise"], "transformer_engine has no precision.recipe"),
        ([*ENGINE, "--bf16", "--fp8-hybrid", "--recompute-activations"], "does not go with recompute.granularity"),
        ([*ENGINE, "--bf16", "--fp8-hybrid", "--fp8-kernel", "torchao"], "transformer_engine brings its own fp8"),
        (["--norm-kernel", "apexx"], "must be one of torch, liger, apex, transformer_engine, got 'apexx'"),
        (["--adam-kernel", "apex", "--optimizer", "lion"], "apex is for optim.kind"),
        (["--adam-kernel", "apex", "--optimizer-cpu-offload"], "apex is for optim.kind"),
        *(
            (
                ["--adam-kernel", "apex", *given.split()],
                rf"apex takes .* in fp32, and there is {words}.*; drop one of them",
            )
            for given, words in (
                ("--bf16 --all-bf16", "step.is_all_bf16"),
                ("--fp64", "step.dtype fp64"),
                ("--bf16 --main-params-dtype bf16", "optim.main_dtype .* bf16"),
                ("--main-grads-dtype bf16", "optim.main_grad_dtype .* bf16"),
                ("--exp-avg-dtype bf16", "optim.exp_avg_dtype .* bf16"),
                ("--exp-avg-sq-dtype fp16", "optim.exp_avg_sq_dtype .* fp16"),
            )
        ),
        (
            ["--fp16", "--main-grads-dtype", "bf16", "--wgrad-kernel", "apex"],
            "optim.main_grad_dtype .* bf16 is neither fp32 nor step.dtype fp16",
        ),
        (["--wgrad-kernel", "apex"], r"in the products of linear layers, and in step.dtype fp32 grad"),
        *(
            (["--bf16", "--wgrad-kernel", "apex", *given.split()], rf"kernels.sums .* apex adds .*, and {words}")
            for given, words in (
                ("--transformer-impl transformer_engine", "kernels.layers .* adds them by itself"),
                ("--fp8-hybrid", "step.fp8 .* has products of its own"),
                ("--no-gradient-accumulation-fusion", "step.accumulates_in_products is off"),
                ("--zero-stage 2", "parallel.zero .* 2 does not keep whole sums"),
                (
                    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
                    "recompute.method .* uniform goes through several layers",
                ),
            )
        ),
        (["--gate-kernel", "liger"], r"is for model.activation \(--activation\) swiglu, and it is gelu"),
        (["--rotary-kernel", "liger"], r"is for model.position_kind \(--position-embedding-type\) rope"),
        (["--rotary-kernel", "liger", *LLAMA, "--rotary-interleaved"], "pairs channels by halves"),
        (
            ["--bf16", "--fp8-hybrid", "--fp8-kernel", "torchao", "--fp8-recipe", "delayed"],
            "torchao has tensorwise with hybrid and rowwise with e4m3, not delayed with hybrid",
        ),
        (["--bf16", "--fp8-hybrid", "--fp8-kernel", "torchao", "--fp8-recipe", "rowwise"], "not rowwise with hybrid"),
        (["--bf16", "--fp8-format", "e4m3", "--fp8-kernel", "torchao"], "not tensorwise with e4m3"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_command([*TINY, "--train-iters", "1", "--data-path", "x", *flags], world_size=1)


def test_ranks_that_share_a_layer_or_divide_layers_are_refused() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x"]
    with pytest.raises(ConfigError, match="needs whole scores, and parallel"):
        read_command([*words, "--loss-kernel", "liger", "--tensor-model-parallel-size", "2"], world_size=2)
    with pytest.raises(ConfigError, match="does not go with parallel"):
        read_command([*words, *ENGINE, "--pipeline-model-parallel-size", "2"], world_size=2)


@pytest.mark.parametrize("precision_flags", [[], ["--bf16"], ["--fp16"]])
@pytest.mark.parametrize(
    "flags, name",
    [
        (["--fp8-kernel", "torchao"], "kernels.fp8 (--fp8-kernel)"),
        (["--fp8-recipe", "delayed"], "precision.recipe (--fp8-recipe)"),
    ],
)
def test_what_is_for_fp8_alone_is_said_to_have_no_effect_without(
    flags: list[str], name: str, precision_flags: list[str]
) -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", *precision_flags, *flags]
    assert f"{name} has no effect without --fp8-format" in read_command(words, world_size=1)[1]
