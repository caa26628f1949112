"""What one rank holds of a model and of its samples under a layout, as plain arithmetic.

Tensor parallelism narrows a layer: a rank's layer is a layer with fewer heads and a narrower MLP, so that parameters
and activations of the narrow model are those of the rank. What lies between the pairs of matrices keeps its width, and
under sequence parallelism has 1/tp of the tokens. Of the experts of a layer a rank holds 1/ep, and 1/etp of each.
Pipeline stages hold some of the layers, and several micro-batches at once.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megaflow_trainer.config.arithmetic import (
    count_block_parameters,
    count_layer_of_experts,
    count_mlp_parameters,
    count_norm_parameters,
)
from megaflow_trainer.config.layout import split_vocab
from megaflow_trainer.config.sections import ModelConfig, ParallelConfig
from megaflow_trainer.config.stages import count_chunks, own_chunks, split_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A rank's part."""

    layers: tuple[int, ...]
    """Numbers of its blocks."""
    chunks: tuple[int, ...] = ()
    """Blocks in each chunk of a pipeline rank that has several."""
    is_first: bool = True
    """Whether it has the embedding."""
    is_last: bool = True
    """Whether it has the output projection, the loss and the blocks of multi-token prediction."""
    tp: int = 1
    is_sequence: bool = False
    """Whether tokens between the pairs of matrices are divided among the tensor-parallel ranks."""
    gathers_again: bool = False
    """Whether of what enters a pair it keeps its own tokens only."""
    ep: int = 1
    """Ranks that divide the experts of a layer."""
    etp: int = 1
    """Ranks that divide each expert."""
    cp: int = 1
    cp_kind: str = "p2p"
    in_flight: float = 1.0
    """Micro-batches whose activations are kept at once, in units of all its layers."""

    @property
    def between(self) -> float:
        """Part of a sample's tokens that a rank holds between the pairs of matrices."""
        return 1 / self.tp if self.is_sequence else 1.0

    @property
    def entered(self) -> float:
        """Part of a sample's tokens that a rank keeps of what enters a pair."""
        return self.between if self.gathers_again else 1.0

    @property
    def has_experts_apart(self) -> bool:
        """Whether experts lie on other ranks than the layers around them."""
        return self.ep > 1 or self.etp != self.tp


def hold_all(model: ModelConfig) -> Share:
    """The share of a single rank."""
    return Share(layers=tuple(range(model.num_layers)))


def find_share(model: ModelConfig, parallel: ParallelConfig, *, pp_rank: int, num_micro_batches: int) -> Share:
    """The share of the ranks of one pipeline stage; of tensor-parallel ranks the first, which holds most."""
    runs, own = split_layers(model, parallel), own_chunks(parallel, pp_rank)
    return Share(
        layers=tuple(layer for chunk in own for layer in runs[chunk]),
        chunks=tuple(len(runs[chunk]) for chunk in own),
        is_first=0 in own,
        is_last=count_chunks(parallel) - 1 in own,
        tp=parallel.tp,
        is_sequence=parallel.sequence_parallel and parallel.tp > 1,
        gathers_again=overlaps_products(parallel),
        ep=parallel.ep,
        etp=parallel.etp or parallel.tp,
        cp=parallel.cp,
        cp_kind=parallel.cp_kind,
        in_flight=count_in_flight(parallel, pp_rank=pp_rank, num_micro_batches=num_micro_batches),
    )


def overlaps_products(parallel: ParallelConfig) -> bool:
    """Whether collectives of tensor parallelism travel beside products in backward: not where it is taken apart."""
    return parallel.overlaps and parallel.schedule not in ("zero_bubble", "zbv")


def count_in_flight(parallel: ParallelConfig, *, pp_rank: int, num_micro_batches: int) -> float:
    """Micro-batches that a pipeline rank has sent forward and not yet backward at its fullest.

    With several chunks a rank, a micro-batch in one of them counts as its part of the rank's layers. Interleaved
    schedules count as torch orders them; zero-bubble ones at most that.
    """
    pp, m = parallel.pp, num_micro_batches
    if pp == 1:
        return 1.0
    if parallel.schedule == "gpipe" or (parallel.schedule == "1f1b" and m < pp):  # then all go forward first
        return float(m)
    if parallel.schedule == "1f1b":
        return float(pp - pp_rank)
    if parallel.schedule == "zbv":
        return float(min(pp, m))
    chunks = parallel.virtual_stages
    per_round = m // max(1, m // pp)
    warm_up = (chunks - 1) * per_round + 2 * (pp - 1 - pp_rank)
    return min(warm_up + 1, m * chunks) / chunks


@functools.lru_cache(maxsize=64)
def narrow(model: ModelConfig, tp: int) -> ModelConfig:
    """A model whose layers are those of one tensor-parallel rank: whole heads, channels of the MLP and of experts.

    What a rank computes of experts is that too, whichever it holds: k rows of 1/tp of an expert's width a token.
    """
    if tp == 1:
        return model
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=None if model.is_latent else max(model.kv_heads // tp, 1),
        head_dim=None if model.is_latent else model.head_width,
        ffn_dim=model.ffn_width // tp,
        expert_dim=max(model.expert_width // tp, 1) if model.num_experts else None,
        shared_dim=model.shared_dim and model.shared_dim // tp,
    )


def count_vocabulary_rows(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding on the tensor-parallel rank that has most."""
    return len(split_vocab(model.vocab_rows, tp, multiple=model.vocab_multiple)[0])


def list_kinds(model: ModelConfig, share: Share) -> list[bool]:
    """Whether each block of a rank has experts, those of multi-token prediction last."""
    further = range(model.num_layers, model.num_layers + model.num_mtp_layers) if share.is_last else ()
    return [model.has_experts(number) for number in (*share.layers, *further)]


def count_stack(model: ModelConfig, share: Share) -> int:
    """Elements of one matrix of all the experts that a rank holds of a layer, which are one weight."""
    return (model.num_experts or 0) // share.ep * (model.expert_width // share.etp) * model.hidden_dim


def _count_experts(model: ModelConfig, share: Share) -> int:
    """Weights of the experts of a layer on a rank; the bias behind the last product is on all that share an expert."""
    bias = model.hidden_dim if model.linear_bias else 0
    inner = count_mlp_parameters(model, model.expert_width) - bias
    return (model.num_experts or 0) // share.ep * (inner // share.etp + bias)


def count_held_experts(model: ModelConfig, share: Share) -> int:
    """Weights of experts on a rank; routers and experts that all tokens pass are not among them."""
    return sum(list_kinds(model, share)) * _count_experts(model, share)


def list_held_blocks(model: ModelConfig, share: Share) -> list[int]:
    """Weights of each block of a rank, those of multi-token prediction last."""
    own = narrow(model, share.tp)
    sizes = {False: count_block_parameters(own)}
    if model.num_experts is not None:
        around = count_layer_of_experts(own) - model.num_experts * count_mlp_parameters(own, own.expert_width)
        sizes[True] = sizes[False] - count_mlp_parameters(own) + around + _count_experts(model, share)
    return [sizes[has_experts] for has_experts in list_kinds(model, share)]


def count_held_parameters(model: ModelConfig, share: Share) -> int:
    """Weights on a rank, a tied embedding on both ends of a pipeline counted on each."""
    h, norm = model.hidden_dim, count_norm_parameters(model)
    table = count_vocabulary_rows(model, share.tp) * h
    total = sum(list_held_blocks(model, share))
    if share.is_first:
        total += table
        total += (model.max_positions or 0) * h if model.position_kind == "learned_absolute" else 0
    if share.is_last:
        has_copy = not share.is_first and (model.tied_embeddings or model.num_mtp_layers > 0)
        total += norm + table * (has_copy + (not model.tied_embeddings))
        total += model.num_mtp_layers * (2 * h * h + 3 * norm)
    return total
