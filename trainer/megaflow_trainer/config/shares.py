"""What one rank holds of a model and of its samples under a layout, as plain arithmetic.

Tensor parallelism narrows a layer: a rank's layer is a layer with fewer heads and a narrower MLP, so that parameters
and activations of the narrow model are those of the rank. What lies between the pairs of matrices keeps its width, and
under sequence parallelism has 1/tp of the tokens. Pipeline stages hold some of the layers, and several micro-batches at
once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megaflow_trainer.config.arithmetic import count_block_parameters, count_norm_parameters
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
    cp: int = 1
    cp_kind: str = "p2p"
    in_flight: float = 1.0
    """Micro-batches whose activations are kept at once, in units of all its layers."""

    @property
    def between(self) -> float:
        """Part of a sample's tokens that a rank holds between the pairs of matrices."""
        return 1 / self.tp if self.is_sequence else 1.0


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
        cp=parallel.cp,
        cp_kind=parallel.cp_kind,
        in_flight=count_in_flight(parallel, pp_rank=pp_rank, num_micro_batches=num_micro_batches),
    )


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


def narrow(model: ModelConfig, tp: int) -> ModelConfig:
    """A model whose layers are those of one tensor-parallel rank: whole heads, channels of the MLP."""
    if tp == 1:
        return model
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=None if model.is_latent else max(model.kv_heads // tp, 1),
        head_dim=None if model.is_latent else model.head_width,
        ffn_dim=model.ffn_width // tp,
    )


def count_vocabulary_rows(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding on the tensor-parallel rank that has most."""
    return len(split_vocab(model.vocab_rows, tp, multiple=model.vocab_multiple)[0])


def count_held_parameters(model: ModelConfig, share: Share) -> int:
    """Weights on a rank, a tied embedding on both ends of a pipeline counted on each."""
    h, own = model.hidden_dim, narrow(model, share.tp)
    block, norm = count_block_parameters(own), count_norm_parameters(model)
    table = count_vocabulary_rows(model, share.tp) * h
    total = len(share.layers) * block
    if share.is_first:
        total += table
        total += (model.max_positions or 0) * h if model.position_kind == "learned_absolute" else 0
    if share.is_last:
        has_copy = not share.is_first and (model.tied_embeddings or model.num_mtp_layers > 0)
        total += norm + table * (has_copy + (not model.tied_embeddings))
        total += model.num_mtp_layers * (block + 2 * h * h + 3 * norm)
    return total
