"""What makes a step faster without changing its maths: compiled blocks, and gradients that products accumulate.

Compiled: each block by itself, with static shapes, so that all blocks share one compilation; whole, or where ranks
share layers or sequences the parts between their collectives; of a block with experts, whose sizes change from step to
step, attention, the activation function and what moves rows. Accumulated: `ops/accumulate.py`, for the linear layers
of the blocks, experts multiplied one by one and the output projection, where the main gradients are wider than the
weights, or of 16 bits, and their buffer is whole (ZeRO 0 and 1, no pipeline, layers not shared by ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megaflow_trainer.model.experts import ExpertWeight
from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.ops.accumulate import AccumulatingLoss, accumulate_linear, score_chunk
from megaflow_trainer.ops.rows import compile_rows
from megaflow_trainer.parallel.buckets import Bucket, Slot
from megaflow_trainer.parallel.data import MainGradients

ROUTER = ".router.weight"


def compile_blocks(model: GPT, *, is_whole: bool) -> None:
    """Compile every block's forward (and so its backward), `is_whole` or in parts between what ranks exchange."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
    kernels = compile_rows()
    for block in blocks:
        if isinstance(block.mlp, MoE):
            block.attend = torch.compile(block.attend, fullgraph=is_whole, dynamic=False)  # type: ignore[method-assign]
            experts = block.mlp.experts
            experts.activate = torch.compile(experts.activate)  # type: ignore[method-assign]
            experts.kernels = kernels
        else:
            block.forward = torch.compile(block.forward, fullgraph=is_whole, dynamic=False)  # type: ignore[method-assign]


def can_accumulate(gradients: MainGradients) -> bool:
    """Whether products may add to the main gradients: wider than the weights (those of routers apart, which are in fp32
    and have no such product) or of 16 bits as they are, and in one buffer all the time.
    """
    slots = [slot for bucket in gradients.buckets for slot in bucket.slots]
    is_wider = all(slot.weight.dtype != gradients.dtype for slot in slots if not slot.name.endswith(ROUTER))
    return gradients.options.zero < 2 and (is_wider or gradients.dtype.itemsize == 2)


def accumulate_in_products(model: GPT, gradients: MainGradients, *, is_compiled: bool) -> None:
    """Let linear layers of blocks add to the main gradients, and in a compiled model the output projection too."""
    slots: dict[Tensor, tuple[Bucket, Slot]] = {
        slot.weight: (bucket, slot) for bucket in gradients.buckets for slot in bucket.slots
    }

    def view(slot: Slot) -> Tensor:
        full = slots[slot.weight][0].full
        assert full is not None, "whole all the time"
        return slot.view(full)

    for block in [module for module in model.modules() if isinstance(module, Block)]:
        own = [module for module in block.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
        for module in own:
            accumulate_linear(module, view(slots[module.weight][1]))
        if isinstance(block.mlp, MoE) and block.mlp.experts.product.accumulates:
            for stack in [module for module in block.mlp.experts.modules() if isinstance(module, ExpertWeight)]:
                stack.main_grad = view(slots[stack.weight][1])
    if not is_compiled:  # written out, the steps of the loss pass over the scores more often than torch's own loss does
        return
    weight = model.output_weight
    assert isinstance(weight, nn.Parameter), "of a plain model"
    model.accumulating_loss = AccumulatingLoss(view(slots[weight][1]), score=torch.compile(score_chunk, dynamic=False))
