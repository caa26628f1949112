"""AdamW by apex's fused kernel, which takes many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaflow_trainer.ops.layer_packages import APEX_ADAM
from megaflow_trainer.ops.packages import APEX
from megaflow_trainer.optim.rules import Adam, Slot, is_uniform


class ApexAdam(Adam):
    """As `Adam`; masters, gradients and moments in fp32 by apex, others weight by weight."""

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float, found_inf: torch.Tensor | None = None) -> None:
        """One call, in which the device itself leaves everything as it is where `found_inf` is 1."""
        same = [slot for slot in slots if _is_taken(slot)]
        if same:
            self._update_at_once(same, lr=lr, decay=decay, found_inf=found_inf)
        for slot in slots:
            if not _is_taken(slot):
                self._update_wide(slot, lr=lr, decay=decay)

    def _update_at_once(self, slots: list[Slot], *, lr: float, decay: float, found_inf: torch.Tensor | None) -> None:
        device = slots[0].master.device
        skip = torch.zeros(1, dtype=torch.int32, device=device)
        if found_inf is not None:
            skip.copy_(found_inf)
        steps = [slot.state["step"] for slot in slots]
        torch._foreach_add_(steps, (1 - skip[0]).to(torch.float32))
        lists = [
            [slot.grad for slot in slots],
            [slot.master for slot in slots],
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
        ]
        rate, one = torch.full((1,), lr, device=device), torch.ones(1, device=device)
        step = steps[0].to(torch.int32).view(1)
        options = (rate, *self.betas, self.eps, step, 1, 1, decay, one)  # decoupled decay, bias correction, scale
        apply, kernel = (APEX.load(path) for path in APEX_ADAM)
        apply(kernel, skip, lists, *options)


def _is_taken(slot: Slot) -> bool:
    return is_uniform(slot) and slot.master.dtype == torch.float32
