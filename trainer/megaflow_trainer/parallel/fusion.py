"""What makes a step faster without changing its maths: compiled blocks, and gradients that products accumulate.

Compiled: each block by itself, with static shapes, so that all blocks share one compilation; whole, or where ranks
share sequences the parts between their collectives; of a block with experts, whose sizes change from step to
step, attention, the activation function and what moves rows. Accumulated: `ops/linear.py` and `ops/accumulate.py`, for
the linear layers of the blocks, experts multiplied one by one, and the output projection of a rank that has all of the
model, where the main gradients are wider than the weights, or of 16 bits, and their buffer is whole (ZeRO 0 and 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from megaflow.errors import first_line
from megaflow_trainer.model.experts import ExpertWeight
from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.ops.accumulate import AccumulatingLoss
from megaflow_trainer.ops.linear import Linear
from megaflow_trainer.ops.rows import compile_rows
from megaflow_trainer.ops.scores import prefer_kernel, score_chunk
from megaflow_trainer.parallel.buckets import Bucket, Slot
from megaflow_trainer.parallel.data import MainGradients

ROUTER = ".router.weight"


class Compiler:
    """Compiles functions, and leaves them as they are from the first failure of torch's compiler on.

    Args:
        tell: is told once why.
    """

    def __init__(self, tell: Callable[[str], None] = lambda why: None) -> None:
        self.tell, self.has_failed = tell, False

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`function`, compiled when it is called first, with the options of `torch.compile`."""
        compiled = torch.compile(function, **options)

        def run(*args: Any) -> Any:
            if self.has_failed:
                return function(*args)
            try:
                return compiled(*args)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # raised before the function has run
                self.has_failed = True
                self.tell(f"blocks are not compiled: {type(error).__name__}: {first_line(error)}")
                return function(*args)

        return run


def compile_blocks(model: GPT, *, is_whole: bool, compiler: Compiler | None = None) -> None:
    """Compile every block's forward (and so its backward), `is_whole` or in parts between what ranks exchange.

    What an earlier run of this process compiled is forgotten: in parts, torch 2.11 takes it for a later model whose
    norms have another kernel, and calls what is not there.
    """
    torch.compiler.reset()
    compiler = compiler or Compiler()
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
    kernels = compile_rows(compiler)
    for block in blocks:
        if isinstance(block.mlp, MoE):
            block.attend = compiler(block.attend, fullgraph=is_whole, dynamic=False)  # type: ignore[method-assign]
            experts = block.mlp.experts
            experts.activate = compiler(experts.activate)  # type: ignore[method-assign]
            experts.kernels = kernels
        else:
            block.forward = compiler(block.forward, fullgraph=is_whole, dynamic=False)  # type: ignore[method-assign]


def can_accumulate(gradients: MainGradients) -> bool:
    """Whether products may add to the main gradients: wider than the weights (those of routers apart, which are in fp32
    and have no such product) or of 16 bits as they are, and in one buffer all the time.
    """
    slots = [slot for bucket in gradients.buckets for slot in bucket.slots]
    is_wider = all(slot.weight.dtype != gradients.dtype for slot in slots if not slot.name.endswith(ROUTER))
    return gradients.options.zero < 2 and (is_wider or gradients.dtype.itemsize == 2)


MakeLoss = Callable[[Tensor, Compiler], Callable[..., Tensor]]
"""From the main gradient of the output projection to a loss that adds to it."""


def make_loss(main_grad: Tensor, compiler: Compiler) -> AccumulatingLoss:
    """Of a rank that has the whole vocabulary."""
    return AccumulatingLoss(main_grad, score=prefer_kernel(compiler(score_chunk, dynamic=False)))


def accumulate_in_products(
    model: GPT, gradients: MainGradients, *, compiler: Compiler | None, make: MakeLoss | None = make_loss
) -> None:
    """Let linear layers of blocks add to the main gradients, and in a compiled model the output projection too, where
    there is a loss that can (`make`).
    """
    slots: dict[Tensor, tuple[Bucket, Slot]] = {
        slot.weight: (bucket, slot) for bucket in gradients.buckets for slot in bucket.slots
    }

    def view(slot: Slot) -> Tensor:
        full = slots[slot.weight][0].full
        assert full is not None, "whole all the time"
        return slot.view(full)

    for block in [module for module in model.modules() if isinstance(module, Block)]:
        for module in block.modules():
            if isinstance(module, Linear):
                module.product.main_grad = view(slots[module.weight][1])
        if isinstance(block.mlp, MoE) and block.mlp.experts.product.accumulates:
            for stack in [module for module in block.mlp.experts.modules() if isinstance(module, ExpertWeight)]:
                stack.main_grad = view(slots[stack.weight][1])
    if compiler is None or make is None:  # written out, it passes over the scores more often than torch's own loss does
        return
    weight = model.output_weight
    assert isinstance(weight, nn.Parameter), "of a plain model"
    model.accumulating_loss = make(view(slots[weight][1]), compiler)
