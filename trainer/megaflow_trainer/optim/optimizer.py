"""The optimizer: master weights, their states, and a rule that moves them; the weights are rounded from the masters.

A master is the weight itself where the dtypes agree, else a copy in the wanted dtype; with offload it lies, like the
states, in the CPU's memory, and the gradient goes there. Which rule moves which weight is decided by name and shape.
AdamW on a GPU moves everything in one pass (`fused.py`); else a rule moves its weights, then they are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor

from megaflow_trainer.config.sections import OptimConfig
from megaflow_trainer.optim.apex import ApexAdam
from megaflow_trainer.optim.fused import FusedAdam, Moved, make_fused
from megaflow_trainer.optim.rules import Adam, Lion, Muon, Rule, Sgd, Slot, is_uniform, orthogonalise_each
from megaflow_trainer.optim.scaler import LossScaler
from megaflow_trainer.parallel.buckets import MainParameter
from megaflow_trainer.parallel.matrices import Matrices

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EMBEDDINGS = ("embedding.weight", "positions.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that one rule moves with the same decay and rate."""

    rule: Rule
    slots: list[Slot]
    decay_factor: float
    lr_factor: float


def is_inner(name: str) -> bool:
    """Whether Muon moves a weight of several dims: embeddings are no maps, nor are biases, a row for each expert."""
    return name not in _EMBEDDINGS and not name.endswith(".bias")


class Optimizer:
    """Masters and states by the names of the model's parameters.

    Args:
        parameters: what `parallel` exposes of the model on this rank.
        config: kind, rates and dtypes.
        mup_ratio: base width / width under mu-P: matrices inside the blocks move at this part of the rate.
        kernel: of AdamW: native or apex.
        scaler: the loss scale of fp16; None in other precisions.
        matrices: puts whole matrices together for Muon; not needed where each lies on one rank.
        stacks: weights that are several matrices one below the other, and how many of them this rank has.
    """

    def __init__(
        self,
        parameters: Sequence[MainParameter],
        config: OptimConfig,
        *,
        mup_ratio: float = 1.0,
        kernel: str = "native",
        scaler: LossScaler | None = None,
        matrices: Matrices | None = None,
        stacks: Mapping[str, int] | None = None,
    ) -> None:
        self.weights = {main.name: main.weight for main in parameters}
        self.masters = {main.name: _make_master(main, config) for main in parameters}
        self.is_matrix = {main.name: main.is_matrix for main in parameters}
        self.main_grads = {main.name: main.main_grad for main in parameters}
        self.scaler, self.is_offloaded = scaler, config.is_offloaded
        self.matrices = matrices if config.kind == "muon" else None
        self.stacks = stacks or {}
        self.weight_decay = config.weight_decay
        self.slots: dict[str, Slot] = {}
        self.groups: list[Group] = []
        self._sort(config, mup_ratio, kernel)
        self.fused: FusedAdam | None = None
        self.obstacle: str | None = "--no-fused-optimizer is given"
        """Why the weights are not moved in one pass."""
        if kernel != "native":
            self.obstacle = f"--adam-kernel {kernel} is given"
        elif config.is_fused and self.matrices is None:
            self.fused, self.obstacle = make_fused(self._list_moved())

    def _list_moved(self) -> list[Moved]:
        names = {id(slot): name for name, slot in self.slots.items()}
        return [
            Moved(slot, group.rule, self.weights[names[id(slot)]].detach(), group.decay_factor, group.lr_factor)
            for group in self.groups
            for slot in group.slots
        ]

    def _sort(self, config: OptimConfig, mup_ratio: float, kernel: str) -> None:
        """Put each weight into the group of its rule, decay and rate."""
        main, rest = _make_rules(config, ApexAdam if kernel == "apex" else Adam)
        found: dict[tuple[Rule, float, float], list[Slot]] = {}
        for name, master in self.masters.items():
            is_matrix = self.is_matrix[name]
            rule = main if is_matrix and is_inner(name) else rest
            decay = 1.0 if is_matrix and not any(fnmatch(name, pattern) for pattern in config.no_decay) else 0.0
            lr = mup_ratio if is_matrix and name.startswith(("blocks.", "further.")) else 1.0
            grad = torch.empty_like(self.main_grads[name], device="cpu") if self.is_offloaded else self.main_grads[name]
            slot = Slot(master.detach(), grad, rule.make_state(master), name, self.stacks.get(name, 1))
            self.slots[name] = slot
            found.setdefault((rule, decay, lr), []).append(slot)
        self.groups = [Group(rule, slots, decay, lr) for (rule, decay, lr), slots in found.items()]

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` can be told by the device itself to change nothing."""
        return self.fused is not None or self._has_uniform_adam

    @property
    def _has_uniform_adam(self) -> bool:
        if self.is_offloaded or self.matrices is not None:  # all ranks decide alike, whichever rules their parts have
            return False
        return all(
            isinstance(group.rule, Adam) and all(is_uniform(slot) for slot in group.slots) for group in self.groups
        )

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float | None = None,
        *,
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Move the masters by their gradients and round them into the weights.

        Gradients are multiplied by `factor`, a scalar on the device, and may hold the product afterwards. With
        `found_inf`, float32 scalar on the device, nothing else changes where it is 1; only if `skips_on_device`.
        """
        decay = self.weight_decay if weight_decay is None else weight_decay
        if self.fused is not None:
            self.fused.step(lr, decay, factor=factor, skip=found_inf)
            return
        if factor is not None and self.main_grads:
            grads = list(self.main_grads.values())
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        if self.is_offloaded:
            for name, slot in self.slots.items():
                slot.grad.copy_(self.main_grads[name])
        if self.matrices is not None:
            self._move_matrices(self.matrices, lr, decay)
        for group in self.groups:
            rates = {"lr": lr * group.lr_factor, "decay": decay * group.decay_factor}
            if self.matrices is not None and isinstance(group.rule, Muon):
                continue
            if found_inf is not None and isinstance(group.rule, Adam):
                group.rule.update(group.slots, **rates, found_inf=found_inf)
            else:
                group.rule.update(group.slots, **rates)
        self.copy_to_weights()

    def _move_matrices(self, matrices: Matrices, lr: float, decay: float) -> None:
        """Muon where ranks have parts of matrices. All of them come to all ranks, whatever these step of each."""
        own = {
            slot.name: (group, slot) for group in self.groups if isinstance(group.rule, Muon) for slot in group.slots
        }
        rule = next((group.rule for group, _ in own.values()), None)
        aims = {name: rule.aim(slot) for name, (_, slot) in own.items()} if isinstance(rule, Muon) else {}
        device = torch.device("cpu") if self.is_offloaded else matrices.mesh.device
        dtype = next(
            (torch.promote_types(master.dtype, torch.float32) for master in self.masters.values()), torch.float32
        )
        names = [name for name in matrices.names if is_inner(name)]
        for name, whole in matrices.join(names, aims, device=device, dtype=dtype):
            if name in own and isinstance(rule, Muon):
                group, slot = own[name]
                direction, width = orthogonalise_each(whole, slot.num_matrices)
                rates = {"lr": lr * group.lr_factor, "decay": decay * group.decay_factor}
                rule.move(slot, matrices.cut(name, direction), width, **rates)

    def list_states(self, name: str) -> dict[str, Tensor]:
        """What there is to save of one weight, by kind: states, and the master where the weight does not hold it."""
        tensors = dict(self.slots[name].state)
        if self.masters[name].dtype != self.weights[name].dtype:
            tensors["master"] = self.masters[name]
        return tensors

    def list_tensors(self) -> dict[str, Tensor]:
        """Everything to save, as KIND.NAME."""
        return {f"{key}.{name}": value for name in self.masters for key, value in self.list_states(name).items()}

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """Round the masters into the weights, where these are another tensor."""
        pairs = [(self.weights[name], master) for name, master in self.masters.items()]
        apart = [(weight, master) for weight, master in pairs if weight.data_ptr() != master.data_ptr()]
        if apart:
            torch._foreach_copy_([weight.data for weight, _ in apart], [master for _, master in apart])


def _make_rules(config: OptimConfig, kind: type[Adam]) -> tuple[Rule, Rule]:
    """The rule for matrices inside the model, and that for embeddings, biases and norms."""
    if config.kind == "lion":
        rule: Rule = Lion(betas=(config.adam_beta1, config.adam_beta2), dtype=DTYPES[config.exp_avg_dtype])
        return rule, rule
    if config.kind == "sgd":
        rule = Sgd(momentum=config.sgd_momentum, dtype=DTYPES[config.exp_avg_dtype])
        return rule, rule
    adam = kind(
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        dtypes=(DTYPES[config.exp_avg_dtype], DTYPES[config.exp_avg_sq_dtype]),
    )
    if config.kind == "muon":
        return Muon(momentum=config.muon_momentum, dtype=DTYPES[config.exp_avg_dtype]), adam
    return adam, adam


def _make_master(main: MainParameter, config: OptimConfig) -> Tensor:
    """The tensor that is stepped: the weight itself, seen by a second name, or a copy of it."""
    weight = main.weight.detach()
    dtype = torch.promote_types(weight.dtype, DTYPES[config.main_dtype])  # routers are in fp32 in every run
    if config.is_offloaded:
        return weight.to("cpu", dtype, copy=True)
    return weight.to(dtype)
