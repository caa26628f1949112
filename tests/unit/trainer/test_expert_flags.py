"""Flags of experts that are seen in parts of the model or of the run, and not in a loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.runs import TINY, one_rank
from megaflow.errors import ConfigError, MegaflowError
from megaflow_trainer.config import TrainConfig, read_command
from megaflow_trainer.config.layout import Layout, make_layout
from megaflow_trainer.model.gpt import GPT
from megaflow_trainer.model.moe import MoE
from megaflow_trainer.ops.grouped import GROUPED, LOOP, Product, choose_product
from megaflow_trainer.parallel.apply import ParallelModel
from megaflow_trainer.parallel.expert import AllGather, AllToAll, shard_experts
from megaflow_trainer.parallel.shards import ShardMap
from megaflow_trainer.training.build import build_model, count_rows_per_expert


def configure(flags: str, world_size: int = 1) -> TrainConfig:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--num-experts", "4", *flags.split()]
    return read_command(words, world_size=world_size)[0]


def build(flags: str) -> ParallelModel:
    return build_model(configure(flags), one_rank())


def find_layer(model: ParallelModel) -> MoE:
    assert isinstance(model.module, GPT)
    layer = model.module.blocks[0].get_submodule("mlp")
    assert isinstance(layer, MoE)
    return layer


def test_tokens_travel_to_experts_as_the_flag_says() -> None:
    found = []
    for flags in ("alltoall", "allgather --moe-shared-expert-overlap"):
        words = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {flags}"
        mesh = dataclasses.replace(one_rank(), layout=Layout(ep=2, dp_replicate=2), expert_group=object())  # type: ignore[arg-type]
        model = build("")
        shard_experts(model.module, mesh, ShardMap.of(model.module), configure(words, world_size=2).parallel)
        found.append((type(find_layer(model).dispatch), find_layer(model).overlaps))
    assert found == [(AllToAll, False), (AllGather, True)]


def test_experts_are_multiplied_as_the_flag_says() -> None:
    flags = ("", "--moe-expert-kernel loop", "--moe-expert-kernel grouped", "--moe-grouped-gemm")
    found = [find_layer(build(words)).experts.product for words in flags]
    assert found == [LOOP, LOOP, GROUPED, GROUPED]
    with pytest.raises(MegaflowError, match="cannot run on cpu in float64; use bf16, or --moe-expert-kernel loop"):
        build("--moe-grouped-gemm --fp64")


@pytest.mark.parametrize(
    "dtype, fits, odd", [(torch.bfloat16, (64, 24), (64, 20)), (torch.float32, (64, 20), (30, 20))]
)
def test_widths_that_the_grouped_kernel_cannot_read_are_multiplied_one_by_one(
    dtype: torch.dtype, fits: tuple[int, int], odd: tuple[int, int]
) -> None:
    gpu = torch.device("cuda")
    assert choose_product("auto", gpu, torch.bfloat16, rows_per_group=9, widths=(64, 24)) is GROUPED
    assert choose_product("auto", gpu, torch.bfloat16, rows_per_group=9, widths=(64, 20)) is LOOP
    rows, ends = torch.ones(5, fits[0], dtype=dtype), torch.tensor([2, 5], dtype=torch.int32)
    assert GROUPED.multiply(rows, torch.ones(2, *fits, dtype=dtype), ends, is_transposed=False).shape == (5, fits[1])
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):  # what torch says of them
        GROUPED.multiply(rows.new_ones(5, odd[0]), rows.new_ones(2, *odd), ends, is_transposed=False)
    with pytest.raises(ConfigError, match=rf"multiples of {16 // dtype.itemsize} in .* {odd[0]} .*by {odd[1]} "):
        choose_product("grouped", torch.device("cpu"), dtype, rows_per_group=9, widths=odd)
    assert choose_product("grouped", torch.device("cpu"), dtype, rows_per_group=9, widths=fits) is GROUPED


@pytest.mark.parametrize("rows, product", [(1, GROUPED), (1023.5, GROUPED), (1024, LOOP), (1e6, LOOP)])
def test_on_a_gpu_few_rows_a_group_are_multiplied_together(rows: float, product: Product) -> None:
    gpu = torch.device("cuda")
    assert choose_product("auto", gpu, torch.bfloat16, rows_per_group=rows, widths=(64, 24)) is product
    assert choose_product("auto", gpu, torch.float32, rows_per_group=rows, widths=(64, 24)) is LOOP
    cpu = torch.device("cpu")
    assert choose_product("auto", cpu, torch.bfloat16, rows_per_group=rows, widths=(64, 24)) is LOOP


@pytest.mark.parametrize(
    "flags, world, rows",
    [
        ("", 1, 16.0),  # 2 x 16 tokens, 2 choices, 4 experts
        ("--expert-model-parallel-size 2", 2, 32.0),
        ("--expert-model-parallel-size 4 --num-experts 8", 4, 32.0),
        ("--tensor-model-parallel-size 2", 2, 16.0),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 2, 8.0),
        ("--context-parallel-size 2", 2, 8.0),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2", 4, 32.0),
    ],
)
def test_rows_of_an_expert_are_those_of_all_ranks_that_share_it(flags: str, world: int, rows: float) -> None:
    config = configure(f"--micro-batch-size 2 {flags}", world_size=world)
    layout = make_layout(config.parallel, world_size=world)
    assert count_rows_per_expert(config, layout) == rows
    tokens = 2 * 16 * layout.dp  # of the stage, each of which makes 2 choices on etp ranks
    ranks = layout.ep * layout.etp * layout.edp
    assert rows * (config.model.num_experts or 0) / layout.ep * ranks == tokens * 2 * layout.etp


@pytest.mark.parametrize(
    "flags, is_idle",
    [("", False), ("--moe-token-dispatcher-type allgather", True), ("--expert-model-parallel-size 1", True)],
)
def test_a_shared_expert_that_cannot_be_computed_meanwhile_is_said(flags: str, is_idle: bool) -> None:
    words = "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap"
    _, notes = read_command(
        [*TINY, "--train-iters", "1", "--data-path", "x", "--num-experts", "4", *words.split(), *flags.split()],
        world_size=2,
    )
    found = [note for note in notes if "alltoall among ranks that share experts" in note]
    assert len(found) == is_idle, notes


def test_routers_that_choose_at_random_are_said() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--moe-router-force-load-balancing"]
    said = "routers choose at random (--moe-router-force-load-balancing)"
    for experts, count in ([], 0), (["--num-experts", "4"], 1):
        _, notes = read_command([*words, *experts], world_size=1)
        assert sum(note.startswith(said) for note in notes) == count, notes


def test_a_rank_that_gets_no_rows_multiplies_none() -> None:
    matrices = torch.ones(2, 8, 16, requires_grad=True)
    for product in (LOOP, GROUPED):
        rows = torch.ones(0, 8, requires_grad=True)
        y = product.multiply(rows, matrices, product.prepare(torch.tensor([0, 0])), is_transposed=False)
        grads = torch.autograd.grad(y, (rows, matrices), torch.ones(0, 16))
        assert (tuple(y.shape), grads[0].shape, grads[1].abs().sum().item()) == ((0, 16), rows.shape, 0)


def test_biases_of_routers_move_by_their_rate() -> None:
    tokens = torch.arange(34).view(2, 17)
    moved: list[torch.Tensor] = []
    counts: list[int] = []
    for flags in ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1"):
        model = build(flags)
        assert model.load is not None
        model.load.start()
        model(tokens[:, :-1], tokens[:, 1:])
        for is_skipped in (True, torch.tensor(True)):
            model.load.move_biases(model.load.finish(torch.tensor(32.0), is_wanted=False), is_skipped=is_skipped)
        router = find_layer(model).router
        assert router.expert_bias is not None
        assert router.expert_bias.abs().sum() == 0
        model.load.move_biases(model.load.finish(torch.tensor(32.0), is_wanted=False), is_skipped=False)
        counts = router.tally.counts.tolist()
        moved.append(router.expert_bias)
    expected = torch.tensor([(count < 16) - (count > 16) for count in counts])  # 64 choices, 4 experts
    assert expected.abs().sum() > 0
    assert torch.equal(moved[1], expected.float())
    assert torch.allclose(moved[0], expected * 1e-3)
    assert find_layer(build("")).router.expert_bias is None


def test_padding_gives_every_expert_as_many_rows_as_it_may_take() -> None:
    tokens = torch.arange(34).view(2, 17)
    seen: list[list[int]] = []
    for flags in ("", "--moe-pad-expert-input-to-capacity"):
        model = build(f"--moe-expert-capacity-factor 1.5 {flags}")
        find_layer(model).experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].tolist()))
        model(tokens[:, :-1], tokens[:, 1:])
    assert seen[1] == [24] * 4  # 32 tokens x 2 / 4 experts x 1.5
    assert max(seen[0]) <= 24
    assert sum(seen[0]) <= 64


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--moe-router-topk 5", "(--moe-router-topk) 5 is above model.num_experts (--num-experts) 4; lower it"),
        ("--moe-layer-freq [1]*3", "(3 entries for 2 layers) must be a number n (every n-th layer) or a list"),
        ("--moe-layer-freq 0", "(every 0-th layer) must be"),
        (
            "--moe-layer-freq [0]*2",
            "'[0]*2' leaves no layer of the 2 with experts; name one, or drop model.num_experts",
        ),
        (
            "--moe-router-topk 1",
            "every token the weight 1, from which the router learns nothing; give model.router_pre",
        ),
        ("--moe-router-topk-scaling-factor 0", "0 takes the experts out of every layer; give a factor above 0"),
        ("--moe-layer-freq __import__('os')", "(neither a number nor a list of zeros and ones) must be"),
        ("--moe-router-num-groups 2", "are given together; give the other one too"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "3 must divide model.num_experts (--num-experts) 4"),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", "is for model.router_score"),
        ("--moe-pad-expert-input-to-capacity", "needs a capacity; give model.capacity_factor"),
        ("--moe-expert-capacity-factor 0", "0 drops every token"),
        ("--moe-router-load-balancing-type sinkhorn", "must be one of none, aux_loss, seq_aux_loss, global_aux_loss"),
    ],
)
def test_what_does_not_fit_is_said(flags: str, said: str) -> None:
    with pytest.raises(MegaflowError) as caught:
        configure(flags)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-topk 1 --moe-router-pre-softmax",
        "--moe-router-topk 1 --moe-router-score-function sigmoid",
        "--moe-router-topk 1 --num-experts 1",  # which is an MLP
    ],
)
def test_a_token_may_choose_one_expert_where_its_weight_is_learned_or_nothing_is(flags: str) -> None:
    router = find_layer(build(flags)).router
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    grad = torch.autograd.grad(router(x, None).weights.sum(), router.weight)[0]
    assert (grad.abs().max() > 0) == (len(router.weight) > 1)


@pytest.mark.parametrize("kind, is_idle", [("seq_aux_loss", True), ("none", False)])
def test_a_kind_of_a_loss_that_is_not_asked_for_is_said(kind: str, is_idle: bool) -> None:
    words = f"--train-iters 1 --data-path x --num-experts 4 --moe-router-load-balancing-type {kind}"
    notes = [*read_command([*TINY, *words.split()], world_size=1)[1]]
    assert any("no effect without --moe-aux-loss-coeff" in note for note in notes) == is_idle, notes


@pytest.mark.parametrize("factor", ["9", "1e30", "1e308"])
def test_no_expert_takes_more_rows_than_there_are_tokens(factor: str) -> None:
    model = build(f"--moe-expert-capacity-factor {factor} --moe-pad-expert-input-to-capacity")
    seen: list[list[int]] = []
    find_layer(model).experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].tolist()))
    tokens = torch.arange(34).view(2, 17)
    losses = model(tokens[:, :-1], tokens[:, 1:])
    assert seen == [[32] * 4]
    assert torch.allclose(losses, build("")(tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.parametrize(
    "flags, world, said",
    [
        ("--expert-model-parallel-size 3", 3, "4 is not divisible by parallel.ep (--expert-model-parallel-size) 3; "),
        ("--expert-model-parallel-size 2", 3, "= 2 ranks share the experts of a layer, and do not divide the 3 ranks"),
        ("--expert-tensor-parallel-size 3", 3, "model.expert_dim (--moe-ffn-hidden-size) 128 is not divisible by"),
        (
            "--tensor-model-parallel-size 2 --moe-shared-expert-intermediate-size 15",
            2,
            "model.shared_dim (--moe-shared-expert-intermediate-size) 15 is not divisible by",
        ),
        ("--tensor-model-parallel-size 2 --seq-length 15", 2, "whose ranks divide the tokens that choose experts;"),
    ],
)
def test_ranks_that_do_not_divide_experts_are_said(flags: str, world: int, said: str) -> None:
    with pytest.raises(MegaflowError) as caught:
        configure(flags, world_size=world)
    assert said in str(caught.value)


def test_experts_of_a_dense_model_are_asked_for() -> None:
    words = [*TINY, "--train-iters", "1", "--data-path", "x", "--expert-model-parallel-size", "2"]
    with pytest.raises(MegaflowError, match="2 divides experts, and the model has none; give"):
        read_command(words, world_size=2)


@pytest.mark.parametrize(
    ("name", "world", "layout"), [("mixtral_8x7b", 32, "tp2.ep4.dp16"), ("deepseek_v3", 2048, "ep64.pp16.dp128")]
)
def test_a_recipe_is_read_and_laid_out(name: str, world: int, layout: str) -> None:
    recipe = Path(__file__).parents[3] / "trainer" / "recipes" / f"{name}.yaml"
    words = ["--config", str(recipe), "--data-path", "x", "--train-iters", "10"]
    config, notes = read_command(words, world_size=world)
    assert str(make_layout(config.parallel, world_size=world)) == layout
    assert config.model.num_experts == {"mixtral_8x7b": 8, "deepseek_v3": 256}[name]
    assert not [note for note in notes if "no effect" in note]
