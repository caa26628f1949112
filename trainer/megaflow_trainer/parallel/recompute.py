"""Activation recompute: memory of backward against time.

Full: a run of blocks keeps its input only and is computed again in backward; `uniform` does so for every run of
`num_layers` blocks, `block` for each of the first `num_layers` blocks. Selective: named parts of a block are computed
again; which ones, the configuration or its cost table says, block by block. A norm and what follows it are one part if
both are named. Random streams are replayed, so losses and gradients are those without recompute, to the bit. What
routers count is counted in forward and not again in backward.

The blocks of multi-token prediction count behind the others; `uniform` takes each of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaflow_trainer.config.sections import RecomputeConfig
from megaflow_trainer.model.gpt import Absent
from megaflow_trainer.model.moe import MoE, list_routers
from megaflow_trainer.model.routing import Tally


def apply_recompute(
    model: nn.Module,
    config: RecomputeConfig,
    parts: Sequence[Sequence[str]] | None = None,
    *,
    chunks: Sequence[nn.ModuleList] = (),
) -> None:
    """Wrap the blocks of a model, or parts of them, so that backward computes them again.

    Args:
        model: a GPT, or what a pipeline rank holds of it.
        config: what is computed again.
        parts: for each block what selective recompute takes; `modules` of all if not given.
        chunks: the blocks of each chunk of a pipeline rank: no run reaches from one into another.
    """
    main, further = _list_blocks(model)
    recomputed = Recomputer([router.tally for router in list_routers(model)])
    if config.granularity == "selective":
        given = [config.modules] * len(main) if parts is None else _pick_present(model, parts)
        extra = [given[-1]] * len(further)  # a block of multi-token prediction is like the last one
        for block, names in zip([*main, *further], [*given, *extra], strict=True):
            _wrap_parts(block, names, recomputed)
    if config.granularity == "full" and config.method == "block":
        for block in [*main, *further][: config.num_layers]:
            block.forward = recomputed(block.forward)
    if config.granularity == "full" and config.method == "uniform":
        for blocks in [list(chunk) for chunk in chunks] or [main]:
            _chain(blocks, config.num_layers or 1, recomputed)
        _chain(further, 1, recomputed)


def _list_blocks(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    blocks, further = model.blocks, model.further
    assert isinstance(blocks, nn.ModuleList), "a GPT"
    assert isinstance(further, nn.ModuleList), "a GPT"
    return [block for block in blocks if not isinstance(block, Absent)], [
        part.get_submodule("block") for part in further
    ]


def _pick_present(model: nn.Module, parts: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """What is given for each block of the model, for those that this stage of the pipeline holds."""
    assert isinstance(model.blocks, nn.ModuleList), "a GPT"
    return [names for block, names in zip(model.blocks, parts, strict=True) if not isinstance(block, Absent)]


class Recomputer:
    """Wraps functions so that backward computes them again, with `tallies` closed meanwhile."""

    def __init__(self, tallies: Sequence[Tally]) -> None:
        self.tallies = tallies

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, keeping its inputs only."""

        def run(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=self._make_contexts)

        return run

    def _make_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._close()

    @contextmanager
    def _close(self) -> Iterator[None]:
        for tally in self.tallies:
            tally.is_open = False
        try:
            yield
        finally:
            for tally in self.tallies:
                tally.is_open = True


def _wrap_parts(block: nn.Module, names: Sequence[str], recomputed: Recomputer) -> None:
    def wrap(owner: nn.Module, method: str) -> None:
        setattr(owner, method, recomputed(getattr(owner, method)))

    for half, whole, method in (("attention", "attend", "mix"), ("mlp", "feed", "narrow")):
        core = "attention_core" if half == "attention" else "mlp_activation"
        part, norm = block.get_submodule(half), block.get_submodule(f"{half}_norm")
        if half in names and f"{half}_norm" in names:
            wrap(block, whole)
        elif half in names:
            wrap(part, "forward")
        else:
            if core in names:
                for owner in _list_cores(part):
                    wrap(owner, method)
            if f"{half}_norm" in names:
                wrap(norm, "forward")


def _list_cores(part: nn.Module) -> list[nn.Module]:
    """Where the core of a half is: in it, or in a layer's experts and the one that all tokens pass."""
    if not isinstance(part, MoE):
        return [part]
    return [part.experts] if part.shared is None else [part.experts, part.shared]


def _chain(blocks: list[nn.Module], length: int, recomputed: Recomputer) -> None:
    """Let the first block of each run of `length` compute the whole run, and the others pass on what they get."""
    for first in range(0, len(blocks), length):
        parts = [block.forward for block in blocks[first : first + length]]

        def run(x: Tensor, *rest: Any, parts: list[Callable[..., Any]] = parts) -> Tensor:
            for part in parts:
                x = part(x, *rest)
            return x

        blocks[first].forward = recomputed(run)
        for block in blocks[first + 1 : first + length]:
            block.forward = lambda x, *rest: x
