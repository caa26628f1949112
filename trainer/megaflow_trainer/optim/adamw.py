"""AdamW on fp32 master weights: decay for matrices and embeddings, none for biases and norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megaflow_trainer.config.sections import OptimConfig
from megaflow_trainer.parallel.data import MainParameter


class AdamW:
    """Moments and, where weights are not fp32, master weights; names are those of the model's parameters."""

    def __init__(self, parameters: Sequence[MainParameter], config: OptimConfig) -> None:
        self.weights = {main.name: main.weight for main in parameters}
        self.masters = {main.name: _make_master(main) for main in parameters}
        decayed = [master for master in self.masters.values() if master.dim() > 1]
        spared = [master for master in self.masters.values() if master.dim() <= 1]
        self.inner = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for master in self.masters.values():
            self.inner.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move the masters by their gradients and copy them to the weights."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        self.copy_to_weights()

    def list_tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name: moments, steps, and masters where they are not the weights themselves."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.inner.state[master].items():
                tensors[f"{key}.{name}"] = value
            if master.dtype != self.weights[name].dtype:
                tensors[f"master.{name}"] = master
        return tensors

    def copy_to_weights(self) -> None:
        """Round the masters into the weights, where these are another tensor."""
        pairs = [(self.weights[name], master) for name, master in self.masters.items()]
        apart = [(weight, master) for weight, master in pairs if weight.dtype != master.dtype]
        if apart:
            torch._foreach_copy_([weight.data for weight, _ in apart], [master for _, master in apart])


def _make_master(main: MainParameter) -> Tensor:
    """The fp32 tensor that is stepped: the weight itself, seen by a second name, or a copy of it."""
    master = main.weight.detach()
    if master.dtype != torch.float32:
        master = master.float()
    master.grad = main.main_grad
    return master
