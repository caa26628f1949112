"""Expert parallelism: the ranks of a pipeline stage hold some of the experts each, and tokens travel to theirs.

Maths. The ranks of a stage are laid out twice: for dense layers as tp x cp x dp, for experts as etp x ep x edp, with
the same product. Every rank routes tokens that no other rank of the stage routes: where tensor-parallel ranks have all
tokens alike (no sequence parallelism), each takes its run of them and they are joined again behind the layer. An expert
lies on the etp ranks of one ep rank, each with some channels of its inner width; what they give are terms of a sum, as
in tensor parallelism. A token's result is the weighted sum over its experts and the terms of each, added on its own
rank in one order, so that no layout changes it beyond rounding.

Communication, per layer and direction, over the n = ep etp ranks that hold a layer's experts together.
- alltoall: each row to every rank that has a part of its expert, k etp rows of h a token, and back; before it the
  numbers of rows, which the host waits for (not with padding to capacity: then all are alike).
- allgather: tokens and choices of all ranks to all, n rows of h a token, and back a reduce-scatter of sums; sizes are
  known, and it is less than the above where k is near ep.
With `overlaps_shared` the expert that every token passes is computed while rows travel, forward and backward.

Gradients. Gradients of tokens travel as the tokens did, so that an expert's weights have the whole gradient of the ep x
etp ranks' tokens without a sum and without a factor; it is summed over edp, the ranks with the same experts. Router
weights are copied and have terms on all tensor-parallel ranks. The bias behind an expert's last product is added, and
answered for, by its first etp rank.

Losses and counts. What routers need of other tokens of a sample (or of a micro-batch of all ranks) is summed by
`Router.share`: numbers only, outside of autograd, an all-reduce of [u, e] a layer where ranks share samples.

Legend: t tokens of this rank, k choices of a token, r rows, h hidden, e experts, n = ep etp ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaflow_trainer.config.sections import ParallelConfig
from megaflow_trainer.model.context import Context
from megaflow_trainer.model.experts import Experts, ExpertWeight
from megaflow_trainer.model.moe import Beside, MoE, combine, make_order, take
from megaflow_trainer.model.routing import Routing
from megaflow_trainer.ops.host_copy import HostCopy
from megaflow_trainer.parallel.collectives import (
    gather_along,
    gather_tokens,
    join_tokens,
    scatter_sums,
    split_tokens,
    sum_over,
)
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import GradientSum, Piece, Shard, ShardMap
from megaflow_trainer.parallel.traffic import Meter


def shard_experts(model: nn.Module, mesh: Mesh, parts: ShardMap, parallel: ParallelConfig) -> None:
    """Leave this rank's part of the experts in a model, whose weights need have no memory, and let tokens travel."""
    if mesh.layout.has_experts_apart:
        parts.experts = frozenset(find_expert_weights(model))
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            _share_tokens(module, mesh, parallel)
            _cut_experts(module.experts, f"{name}.experts", mesh, parts)
            _share_numbers(module, mesh)
            if mesh.tp_group is not None:
                rows = module.router.weight.shape[0]
                parts.sums[f"{name}.router.weight"] = (GradientSum(mesh.tp_group, 0, 0, rows),)


def find_expert_weights(model: nn.Module) -> set[str]:
    """Names of the weights that the ranks of a stage hold as experts."""
    stacks = {name: module for name, module in model.named_modules() if isinstance(module, ExpertWeight)}
    return {f"{name}.{key}" for name, module in stacks.items() for key, _ in module.named_parameters()}


def _cut_experts(experts: Experts, name: str, mesh: Mesh, parts: ShardMap) -> None:
    """This rank's experts and its channels of them; `parts` learns it."""
    ep, etp = mesh.layout.ep, mesh.layout.etp
    num_here, f = experts.num_experts // ep, len(experts.up.weight) // experts.num_experts
    own = range(mesh.ep_rank * num_here, (mesh.ep_rank + 1) * num_here)
    channels = tuple(Piece(i * f + mesh.etp_rank * f // etp, f // etp) for i in own)
    is_first = mesh.etp_rank == 0
    for key, stack in experts.named_children():
        assert isinstance(stack, ExpertWeight)
        for kind, weight in list(stack.named_parameters()):
            full = f"{name}.{key}.{kind}"
            is_row = key == "down" and kind == "bias"  # one row an expert, on all that share it
            pieces = (Piece(own.start, len(own), is_first),) if is_row else _join(channels)
            parts.shards[full] = shard = Shard(tuple(weight.shape), 0, pieces)
            parts.sums.pop(full, None)
            if is_row and mesh.etp_group is not None:
                parts.sums[full] = (GradientSum(mesh.etp_group, 0, 0, len(own)),)
            if shard.local_shape != shard.shape:
                local = torch.empty(shard.local_shape, dtype=weight.dtype, device=weight.device)
                setattr(stack, kind, nn.Parameter(local))
    experts.num_experts = num_here
    experts.has_bias_turn = is_first


def _join(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Runs that follow each other as one."""
    if len(pieces) > 1 and pieces[0].start + pieces[0].length == pieces[1].start:
        return (Piece(pieces[0].start, sum(piece.length for piece in pieces)),)
    return pieces


def _share_tokens(layer: MoE, mesh: Mesh, parallel: ParallelConfig) -> None:
    """Let a layer route this rank's own tokens, and send rows to their experts."""
    layer.overlaps = parallel.overlaps_shared
    if mesh.expert_group is not None:
        ranks = ExpertRanks(mesh.expert_group, mesh.layout.ep, mesh.layout.etp, mesh.meter("ep"))
        layer.dispatch = AllToAll(ranks) if parallel.dispatcher == "alltoall" else AllGather(ranks)
    if mesh.tp_group is None:
        return
    group, mix, is_sequence, meter = mesh.tp_group, layer.mix, parallel.sequence_parallel, mesh.meter("tp")

    def mix_own(x: Tensor, context: Context | None, beside: Beside | None) -> tuple[Tensor, Tensor | None]:
        if context is not None:
            given = (context.rows, context.weights)
            rows, weights = (None if own is None else split_tokens(own, group, meter=meter) for own in given)
            context = replace(context, rows=rows, weights=weights)
        if is_sequence:
            return mix(x, context, beside)
        y, meanwhile = mix(split_tokens(x, group, meter=meter), context, beside)
        return join_tokens(y, group, meter=meter), meanwhile

    layer.mix = mix_own  # type: ignore[method-assign]


def _share_numbers(layer: MoE, mesh: Mesh) -> None:
    """Let the router sum its numbers over the ranks that hold other tokens of the same units."""
    is_global = layer.router.config.balance_kind == "global_aux_loss"
    others = (mesh.gradient_group, mesh.meter("dp")) if is_global else (mesh.cp_group, mesh.meter("cp"))
    groups = [(mesh.tp_group, mesh.meter("tp")), others]
    if all(group is None for group, _ in groups):
        return

    @torch.no_grad()
    def share(numbers: Tensor) -> Tensor:
        total = numbers.clone()
        for group, meter in groups:
            sum_over(total, group, meter)
        return total

    layer.router.share = share


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks that hold all experts of a layer together: ep rank i's etp ranks are numbers i etp to (i + 1) etp."""

    group: dist.ProcessGroup
    ep: int
    etp: int
    meter: Meter

    @property
    def size(self) -> int:
        """How many there are."""
        return self.ep * self.etp


class AllToAll:
    """Sends each row to the ranks of its expert, and takes back what they made of it."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self.ranks = ranks

    def __call__(
        self, x: Tensor, routing: Routing, experts: nn.Module, beside: Beside | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Dispatcher`."""
        assert isinstance(experts, Experts)
        ranks, e = self.ranks, experts.num_experts * self.ranks.ep
        order = make_order(routing, e, experts.kernels)
        counts = order.counts.view(ranks.ep, 1, -1).expand(-1, ranks.etp, -1).reshape(ranks.size, -1)  # [n, e / ep]
        arriving, read = self._agree(counts, routing)
        if ranks.etp > 1:
            order = order.copy_parts(order.counts.view(ranks.ep, -1).sum(dim=1), ranks.etp)
        taken = take(x, order)
        sent, received = read()
        travel = _Travel(ranks, sent, [sum(rows) for rows in received], arriving, has_beside=beside is not None)
        rows = _StartOut.apply(taken, travel)
        meanwhile = None if beside is None else beside()
        sizes = [sum(rows) for rows in zip(*received, strict=True)]
        rows = experts(_EndOut.apply(rows, travel), arriving.sum(dim=0), sizes)
        return combine(_Return.apply(rows, travel), routing.weights, order), meanwhile

    def _agree(
        self, counts: Tensor, routing: Routing
    ) -> tuple[Tensor, Callable[[], tuple[list[int], list[list[int]]]]]:
        """Rows that arrive from each rank for each expert here, on the device; and what says, once the host has waited
        for it, how many are sent, rank by rank, and which arrive. Sends the numbers once, unless all are alike.
        """
        n, e = counts.shape
        if (alike := routing.num_rows) is not None:
            return counts, lambda: ([alike * e] * n, [[alike] * e] * n)
        arriving = torch.empty_like(counts)
        with self.ranks.meter.send("all_to_all", counts, self.ranks.group):
            dist.all_to_all_single(arriving, counts.contiguous(), group=self.ranks.group)
        coming = HostCopy(torch.cat([counts.sum(dim=1), arriving.flatten()]))

        def read() -> tuple[list[int], list[list[int]]]:
            numbers = coming.read()
            return numbers[:n], [numbers[n + i * e : n + (i + 1) * e] for i in range(n)]

        return arriving, read


def find_places(arriving: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows that come rank by rank, `[n, e]` of them for each expert, in the order of the experts; int64 `[r]` each.

    Runs of one rank and expert stay together in both orders, so that a row's places differ by what its run is moved.

    Returns:
        Of each place in the order of experts the place in that of ranks, and the other way round.
    """
    by_rank, by_expert = arriving.flatten(), arriving.t().flatten()
    starts = (by_rank.cumsum(0) - by_rank).view_as(arriving)
    moved = (by_expert.cumsum(0) - by_expert).view_as(arriving.t()).t() - starts  # [n, e]
    places = torch.arange(num_rows, device=arriving.device)
    from_ranks = places - moved.t().flatten().repeat_interleave(by_expert, output_size=num_rows)
    from_experts = places + moved.flatten().repeat_interleave(by_rank, output_size=num_rows)
    return from_ranks, from_experts


class _Travel:
    """Rows on their way to other ranks and back.

    Args:
        ranks: that hold the experts.
        sent: rows to each of them.
        received: rows from each of them.
        arriving: of those, how many there are for each expert, `[n, e]`, on the device.
        has_beside: whether something is computed while rows travel to the experts, and gradients back.
    """

    def __init__(
        self, ranks: ExpertRanks, sent: list[int], received: list[int], arriving: Tensor, *, has_beside: bool
    ) -> None:
        self.group, self.meter = ranks.group, ranks.meter
        self.sent, self.received, self.has_beside = sent, received, has_beside
        self.from_ranks, self.from_experts = find_places(arriving, sum(received))
        self.handle: Any = None
        self.kept: Tensor | None = None
        self.back: Tensor | None = None

    def start(self, rows: Tensor, *, is_background: bool = False) -> Tensor:
        """Begin to send rows; what is returned is filled when `wait` is done."""
        self.meter.send_rows(rows, self.sent, self.group, is_background=is_background)
        arrived = rows.new_empty(sum(self.received), rows.shape[1])
        self.kept = rows.contiguous()
        self.handle = dist.all_to_all_single(
            arrived, self.kept, self.received, self.sent, group=self.group, async_op=True
        )
        return arrived

    def start_back(self, rows: Tensor, *, is_background: bool = False) -> Tensor:
        """Begin to send rows back to where they came from."""
        self.meter.send_rows(rows, self.received, self.group, is_background=is_background)
        arrived = rows.new_empty(sum(self.sent), rows.shape[1])
        self.kept = rows.contiguous()
        self.handle = dist.all_to_all_single(
            arrived, self.kept, self.sent, self.received, group=self.group, async_op=True
        )
        return arrived

    def wait(self) -> None:
        """Until the rows are there."""
        with self.meter.wait("all_to_all"):
            self.handle.wait()
        self.handle = self.kept = None

    def take_back(self) -> Tensor:
        """What `start_back` sent, once it is there."""
        self.wait()
        back, self.back = self.back, None
        assert back is not None, "backward has begun the way back"
        return back

    def sort(self, rows: Tensor) -> Tensor:
        """From the order of ranks to that of experts."""
        return rows.index_select(0, self.from_ranks)

    def unsort(self, rows: Tensor) -> Tensor:
        """From the order of experts to that of ranks."""
        return rows.index_select(0, self.from_experts)


class _StartOut(torch.autograd.Function):
    """Rows begin to travel; backward ends the way back of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        return travel.start(rows, is_background=travel.has_beside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.take_back(), None


class _EndOut(torch.autograd.Function):
    """Rows are there, by expert; backward begins the way back of their gradients. What lies between the two functions
    in forward runs between them in backward too: autograd takes what came last first. Gradients travel beside autograd,
    which is handed zeros that take no memory: there are as many rows as were received, and as were sent come back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        travel.wait()
        return travel.sort(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        travel: _Travel = ctx.travel
        travel.back = travel.start_back(travel.unsort(grad), is_background=travel.has_beside)
        return grad.new_zeros(()).expand_as(grad), None


class _Return(torch.autograd.Function):
    """What experts made of rows goes back; gradients come the way of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        arrived = travel.start_back(travel.unsort(rows))
        travel.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        arrived = ctx.travel.start(grad)
        ctx.travel.wait()
        return ctx.travel.sort(arrived), None


class AllGather:
    """Gives every rank all tokens, and adds what each rank's experts made of them."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self.ranks = ranks

    def __call__(
        self, x: Tensor, routing: Routing, experts: nn.Module, beside: Beside | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Dispatcher`."""
        assert isinstance(experts, Experts)
        group, meter, e = self.ranks.group, self.ranks.meter, experts.num_experts
        first = dist.get_rank(group) // self.ranks.etp * e
        chosen = gather_along(routing.chosen, group, 0, meter) - first
        is_here = (chosen >= 0) & (chosen < e)
        if routing.kept is not None:
            is_here &= gather_along(routing.kept.to(torch.uint8), group, 0, meter).bool()
        num_rows = None if routing.num_rows is None else routing.num_rows * self.ranks.size
        order = make_order(routing._replace(chosen=chosen, kept=is_here, num_rows=num_rows), e, experts.kernels)
        tokens = gather_tokens(x, group, 0, meter=meter)
        weights = gather_tokens(routing.weights, group, 0, meter=meter)
        meanwhile = None if beside is None else beside()
        rows = experts(take(tokens, order), order.counts, order.known)
        return scatter_sums(combine(rows, weights, order), group, 0, meter=meter), meanwhile
