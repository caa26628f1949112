"""The only place that knows in which order parallelism is put on a model.

Order: pipeline split -> tensor/sequence -> expert -> context -> fp8, kernels of packages -> recompute -> compile ->
data parallel.
A model comes without memory for its weights; it gets it, and values, as soon as it is known which part of each weight
this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import KernelConfig, ParallelConfig, PrecisionConfig, RecomputeConfig
from megaflow_trainer.config.shares import overlaps_products
from megaflow_trainer.model.gpt import GPT, stack_labels
from megaflow_trainer.parallel.collectives import copy_from_first
from megaflow_trainer.parallel.context import cut_positions, share_context
from megaflow_trainer.parallel.data import DataOptions, MainGradients
from megaflow_trainer.parallel.expert import shard_experts
from megaflow_trainer.parallel.fsdp import DividedGradients, can_divide, divide_weights
from megaflow_trainer.parallel.fusion import (
    Compiler,
    MakeLoss,
    accumulate_in_products,
    can_accumulate,
    compile_blocks,
    make_loss,
)
from megaflow_trainer.parallel.graphs import MicroBatchGraph
from megaflow_trainer.parallel.kernels import apply_kernels, is_traceable, join_norms, make_scope
from megaflow_trainer.parallel.load import ExpertLoad
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.pipeline import Chunk, Pipeline, join_copies, split_pipeline
from megaflow_trainer.parallel.precision import Fp8Layers, apply_fp8
from megaflow_trainer.parallel.recompute import apply_recompute
from megaflow_trainer.parallel.saved import SavedActivations, keep_saved, make_saved
from megaflow_trainer.parallel.shards import ShardMap
from megaflow_trainer.parallel.tensor import find_divided, shard_tensor
from megaflow_trainer.parallel.vocabulary import (
    AccumulatingVocabularyLoss,
    VocabularyLoss,
    measure_scores,
    slope_scores,
)

Fill = Callable[[GPT, ShardMap], None]
"""Gives a model memory and values for what this rank holds of each weight."""


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """A model as the loop uses it: call it for losses, ask `gradients` for what backward left."""

    module: nn.Module
    gradients: MainGradients | DividedGradients
    parts: ShardMap
    saved: SavedActivations | None = None
    positions: Tensor | None = None
    """Places of this rank's tokens in their samples where ranks share sequences, int64 `[s]` on the CPU."""
    pipeline: Pipeline | None = None
    """Runs the micro-batches of a step where the model is cut into stages; the model itself is not called then."""
    load: ExpertLoad | None = None
    """Counts and biases of routers, where the model has experts."""
    fp8: Fp8Layers | None = None
    """Layers whose products are in fp8, if any are to be."""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is entered around forward."""
    graph: MicroBatchGraph | None = None
    """Replays forward and backward of micro-batches, if that is asked for."""

    @property
    def side_losses(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Losses of the last forward in training that are logged apart, by name, and where there are any; `[b, s]`."""
        losses: dict[str, tuple[Tensor, Tensor]] = getattr(self.module, "side_losses", {})
        return losses

    def take_own(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole samples, `[b, s, ...]`."""
        if self.positions is None:
            return x
        return x.index_select(1, self.positions.to(x.device, non_blocking=True))

    def take_labels(self, labels: Tensor) -> Tensor:
        """This rank's labels, as `GPT.forward` takes them: with those of later tokens if the model predicts them, since
        other ranks may have these.
        """
        further = len(self.module.further) if isinstance(self.module, GPT) else 0
        if self.positions is None or further == 0:
            return self.take_own(labels)
        return self.take_own(stack_labels(labels, further))

    def __call__(
        self,
        tokens: Tensor,
        labels: Tensor,
        keys: Tensor | None = None,
        weights: Tensor | None = None,
        documents: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Loss per token of this rank's micro-batch, float32, `[b, s]`; `keys` decide its dropout, int64 `[b]`.

        With `weights`, float32 `[b, s]`, backward must be of the sum of losses times weights. `documents` tells the
        document of each token of the whole samples, int64 `[b, S]`. `mask`, float32 `[b, s]`, says how much each token
        counts in the losses of routers; all count alike without it.
        """
        options = {"keys": keys, "positions": self.positions, "documents": documents, "weights": weights, "mask": mask}
        with keep_saved(self.saved), self.scope():
            loss: Tensor = self.module(tokens, labels, **options)
        return loss

    def measure_norm(self) -> Tensor:
        """2-norm of all weights, fp32 scalar on the device (fp64 in fp64). Every element of the model is counted once.

        Sends one all-reduce where ranks divide the model.
        """
        return self.gradients.measure_weights()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is put on a model.

    Args:
        parallel: what ranks divide.
        recompute: what is computed again in backward, and how the rest is kept.
        recomputed_parts: for each block what selective recompute takes; `recompute.modules` of all if not given.
        compute_dtype: of activations where ZeRO 3 keeps weights wider.
        grad_dtype: of the main gradients.
        is_compiled: whether each block is compiled.
        tell: is told once if the compiler fails.
        is_traceable: whether all of a block can be part of a compiled graph.
        accumulates: whether products add to main gradients that are wider than the weights.
        fp8: format of products in 8 bits: none, hybrid or e4m3.
        precision: how they are scaled, and which blocks have none.
        kernels: what optional packages compute.
        measure_every: forwards from one measurement of the error of compressed activations to the next.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    recomputed_parts: Sequence[Sequence[str]] | None = None
    compute_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    is_compiled: bool = False
    tell: Callable[[str], None] = lambda why: None
    is_traceable: bool = True
    accumulates: bool = False
    fp8: str = "none"
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    measure_every: int = 1
    seq_len: int = 0
    """Tokens of a sample, for ranks that share sequences."""
    micro_batch: int = 1
    """Samples of a micro-batch, for ranks that divide them."""


def parallelize(model: GPT, mesh: Mesh, plan: Plan = Plan(), fill: Fill | None = None) -> ParallelModel:
    """Make a model ready for the ranks of `mesh`. Broadcasts the weights of the first rank of those that share them.

    Args:
        model: without memory if `fill` is given, else with its weights.
        mesh: the ranks.
        plan: what is put on it.
        fill: gives memory and values; called when it is known what this rank holds.
    """
    chunks = split_pipeline(model, mesh, plan.parallel) if mesh.pp_group is not None else []
    overlaps = overlaps_products(plan.parallel)
    is_sequence = plan.parallel.sequence_parallel
    parts = shard_tensor(model, mesh, is_sequence=is_sequence, overlaps=overlaps, micro_batch=plan.micro_batch)
    join_copies(model, mesh, parts, plan.parallel)
    shard_experts(model, mesh, parts, plan.parallel)
    share_context(model, mesh, plan.parallel.cp_kind)
    if fill is not None:
        fill(model, parts)
    for name, weight in model.named_parameters():
        copy_from_first(weight.data, mesh.edp_group if name in parts.experts else mesh.gradient_group)
    apply_kernels(model, plan.kernels, has_fp8=plan.fp8 != "none")
    fp8 = None if plan.fp8 == "none" else apply_fp8(model, mesh, plan.fp8, plan.precision, plan.kernels)
    join_norms(model, plan.kernels)
    apply_recompute(model, plan.recompute, plan.recomputed_parts, chunks=[chunk.blocks for chunk in chunks])
    compiler = Compiler(plan.tell) if plan.is_compiled else None
    if compiler is not None:
        can_be_whole = plan.is_traceable and is_traceable(plan.kernels)
        is_whole = can_be_whole and mesh.cp_group is None
        compile_blocks(model, is_whole=is_whole, compiler=compiler)
    gradients = collect_gradients(model, mesh, parts, plan, chunks)
    if plan.accumulates and isinstance(gradients, MainGradients) and can_accumulate(gradients):
        has_loss = not chunks and plan.kernels.loss == "native"
        make = make_vocabulary_loss(model) if mesh.tp_group is not None else make_loss
        accumulate_in_products(model, gradients, compiler=compiler, make=make if has_loss else None)
    saved = make_saved(model, plan.recompute, measure_every=plan.measure_every)
    pipeline = make_pipeline(chunks, model, mesh, plan, gradients)
    positions = None
    if mesh.cp_group is not None:
        positions = cut_positions(plan.seq_len, mesh.layout.cp, mesh.cp_rank, plan.parallel.cp_kind)
    for chunk in chunks:
        chunk.positions, chunk.saved = positions, saved
    load = None if model.config.num_experts is None else ExpertLoad(model, model.config, mesh)
    return ParallelModel(
        model,
        gradients,
        parts,
        saved,
        positions,
        pipeline,
        load,
        fp8,
        make_scope(plan.fp8, plan.kernels, plan.precision, mesh),
    )


def make_vocabulary_loss(model: GPT) -> MakeLoss:
    """What makes the loss of a rank that has some rows of the vocabulary."""
    loss = model.loss
    assert isinstance(loss, VocabularyLoss), "ranks share the model"

    def make(main_grad: Tensor, compiler: Compiler) -> AccumulatingVocabularyLoss:
        measure, slope = (compiler(part, dynamic=False) for part in (measure_scores, slope_scores))
        return AccumulatingVocabularyLoss(loss.ranks, loss.rows, main_grad, measure, slope)

    return make


def collect_gradients(
    model: GPT, mesh: Mesh, parts: ShardMap, plan: Plan, chunks: Sequence[Chunk] = ()
) -> MainGradients | DividedGradients:
    """Data parallelism as the plan asks for it."""
    own = plan.parallel
    if own.zero == 3 and can_divide(mesh, model.config):
        dtypes = {"compute_dtype": plan.compute_dtype, "grad_dtype": plan.grad_dtype}
        return DividedGradients(model, mesh, parts, divide_weights(model, mesh, parts, **dtypes, chunks=chunks))
    options = DataOptions(
        zero=min(own.zero, 2), bucket_size=own.bucket_size, overlaps=own.overlaps, dtype=plan.grad_dtype
    )
    return MainGradients(model, mesh, parts, options)


def make_pipeline(
    chunks: Sequence[Chunk], model: GPT, mesh: Mesh, plan: Plan, gradients: MainGradients | DividedGradients
) -> Pipeline | None:
    """What runs the stages; None for a model in one piece."""
    if not chunks:
        return None
    is_divided = isinstance(gradients, DividedGradients)  # then weights are wider than what travels
    width, dtype = model.config.hidden_dim, plan.compute_dtype if is_divided else next(model.parameters()).dtype
    divided = find_divided(model.config, mesh.tp_size, plan.micro_batch) if plan.parallel.sequence_parallel else None
    return Pipeline(chunks, mesh, plan.parallel, width=width, dtype=dtype, sweep=gradients.sweep, divided=divided)
