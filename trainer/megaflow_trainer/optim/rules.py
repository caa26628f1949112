"""How one step moves a master weight: AdamW, Lion, SGD with momentum, Muon. Weight decay is decoupled in all of them.

States may be kept in 16 bits; arithmetic is in fp32 (fp64 for fp64 masters). Legend: g gradient, w master, m and v
moments, t number of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True, slots=True)
class Slot:
    """A master weight, its gradient and its states by name."""

    master: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    name: str = ""
    num_matrices: int = 1
    """How many matrices lie in it one below the other: those of experts."""


class Rule(Protocol):
    """Moves master weights."""

    def make_state(self, master: Tensor) -> dict[str, Tensor]:
        """The states of one weight before the first step."""

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float) -> None:
        """Move the masters of `slots` one step."""


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pick(dtype: torch.dtype, master: Tensor) -> torch.dtype:
    """The dtype of a state: the asked one, but never narrower than asked nor less than fp64 for fp64 masters."""
    return torch.float64 if master.dtype == torch.float64 else dtype


class Adam:
    """AdamW: w (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)."""

    def __init__(self, *, betas: tuple[float, float], eps: float, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self.betas, self.eps, self.dtypes = betas, eps, dtypes

    def make_state(self, master: Tensor) -> dict[str, Tensor]:
        """Number of steps and both moments."""
        first, second = (_pick(dtype, master) for dtype in self.dtypes)
        return {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master, dtype=first),
            "exp_avg_sq": torch.zeros_like(master, dtype=second),
        }

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float, found_inf: Tensor | None = None) -> None:
        """One fused call where all dtypes agree, which changes nothing where `found_inf` is 1; else weight by weight
        in fp32.
        """
        same = [slot for slot in slots if is_uniform(slot)]
        if same:
            adamw(
                [slot.master for slot in same],
                [slot.grad for slot in same],
                [slot.state["exp_avg"] for slot in same],
                [slot.state["exp_avg_sq"] for slot in same],
                [],
                [slot.state["step"] for slot in same],
                fused=True,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )
        for slot in slots:
            if not is_uniform(slot):
                self._update_wide(slot, lr=lr, decay=decay)

    def _update_wide(self, slot: Slot, *, lr: float, decay: float) -> None:
        slot.state["step"] += 1
        t = slot.state["step"]
        w, g = _widen(slot.master), _widen(slot.grad)
        m = torch.lerp(_widen(slot.state["exp_avg"]), g, 1 - self.betas[0])
        v = torch.lerp(_widen(slot.state["exp_avg_sq"]), g * g, 1 - self.betas[1])
        slot.state["exp_avg"].copy_(m)
        slot.state["exp_avg_sq"].copy_(v)
        root = (v / (1 - self.betas[1] ** t)).sqrt() + self.eps
        slot.master.copy_(w * (1 - lr * decay) - lr * (m / (1 - self.betas[0] ** t)) / root)


def is_uniform(slot: Slot) -> bool:
    """Whether master, gradient and moments have one dtype, so that torch's fused kernel takes them."""
    return slot.master.dtype == slot.grad.dtype == slot.state["exp_avg"].dtype == slot.state["exp_avg_sq"].dtype


class Lion:
    """w (1 - lr decay) - lr sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g."""

    def __init__(self, *, betas: tuple[float, float], dtype: torch.dtype) -> None:
        self.betas, self.dtype = betas, dtype

    def make_state(self, master: Tensor) -> dict[str, Tensor]:
        """One moment."""
        return {"exp_avg": torch.zeros_like(master, dtype=_pick(self.dtype, master))}

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float) -> None:
        """Weight by weight."""
        for slot in slots:
            w, g, m = _widen(slot.master), _widen(slot.grad), _widen(slot.state["exp_avg"])
            slot.master.copy_(w * (1 - lr * decay) - lr * torch.lerp(m, g, 1 - self.betas[0]).sign())
            slot.state["exp_avg"].copy_(torch.lerp(m, g, 1 - self.betas[1]))


class Sgd:
    """m = momentum m + g, then w (1 - lr decay) - lr m."""

    def __init__(self, *, momentum: float, dtype: torch.dtype) -> None:
        self.momentum, self.dtype = momentum, dtype

    def make_state(self, master: Tensor) -> dict[str, Tensor]:
        """The moving sum of gradients, if there is one."""
        return {"momentum": torch.zeros_like(master, dtype=_pick(self.dtype, master))} if self.momentum else {}

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float) -> None:
        """Weight by weight."""
        for slot in slots:
            w, g = _widen(slot.master), _widen(slot.grad)
            if self.momentum:
                g = _widen(slot.state["momentum"]) * self.momentum + g
                slot.state["momentum"].copy_(g)
            slot.master.copy_(w * (1 - lr * decay) - lr * g)


class Muon:
    """Momentum made orthogonal: w (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) orthogonalise(g + momentum m).

    The factor gives a step about the size of AdamW's, so that one learning rate serves both.
    """

    def __init__(self, *, momentum: float, dtype: torch.dtype) -> None:
        self.momentum, self.dtype = momentum, dtype

    def make_state(self, master: Tensor) -> dict[str, Tensor]:
        """The moving sum of gradients."""
        return {"momentum": torch.zeros_like(master, dtype=_pick(self.dtype, master))}

    def update(self, slots: Sequence[Slot], *, lr: float, decay: float) -> None:
        """Weight by weight."""
        for slot in slots:
            direction, width = orthogonalise_each(self.aim(slot), slot.num_matrices)
            self.move(slot, direction, width, lr=lr, decay=decay)

    def aim(self, slot: Slot) -> Tensor:
        """The direction g + momentum m, for all elements of a slot by themselves; moves the momentum."""
        g = _widen(slot.grad)
        m = _widen(slot.state["momentum"]) * self.momentum + g
        slot.state["momentum"].copy_(m)
        return g + self.momentum * m

    def move(self, slot: Slot, direction: Tensor, width: int, *, lr: float, decay: float) -> None:
        """Move a slot by its part of a direction made orthogonal; `width` is the longer side of a whole matrix."""
        size = lr * 0.2 * width**0.5
        slot.master.copy_(_widen(slot.master) * (1 - lr * decay) - size * direction)


def orthogonalise_each(stack: Tensor, num_matrices: int) -> tuple[Tensor, int]:
    """`orthogonalise` of each of the matrices that lie one below the other in `stack`, `[n rows, columns]`; and the
    longer side of one.
    """
    if num_matrices == 1:
        return orthogonalise(stack), max(stack.shape)
    matrices = stack.unflatten(0, (num_matrices, -1))
    return orthogonalise(matrices).flatten(0, 1), max(matrices.shape[1:])


def orthogonalise(matrix: Tensor, *, num_rounds: int = 5) -> Tensor:
    """A matrix with the singular vectors of `matrix`, `[..., rows, columns]`, and singular values near 1.

    Newton-Schulz rounds of the quintic 3.4445 x - 4.7750 x^3 + 2.0315 x^5, whose slope at 0 is steep: singular values
    end between about 0.7 and 1.2.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_rounds):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if is_tall else x
