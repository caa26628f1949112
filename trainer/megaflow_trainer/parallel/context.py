"""Context parallelism: the ranks of a group share every sequence, and each computes its own tokens.

Everything but attention works token by token. Attention's queries need the keys and values of earlier tokens, wherever
they are; there are three ways:

- `all_gather`: each rank gathers all keys and values (forward an all-gather, backward a reduce-scatter of [b, g, s, d]
  twice) and attends with its own queries. Simple, and cheap where there are few key/value heads.
- `p2p`, the ring: keys and values travel round the ranks; what each block gives, with the logarithm of its sum of
  exponentials, is merged into the result: out = sum_i out_i exp(lse_i - lse), lse = log sum_i exp(lse_i). Backward
  sends them round again with their gradients. A block travels while the one before it is computed.
- `a2a`, Ulysses: an all-to-all turns tokens of all heads into all tokens of some heads, attention is then as on one
  rank, with any kernel, and another all-to-all turns the result back. Heads must divide by ranks.

Balance. Late tokens see more than early ones, so a sequence is cut into 2 cp pieces of which rank r has r and
2 cp - 1 - r: every rank computes as much as the others. Under `a2a` pieces are plain runs.

The loss is summed over all ranks and divided by all tokens, as with data parallelism: neither depends on cp.

Legend: b micro-batch, n query heads, g key/value heads, s tokens of this rank, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_trainer.ops.attention_block import Numbers, attend_block, attend_block_backward
from megaflow_trainer.ops.attention_mask import DocumentMask, make_mask
from megaflow_trainer.parallel.collectives import exchange, gather_tokens
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.traffic import Meter


def cut_positions(seq_len: int, size: int, rank: int, kind: str) -> Tensor:
    """Places of a rank's tokens in their sample, int64 `[seq_len / size]`."""
    if kind == "a2a":
        return torch.arange(seq_len).view(size, -1)[rank]
    pieces = torch.arange(seq_len).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def share_context(model: nn.Module, mesh: Mesh, kind: str) -> None:
    """Let the attention cores of a model, of which each rank has some tokens, see those of the others."""
    if mesh.cp_group is None:
        return
    ranks = ContextRanks(mesh.cp_group, mesh.cp_rank, mesh.layout.cp, mesh.meter("cp"))
    for module in model.modules():
        core = getattr(module, "core", None)
        if core is not None:
            module.core = KINDS[kind](ranks, core)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The group that shares sequences."""

    group: dist.ProcessGroup
    rank: int
    size: int
    meter: Meter | None = None


@dataclass(frozen=True, slots=True)
class GatheredAttention:
    """The attention core of `all_gather`; arguments and result as in `ops.attention`, tokens those of this rank."""

    ranks: ContextRanks
    core: Callable[..., Tensor]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float,
        window: int | None = None,
        scale: float | None = None,
        documents: DocumentMask | None = None,
    ) -> Tensor:
        """`[b, n, s, d]`, the keys and values of all earlier tokens gathered."""
        size, seq_len = self.ranks.size, q.shape[2] * self.ranks.size
        order = torch.cat([cut_positions(seq_len, size, rank, "all_gather") for rank in range(size)]).argsort()
        order = order.to(q.device)
        k, v = (gather_tokens(part, self.ranks.group, 2, meter=self.ranks.meter) for part in (k, v))
        k, v = (part.index_select(2, order) for part in (k, v))
        length = q.shape[2] // 2
        outs = []
        for piece, number in zip(q.split(length, 2), (self.ranks.rank, 2 * size - 1 - self.ranks.rank), strict=True):
            seen = (number + 1) * length  # keys up to the end of the piece
            place = (number * length, length, seen, window)
            mask = make_mask(*place, q.device) if documents is None else documents.make_mask(*place)
            outs.append(
                F.scaled_dot_product_attention(
                    piece,
                    k[:, :, :seen],
                    v[:, :, :seen],
                    attn_mask=mask,
                    dropout_p=dropout,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )
        return torch.cat(outs, 2)


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """The attention core of `a2a`; fewer key/value heads than ranks are copied."""

    ranks: ContextRanks
    core: Callable[..., Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`[b, n, s, d]`, computed for all tokens of some heads."""
        group, meter = self.ranks.group, self.ranks.meter
        copies = max(1, self.ranks.size // k.shape[1])
        k, v = (part.repeat_interleave(copies, 1) if copies > 1 else part for part in (k, v))
        q, k, v = (exchange(part, group, cut=1, join=2, meter=meter) for part in (q, k, v))
        return exchange(self.core(q, k, v, **options), group, cut=2, join=1, meter=meter)


@dataclass(frozen=True, slots=True)
class RingAttention:
    """The attention core of `p2p`; without dropout."""

    ranks: ContextRanks
    core: Callable[..., Tensor]

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float,
        window: int | None = None,
        scale: float | None = None,
        documents: DocumentMask | None = None,
    ) -> Tensor:
        """`[b, n, s, d]`, keys and values received one rank after the other."""
        assert dropout == 0, "checked with the configuration"
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        out: Tensor = _Ring.apply(q, k, v, self.ranks, window, factor, None if documents is None else documents.numbers)
        return out


KINDS: dict[str, Callable[[ContextRanks, Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "p2p": RingAttention,
    "all_gather": GatheredAttention,
    "a2a": UlyssesAttention,
}


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranks: ContextRanks,
        window: int | None,
        scale: float,
        numbers: Tensor | None,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        held = [k, v]
        for step in range(ranks.size):
            travel = _start_ring(held, ranks) if step < ranks.size - 1 else None
            for own, other, places in _list_blocks(q.shape[2], ranks, step, window):
                part, part_lse = attend_block(
                    q[:, :, own],
                    held[0][:, :, other],
                    held[1][:, :, other],
                    offset=places[0] - places[1],
                    window=window,
                    scale=scale,
                    documents=_take_numbers(numbers, places, q.shape[2] // 2),
                )
                _merge(out[:, :, own], lse[:, :, own], part, part_lse)
            held = travel() if travel is not None else held
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ranks, ctx.window, ctx.scale, ctx.numbers = ranks, window, scale, numbers
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ranks, window, grad = ctx.ranks, ctx.window, grad.contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        held, sums = [k, v], [torch.zeros_like(part, dtype=wide) for part in (k, v)]
        for step in range(ranks.size):
            travel = _start_ring(held, ranks) if step < ranks.size - 1 else None
            for own, other, places in _list_blocks(q.shape[2], ranks, step, window):
                parts = attend_block_backward(
                    grad[:, :, own],
                    (q[:, :, own], held[0][:, :, other], held[1][:, :, other]),
                    (out[:, :, own], lse[:, :, own]),
                    offset=places[0] - places[1],
                    window=window,
                    scale=ctx.scale,
                    documents=_take_numbers(ctx.numbers, places, q.shape[2] // 2),
                )
                grad_q[:, :, own] += parts[0]
                sums[0][:, :, other] += parts[1]
                sums[1][:, :, other] += parts[2]
            held = travel() if travel is not None else held
            sums = _start_ring(sums, ranks)()  # with their keys and values; after the last step they are home
        return grad_q.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None, None, None, None


def _list_blocks(
    length: int, ranks: ContextRanks, step: int, window: int | None
) -> list[tuple[slice, slice, tuple[int, int]]]:
    """Pairs of a run of own queries and a run of the keys held at `step` that see each other, and where both begin in
    their sample.
    """
    half = length // 2
    source = (ranks.rank - step) % ranks.size
    runs = (slice(0, half), slice(half, length))
    own, other = ((rank, 2 * ranks.size - 1 - rank) for rank in (ranks.rank, source))
    pairs = [
        (runs[i], runs[j], (piece * half, key_piece * half))
        for i, piece in enumerate(own)
        for j, key_piece in enumerate(other)
        if piece >= key_piece
    ]
    return [pair for pair in pairs if window is None or pair[2][0] - pair[2][1] - half < window]


def _take_numbers(numbers: Tensor | None, places: tuple[int, int], length: int) -> Numbers | None:
    """The documents of a run of queries and of a run of keys, from those of whole samples."""
    if numbers is None:
        return None
    queries, keys = (numbers[:, place : place + length] for place in places)
    return queries, keys


def _start_ring(parts: list[Tensor], ranks: ContextRanks) -> Callable[[], list[Tensor]]:
    """Send tensors to the next rank; what is returned waits for those of the rank before."""
    received = [torch.empty_like(part) for part in parts]
    following, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    ops = [dist.P2POp(dist.isend, part, group=ranks.group, group_peer=following) for part in parts]
    ops += [dist.P2POp(dist.irecv, part, group=ranks.group, group_peer=before) for part in received]
    works = dist.batch_isend_irecv(ops)
    if ranks.meter is not None:
        num_bytes = sum(part.numel() * part.element_size() for part in parts)
        ranks.meter.traffic.count("cp", "send", num_bytes, calls=len(parts), is_background=True)

    def finish() -> list[Tensor]:
        with nullcontext() if ranks.meter is None else ranks.meter.wait("send"):
            for work in works:
                work.wait()
        return received

    return finish


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add what a block gives to the result so far, in place."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.clamp(min=torch.finfo(total.dtype).min)  # nothing seen yet by either: both shares are 0
    out.mul_((lse - finite).exp()[..., None]).add_(part * (part_lse - finite).exp()[..., None])
    lse.copy_(total)
