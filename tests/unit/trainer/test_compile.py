"""Blocks are compiled where they can be, and run as they are where the compiler fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.runs import one_rank
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.compiling import find_compile_obstacle, find_default_obstacle
from megaflow_trainer.model.attention import Attention
from megaflow_trainer.model.norm import RMSNorm
from megaflow_trainer.ops.attention import attend_sdpa
from megaflow_trainer.parallel.fusion import Compiler, compile_blocks
from megaflow_trainer.training.build import build_model

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --train-iters 1 "
    "--data-path none --micro-batch-size 2"
)
PP2 = "--pipeline-model-parallel-size 2"


def double(x: Tensor) -> Tensor:
    return 2 * x


def double_in_parts(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return 2 * x


def test_a_function_that_the_compiler_refuses_runs_as_it_is_and_so_do_all_others() -> None:
    told: list[str] = []
    compiler = Compiler(told.append)
    options = {"fullgraph": True, "backend": "eager"}
    good, bad, late = (compiler(function, **options) for function in (double, double_in_parts, double))
    x = torch.ones(2, requires_grad=True)
    assert good(x).tolist() == [2, 2]
    assert not told
    y = bad(x)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([2, 2], [2, 2])  # type: ignore[union-attr]
    assert late(x).tolist() == bad(x).tolist() == [2, 2]
    assert len(told) == 1
    assert told[0].startswith("blocks are not compiled: Unsupported: Call to `torch._dynamo.graph_break()`")


def test_an_error_of_the_function_itself_stays_its_own() -> None:
    def fail(x: Tensor) -> Tensor:
        return x @ torch.ones(3)

    with pytest.raises(RuntimeError, match=r"size mismatch|incompatible"):
        Compiler()(fail, backend="eager")(torch.ones(2, 2))


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("flags", ["", "--num-experts 2"])
def test_blocks_are_compiled_whole_where_nothing_is_exchanged(flags: str, is_whole: bool) -> None:
    """A graph that breaks in a block would go unseen."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Seeing(Compiler):
        def __call__(self, function: Any, **options: Any) -> Any:
            seen.append((function.__qualname__, options))
            return function

    config, _ = read_command(f"{BASE} --no-compile {flags}".split(), world_size=1)
    compile_blocks(build_model(config, one_rank()).module, is_whole=is_whole, compiler=Seeing())  # type: ignore[arg-type]
    blocks = [options for name, options in seen if name.startswith("Block.")]
    assert blocks == [{"fullgraph": is_whole, "dynamic": False}] * 4


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_run_in_parts_is_not_given_what_an_earlier_run_compiled() -> None:
    class Eager(Compiler):
        def __call__(self, function: Any, **options: Any) -> Any:
            return super().__call__(function, backend="eager", **options)

    def run(attend: Callable[..., Tensor], *, has_package: bool, is_whole: bool) -> Tensor:
        flags = f"{BASE} --no-compile --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0"
        module = build_model(read_command(flags.split(), world_size=1)[0], one_rank()).module
        for part in module.modules():
            if isinstance(part, RMSNorm) and has_package:
                part.kernel = make_package()
            if isinstance(part, Attention):
                part.core = attend
        compile_blocks(module, is_whole=is_whole, compiler=Eager(told.append))
        tokens = torch.arange(32).view(2, 16)
        module(tokens, tokens)
        losses: Tensor = module(tokens, tokens)
        losses.sum().backward()
        return losses.detach()

    def make_package() -> Callable[..., Tensor]:
        @torch.compiler.disable
        def package(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

        return package

    @torch.compiler.disable
    def apart(*heads: Tensor, **options: Any) -> Tensor:
        return attend_sdpa(*heads, **options)

    told: list[str] = []
    expected = run(attend_sdpa, has_package=False, is_whole=True)
    later = ((attend_sdpa, True, False), (attend_sdpa, False, True), (apart, False, False))
    for attend, has_package, is_whole in later:
        assert torch.allclose(run(attend, has_package=has_package, is_whole=is_whole), expected, atol=1e-6)
    assert not told, "compiled, not left as it is"


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ("--zero-stage 3", 2, "gathers weights inside of blocks"),
        (f"{PP2} --pipeline-schedule zbv", 2, "takes backward apart"),
        (f"{PP2} --pipeline-schedule zero_bubble", 2, "takes backward apart"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_by_default_left(flags: str, world_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.*drop --compile"):
        read_command(f"{BASE} {flags} --compile".split(), world_size=world_size)
    config, _ = read_command(f"{BASE} {flags}".split(), world_size=world_size)
    assert config.step.is_compiled is None
    assert words in (find_compile_obstacle(config) or "")
    assert find_default_obstacle(config) == find_compile_obstacle(config)


def test_what_is_not_tried_with_compiled_blocks_is_compiled_if_it_is_asked_for() -> None:
    config, _ = read_command(f"{BASE} --offload-activations --compile".split(), world_size=1)
    assert config.step.is_compiled
    assert "not tried" in (find_default_obstacle(config) or "")
    assert find_default_obstacle(read_command(BASE.split(), world_size=1)[0]) is None
