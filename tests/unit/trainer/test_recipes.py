"""Every recipe: planned for the ranks that it names, and the part of every kind of rank built without memory."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.fake_ranks import RankPart, build_part, find_layout
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.config.arithmetic import count_expert_parameters, count_parameters
from megaflow_trainer.config.layout import EXPERT_AXES, Layout
from megaflow_trainer.config.memory import estimate_memory
from megaflow_trainer.model.gpt import build_gpt
from megaflow_trainer.model.sockets import Sockets

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "trainer" / "recipes"
GPU_BYTES = 80e9
WORLDS = {
    "gpt_tiny_cpu": 1,
    "gpt2_124m_1gpu": 1,
    "gpt_mini_4gpu": 4,
    "gpt_1.3b_tp8": 8,
    "llama3_8b": 8,
    "llama_70b_64gpu": 64,
    "llama3_405b": 256,
    "nemotron4_340b": 1536,
    "mixtral_8x7b": 32,
    "deepseek_v3": 2048,
}
MANY = {"deepseek_v3"}
"""Recipes whose experts lie on so many ranks that those of one stage are enough."""
LAYOUTS = {
    "gpt_mini_4gpu": "tp2.dp2",
    "gpt_1.3b_tp8": "tp8",
    "llama3_8b": "dp8",
    "llama_70b_64gpu": "tp4.pp4.dp4",
    "llama3_405b": "tp8.cp2.pp8.dp2",
    "nemotron4_340b": "tp8.pp12.dp16",
    "mixtral_8x7b": "tp2.ep4.dp16",
    "deepseek_v3": "ep64.pp16.dp128",
}


def read_recipe(name: str) -> TrainConfig:
    config, notes = read_command(
        ["--config", str(RECIPES / f"{name}.yaml"), "--data-path", "x"], world_size=WORLDS[name]
    )
    assert notes == []
    model = config.model
    return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=model.vocab_size or 50257))


@cache
def build_kinds(name: str) -> tuple[Layout, list[RankPart]]:
    """The parts of all ranks that hold one model together; those of other replicas are the same.

    A rank answers for its experts if it is the first of those that have the same, and so for everything else.
    """
    config = read_recipe(name)
    layout = find_layout(config, WORLDS[name])
    ranks = range(layout.size)
    first = {rank for rank in ranks if layout.peers(rank, ("dp_replicate", "dp_shard", "cp"))[0] == rank}
    has_experts = {rank for rank in ranks if layout.peers(rank, ("edp_replicate", "edp_shard"), EXPERT_AXES)[0] == rank}
    assert len(first) == layout.tp * layout.pp
    assert len(has_experts) == layout.ep * layout.etp * layout.pp
    if name in MANY:
        has_experts = set()
    return layout, [
        keep_owned(build_part(config, layout, rank), is_first=rank in first, has_experts=rank in has_experts)
        for rank in sorted(first | has_experts)
    ]


def keep_owned(part: RankPart, *, is_first: bool, has_experts: bool) -> RankPart:
    """A part with the weights that its rank answers for."""
    owned = {name: own for name, own in part.owned.items() if (has_experts if name in part.experts else is_first)}
    return dataclasses.replace(part, owned=owned)


def find_lost(config: TrainConfig, parts: list[RankPart]) -> list[str]:
    """Weights of the model of which some row has no rank that answers for it, or several."""
    whole = {name: tuple(weight.shape) for name, weight in build_whole(config).named_parameters()}
    rows: dict[str, list[tuple[int, int]]] = {name: [] for name in whole}
    shapes: dict[str, set[tuple[tuple[int, ...], int]]] = {name: set() for name in whole}
    for part in parts:
        for name, pieces in part.owned.items():
            rows[name] += [(start, length) for start, length, _, _ in pieces if length]
            shapes[name] |= {(shape, dim) for _, _, shape, dim in pieces}
    lost = []
    for name, shape in whole.items():
        ends = [0]
        for start, length in sorted(rows[name]):
            ends.append(start + length if start == ends[-1] else -1)
        is_whole = len(shapes[name]) == 1 and all(found == shape for found, _ in shapes[name])
        if not is_whole or ends[-1] != shape[next(iter(shapes[name]))[1]]:
            lost.append(name)
    return lost


def build_whole(config: TrainConfig) -> nn.Module:
    return build_gpt(config.model, Sockets(), device=torch.device("meta"), dtype=torch.bfloat16)


def test_every_recipe_is_in_the_table_and_says_its_ranks() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == WORLDS.keys()
    for name, world_size in WORLDS.items():
        head = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").split("\nnum_steps", 1)[0].replace("\n# ", " ")
        if world_size > 8:
            assert f"{world_size:,} GPUs" in head or "8 machines of 8 GPUs" in head
        if name in LAYOUTS:
            assert f" {LAYOUTS[name]}" in head


@pytest.mark.parametrize("name", WORLDS)
def test_a_recipe_is_complete_but_for_the_data(name: str) -> None:
    config = read_recipe(name)
    sizes = config.step.sizes
    layout = find_layout(config, WORLDS[name])
    assert config.log.name == name
    assert str(layout) == LAYOUTS.get(name, "one rank")
    assert sizes.micro_batch_size * sizes.num_micro_batches * layout.dp == sizes.global_batch_size
    assert config.checkpoint.every or config.num_steps <= 100


@pytest.mark.parametrize("name", WORLDS)
def test_the_ranks_of_a_recipe_hold_the_whole_model_once(name: str) -> None:
    config = read_recipe(name)
    layout, parts = build_kinds(name)
    elsewhere = {weight for part in parts for weight in part.experts} if name in MANY else set()
    assert set(find_lost(config, parts)) == elsewhere
    elements = sum(
        length * torch.Size(shape).numel() // shape[dim]
        for part in parts
        for pieces in part.owned.values()
        for _, length, shape, dim in pieces
    )
    assert elements == count_parameters(config.model) - bool(elsewhere) * count_expert_parameters(config.model)
    last = build_part(config, layout, layout.size - 1)  # the last replica of the last kind
    assert all(last.owned[weight] == own for weight, own in parts[-1].owned.items())


@pytest.mark.slow
def test_the_ranks_of_a_stage_hold_its_experts_once() -> None:
    config = read_recipe("deepseek_v3")
    layout = find_layout(config, WORLDS["deepseek_v3"])
    ranks = layout.peers(layout.size - 1, ("ep", "etp"), EXPERT_AXES)
    parts = [keep_owned(build_part(config, layout, rank), is_first=False, has_experts=True) for rank in ranks]
    assert len(parts) == 64
    assert len(parts[0].experts) == 3 * 4  # matrices of three layers and of the further prediction
    assert parts[0].experts.isdisjoint(find_lost(config, parts))
    assert parts[0].experts <= set(find_lost(config, parts[1:]))


@pytest.mark.parametrize("name", ["gpt_mini_4gpu", "llama_70b_64gpu"])
def test_a_rank_that_is_left_out_is_noticed(name: str) -> None:
    config = read_recipe(name)
    _, parts = build_kinds(name)
    for missing in range(len(parts)):
        assert find_lost(config, [*parts[:missing], *parts[missing + 1 :]])
        assert find_lost(config, [*parts, parts[missing]])


@pytest.mark.parametrize("name", [name for name in WORLDS if name != "gpt_tiny_cpu"])
def test_a_recipe_fits_its_gpus(name: str) -> None:
    """States are those of the built parts. Activations are the formula's of the whole model, of which a rank of the
    first stage has 1 / (tp cp) whatever pp is: pp micro-batches of 1 / pp of the layers, a little more with chunks.
    """
    config = read_recipe(name)
    layout, parts = build_kinds(name)
    own = config.parallel
    chunks = 1 + (own.pp - 1) / (own.pp * own.virtual_stages) if own.virtual_stages > 1 else 1
    activations = estimate_memory(config)[0]["activations"] * chunks / (layout.tp * layout.cp)
    largest = max(part.state_bytes for part in parts)
    assert largest + activations < 0.9 * GPU_BYTES, (largest, activations)
    least = (18 if own.zero < 3 else 16) * count_parameters(config.model)  # under ZeRO 3 weights are their masters
    assert len(parts) * largest >= least / (layout.dp * layout.cp)


def test_the_batch_script_starts_the_recipe_on_its_machines() -> None:
    text = (RECIPES / "llama_70b_64gpu.sbatch").read_text(encoding="utf-8")
    nodes, gpus = (int(re.findall(rf"#SBATCH --{word}=(\d+)", text)[0]) for word in ("nodes", "gpus-per-node"))
    assert nodes * gpus == WORLDS["llama_70b_64gpu"]
    assert "trainer/recipes/llama_70b_64gpu.yaml" in text
