"""What makes steps faster on a GPU, against the same without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import score_rows, turned_heads
from helpers.fused_adam import CASES, compare, compare_unaligned, make
from helpers.pairs import write_pair
from helpers.runs import TINY, read_curve, run_tiny
from megaflow_trainer.config import read_command
from megaflow_trainer.ops import rotation, scores
from megaflow_trainer.ops.attention import ATTENTION, attend_cudnn, attend_math
from megaflow_trainer.ops.attention_timing import AttentionShape, time_attention
from megaflow_trainer.ops.registry import Need
from megaflow_trainer.parallel.graphs import MicroBatchGraph
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh
from megaflow_trainer.training.kernels import choose_attention, choose_compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]
LENGTH = ("--train-iters", "8", "--global-batch-size", "8", "--micro-batch-size", "4", "--eod-mask-loss")
BF16, FP16 = 2.0**-8, 2.0**-11
"""What one rounding may be off by; where two paths round differently, two."""


def one_gpu() -> Mesh:
    return build_mesh(Launch(), torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_of_adamw_is_the_reference(case: str) -> None:
    differences = compare(case, torch.device("cuda", 0))
    assert differences.pop("step") == 0
    loose = {"bf16": {"weight": 2 * BF16}, "fp16": {"weight": 2 * FP16}, "fp32": {}}.get(case)
    for kind, difference in differences.items():
        largest = 8 * BF16 if loose is None else loose.get(kind, 1e-6)
        assert difference <= largest, (kind, difference)


def test_gradients_turned_back_by_the_kernel_are_those_of_plain_torch() -> None:
    device = torch.device("cuda", 0)
    for name, heads, num_turned, cos, sin, is_interleaved in turned_heads.list_cases(device):
        own, wanted = heads.clone(), heads.clone()
        rotation.turn_back_(own, num_turned, cos, sin, is_interleaved=is_interleaved)  # a warning is an error here
        rotation.turn_back_plainly(wanted, num_turned, cos, sin, is_interleaved=is_interleaved)
        torch.testing.assert_close(own, wanted, atol=2e-6, rtol=2.0**-7, equal_nan=True, msg=name)
    for name, difference in turned_heads.find_differences(device).items():
        assert difference <= 1.01, name


def test_scores_by_the_kernel_are_those_of_plain_torch() -> None:
    """Losses to 4e-6; gradients to a rounding, or to 1e-5 of the token's weight in fp32."""
    device = torch.device("cuda", 0)
    for num_columns in (50304, 128256, 1000):
        assert all(scores._find_kernel(device, dtype, num_columns) for dtype in score_rows.DTYPES)
    from megaflow_trainer.ops.scores_kernel import TILE  # needs triton

    for tile in (TILE, (64, 4)):
        for name, difference in score_rows.find_differences(device, tile).items():
            assert difference <= (4e-6 if name.endswith("losses") else 10 if "float32" in name else 1.1), (tile, name)


def test_tensors_may_begin_anywhere() -> None:
    assert compare_unaligned(torch.device("cuda", 0)) < 1e-6


@pytest.mark.parametrize("case", ["bf16", "fp16", "states in bf16"])
def test_the_weight_is_its_master_rounded_to_the_nearest(case: str) -> None:
    _, gradients, optimizer = make(case, torch.device("cuda", 0), is_fused=True)
    for step in range(3):
        gradients.kept[0].copy_(torch.randn_like(gradients.kept[0]))
        optimizer.step(1e-2 / (step + 1))
    for name, master in optimizer.masters.items():
        assert torch.equal(optimizer.weights[name], master.to(optimizer.weights[name].dtype))


def test_a_skipped_step_changes_nothing() -> None:
    model, gradients, optimizer = make("bf16", torch.device("cuda", 0), is_fused=True)
    gradients.kept[0].fill_(1.0)
    optimizer.step(1e-2)
    tensors = {**dict(model.named_parameters()), **optimizer.list_tensors()}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    gradients.kept[0].fill_(torch.nan)
    optimizer.step(1e-2, factor=torch.tensor(torch.nan).cuda(), found_inf=torch.ones((), device="cuda"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--bf16", "--exp-avg-dtype", "bf16"], ["--fp16"]])
def test_a_run_in_one_pass_is_the_run_without(tmp_path: Path, flags: list[str]) -> None:
    prefix = write_pair(tmp_path / "toy")
    for name, more in (("plain", ["--no-fused-optimizer"]), ("fused", [])):
        run_tiny(prefix, [*LENGTH, *flags, *more, "--run-dir", str(tmp_path / name)], one_gpu())
    for plain, fused in zip(read_curve(tmp_path / "plain"), read_curve(tmp_path / "fused"), strict=True):
        assert fused[1] == pytest.approx(plain[1], rel=1e-3 if flags else 1e-5)
        assert fused[2] == pytest.approx(plain[2], rel=2e-2 if flags else 1e-4)


def test_compiled_blocks_are_the_default_and_the_run_without(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "toy")
    config, _ = read_command([*TINY, *LENGTH, "--data-path", prefix], world_size=1)
    assert choose_compile(config, torch.device("cuda", 0)) == (True, None)
    for name, flag in (("plain", "--no-compile"), ("compiled", "--compile")):
        run_tiny(prefix, [*LENGTH, flag, "--run-dir", str(tmp_path / name)], one_gpu())
    for plain, compiled in zip(read_curve(tmp_path / "plain"), read_curve(tmp_path / "compiled"), strict=True):
        assert compiled[1] == pytest.approx(plain[1], rel=1e-5)
        assert compiled[2] == pytest.approx(plain[2], rel=1e-4)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("groups", [4, 2])
def test_cudnns_attention_equals_attention_written_out(width: int, groups: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 128, width, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, groups, 128, width, device="cuda").bfloat16()
    torch.testing.assert_close(
        attend_cudnn(q, k, v, dropout=0.0), attend_math(q, k, v, dropout=0.0), atol=2e-2, rtol=2e-2
    )


def test_every_usable_kernel_is_timed_and_the_fastest_taken(capsys: pytest.CaptureFixture[str]) -> None:
    need = Need(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=64)
    shape = AttentionShape(b=4, n=12, g=12, s=1024, d=64, e=64)
    times = {entry.name: time_attention(entry, shape, need) for entry in ATTENTION if entry.is_timed}
    assert {"sdpa", "flash", "cudnn"} <= times.keys()
    assert all(ms is not None and 0.01 < ms < 100 for ms in times.values()), times
    words = (
        "--num-layers 2 --seq-length 1024 --micro-batch-size 4 --attention-dropout 0 --vocab-size 64 --train-iters 1"
    )
    config, _ = read_command([*words.split(), "--data-path", "none", "--bf16"], world_size=1)
    chosen = choose_attention(config, one_gpu(), need)
    line = capsys.readouterr().out
    assert line.startswith(f" attention at b 4, heads 12/12, s 1024, d 64: {chosen.name} (sdpa ")
    huge = AttentionShape(b=1, n=1, g=1, s=128, d=1024, e=1024)
    assert time_attention(next(entry for entry in ATTENTION if entry.name == "flash"), huge, need) is None


@pytest.mark.parametrize(
    "flags",
    [
        "--no-compile",
        "--compile",
        "--no-compile --bf16 --hidden-dropout 0.2",
        "--compile --bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear",
        "--no-compile --bf16 --zero-stage 1 --eval-interval 4 --eval-iters 1",
    ],
)
def test_micro_batches_replayed_as_a_cuda_graph_are_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    prefix = write_pair(tmp_path / "toy")
    words = [*LENGTH, *flags.split()]
    run_tiny(prefix, [*words, "--run-dir", str(tmp_path / "plain")], one_gpu())
    replays: list[int] = []
    keep = MicroBatchGraph.run

    def count(self: MicroBatchGraph, *args: Any) -> Any:
        results = keep(self, *args)
        replays.append(self.num_replayed)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatchGraph, "run", count)
        run_tiny(prefix, [*words, "--cuda-graph-impl", "local", "--run-dir", str(tmp_path / "graph")], one_gpu())
    assert replays[-1] == 16 - 3, capsys.readouterr().out
    exact = "--bf16" not in flags
    for plain, graph in zip(read_curve(tmp_path / "plain"), read_curve(tmp_path / "graph"), strict=True):
        assert graph[1] == pytest.approx(plain[1], rel=1e-5 if exact else 1e-3)
        assert graph[2] == pytest.approx(plain[2], rel=1e-4 if exact else 2e-2)
