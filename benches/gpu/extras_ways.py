"""A way to compute a part of a model, and how two ways are compared and timed; the cases are in `extras_cases.py`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow_trainer.ops.attention_timing import keep_busy, measure_difference  # noqa: E402

DEVICE = torch.device("cuda", 0)


def draw_slope(y: Tensor) -> Tensor:
    """The gradient of a result, the same for every way: any numbers, in its dtype, laid out as it is."""
    generator = torch.Generator(y.device).manual_seed(5)
    drawn = torch.randn(y.shape, device=y.device, generator=generator).bfloat16()
    return torch.empty_like(y).copy_(drawn)


@dataclass(slots=True)
class Way:
    """One way to compute a part, as a step of training does.

    Inputs, and the gradients of results, belong to the part alone in a step, and kernels may write into them: liger's
    gate leaves its gradients where its inputs were, its rotary turns what it is handed. So every pass gets fresh ones,
    made outside of what is timed: no way pays for copies that a step does not make.

    Args:
        forward: from inputs to the result, or several; an empty tuple where it moves `states` and there is no backward.
        inputs: what it is called with; those that require gradients get them.
        weights: gradients of these are compared too, taken from `main_grads` where they are added there.
        main_grads: by position of the weight. What backward leaves as the weight's own gradient is added to it as in a
            step, and timed.
        states: what forward moves in place; compared as results are.
        slope: the gradient of a result.
        scope: what is entered around forward.
        prepare: is called after a first forward and backward.
        reset: takes back what forward has changed beside its inputs.
    """

    forward: Callable[..., Any]
    inputs: list[Tensor]
    weights: list[Tensor] = field(default_factory=list)
    main_grads: dict[int, Tensor] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)
    slope: Callable[[Tensor], Tensor] = draw_slope
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None
    kept: list[Tensor] = field(init=False)
    slopes: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.kept = [x.detach().clone() for x in self.inputs]

    def clear(self) -> None:
        """Fresh inputs and slopes, no gradients, and nothing of what forward has changed."""
        self.reset()
        for tensor in [*self.inputs, *self.weights]:
            tensor.grad = None
        for grad in self.main_grads.values():
            grad.zero_()
        for x, kept in zip(self.inputs, self.kept, strict=True):
            x.detach().copy_(kept)
        self.slopes = [self.slope(like) for like in self.slopes]

    def go(self) -> list[Tensor]:
        """Forward and backward, after `clear`: all that is timed, and what is compared. The results."""
        with self.scope():
            found = self.forward(*self.inputs)
        results = list(found) if isinstance(found, tuple) else [found]
        if not results:
            return []
        if not self.slopes:  # the first pass, which nobody times
            self.slopes = [self.slope(y) for y in results]
        torch.autograd.backward(results, self.slopes)
        for place, main_grad in self.main_grads.items():
            weight = self.weights[place]
            if weight.grad is not None:  # the product has not added it itself
                main_grad.add_(weight.grad)
                weight.grad = None
        return results

    def run(self) -> list[Tensor]:
        """Results, states and gradients, after `clear`."""
        results = self.go()
        grads = [x.grad for x in self.inputs if x.requires_grad]
        grads += [self.main_grads.get(place, weight.grad) for place, weight in enumerate(self.weights)]
        assert all(grad is not None for grad in grads)
        return [*(y.detach() for y in results), *self.states, *grads]  # type: ignore[list-item]


@dataclass(frozen=True, slots=True)
class Case:
    """An entry beside the native part.

    Args:
        name: of the entry.
        tolerance: largest difference over largest value, against the reference.
        find_obstacle: why it cannot run here, or None.
        make: native way, the entry's, and the reference in fp32 or wider, for some sizes.
    """

    name: str
    tolerance: float
    find_obstacle: Callable[[dict[str, int]], str | None]
    make: Callable[[dict[str, int]], tuple[Way, Way, Way]]


def compare(way: Way, reference: Way) -> float:
    """The largest difference over the largest value, of results and gradients; infinite where one is not finite."""
    outcomes = []
    for one in (way, reference):
        one.clear()
        outcomes.append([tensor.float().clone() for tensor in one.run()])
        one.clear()
    return measure_difference(*outcomes)


def warm_up(way: Way) -> None:
    """Compile, and learn scales."""
    for _ in range(3):
        way.clear()
        way.run()
        way.prepare()


def time_way(way: Way, repeats: int) -> float:
    """Median milliseconds of forward and backward on a GPU that has other work until the host has launched them: in a
    step the host is ahead.
    """
    found = []
    for _ in range(repeats):
        way.clear()
        keep_busy(torch.bfloat16, DEVICE)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        way.go()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended))
    return statistics.median(found)


def run_case(case: Case, sizes: dict[str, int], repeats: int) -> dict[str, Any]:
    """A row; `reason` in place of figures if the entry cannot run."""
    row: dict[str, Any] = {"entry": case.name, "tolerance": case.tolerance}
    reason = case.find_obstacle(sizes)
    if reason is not None:
        return row | {"reason": reason}
    native, other, reference = case.make(sizes)
    warm_up(native)
    warm_up(other)
    row |= {"native_error": compare(native, reference), "error": compare(other, reference)}
    del reference
    if repeats:
        row |= {"native_ms": time_way(native, repeats), "ms": time_way(other, repeats)}
    return row
