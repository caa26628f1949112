"""Tensor parallelism, and sequence parallelism with it: the ranks of a group share every layer.

Maths. A pair of matrices A, then B, with anything per channel between them: each rank has some columns of the result of
A (rows of its weight, [out, in]) and the matching inputs of B. What the ranks' B give are terms of a sum. Attention is
such a pair with whole heads, the MLP with channels of its inner width, the embedding and the output projection with
tokens of the vocabulary.

Communication. Between the pairs activations are the same on every rank. Entering a pair costs nothing forward and one
all-reduce backward; leaving it one all-reduce forward and nothing backward: 2 all-reduces of [b, s, h] a block and
direction. With sequence parallelism tokens are divided between the pairs, where norms, dropouts and residual sums work
token by token: entering is an all-gather (backward a reduce-scatter), leaving a reduce-scatter (backward an
all-gather). The same bytes travel, and a rank keeps 1/tp of those activations. What is divided are whole samples where
their number in a micro-batch allows it, which then lie one behind the other when they are gathered, else the tokens of
each. What backward sends at an entry travels beside products, and tokens are gathered again there under sequence
parallelism (`overlap.py`).

Gradients. A weight that is cut has its own gradient. A weight that is copied has the whole gradient on every rank, with
two exceptions whose terms are added after backward (`sums`): weights that are used by some of the heads only (norms of
queries, keys and latent vectors; key and value heads that several ranks share), and, with sequence parallelism,
everything between the pairs.

Latent attention enters behind its narrow projections: the latent vectors travel instead of the hidden states.

Legend: b micro-batch, s sequence, h hidden, tp ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.config.layout import split_vocab
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.attention import Attention, LatentAttention
from megaflow_trainer.model.context import Dropout
from megaflow_trainer.model.gpt import GPT, Absent
from megaflow_trainer.model.mlp import Mlp
from megaflow_trainer.ops.linear import Linear
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.overlap import Columns, Rows, Sharers, enter, leave, name_sharers
from megaflow_trainer.parallel.shards import GradientSum, Piece, Shard, ShardMap, run, whole
from megaflow_trainer.parallel.vocabulary import VocabularyLoss


@dataclass(slots=True)
class TensorRanks:
    """The group that shares a model, and what has been done to it so far."""

    sharers: Sharers
    rank: int
    config: ModelConfig
    kv_group: dist.ProcessGroup | None
    overlaps: bool = False
    """Whether entries of pairs travel beside products in backward."""
    shards: dict[str, Shard] = field(default_factory=dict)
    sums: dict[str, tuple[GradientSum, ...]] = field(default_factory=dict)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.sharers.group

    @property
    def size(self) -> int:
        """How many they are."""
        return self.sharers.size

    @property
    def is_sequence(self) -> bool:
        """Whether tokens are divided between the pairs."""
        return self.sharers.is_sequence

    def enter(self, x: Tensor) -> Tensor:
        """From between the pairs into one: `[b, s, h]` whichever way tokens lie outside."""
        return enter(x, self.sharers)

    def leave(self, x: Tensor) -> Tensor:
        """From inside a pair, where `x` is a term of a sum, to between the pairs."""
        return leave(x, self.sharers)

    def take_own(self, x: Tensor) -> Tensor:
        """This rank's part of what is given for all tokens, `[b, s]`, or for those of each sample, `[s]`."""
        dim = self.sharers.dim
        if not self.is_sequence or (x.dim() == 1 and dim == 0):
            return x
        dim = min(dim, x.dim() - 1)
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * length, length)

    @property
    def own_vocabulary(self) -> range:
        """This rank's rows of the embedding and of the output projection."""
        return split_vocab(self.config.vocab_rows, self.size, multiple=self.config.vocab_multiple)[self.rank]

    def even(self, total: int) -> range:
        """This rank's part of rows that are cut evenly."""
        return range(self.rank * total // self.size, (self.rank + 1) * total // self.size)


Style = Callable[[nn.Module, str, TensorRanks], None]


def shard_tensor(model: GPT, mesh: Mesh, *, is_sequence: bool, overlaps: bool = True, micro_batch: int = 1) -> ShardMap:
    """Cut a model, whose weights need have no memory yet, into this rank's part, and let its ranks work together.

    Only parts of the plan that the model has are touched (a pipeline stage has some of them). `overlaps` lets
    collectives travel beside products (`overlap.py`); not where backward is taken apart. `micro_batch` is how many
    samples every micro-batch has.
    """
    if mesh.tp_group is None:
        return ShardMap.of(model)
    dim = find_divided(model.config, mesh.tp_size, micro_batch)
    sharers = name_sharers(mesh.tp_group, is_sequence=is_sequence, dim=dim, meter=mesh.meter("tp"))
    ranks = TensorRanks(sharers, mesh.tp_rank, model.config, mesh.kv_group, overlaps=overlaps)
    for name, module in model.named_modules():
        for pattern, style in PLAN:
            if fnmatch(name, pattern) and not isinstance(module, Absent):
                style(module, name, ranks)
    for name, weight in model.named_parameters():
        ranks.shards.setdefault(name, whole(weight.shape, is_owned=ranks.rank == 0))
        if is_sequence and name not in ranks.sums and is_copied(ranks.shards[name]):
            ranks.sums[name] = (whole_sum(weight, ranks.group),)
    return ShardMap(ranks.shards, ranks.sums)


def find_divided(config: ModelConfig, tp: int, micro_batch: int) -> int:
    """What sequence parallelism divides: the samples of a micro-batch (0), or the tokens of each (1), as routers, whose
    losses are of whole sequences, expect it.
    """
    return 0 if micro_batch % tp == 0 and config.num_experts is None else 1


def is_copied(shard: Shard) -> bool:
    """Whether every rank holds the whole weight."""
    return shard.local_shape == shard.shape


def whole_sum(weight: Tensor, group: dist.ProcessGroup) -> GradientSum:
    """The whole gradient is a term."""
    return GradientSum(group, 0, 0, weight.shape[0])


def cut(module: nn.Module, name: str, key: str, shard: Shard, ranks: TensorRanks) -> None:
    """Replace a weight by memory for this rank's part of it."""
    weight = getattr(module, key)
    ranks.shards[f"{name}.{key}"] = shard
    setattr(module, key, nn.Parameter(torch.empty(shard.local_shape, dtype=weight.dtype, device=weight.device)))


def set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Let a module compute something else, inside of what wraps it later (recompute, ZeRO 3)."""
    module.forward = forward


def enter_at(layer: nn.Module, ranks: TensorRanks) -> None:
    """What a linear layer reads comes from between the pairs."""
    assert isinstance(layer, Linear), "another kind of linear layer has to say how it is entered"
    layer.sharing = Columns(ranks.sharers, ranks.overlaps)


def enter_before_plain(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """Attention with a projection straight to all heads is entered before it; latent attention further inside."""
    if isinstance(module, Attention):
        enter_at(module.qkv, ranks)
    elif isinstance(module, LatentAttention):
        module.num_heads //= ranks.size
        if module.q_down is None:
            enter_at(module.q_up, ranks)


def enter_before_mlp(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """A dense MLP, or the part of a layer with experts that all tokens pass; experts themselves lie elsewhere."""
    if isinstance(module, Mlp):
        module.widen = Columns(ranks.sharers, ranks.overlaps).widen


def enter_behind(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """The layer works between the pairs, and its output goes into one."""
    forward = module.forward
    set_forward(module, lambda x: ranks.enter(forward(x)))


def cut_columns(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """A linear layer of which this rank computes some outputs."""
    assert isinstance(module, nn.Linear)
    for key, weight in module.named_parameters():
        cut(module, name, key, run(weight.shape, 0, ranks.even(weight.shape[0])), ranks)
    module.out_features //= ranks.size


def cut_rows(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """A linear layer of which this rank has some inputs; the bias is added once, after the sum."""
    assert isinstance(module, Linear), "another kind of linear layer has to say how to leave out its bias"
    cut(module, name, "weight", run(module.weight.shape, 1, ranks.even(module.in_features)), ranks)
    module.in_features //= ranks.size
    module.sharing = Rows(ranks.sharers, ranks.overlaps)


def cut_heads(module: nn.Module, name: str, ranks: TensorRanks) -> int:
    """The projection to queries, keys and values; returns how many key/value heads this rank has.

    With fewer of them than ranks, neighbours hold the same one and add their gradients of it.
    """
    assert isinstance(module, nn.Linear)
    num_heads, num_kv, head_dim = ranks.config.num_heads, ranks.config.kv_heads, ranks.config.head_width
    own = max(num_kv // ranks.size, 1)
    sharers = max(ranks.size // num_kv, 1)
    first = ranks.rank * num_kv // ranks.size
    queries, is_owned = ranks.even(num_heads * head_dim), ranks.rank % sharers == 0
    starts = [num_heads * head_dim + (block * num_kv + first) * head_dim for block in range(2)]
    pieces = [Piece(queries.start, len(queries)), *(Piece(start, own * head_dim, is_owned) for start in starts)]
    for key, weight in list(module.named_parameters()):
        cut(module, name, key, Shard(tuple(weight.shape), 0, tuple(pieces)), ranks)
    if sharers > 1:
        assert ranks.kv_group is not None, "the mesh is laid out for this model"
        shared = GradientSum(ranks.kv_group, 0, len(queries), 2 * own * head_dim)
        ranks.sums |= {f"{name}.{key}": (shared,) for key, _ in module.named_parameters()}
    module.out_features = len(queries) + 2 * own * head_dim
    return own


def cut_attention(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """Plain attention: whole heads to each rank."""
    if isinstance(module, Attention):
        module.num_kv_heads = cut_heads(module.qkv, f"{name}.qkv", ranks)


def sum_gradient(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """Weights used by this rank's heads only."""
    for key, weight in module.named_parameters():
        ranks.sums[f"{name}.{key}"] = (whole_sum(weight, ranks.group),)


def cut_embedding(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """This rank looks up its tokens of the vocabulary; the others give zero rows to the sum."""
    assert isinstance(module, nn.Embedding)
    rows = ranks.own_vocabulary
    cut(module, name, "weight", run(module.weight.shape, 0, rows), ranks)
    module.num_embeddings = len(rows)

    def forward(tokens: Tensor) -> Tensor:
        own = tokens - rows.start
        is_other = (own < 0) | (own >= len(rows))
        x = F.embedding(own.masked_fill(is_other, 0), module.weight)
        return ranks.leave(x.masked_fill(is_other[..., None], 0))

    set_forward(module, forward)


def cut_output(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """The untied output projection, whose weight the loss takes."""
    assert isinstance(module, nn.Linear)
    cut(module, name, "weight", run(module.weight.shape, 0, ranks.own_vocabulary), ranks)


def take_positions(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """Learned positions of this rank's tokens, `[s]` or `[b, s]`."""
    forward = module.forward
    set_forward(module, lambda ids: forward(ranks.take_own(ids)))


def take_dropout(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """Dropout of this rank's tokens."""
    assert isinstance(module, Dropout)
    module.take_own = ranks.take_own


def lead_to_loss(module: nn.Module, name: str, ranks: TensorRanks) -> None:
    """The model's loss over this rank's rows of the vocabulary."""
    assert isinstance(module, GPT)
    module.loss = VocabularyLoss(ranks.sharers, ranks.own_vocabulary)


PLAN: tuple[tuple[str, Style], ...] = (
    ("", lead_to_loss),
    ("embedding", cut_embedding),
    ("head", cut_output),
    ("positions", take_positions),
    ("*dropout", take_dropout),
    ("*.attention", enter_before_plain),
    ("*.attention", cut_attention),
    ("*.attention.q_norm", sum_gradient),
    ("*.attention.k_norm", sum_gradient),
    ("*.attention.q_down", enter_behind),
    ("*.attention.kv_down", enter_behind),
    ("*.attention.kv_norm", sum_gradient),
    ("*.attention.q_up", cut_columns),
    ("*.attention.kv_up", cut_columns),
    ("*.attention.proj", cut_rows),
    ("*.mlp", enter_before_mlp),
    ("*.mlp.gate", cut_columns),
    ("*.mlp.up", cut_columns),
    ("*.mlp.down", cut_rows),
    ("*.mlp.shared", enter_before_mlp),
    ("*.mlp.shared.gate", cut_columns),
    ("*.mlp.shared.up", cut_columns),
    ("*.mlp.shared.down", cut_rows),
)
"""Which parts of a model are cut how, by name; what is not here is copied."""
