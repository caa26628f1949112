"""Products in fp8, put on a model from outside, and what delayed scales remember.

The linear layers of blocks get them where they are large enough on this rank; the output projection, routers and the
stacked matrices of experts never do. Ranks that share a layer each round their own part of it: the units of one
rank's part are its own (tensorwise, rowwise), and delayed ones are those of the whole tensor, since the largest values
are agreed on.

Communication. Delayed scales send one all-reduce (maximum) of [N, 3] fp32 numbers a step over all ranks, so that every
rank that holds a part or a copy of a layer has the same units, whatever the layout.

Legend: n layers with fp8 on this rank, N in the whole model, k past steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megaflow_trainer.config.precision_section import FP8_WIDTH
from megaflow_trainer.config.sections import KernelConfig, PrecisionConfig
from megaflow_trainer.model.gpt import GPT, Block
from megaflow_trainer.ops.fp8 import SMALLEST, DelayedProduct, RowwiseProduct, TensorwiseProduct
from megaflow_trainer.ops.fp8_cast import MULTIPLE, find_largest
from megaflow_trainer.ops.layer_packages import EngineProduct, TorchaoProduct
from megaflow_trainer.ops.linear import Linear, Product
from megaflow_trainer.parallel.collectives import gather_objects, max_over
from megaflow_trainer.parallel.mesh import Mesh

_BLOCK = re.compile(r"blocks\.(\d+)$")


class DelayedScales:
    """What tensors of layers reached in past steps, and the units that follow from it.

    Args:
        layers: of this rank, by name; their products are delayed ones.
        config: how units follow.
        mesh: the ranks.
    """

    def __init__(self, layers: Mapping[str, Linear], config: PrecisionConfig, mesh: Mesh) -> None:
        self.layers, self.config, self.mesh = layers, config, mesh
        self.products = [layer.product for layer in layers.values() if isinstance(layer.product, DelayedProduct)]
        names = sorted({name for own in gather_objects(list(layers), mesh.world_group) for name in own})
        self.num_everywhere = len(names)
        rows = [names.index(name) for name in layers]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
        self.limits = torch.tensor([product.limits for product in self.products], device=mesh.device).view(-1, 3)
        self.history = torch.zeros(len(rows), 3, config.history_len, device=mesh.device)
        """Largest values of inputs, weight and gradient in the last steps, latest first, `[n, 3, k]`."""

    @torch.no_grad()
    def begin(self) -> None:
        """Take the units of weights from the weights, and forget past steps: before a first step nothing is known of
        inputs and gradients, whose units stay as they are.
        """
        for layer, product in zip(self.layers.values(), self.products, strict=True):
            weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
            if weight.numel():
                product.largest_w.copy_(find_largest(weight))
        self.advance()
        self.history.zero_()

    @torch.no_grad()
    def advance(self) -> None:
        """End a step: agree on what tensors reached in it, and set the units of the next one."""
        table = torch.zeros(self.num_everywhere, 3, device=self.mesh.device)
        if self.products:
            table[self.rows] = torch.stack([one for product in self.products for one in product.largest]).view(-1, 3)
        max_over(table, self.mesh.world_group, self.mesh.meter("world"))
        if not self.products:
            return
        found = torch.where(table.isfinite()[self.rows], table[self.rows], self.history[..., 0])
        self.history.copy_(torch.cat([found[..., None], self.history[..., :-1]], dim=-1))
        torch._foreach_zero_([one for product in self.products for one in product.largest])
        self.set_units()

    @torch.no_grad()
    def set_units(self) -> None:
        """Set units from the history; where that has nothing, they stay."""
        if not self.products:
            return
        largest = self.history[..., 0] if self.config.history_algo == "most_recent" else self.history.amax(-1)
        own = [unit for product in self.products for unit in product.units]
        units = largest.clamp(min=SMALLEST) / self.limits * 2.0**self.config.margin
        units = torch.where(largest > 0, units, torch.stack(own).view(-1, 3))
        torch._foreach_copy_(own, list(units.view(-1).unbind()))

    def list_states(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the history of each layer, `[3, k]`, by the layer's name."""
        return dict(zip(self.layers, self.history.unbind(), strict=True))


class Fp8Layers:
    """The layers of this rank whose products are in fp8.

    Args:
        layers: these, by name.
        num_linear: all linear layers of its blocks.
        num_allowed: those of blocks that may have products in fp8.
        scales: delayed ones, if they are.
    """

    def __init__(
        self, layers: Mapping[str, Linear], num_linear: int, num_allowed: int, scales: DelayedScales | None
    ) -> None:
        self.layers, self.num_linear, self.num_allowed, self.scales = layers, num_linear, num_allowed, scales

    def describe(self) -> str:
        """A line for the log."""
        text = f"products in fp8 in {len(self.layers)} of {self.num_linear} linear layers of blocks"
        if self.layers or self.num_linear == 0:
            return text
        if self.num_allowed == 0:
            return f"{text}: all blocks of this rank stay in 16 bits (--first-last-layers-bf16)"
        return f"{text}: none is {FP8_WIDTH} wide both ways, below which fp8 does not pay, and a multiple of {MULTIPLE}"


def apply_fp8(model: GPT, mesh: Mesh, kind: str, config: PrecisionConfig, kernels: KernelConfig) -> Fp8Layers:
    """Give the large linear layers of blocks products in fp8. Their weights must have values.

    Args:
        model: this rank's part of it.
        mesh: the ranks.
        kind: hybrid or e4m3.
        config: how products are scaled, and which blocks are left out.
        kernels: whose products they are.
    """
    linear = dict(_list_linear(model))
    layers = {name: layer for name, (layer, number) in linear.items() if _is_taken(layer, number, model, config)}
    for layer in layers.values():
        layer.product = _make_product(layer, kind, config.recipe, kernels)
    scales = None
    if config.recipe == "delayed" and kernels.layers == "local":
        scales = DelayedScales(layers, config, mesh)
        scales.begin()
    allowed = [number for _, number in linear.values() if config.has_fp8(number, model.config.num_layers)]
    return Fp8Layers(layers, len(linear), len(allowed), scales)


def _make_product(layer: Linear, kind: str, recipe: str, kernels: KernelConfig) -> Product:
    if kernels.layers == "transformer_engine":
        return EngineProduct(layer.weight)
    if kernels.fp8 == "torchao":
        return TorchaoProduct(layer.weight, recipe)
    if recipe == "delayed":
        return DelayedProduct(kind, layer.weight.device)
    return RowwiseProduct(kind) if recipe == "rowwise" else TensorwiseProduct(kind)


def _is_taken(layer: Linear, number: int, model: GPT, config: PrecisionConfig) -> bool:
    """Whether a layer's products pay in fp8, kernels take its weight, and its block is to have them."""
    is_large = all(width >= FP8_WIDTH and width % MULTIPLE == 0 for width in layer.weight.shape)
    return is_large and config.has_fp8(number, model.config.num_layers)


def _list_linear(model: GPT) -> Iterator[tuple[str, tuple[Linear, int]]]:
    """Linear layers of blocks and the number of their block, by name; blocks of further predictions count as the
    last one.
    """
    for prefix, block in model.named_modules():
        if isinstance(block, Block):
            place = _BLOCK.match(prefix)
            number = model.config.num_layers - 1 if place is None else int(place[1])
            for name, layer in block.named_modules(prefix=prefix):
                if isinstance(layer, Linear):
                    yield name, (layer, number)
