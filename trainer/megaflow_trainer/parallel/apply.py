"""The only place that knows in which order parallelism is put on a model.

Order: pipeline split -> tensor/sequence -> expert -> context -> recompute -> compile -> data parallel.
This version has recompute and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import RecomputeConfig
from megaflow_trainer.parallel.collectives import copy_from_first
from megaflow_trainer.parallel.data import MainGradients
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.recompute import apply_recompute
from megaflow_trainer.parallel.saved import SavedActivations, keep_saved, make_saved

NO_RECOMPUTE = RecomputeConfig()


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """A model as the loop uses it: call it for losses, ask `gradients` for what backward left."""

    module: nn.Module
    gradients: MainGradients
    saved: SavedActivations | None = None

    @property
    def side_losses(self) -> dict[str, Tensor]:
        """Losses of the last forward in training that are logged apart, by name, detached."""
        losses: dict[str, Tensor] = getattr(self.module, "side_losses", {})
        return losses

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Loss per token of this rank's micro-batch, float32, `[b, s]`."""
        with keep_saved(self.saved):
            loss: Tensor = self.module(tokens, labels)
        return loss

    def measure_norm(self) -> Tensor:
        """2-norm of all weights, fp32 scalar on the device (fp64 in fp64). Every weight is counted once."""
        weights = [weight.detach() for weight in self.module.parameters()]
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(weights, 2, wide)))


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    parts: Sequence[Sequence[str]] | None = None,
    grad_dtype: torch.dtype = torch.float32,
    measure_every: int = 1,
) -> ParallelModel:
    """Make a model with initial weights ready for the ranks of `mesh`. Broadcasts the weights of the first rank.

    Args:
        model: a GPT.
        mesh: the ranks.
        recompute: what is computed again in backward, and how the rest is kept.
        parts: for each block what selective recompute takes; `recompute.modules` of all blocks if not given.
        grad_dtype: of the main gradients.
        measure_every: forwards from one measurement of the error of compressed activations to the next.
    """
    for weight in model.parameters():
        copy_from_first(weight.data, mesh.dp_group)
    apply_recompute(model, recompute, parts)
    gradients = MainGradients(model, mesh.dp_group, grad_dtype)
    return ParallelModel(model, gradients, make_saved(model, recompute, measure_every=measure_every))
