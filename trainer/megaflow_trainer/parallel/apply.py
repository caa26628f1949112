"""The only place that knows in which order parallelism is put on a model.

Order: pipeline split -> tensor/sequence -> expert -> context -> recompute -> compile -> data parallel.
This version has recompute and the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import RecomputeConfig
from megaflow_trainer.parallel.collectives import copy_from_first
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.recompute import SavedActivations, apply_recompute, keep_saved, make_saved

NO_RECOMPUTE = RecomputeConfig()


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """A model as the loop uses it: call it for losses, ask `gradients` for what backward left."""

    module: nn.Module
    gradients: MainGradients
    saved: SavedActivations | None = None

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss per token of this rank's micro-batch, float32, `[b, s]`."""
        with keep_saved(self.saved):
            loss: Tensor = self.module(tokens, labels)
        return loss


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    grad_dtype: torch.dtype = torch.float32,
) -> ParallelModel:
    """Make a model with initial weights ready for the ranks of `mesh`. Broadcasts the weights of the first rank."""
    for weight in model.parameters():
        copy_from_first(weight.data, mesh.dp_group)
    apply_recompute(model, recompute)
    gradients = MainGradients(model, mesh.dp_group, grad_dtype)
    return ParallelModel(model, gradients, make_saved(model, recompute))
