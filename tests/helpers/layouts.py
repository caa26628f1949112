"""A few training steps of a tiny model on some layout of ranks, and how far two such runs are apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.config.layout import Layout, make_layout
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.collectives import gather_objects
from megaflow_trainer.parallel.mesh import Launch, Mesh, build_mesh
from megaflow_trainer.parallel.seed import seed_dropout
from megaflow_trainer.parallel.shards import Shard, ShardMap, gather_full
from megaflow_trainer.training.build import build_model, build_optimizer
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.step import StepReport, train_step

GLOBAL_BATCH, STEPS, SEQ_LEN, EOD = 8, 10, 16, 0
SHAPE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --eval-interval 0 "
    "--attention-dropout 0 --data-path none --adam-eps 1e-6"
)
"""Adam's epsilon is above the rounding of gradients that are 0 (softmax ignores the bias of keys): these then stay."""
_PLAIN = "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0"
_LLAMA = f"{_PLAIN} --normalization RMSNorm --swiglu --ffn-hidden-size 48"
_LATENT = (
    "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --hidden-dropout 0"
)
_APART = "--reset-position-ids --reset-attention-mask"
_MOE = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-z-loss-coeff 0.001"
_BALANCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02"
_SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-num-groups 2 --moe-router-group-topk 2"
)
FIRST_HALF = tuple(range(GLOBAL_BATCH // 2))
KINDS = {
    "gpt2": "--hidden-dropout 0.2",
    "gpt2_plain": "--hidden-dropout 0",
    "llama": f"{_LLAMA} --num-query-groups 2",
    "multi_query": "--position-embedding-type rope --num-query-groups 1 --hidden-dropout 0",
    "qwen": f"{_LLAMA} --add-qkv-bias --qk-layernorm",
    "nemotron": f"{_PLAIN} --squared-relu --rotary-percent 0.5",
    "window": f"{_LLAMA} --window-size 5",
    "latent": _LATENT,
    "latent_queries": f"{_LATENT} {_LLAMA} --q-lora-rank 10",
    "documents": f"{_APART} --hidden-dropout 0.2",
    "documents_llama": f"{_APART} {_LLAMA} --num-query-groups 2",
    "further": "--mtp-num-layers 2 --hidden-dropout 0.1",
    "further_llama": f"{_LLAMA} --mtp-num-layers 1",
    "moe": f"{_LLAMA} {_MOE} {_BALANCE}",
    "moe_documents": f"{_APART} {_LLAMA} {_MOE} {_BALANCE}",
    "moe_padded": f"{_LLAMA} {_MOE} --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
    "moe_bias": f"{_MOE} --hidden-dropout 0.1 --moe-layer-freq 2 --moe-input-jitter-eps 0.05 {_SIGMOID}",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A run: kind of model, flags of the layout, ranks, vocabulary, whether masks are unequal, flags of all layouts,
    steps, samples of a global batch that are almost all EOD.
    """

    kind: str
    flags: str = ""
    num_ranks: int = 1
    vocab: int = 64
    eod_id: int | None = EOD
    micro: int = 2
    common: str = ""
    steps: int = STEPS
    few: tuple[int, ...] = FIRST_HALF


@dataclass
class Batch:
    """What a loader yields."""

    tokens: np.ndarray
    labels: np.ndarray
    sample_ids: np.ndarray
    loss_mask: np.ndarray | None = None
    queue_depth: int = 1


class ListLoader:
    """Random samples in the order of the loader's contract; those of each global batch that `few` names are almost all
    EOD, the others hold three documents.
    """

    def __init__(self, micro_batch_size: int, mesh: Mesh, vocab: int, few: tuple[int, ...] = FIRST_HALF) -> None:
        samples = np.random.default_rng(3).integers(1, vocab, (GLOBAL_BATCH * STEPS, SEQ_LEN + 1))
        for first in range(0, len(samples), GLOBAL_BATCH):
            own = samples[first : first + GLOBAL_BATCH]
            own[:, [4, 10]] = EOD
            own[list(few), 1:-1] = EOD
        self.samples, self.size, self.mesh, self.position = samples, micro_batch_size, mesh, 0

    def __next__(self) -> Batch:
        if self.position >= len(self.samples):
            raise StopIteration
        first = self.position + self.mesh.dp_rank * self.size
        self.position += self.size * self.mesh.dp_size
        own = self.samples[first : first + self.size]
        return Batch(own[:, :-1], own[:, 1:], np.arange(first, first + self.size))

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"consumed_samples": self.position}


_MESHES: dict[Layout, Mesh] = {}


def find_mesh(pool: Mesh, layout: Layout) -> Mesh:
    """The mesh of a layout, built once a process; the pool is cut into as many copies of it as fit."""
    rank, size = pool.rank, layout.size
    if layout not in _MESHES:
        launch = Launch(rank=rank % size, world_size=size, base=rank // size * size)
        _MESHES[layout] = build_mesh(launch, pool.device, pool.backend, layout)
    return _MESHES[layout]


def level_groups(pool: Mesh) -> None:
    """Let all ranks of the pool have made equally many groups, after runs of some of them: torch names groups so."""
    world = dist.distributed_c10d._world
    world.group_count = max(gather_objects(world.group_count, pool.world_group))


def make_config(case: Case) -> TrainConfig:
    sizes = f"--micro-batch-size {case.micro} --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS}"
    own = f"{case.common} {case.flags}"
    plain = "" if "--compile" in own else "--no-compile"  # which takes a minute, and is a case of its own
    flags = f"{SHAPE} --vocab-size {case.vocab} {KINDS[case.kind]} {sizes} {own} {plain}"
    return read_command(flags.split(), world_size=case.num_ranks)[0]


def run_case(pool_mesh: Mesh, case: Case) -> dict[str, Any] | None:
    """Losses, norms and full weights of a few steps on the first ranks of the pool; None on the others."""
    config = make_config(case)
    layout = make_layout(config.parallel, world_size=case.num_ranks, num_kv_heads=config.model.kv_heads)
    mesh = find_mesh(pool_mesh, layout)
    if pool_mesh.rank >= case.num_ranks:
        return None
    seed_dropout(config.seed, mesh)
    model = build_model(config, mesh)
    optimizer, clock = build_optimizer(model, config), Clock(mesh.device)
    loader = ListLoader(case.micro, mesh, case.vocab, case.few)
    feed = Feed(
        loader,  # type: ignore[arg-type]
        mesh.device,
        clock,
        vocab_size=case.vocab,
        eod_id=case.eod_id,
        document_end=EOD if config.model.tells_documents else None,
    )
    count = config.step.sizes.num_micro_batches
    losses, norms, has_load = [], [], config.model.num_experts is not None
    for step in range(case.steps):
        plan = StepPlan(
            lr=1e-3,
            weight_decay=0.01,
            num_micro_batches=count,
            num_samples=GLOBAL_BATCH,
            first_sample=step * GLOBAL_BATCH,
        )
        report = train_step(model, optimizer, feed, mesh, clock, config, plan=plan, has_norm=has_load)
        losses.append(report.loss.item())
        norms.append(report.grad_norm.item())
    model.gradients.receive_weights()
    own = {name: read_whole(weight.detach()) for name, weight in model.module.named_parameters()}
    pieces = dict(digest_pieces(own, model.parts.shards))
    full = gather_all(own, model.parts, mesh)
    return {
        "losses": losses,
        "pieces": pieces,
        "norms": norms,
        "load": describe_load(report),
        "dtypes": {name: str(weight.dtype) for name, weight in own.items()},
        "weights": {name: weight.float().cpu().numpy() for name, weight in full.items()},
    }


def describe_load(report: StepReport) -> dict[str, Any]:
    """What a step says of its experts; nothing of a dense model."""
    if report.load is None:
        return {}
    values = {name: value.item() for name, value in report.load.list_values().items()}
    return {"counts": report.load.counts.tolist(), "values": values}


def gather_all(own: dict[str, torch.Tensor], parts: ShardMap, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Full weights on every rank; of ranks that hold the same the first one counts."""
    if not parts.experts:
        return gather_full(own, parts.shards, mesh.model_group)
    shards = {}
    for name, shard in parts.shards.items():
        is_first = mesh.edp_rank == 0 if name in parts.experts else mesh.is_replica_first
        pieces = tuple(replace(piece, is_owned=piece.is_owned and is_first) for piece in shard.pieces)
        shards[name] = replace(shard, pieces=pieces)
    return gather_full(own, shards, mesh.world_group)


def digest_pieces(
    weights: dict[str, torch.Tensor], shards: Mapping[str, Shard]
) -> Iterator[tuple[tuple[str, int, int], str]]:
    """What a rank holds, by name and place: ranks that hold the same must have the same bits."""
    for name, weight in weights.items():
        for piece, part in zip(shards[name].pieces, shards[name].cut(weight), strict=True):
            content = part.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            yield (name, piece.start, piece.length), hashlib.sha256(content).hexdigest()


def read_whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight that ZeRO 3 has divided, or as it is."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def find_difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest differences: losses absolute, norms relative, weights relative to their scale."""
    assert one["weights"].keys() == other["weights"].keys()
    weights = {
        name: float(np.abs(value - other["weights"][name]).max() / (np.abs(value).max() + 1e-12))
        for name, value in one["weights"].items()
    }
    return {
        "losses": max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)),
        "norms": max(abs(a - b) / a for a, b in zip(one["norms"], other["norms"], strict=True)),
        "weights": max(weights.values()),
    }


def check_equal(outcomes: Sequence[dict[str, Any]], one: dict[str, Any], largest: Mapping[str, float]) -> None:
    """All ranks are as near to one process as `largest` says, and what two of them hold or tell is the same to the bit:
    replicas, copies, both ends of a pipeline.
    """
    held: dict[tuple[str, int, int], str] = {}
    for outcome in outcomes:
        difference = find_difference(one, outcome)
        assert all(difference[name] <= limit for name, limit in largest.items()), difference
        for place, digest in outcome["pieces"].items():
            assert held.setdefault(place, digest) == digest, place
    assert all(outcome["losses"] == outcomes[0]["losses"] for outcome in outcomes)
    assert all(outcome["norms"] == outcomes[0]["norms"] for outcome in outcomes)
