"""Data parallelism and ZeRO: ranks with the same weights read other samples, and their gradients are added.

Gradients. Backward leaves a gradient in the weight's dtype; a hook adds it to a flat buffer of main gradients (fp32)
and frees it (those of biases and norms together, at the end of a backward or before their bucket is sent), so that
accumulation over micro-batches is in fp32 whatever the weights are. The buffer is cut into
buckets in the order of backward. A bucket whose last gradient of the step has come is sent while backward goes on, the
next one never before it, so that all ranks send in the same order.

What is divided. ZeRO 0: nothing; a bucket is all-reduced. ZeRO 1: optimizer states; each rank steps one equal part of
every bucket, so that a bucket is reduce-scattered, and after the step its weights are all-gathered, in the order of
forward, waited for by the modules that use them. ZeRO 2: main gradients too; a rank keeps those of its part only, and a
bucket's full buffer lives from its first gradient of a micro-batch to the reduce-scatter behind its last one. With
replicas, parts are all-reduced among the ranks that have the same one.

Bytes a step and weight (fp32 gradients, bf16 weights, n ranks): ZeRO 0 all-reduce 2 (n-1)/n x 4; ZeRO 1 reduce-scatter
(n-1)/n x 4 and all-gather (n-1)/n x 2; ZeRO 2 the reduce-scatter once a micro-batch.

Other axes. Terms of a gradient that lie on other ranks (`GradientSum`) are added before a bucket is sent. The norm
counts every element on the one rank that answers for it and adds the ranks' squares. Experts that lie on other ranks
than the layers around them have buckets of their own, which travel among the ranks with the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaflow_trainer.parallel.buckets import (
    Bucket,
    MainParameter,
    Slot,
    add_terms,
    expose,
    find_owned,
    make_buckets,
    sum_squares,
)
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.shards import ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """How data-parallel ranks work together."""

    zero: int = 0
    bucket_size: int = 40_000_000
    overlaps: bool = True
    dtype: torch.dtype = torch.float32


class MainGradients:
    """The gradients of a model in one dtype (fp32; fp64 for fp64 weights), as sums over the tokens of the batch."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, parts: ShardMap | None = None, options: DataOptions = DataOptions()
    ) -> None:
        parts = parts or ShardMap.of(model)
        self.mesh, self.options = mesh, options
        named = list(model.named_parameters())
        self.device, weight_dtype = named[0][1].device, named[0][1].dtype
        self.dtype = torch.float64 if weight_dtype == torch.float64 else options.dtype
        self.buckets = make_buckets(named, parts, options.bucket_size, mesh, is_divided=options.zero > 0)
        is_divided = any(bucket.sharers.divisor > 1 for bucket in self.buckets)
        self.parameters: list[MainParameter] = []
        self.num_micro_batches, self.num_sent, self.is_held = 1, 0, False
        self.put_off: list[tuple[Bucket, Slot]] = []
        for bucket in self.buckets:
            self._give_memory(bucket)
        order = {name: number for number, (name, _) in enumerate(named)}
        self.parameters.sort(key=lambda main: order[main.name])
        if is_divided and options.overlaps:
            _wait_in_forward(model, self.buckets, self._receive)
        self.has_experts_apart = mesh.layout.has_experts_apart
        self.has_all = mesh.model_group is None and not is_divided and not self.has_experts_apart
        self.owned = self.kept if self.has_all else list(find_owned(self.buckets))

    def _give_memory(self, bucket: Bucket) -> None:
        """Buffers of a bucket, hooks of its weights, and what the optimizer sees of them."""
        is_kept_full = self.options.zero < 2
        length = bucket.own.stop - bucket.own.start
        kept = torch.zeros(bucket.size if is_kept_full else length, dtype=self.dtype, device=self.device)
        if is_kept_full:
            bucket.full = kept
        bucket.kept = kept[bucket.own] if is_kept_full else kept
        if self.options.zero:
            bucket.weights = torch.zeros(bucket.size, dtype=bucket.slots[0].weight.dtype, device=self.device)
        for slot in bucket.slots:
            if bucket.weights is not None:
                view = slot.view(bucket.weights)
                view.copy_(slot.weight.data)
                slot.weight.data = view
            slot.weight.register_post_accumulate_grad_hook(self._make_hook(bucket, slot))
            main = expose(bucket, slot)
            if main is not None:
                self.parameters.append(main)

    def _make_hook(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        def take(weight: Tensor) -> None:
            if weight.grad is None:
                pass  # the product has added it itself
            elif weight.dim() > 1:
                self._add(bucket, slot)
            else:
                if not self.put_off:
                    torch.autograd.Variable._execution_engine.queue_callback(self._add_put_off)  # behind this backward
                self.put_off.append((bucket, slot))
            if self.is_held:
                return
            slot.missing -= 1
            bucket.waiting -= slot.missing == 0
            if bucket.waiting == 0:
                self._send_ready()

        return take

    def _add(self, bucket: Bucket, slot: Slot) -> None:
        """Move a weight's gradient into the bucket."""
        assert slot.weight.grad is not None
        slot.view(self._open(bucket)).add_(slot.weight.grad)
        slot.weight.grad = None

    def _add_put_off(self) -> None:
        """Move the gradients of biases and norms into their buckets, a few kernels for all of them: each by itself is a
        launch for some thousand numbers.
        """
        mains, grads = [], []
        for bucket, slot in self.put_off:
            grad, slot.weight.grad = slot.weight.grad, None
            if grad is not None:  # else it was put off twice, and is a sum
                mains.append(slot.view(self._open(bucket)).flatten())
                grads.append(grad.flatten())
        self.put_off.clear()
        if not grads:
            return
        if any(x.dtype != self.dtype for x in grads):  # adding in one pass wants one dtype
            sizes = [x.numel() for x in grads]
            wide = list(torch.empty(sum(sizes), dtype=self.dtype, device=self.device).split(sizes))
            torch._foreach_copy_(wide, grads)
            grads = wide
        torch._foreach_add_(mains, grads)

    def _open(self, bucket: Bucket) -> Tensor:
        """A bucket's buffer, which ZeRO 2 has from the first gradient on."""
        if bucket.full is None:
            bucket.full = torch.zeros(bucket.size, dtype=self.dtype, device=self.device)
        return bucket.full

    @property
    def kept(self) -> list[Tensor]:
        """The main gradients that this rank steps, flat, a tensor a bucket."""
        return [bucket.kept for bucket in self.buckets]

    def start(self, num_micro_batches: int = 1) -> None:
        """Forget the last step; what comes is that of `num_micro_batches` backwards."""
        self.receive_weights()
        self.forget_loose()
        self.num_micro_batches = 1 if self.options.zero == 2 else num_micro_batches
        for bucket in self.buckets:
            (bucket.kept if bucket.full is None else bucket.full).zero_()
            self._arm(bucket)
        self.num_sent = 0

    def _arm(self, bucket: Bucket) -> None:
        """Count again the gradients that a bucket waits for."""
        bucket.waiting = len(bucket.slots)
        for slot in bucket.slots:
            slot.missing = self.num_micro_batches

    def _send_ready(self) -> None:
        """Send buckets that are complete, in their order; under ZeRO 2 once a micro-batch, else once a step."""
        if not self.options.overlaps and self.options.zero < 2:
            return
        early = [bucket for bucket in self.buckets if not bucket.is_late]
        while self.num_sent < len(early):
            if early[self.num_sent].waiting > 0:
                return
            self._send(early[self.num_sent])
            self.num_sent += 1
        if self.options.zero == 2:  # take in what has been reduced, and make ready for the next micro-batch
            self.num_sent = 0
            for bucket in early:
                self._finish(bucket)
                self._arm(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Add terms of other ranks, then start the reduction of a bucket."""
        self._add_put_off()
        assert bucket.full is not None, "it has a gradient"
        add_terms(((slot.view(bucket.full), slot.sums) for slot in bucket.slots), self.mesh)
        sharers, is_async, meter = bucket.sharers, self.options.overlaps, self.mesh.meter("dp")
        if self.options.zero == 0:
            if sharers.group is not None:
                with meter.send("all_reduce", bucket.full, sharers.group, is_background=is_async):
                    bucket.handle = dist.all_reduce(bucket.full, group=sharers.group, async_op=is_async)
        elif sharers.shard_group is not None:
            bucket.received = torch.empty_like(bucket.kept)
            with meter.send("reduce_scatter", bucket.full, sharers.shard_group, is_background=is_async):
                bucket.handle = dist.reduce_scatter_tensor(
                    bucket.received, bucket.full, group=sharers.shard_group, async_op=is_async
                )
        elif self.options.zero == 2:
            bucket.received = bucket.full

    def _finish(self, bucket: Bucket) -> None:
        """Wait for a bucket and keep this rank's part of it."""
        if bucket.handle is not None:
            with self.mesh.meter("dp").wait("reduce_scatter" if self.options.zero else "all_reduce"):
                bucket.handle.wait()
            bucket.handle = None
        if bucket.received is not None:
            (bucket.kept.add_ if self.options.zero == 2 else bucket.kept.copy_)(bucket.received)
            bucket.received = None
        if self.options.zero == 2:
            bucket.full = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Meanwhile gradients are added, and neither counted nor sent: for backwards that are recorded to run again.
        `reduce` sends what was not counted.
        """
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def forget_loose(self) -> None:
        """Drop gradients that a backward left outside of the buffers when it failed."""
        self.put_off.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.weight.grad = None

    def sweep(self) -> None:
        """Take in gradients left by a backward that runs no hooks."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.weight.grad is not None:
                    self._add(bucket, slot)

    def reduce(self) -> None:
        """Complete the sums over the ranks; what is not sent yet is sent now, in the same order on every rank."""
        self.sweep()
        for bucket in self.buckets[self.num_sent :]:
            if bucket.full is not None:
                self._send(bucket)
        for bucket in self.buckets:
            self._finish(bucket)
            if self.options.zero:
                sum_over(bucket.kept, bucket.sharers.replicate_group, self.mesh.meter("dp"))

    def norm(self) -> Tensor:
        """Global 2-norm, fp32 scalar on the device (fp64 in fp64). Every element of the model is counted once."""
        square = sum_squares(self.owned, self.device)
        if not self.has_all:
            sum_over(square, self.mesh.world_group, self.mesh.meter("world"))
        return square.sqrt().to(torch.promote_types(self.dtype, torch.float32))

    def list_weights(self) -> list[tuple[str, Tensor, int]]:
        """This rank's part of each weight of the model: name, memory, first element in the flattened part, here 0.

        Waits for weights that are on their way.
        """
        self.receive_weights()
        return [(slot.name, slot.weight.data, 0) for bucket in self.buckets for slot in bucket.slots]

    def measure_weights(self) -> Tensor:
        """2-norm of the weights, as `norm` is of the gradients; waits for weights that are on their way."""
        self.receive_weights()
        owned = [
            run
            for bucket in self.buckets
            if bucket.sharers.is_first or not self.has_experts_apart
            for slot in bucket.slots
            for run in slot.shard.list_owned(slot.weight.detach())
        ]
        square = sum_squares(owned, self.device)
        group = self.mesh.world_group if self.has_experts_apart else self.mesh.model_group
        sum_over(square, group, self.mesh.meter("world"))
        return square.sqrt().to(torch.promote_types(self.dtype, torch.float32))

    def share_weights(self) -> None:
        """Send the weights that this rank has stepped to the others, in the order in which forward needs them."""
        if self.options.zero == 0:
            return
        for bucket in reversed(self.buckets):
            assert bucket.weights is not None
            group = bucket.sharers.shard_group
            if group is None:
                continue
            self.mesh.meter("dp").send("all_gather", bucket.weights, group, is_background=True)
            bucket.handle = dist.all_gather_into_tensor(
                bucket.weights, bucket.weights[bucket.own].clone(), group=group, async_op=True
            )
        if not self.options.overlaps:
            self.receive_weights()

    def receive_weights(self) -> None:
        """Wait until every weight is here: for readers other than forward."""
        for bucket in reversed(self.buckets):
            self._receive(bucket)

    def _receive(self, bucket: Bucket) -> None:
        if bucket.handle is not None:
            with self.mesh.meter("dp").wait("all_gather"):
                bucket.handle.wait()
            bucket.handle = None


def _wait_in_forward(model: nn.Module, buckets: Sequence[Bucket], receive: Callable[[Bucket], None]) -> None:
    """Let each module wait for its own weights before it uses them.

    Hooks are on the modules that own weights, since blocks may be computed by others (recompute). The projection's
    weight is used by the loss without a call of its module: the norm before it waits for it.
    """
    bucket_of: Mapping[nn.Parameter, Bucket] = {slot.weight: bucket for bucket in buckets for slot in bucket.slots}
    modules = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    for name, module in modules.items():
        used = list(module.parameters(False))
        if name == "norm":
            used += list(modules["head" if "head" in modules else "embedding"].parameters(False))
        needed = {id(bucket_of[weight]): bucket_of[weight] for weight in used}

        def wait(*_: object, needed: Sequence[Bucket] = tuple(needed.values())) -> None:
            for bucket in needed:
                receive(bucket)

        module.register_forward_pre_hook(wait)
