"""The load of experts over all ranks: counted by routers as they choose, added up once a step, and what it moves.

Communication: one all-reduce of [layers, e + 4] float64 numbers (counts are exact below 2^53) over all ranks, in steps
that are logged, and in all where biases move. Every rank counts tokens that no other rank of its stage routes, and the
layers of a stage are on no other, so that the sum over all ranks counts each choice of the model once.

Biases (auxiliary-loss-free balancing, DeepSeek-V3): after a step the bias of an expert rises by a fixed amount if it
got fewer choices of the whole global batch than the mean of its layer, and falls if more; so it does not depend on how
the batch was cut.

Legend: e experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.routing import Router
from megaflow_trainer.parallel.collectives import sum_over
from megaflow_trainer.parallel.mesh import Mesh

_LAYER = re.compile(r"(blocks|further)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A step's load.

    Args:
        counts: choices of each expert, float64 `[layers with experts, e]`, whole numbers.
        layers: numbers of those layers.
        losses: mean balance loss and mean z-loss of a layer and token, by name; those that are asked for.
        num_dropped: choices that were not served, in all layers.
        bias_norm: 2-norm of all biases, None without.
    """

    counts: Tensor
    layers: tuple[int, ...]
    losses: dict[str, Tensor]
    num_dropped: Tensor
    bias_norm: Tensor | None

    def list_values(self) -> dict[str, Tensor]:
        """What is logged, by name: float64 scalars on the device."""
        share = self.counts / self.counts.sum(dim=1, keepdim=True).clamp(min=1)
        entropy = torch.special.xlogy(share, share).sum(dim=1).mean().abs() / math.log(max(self.counts.shape[1], 2))
        values = {
            "expert_tokens_min": self.counts.min(),
            "expert_tokens_mean": self.counts.mean(),
            "expert_tokens_max": self.counts.max(),
            "expert_max_over_mean": (self.counts.amax(dim=1) / self.counts.mean(dim=1).clamp(min=1)).mean(),
            "expert_entropy": entropy,
            "dead_experts": (self.counts == 0).sum(),
            "dropped_share": self.num_dropped / self.counts.sum().clamp(min=1),
        }
        if self.bias_norm is not None:
            values["expert_bias_norm"] = self.bias_norm
        return values | self.losses

    def describe_dead(self) -> str | None:
        """A line about experts that no token chose, None if there are none; waits for the device."""
        dead = [
            f"layer {layer}: {', '.join(str(expert) for expert, count in enumerate(row) if count == 0)}"
            for layer, row in zip(self.layers, self.counts.tolist(), strict=True)
            if 0 in row
        ]
        if not dead:
            return None
        more = f" and {len(dead) - 8} more layers" if len(dead) > 8 else ""
        return f"experts that no token of this step chose: {'; '.join(dead[:8])}{more}"


class ExpertLoad:
    """Counts, losses and biases of the routers that this rank has."""

    def __init__(self, model: nn.Module, config: ModelConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.routers = {_number(name, config): m for name, m in model.named_modules() if isinstance(m, Router)}
        count = config.num_layers + config.num_mtp_layers
        self.layers = tuple(number for number in range(count) if config.has_experts(number))

    def start(self, lift: float = 1.0) -> None:
        """Forget the last step; losses of this one are multiplied by `lift` before backward."""
        for router in self.routers.values():
            router.tally.clear(self.mesh.device)
            router.lift = lift

    @torch.no_grad()
    def finish(self, num_tokens: Tensor, *, is_wanted: bool) -> LoadReport | None:
        """Add up what all ranks counted; None where nobody needs it. `num_tokens` are those that count in the loss."""
        config = self.config
        if not (is_wanted or config.has_expert_bias):
            return None
        e = config.num_experts or 0
        table = torch.zeros(len(self.layers), e + 4, dtype=torch.float64, device=self.mesh.device)
        is_first = self.mesh.is_replica_first and self.mesh.tp_rank == 0  # biases are alike on the ranks of a stage
        for number, router in self.routers.items():
            tally, row = router.tally, table[self.layers.index(number)]
            row[:e] = tally.counts
            row[e], row[e + 1], row[e + 2] = tally.num_dropped, tally.aux_loss, tally.z_loss
            if router.expert_bias is not None and is_first:
                row[e + 3] = router.expert_bias.square().sum()
        sum_over(table, self.mesh.world_group, self.mesh.meter("world"))
        return self._report(table, num_tokens)

    def _report(self, table: Tensor, num_tokens: Tensor) -> LoadReport:
        config, e = self.config, self.config.num_experts or 0
        dropped, aux, z, squares = table[:, e:].sum(dim=0).unbind()
        per_layer = num_tokens.clamp(min=1) * len(self.layers)
        losses = {}
        if config.aux_loss_scale and config.balance_kind != "none":
            losses["balance_loss"] = aux / per_layer
        if config.z_loss_scale:
            losses["router_z_loss"] = z / per_layer
        norm = squares.sqrt() if config.has_expert_bias else None
        return LoadReport(table[:, :e], self.layers, losses, dropped, norm)

    @torch.no_grad()
    def move_biases(self, report: LoadReport | None, *, is_skipped: Tensor | bool) -> None:
        """Move biases against the load of the step, unless its update was left out."""
        if report is None or not self.config.has_expert_bias:
            return
        for number, router in self.routers.items():
            counts = report.counts[self.layers.index(number)]
            towards = (counts.mean() - counts).sign() * self.config.expert_bias_rate
            assert router.expert_bias is not None, "made with the configuration"
            if isinstance(is_skipped, Tensor):
                towards = towards * ~is_skipped
            elif is_skipped:
                continue
            router.expert_bias.add_(towards.to(router.expert_bias.dtype))


def _number(name: str, config: ModelConfig) -> int:
    place = _LAYER.match(name)
    assert place is not None, "routers are in blocks"
    return int(place[2]) + (config.num_layers if place[1] == "further" else 0)


def list_biases(model: nn.Module) -> dict[str, Tensor]:
    """The biases of routers by name; they are no parameters, but saved as weights are."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}
