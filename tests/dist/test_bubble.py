"""The idle part of a pipeline's step as it is measured, on stages that take equally long because they sleep."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from helpers.layouts import Case, find_mesh, make_config
from helpers.ranks import RankPool
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.pipeline import Chunk, MicroBatch
from megaflow_trainer.training.build import build_model

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

FORWARD_S, BACKWARD_S = 0.2, 0.4
"""Long beside what a busy machine needs for the tiny layers around them."""


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return grad


def sleep_in(chunk: Chunk) -> None:
    forward = chunk.forward
    chunk.forward = lambda *args, **options: Sleep.apply(forward(*args, **options))  # type: ignore[method-assign]


def measure(pool_mesh: Mesh, num_stages: int, num_micro_batches: int) -> float | None:
    case = Case("gpt2_plain", f"--pipeline-model-parallel-size {num_stages}", num_stages)
    config = make_config(case)
    layout = make_layout(config.parallel, world_size=num_stages, num_kv_heads=config.model.kv_heads)
    mesh = find_mesh(pool_mesh, layout)
    if pool_mesh.rank >= num_stages:
        return None
    pipeline = build_model(config, mesh).pipeline
    assert pipeline is not None
    for chunk in pipeline.chunks:
        sleep_in(chunk)
    tokens = torch.ones(1, config.data.seq_len, dtype=torch.int64)
    batches = [MicroBatch(tokens, tokens, None, None)] * num_micro_batches
    pipeline.run(batches)  # meets the neighbours
    idle = []
    for _ in range(2):
        pipeline.run(batches)
        idle.append(pipeline.spans.idle)
    return min(idle)  # another process can only add to it


@pytest.mark.parametrize("num_stages, num_micro_batches", [(2, 4), (4, 8)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(
    eight_ranks: RankPool, num_stages: int, num_micro_batches: int
) -> None:
    found = eight_ranks.run(measure, num_stages, num_micro_batches)[:num_stages]
    expected = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    assert found == pytest.approx([expected] * num_stages, rel=0.1)
