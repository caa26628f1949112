"""Memory by formula is what ranks hold in a layout: weights, gradients, states, activations, micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from helpers.layouts import find_mesh
from helpers.ranks import RankPool
from helpers.saved import count_saved_bytes
from megaflow_trainer.config import TrainConfig, activations, read_command
from megaflow_trainer.config.activations import CPU, count_activation_bytes
from megaflow_trainer.config.cost_table import ITEM_BYTES
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.config.memory import divide_states
from megaflow_trainer.config.shares import (
    Share,
    count_held_parameters,
    count_in_flight,
    find_share,
    list_held_blocks,
)
from megaflow_trainer.parallel import precision
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.pipeline import MicroBatch, Stage
from megaflow_trainer.training.build import build_model, build_optimizer

pytestmark = pytest.mark.dist

LENGTH, MICRO = 128, 2
SHAPE = (
    f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length {LENGTH} --vocab-size 500 --data-path none "
    f"--attention-dropout 0 --train-iters 1 --micro-batch-size {MICRO} --num-micro-batches 4 --ddp-bucket-size 1000"
)
_LLAMA = (
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--normalization RMSNorm --swiglu --num-query-groups 2"
)
KINDS = {
    "gpt2": "--hidden-dropout 0.1",
    "llama": _LLAMA,
    "multi_query": f"{_LLAMA} --num-query-groups 1 --qk-layernorm",
    "latent": (
        "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 32 --q-lora-rank 40 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 24 --hidden-dropout 0"
    ),
    "further": f"{_LLAMA} --mtp-num-layers 1",
}
_MOE = "--num-experts 4 --moe-ffn-hidden-size 96 --moe-router-topk 2"
EXPERTS = {
    "moe": f"{_LLAMA} {_MOE}",
    "moe_shared": f"{_MOE} --moe-shared-expert-intermediate-size 48 --moe-layer-freq 2 --hidden-dropout 0.1",
    "moe_further": f"{_LLAMA} {_MOE} --moe-layer-freq ([0]*1+[1]*3) --mtp-num-layers 1",
}
EP2, ETP1 = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1"
TP2, CP2, PP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = "--sequence-parallel"


def read(kind: str, flags: str) -> TrainConfig:
    return read_command(f"{SHAPE} {(KINDS | EXPERTS)[kind]} {flags}".split(), world_size=2)[0]


def own_share(config: TrainConfig, mesh: Mesh) -> Share:
    count = config.step.sizes.num_micro_batches
    return find_share(config.model, config.parallel, pp_rank=mesh.pp_rank, num_micro_batches=count)


def start(pool: Mesh, kind: str, flags: str) -> tuple[TrainConfig, Mesh, Any]:
    config = read(kind, flags)
    layout = make_layout(config.parallel, world_size=2, num_kv_heads=config.model.kv_heads)
    mesh = find_mesh(pool, layout)
    return config, mesh, build_model(config, mesh)


def compare_kept(pool: Mesh, kind: str, flags: str) -> tuple[int, int]:
    """Bytes that autograd keeps of one micro-batch on this rank, and those by formula."""
    config, mesh, model = start(pool, kind, flags)
    tokens = torch.randint(500, (MICRO, LENGTH + 1))
    own = model.take_own(tokens[:, :-1]), model.take_own(tokens[:, 1:])
    keys = torch.arange(MICRO)
    found, losses = count_saved_bytes(model.module, lambda: model(*own, keys=keys))
    losses.sum().backward()
    counted = count_activation_bytes(
        config.model,
        config.recompute,
        [config.recompute.modules] * config.model.num_layers,
        seq_len=LENGTH,
        micro_batch_size=MICRO,
        item_bytes=ITEM_BYTES[config.step.dtype],
        kernels=dataclasses.replace(CPU, has_fp8=config.step.fp8 != "none", input_copies=2),
        share=own_share(config, mesh),
    )
    return found, counted.kept


def compare_kept_in_fp8(pool: Mesh, kind: str, flags: str) -> tuple[int, int]:
    """The same where all linear layers of blocks have products in fp8."""
    keep = precision.FP8_WIDTH
    precision.FP8_WIDTH = activations.FP8_WIDTH = 32
    try:
        return compare_kept(pool, kind, f"{flags} --bf16 --fp8-hybrid")
    finally:
        precision.FP8_WIDTH = activations.FP8_WIDTH = keep


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        TP2,
        f"{TP2} {SP}",
        f"{TP2} {SP} --bf16",
        f"{TP2} {SP} --recompute-granularity full",
        f"{TP2} {SP} --recompute-activations",
    ],
    ids=["tp", "sp", "sp_bf16", "sp_full", "sp_attention"],
)
def test_tensor_parallel_ranks_keep_the_counted_bytes(two_ranks: RankPool, kind: str, layout: str) -> None:
    for found, counted in two_ranks.run(compare_kept, kind, layout):
        assert counted == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("layout", [TP2, f"{TP2} {SP}"], ids=["tp", "sp"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tensor_parallel_ranks_in_fp8_keep_the_counted_bytes(two_ranks: RankPool, kind: str, layout: str) -> None:
    """Of gathered tokens each rank keeps all, in 8 bits, and does not gather them again."""
    for found, counted in two_ranks.run(compare_kept_in_fp8, kind, layout):
        assert counted == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(
    "layout",
    [
        TP2,
        f"{TP2} {SP}",
        f"{TP2} {SP} --bf16",
        f"{TP2} {EP2} {ETP1}",
        EP2,
        f"{EP2} --bf16",
        f"{EP2} --recompute-granularity full",
    ],
    ids=["tp", "sp", "sp_bf16", "tp_ep", "ep", "ep_bf16", "ep_full"],
)
def test_ranks_that_share_experts_keep_the_counted_bytes(two_ranks: RankPool, kind: str, layout: str) -> None:
    """Together: one rank's experts may get more tokens than the other's."""
    found, counted = (sum(ranks) for ranks in zip(*two_ranks.run(compare_kept, kind, layout), strict=True))
    assert counted == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "multi_query", "latent"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_context_parallel_ranks_keep_the_counted_bytes(two_ranks: RankPool, kind: str, comm: str) -> None:
    for found, counted in two_ranks.run(compare_kept, kind, f"{CP2} --cp-comm-type {comm} --hidden-dropout 0"):
        assert counted == pytest.approx(found, rel=0.02)


def compare_states(pool: Mesh, kind: str, flags: str) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Bytes of states on this rank and by formula, and weights on it and by formula."""
    config, mesh, model = start(pool, kind, flags)
    optimizer = build_optimizer(model, config)
    held = sum(weight.numel() for weight in model.module.parameters())
    weights = sum(_local(weight) for weight in model.module.parameters())
    grads = sum(kept.numel() * kept.element_size() for kept in model.gradients.kept)
    if config.parallel.zero < 2:
        grads = sum(bucket.full.nbytes for bucket in model.gradients.buckets)
    states = sum(tensor.nbytes for tensor in optimizer.list_tensors().values())
    share = own_share(config, mesh)
    found = {"weights": weights, "gradients": grads, "optimizer": states}
    return found, divide_states(config, share), held, count_held_parameters(config.model, share)


def _local(weight: torch.Tensor) -> int:
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return int(local.nbytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [TP2, PP2, f"{PP2} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2"],
    ids=["tp", "pp", "interleaved"],
)
def test_ranks_that_share_the_model_hold_the_counted_states(two_ranks: RankPool, kind: str, layout: str) -> None:
    for found, counted, held, num in two_ranks.run(compare_states, kind, f"{layout} --bf16"):
        assert num == held
        for name in found:
            assert counted[name] == pytest.approx(found[name], rel=0.01), name


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(
    "layout",
    [TP2, PP2, EP2, f"{TP2} {EP2} {ETP1}", f"{EP2} --zero-stage 1", f"{TP2} {EP2} {ETP1} --zero-stage 1"],
    ids=["tp", "pp", "ep", "tp_ep", "ep_zero", "tp_ep_zero"],
)
def test_ranks_that_share_experts_hold_the_counted_states(two_ranks: RankPool, kind: str, layout: str) -> None:
    for found, counted, held, num in two_ranks.run(compare_states, kind, f"{layout} --bf16"):
        assert num == held
        for name in found:
            assert counted[name] == pytest.approx(found[name], rel=0.02), name


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("layout", [EP2, f"{TP2} {ETP1}", f"{TP2} {EP2} {ETP1}"], ids=["ep", "tp_etp", "tp_ep"])
def test_zero3_divides_the_counted_states_of_experts_apart(two_ranks: RankPool, kind: str, layout: str) -> None:
    """Layers are divided, but not experts, of which each rank has its own; experts, but not layers; nothing."""
    flags = f"{layout} --zero-stage 3 --bf16"
    config = read(kind, flags)
    share = find_share(config.model, config.parallel, pp_rank=0, num_micro_batches=1)
    blocks = sorted(list_held_blocks(config.model, share)[: config.model.num_layers])
    for found, counted, held, num in two_ranks.run(compare_states, kind, flags):
        assert num == held
        gathered = 2 * (num - sum(blocks) + sum(blocks[-2:])) if share.ep * share.tp < 4 else 0
        reduced = 6 * blocks[-1] if share.ep * share.tp < 4 else 0
        assert counted["optimizer"] == pytest.approx(found["optimizer"], rel=0.02)
        assert counted["weights"] == pytest.approx(found["weights"] + gathered, rel=0.02)
        assert counted["gradients"] == pytest.approx(found["gradients"] + reduced, rel=0.02)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_divides_the_counted_states(two_ranks: RankPool, zero: int) -> None:
    config = read("llama", f"--zero-stage {zero} --bf16")
    table = 512 * 64
    for found, counted, held, num in two_ranks.run(compare_states, "llama", f"--zero-stage {zero} --bf16"):
        assert num == held
        assert counted["optimizer"] == pytest.approx(found["optimizer"], rel=0.02)
        if zero == 2:  # a bucket of whole gradients: here the embedding's
            assert counted["gradients"] == pytest.approx(found["gradients"] + 4 * table, rel=0.02)
        elif zero == 3:
            block = (num - 2 * table - 64) // 4
            assert counted["weights"] == pytest.approx(found["weights"] + 2 * (2 * table + 64 + 2 * block), rel=0.02)
            assert counted["gradients"] == pytest.approx(found["gradients"] + 6 * block, rel=0.02)
        else:
            assert counted["gradients"] == pytest.approx(found["gradients"], rel=0.02)
    assert config.parallel.zero == zero


def count_flight(pool: Mesh, flags: str, count: int) -> tuple[float, float]:
    """Micro-batches in flight at most on this rank in a step of the real schedule, and by formula."""
    config, mesh, model = start(pool, "llama", f"{PP2} {flags}")
    forward, backward = Stage.forward_one_chunk, Stage.backward_one_chunk
    now, most = [0], [0]

    def go(self: Any, *args: Any, **options: Any) -> Any:
        now[0] += 1
        most[0] = max(most[0], now[0])
        return forward(self, *args, **options)

    def back(self: Any, *args: Any, **options: Any) -> None:
        backward(self, *args, **options)
        now[0] -= 1

    tokens = torch.randint(500, (1, LENGTH))
    try:
        Stage.forward_one_chunk, Stage.backward_one_chunk = go, back  # type: ignore[method-assign, assignment]
        model.pipeline.run([MicroBatch(tokens, tokens, None, None)] * count)
    finally:
        Stage.forward_one_chunk, Stage.backward_one_chunk = forward, backward  # type: ignore[method-assign]
    counted = count_in_flight(config.parallel, pp_rank=mesh.pp_rank, num_micro_batches=count)
    return most[0] / len(model.pipeline.chunks), counted


def count_buffers(pool: Mesh, flags: str, count: int) -> tuple[int, int]:
    """Tensors that this rank has memory for to receive into, at most and after a step of the real schedule."""
    _, _, model = start(pool, "llama", f"{PP2} {flags}")
    found = [0]

    def look(name: str) -> Any:
        own = getattr(Stage, name)

        def run(self: Any, *args: Any, **options: Any) -> Any:
            outcome = own(self, *args, **options)
            found.append(sum(map(_count_real, stages())))
            return outcome

        return run

    def stages() -> list[Any]:
        schedules = model.pipeline.schedules.values()
        return [stage for one in schedules for stage in (getattr(one, "_stages", None) or [one._stage])]

    tokens = torch.randint(500, (1, LENGTH))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_fwd_recv_ops", "get_bwd_recv_ops", "forward_one_chunk", "backward_one_chunk"):
            patch.setattr(Stage, name, look(name))
        model.pipeline.run([MicroBatch(tokens, tokens, None, None)] * count)
    return max(found), sum(map(_count_real, stages()))


def _count_real(stage: Any) -> int:
    infos = [info for known in (stage.args_recv_info, stage.grad_recv_info) for one in known.values() for info in one]
    return sum(not info.buffer.is_meta for info in infos if hasattr(info, "buffer"))


@pytest.mark.parametrize(
    "schedule, most",
    [
        ("gpipe", 1),
        ("1f1b", 2),
        ("interleaved --num-virtual-stages-per-pipeline-rank 2", 4),
        ("zero_bubble --num-virtual-stages-per-pipeline-rank 2", 4),
        ("zbv", 4),
    ],
)
def test_messages_have_memory_only_while_they_travel(two_ranks: RankPool, schedule: str, most: int) -> None:
    for found, left in two_ranks.run(count_buffers, f"--pipeline-schedule {schedule}", 12):
        assert 0 < found <= most
        assert left == 0


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "schedule, is_bound",
    [
        ("gpipe", False),
        ("1f1b", False),
        ("interleaved --num-virtual-stages-per-pipeline-rank 2", False),
        ("zero_bubble --num-virtual-stages-per-pipeline-rank 2", True),
        ("zbv", True),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_schedule(
    two_ranks: RankPool, schedule: str, is_bound: bool, count: int
) -> None:
    for found, counted in two_ranks.run(count_flight, f"--pipeline-schedule {schedule}", count):
        assert found <= counted if is_bound else found == counted
