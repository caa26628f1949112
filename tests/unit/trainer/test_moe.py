"""A layer of experts against its equations, written out once more without anything clever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import Places, make_context
from megaflow_trainer.model.experts import Experts
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.moe import MoE, make_order
from megaflow_trainer.model.routing import Router, Routing, choose, keep_first, take_best
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.dropout import draw_scores
from megaflow_trainer.ops.grouped import GROUPED, LOOP
from megaflow_trainer.ops.host_copy import HostCopy
from megaflow_trainer.ops.rows import RowKernels
from megaflow_trainer.parallel.expert import find_places

B, S, H, E = 3, 8, 16, 6
PLAIN = ModelConfig(
    num_layers=1, hidden_dim=H, num_heads=2, num_experts=E, expert_dim=12, vocab_size=32, hidden_dropout=0.0
)


def make(**changes: Any) -> tuple[ModelConfig, MoE]:
    config = dataclasses.replace(PLAIN, **changes)
    layer = MoE(config, Sockets(), 0).to(torch.float64)
    init_weights(layer, dataclasses.replace(config, init_std=0.5), seed=3)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.endswith("bias"):
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, E))
    return config, layer


def make_input() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(B, S, H, dtype=torch.float64, requires_grad=True)


def apply_expert(layer: MoE, number: int, x: Tensor) -> Tensor:
    """One expert as an MLP of its own."""
    experts, f = layer.experts, layer.router.config.expert_width
    rows = slice(number * f, (number + 1) * f)

    def widen(matrix: Any) -> Tensor:
        y = x @ matrix.weight[rows].T
        return y if matrix.bias is None else y + matrix.bias[rows]

    if experts.gate is not None:
        inner = torch.nn.functional.silu(widen(experts.gate)) * widen(experts.up)
    elif experts.activation == "squared_relu":
        inner = torch.relu(widen(experts.up)) ** 2
    else:
        inner = torch.nn.functional.gelu(widen(experts.up), approximate="tanh")
    y = inner @ experts.down.weight[rows]
    return y if experts.down.bias is None else y + experts.down.bias[number]


def score(layer: MoE, token: Tensor) -> tuple[list[int], list[Tensor], Tensor]:
    """Experts, weights and probabilities over all experts of one token, by the papers' equations."""
    config, bias = layer.router.config, layer.router.expert_bias
    logits = layer.router.weight @ token
    scores = torch.sigmoid(logits) if config.router_score == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum()
    preference = [(scores[i] + (0 if bias is None else bias[i])).item() for i in range(E)]
    allowed = set(range(E))
    if config.router_groups is not None and config.router_group_top_k is not None:
        size, best = E // config.router_groups, config.router_top_k // config.router_group_top_k
        values = [sum(sorted(preference[g * size : (g + 1) * size])[-best:]) for g in range(config.router_groups)]
        groups = sorted(range(config.router_groups), key=lambda g: -values[g])[: config.router_group_top_k]
        allowed = {i for g in groups for i in range(g * size, (g + 1) * size)}
    chosen = sorted(allowed, key=lambda i: -preference[i])[: config.router_top_k]
    if config.router_score == "sigmoid":
        total = sum(scores[i] for i in chosen) if config.router_top_k > 1 else 1.0
        weights = [scores[i] / total for i in chosen]
    elif config.router_pre_softmax:
        weights = [scores[i] for i in chosen]
    else:
        weights = [torch.exp(logits[i]) / sum(torch.exp(logits[j]) for j in chosen) for i in chosen]
    return chosen, [weight * config.router_scale for weight in weights], scores / scores.sum()


def compute_plainly(layer: MoE, x: Tensor) -> Tensor:
    out = []
    for token in x.flatten(0, 1):
        chosen, weights, _ = score(layer, token)
        y = sum(weight * apply_expert(layer, number, token) for number, weight in zip(chosen, weights, strict=True))
        out.append(y if layer.shared is None else y + layer.shared(token))
    return torch.stack(out).view_as(x)


SIGMOID: dict[str, Any] = {"router_score": "sigmoid", "has_expert_bias": True}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "one": {"router_top_k": 1, "router_pre_softmax": True},
    "pre_softmax": {"router_pre_softmax": True, "router_scale": 1.5, "router_top_k": 3},
    "swiglu": {"activation": "swiglu", "linear_bias": False, "shared_dim": 20},
    "squared_relu": {"activation": "squared_relu", "router_top_k": 6},
    "sigmoid": {**SIGMOID, "router_top_k": 3, "router_scale": 2.5},
    "sigmoid_one": {**SIGMOID, "router_top_k": 1},
    "groups": {**SIGMOID, "router_groups": 3, "router_group_top_k": 2, "router_top_k": 4},
    "softmax_bias": {"has_expert_bias": True, "router_groups": 2, "router_group_top_k": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_equations(kind: str) -> None:
    _, layer = make(**KINDS[kind])
    x, out_grad = make_input(), torch.randn(B, S, H, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    y, expected = layer(x), compute_plainly(layer, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((y * out_grad).sum(), leaves)
    wanted = torch.autograd.grad((expected * out_grad).sum(), leaves)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


def sum_losses_plainly(layer: MoE, x: Tensor, masks: Tensor) -> Tensor:
    """Losses by their definition: sums over tokens that count of the balance loss of their unit and of their z-loss."""
    config, total = layer.router.config, torch.zeros((), dtype=torch.float64)
    units = list(range(B)) if config.balance_kind == "seq_aux_loss" else [slice(None)]
    for unit in units:
        tokens = x[unit].reshape(-1, H)
        scored = [score(layer, token) for token in tokens]
        chosen = [i for experts, _, _ in scored for i in experts]
        balance = E * sum(
            chosen.count(i) / len(chosen) * torch.stack([p[i] for _, _, p in scored]).mean() for i in range(E)
        )
        total = total + config.aux_loss_scale * masks[unit].sum() * balance
    z = torch.logsumexp(x @ layer.router.weight.T, dim=-1).square()
    return total + config.z_loss_scale * (z * masks).sum()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_gradient_of_the_losses_is_that_of_plain_autograd(router: str, kind: str) -> None:
    _, layer = make(**KINDS[router], balance_kind=kind, aux_loss_scale=0.3, z_loss_scale=0.07)
    x = make_input()
    masks = (torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.7).to(torch.float64)
    context = make_context(Places(layer.router.config), torch.zeros(B, S), weights=masks)
    layer.router.lift = 2.0
    leaves = [x, layer.router.weight]
    found = torch.autograd.grad((layer(x, context) * 0).sum(), leaves)
    wanted = torch.autograd.grad(2 * sum_losses_plainly(layer, x, masks), leaves)
    assert wanted[0].abs().max() > 1e-3
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_even_choices_have_the_balance_loss_one_and_one_expert_for_all_as_much_as_experts() -> None:
    config, layer = make(router_top_k=1, aux_loss_scale=1.0)
    router = layer.router
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, :E] = torch.eye(E, dtype=torch.float64) * 50
    even = torch.eye(E, H, dtype=torch.float64).view(1, E, H)
    router(even, None)
    assert router.tally.aux_loss.item() == pytest.approx(E * 1.0)  # one a token, E tokens
    router.tally.clear(torch.device("cpu"))
    router(even[:, :1].expand(1, E, H), None)
    assert router.tally.aux_loss.item() == pytest.approx(E * E)
    assert router.tally.counts.tolist() == [E, 0, 0, 0, 0, 0]
    assert config.num_experts == E


def test_ties_go_to_the_first_expert() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert take_best(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    equal = torch.zeros(100, E, dtype=torch.float64)
    chosen, weights = choose(equal, PLAIN, None)
    assert (chosen == torch.tensor([0, 1])).all()
    assert (weights == 0.5).all()


def test_router_and_bias_stay_in_fp32_when_the_model_becomes_bf16() -> None:
    config = dataclasses.replace(PLAIN, has_expert_bias=True, router_score="sigmoid")
    layer = MoE(config, Sockets(), 0)
    init_weights(layer, config, seed=1)
    assert layer.router.expert_bias is not None
    layer.router.expert_bias.fill_(1.001)
    before = layer.router.weight.clone()
    layer = layer.bfloat16().half().to(torch.bfloat16)
    assert (layer.router.weight.dtype, layer.router.expert_bias.dtype) == (torch.float32, torch.float32)
    assert torch.equal(layer.router.weight, before)
    assert (layer.router.expert_bias == torch.tensor(1.001)).all()
    assert layer.experts.up.weight.dtype == torch.bfloat16
    routing = layer.router(torch.randn(2, 4, H, dtype=torch.bfloat16), None)
    assert routing.weights.dtype == torch.float32


def test_bf16_scores_would_choose_other_experts_and_ours_do_not() -> None:
    config = dataclasses.replace(PLAIN, num_experts=64)
    router = Router(config, -2)
    torch.manual_seed(1)
    torch.nn.init.normal_(router.weight, std=0.02)
    x = torch.randn(1, 512, H).bfloat16()
    exact = take_best((x[0].double() @ router.weight.double().T), 2)
    assert torch.equal(router(x, None).chosen, exact)
    rounded = take_best((x[0] @ router.bfloat16().weight.bfloat16().T).softmax(1), 2)
    assert (rounded != exact).any()  # the control: what the fault would do


def test_a_bias_smaller_than_bf16_can_tell_decides() -> None:
    config = dataclasses.replace(PLAIN, has_expert_bias=True, router_score="sigmoid", router_top_k=1)
    bias = torch.tensor([1.0, 1.0001, 1.0, 1.0, 1.0, 1.0])
    assert bias.bfloat16().unique().numel() == 1  # what rounding would lose
    chosen, weights = choose(torch.zeros(2, E), config, bias)
    assert (chosen.flatten().tolist(), weights.flatten().tolist()) == ([1, 1], [0.5, 0.5])  # not in the weights


@pytest.mark.parametrize("is_transposed", [True, False])
def test_products_one_after_the_other_equal_grouped_ones(is_transposed: bool) -> None:
    torch.manual_seed(2)
    counts = torch.tensor([3, 0, 5, 1])
    shape = (4, 16, 8) if is_transposed else (4, 8, 16)
    rows, matrices = torch.randn(9, 8, requires_grad=True), torch.randn(shape, requires_grad=True)
    out_grad = torch.randn(9, 16)
    outcomes = []
    for product in (LOOP, GROUPED):
        y = product.multiply(rows, matrices, product.prepare(counts), is_transposed=is_transposed)
        outcomes.append((y, *torch.autograd.grad((y * out_grad).sum(), (rows, matrices))))
    for one, two in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert outcomes[0][2][1].abs().max() == 0  # the group without rows
    main_grad = torch.ones(shape)
    y = LOOP.multiply(rows, matrices, counts.tolist(), is_transposed=is_transposed, main_grad=main_grad)
    (y * out_grad).sum().backward()
    assert matrices.grad is None
    torch.testing.assert_close(main_grad, 1 + outcomes[0][2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.grad, outcomes[0][1], rtol=0, atol=0)


def test_whole_numbers_are_counted_and_a_closed_tally_counts_nothing() -> None:
    _, layer = make()
    x = make_input()
    for _ in range(3):
        layer(x)
    chosen = layer.router(x, None).chosen
    counts = torch.bincount(chosen.flatten(), minlength=E)
    tally = layer.router.tally
    assert tally.counts.dtype == torch.int64
    assert torch.equal(tally.counts, 4 * counts)
    tally.is_open = False
    layer(x)
    assert torch.equal(tally.counts, 4 * counts)
    layer.eval()
    tally.is_open = True
    layer(x)
    assert torch.equal(tally.counts, 4 * counts)


def test_an_expert_takes_its_capacity_by_weight_or_by_place() -> None:
    chosen = torch.tensor([[0], [0], [1], [0], [0]])
    weights = torch.tensor([[0.2], [0.9], [0.5], [0.9], [0.3]])
    by_weight = keep_first(chosen, weights, num_experts=2, capacity=2)
    by_place = keep_first(chosen, None, num_experts=2, capacity=2)
    assert by_weight.flatten().tolist() == [False, True, True, True, False]
    assert by_place.flatten().tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_choices_add_nothing_and_padding_changes_nothing(policy: str) -> None:
    outcomes = []
    for pads in (False, True):
        _, layer = make(capacity_factor=0.5, drop_policy=policy, pads_to_capacity=pads)
        x = make_input()
        seen: list[list[int]] = []
        layer.experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].tolist()))
        y = layer(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        outcomes.append((y, *grads))
        routing = layer.router(x, None)
        assert routing.kept is not None
        capacity = layer.router.config.count_capacity(B * S)
        assert capacity == 4  # 24 tokens x 2 / 6 experts x 0.5
        kept = [int((routing.chosen[routing.kept] == i).sum()) for i in range(E)]
        assert max(kept) == capacity
        assert seen[0] == ([capacity] * E if pads else kept)
        assert layer.router.tally.num_dropped.item() == 2 * int((~routing.kept).sum())
        flat = x.flatten(0, 1)
        expected = torch.stack(
            [
                sum(
                    (
                        routing.weights[t, j] * apply_expert(layer, int(routing.chosen[t, j]), flat[t])
                        for j in range(2)
                        if routing.kept[t, j]
                    ),
                    torch.zeros(H, dtype=torch.float64),
                )
                for t in range(B * S)
            ]
        ).view_as(x)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for one, two in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_rows_lie_by_expert_and_inside_of_one_by_token() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]])
    order = make_order(Routing(chosen, torch.ones(3, 2), None, None, None), 4)
    assert order.counts.tolist() == [2, 2, 2, 0]
    assert order.slots.tolist() == [1, 4, 2, 5, 0, 3]
    assert order.sources.tolist() == [0, 2, 1, 2, 0, 1]
    assert order.places.tolist() == [[4, 0], [2, 5], [1, 3]]


@pytest.mark.parametrize("num_experts", [255, 256, 32767, 32768])
def test_rows_lie_by_expert_however_many_there_are(num_experts: int) -> None:
    """The numbers are sorted in the narrowest type that has them, and the one that stands for a choice not served."""
    chosen = torch.tensor([[num_experts - 1, 0], [num_experts - 2, num_experts - 1], [127, 128]])
    kept = torch.tensor([[True, True], [True, False], [True, True]])
    order = make_order(Routing(chosen, torch.ones(3, 2), kept, None, None), num_experts)
    assert order.slots.tolist() == [1, 4, 5, 2, 0]


def test_rows_are_taken_before_the_host_waits_for_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    read = HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda self: events.append("wait") or read(self))
    layer = make()[1]
    gather = layer.experts.kernels.gather
    layer.experts.kernels = RowKernels(gather=lambda *args: events.append("take") or gather(*args))
    layer(make_input(), None)
    assert events == ["take", "wait"]


def test_copies_of_parts_lie_behind_each_other_and_are_choices_of_their_own() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]])
    order = make_order(Routing(chosen, torch.ones(3, 2), None, None, None), 4)
    twice = order.copy_parts(torch.tensor([4, 2]), 2)  # experts 0 and 1 on one rank, 2 and 3 on another
    assert twice.sources.tolist() == [0, 2, 1, 2, 0, 2, 1, 2, 0, 1, 0, 1]
    assert (twice.slots % 4).tolist() == [1, 0, 0, 1, 3, 2, 2, 3, 0, 1, 2, 3]
    assert twice.places.tolist() == [[8, 0, 10, 4], [2, 9, 6, 11], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    "arriving", [[[2, 0, 1], [1, 3, 0]], [[0, 0], [0, 4]], [[0]], [[5, 1, 2, 0], [0, 0, 0, 0], [1, 1, 1, 1]]]
)
def test_rows_that_come_rank_by_rank_are_put_by_expert_and_back(arriving: list[list[int]]) -> None:
    counts = torch.tensor(arriving)
    experts = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
    from_ranks, from_experts = find_places(counts, len(experts))
    assert torch.equal(from_ranks, experts.sort(stable=True).indices)
    assert torch.equal(from_ranks[from_experts], torch.arange(len(experts)))


@pytest.mark.parametrize("known", [None, [2, 0, 1]])
def test_the_loop_reads_sizes_from_the_device_only_where_the_host_does_not_know_them(known: list[int] | None) -> None:
    assert LOOP.prepare(torch.tensor([1, 1, 1]), known) == (known or [1, 1, 1])


def test_jitter_is_drawn_by_place_in_training_alone() -> None:
    config = dataclasses.replace(PLAIN, router_jitter=0.1)
    router = Router(config, -2)
    torch.nn.init.ones_(router.weight)
    x, seen = torch.ones(2, S, H), []
    for keys in ([5, 6], [6, 5]):
        context = make_context(Places(config), torch.zeros(2, S), keys=torch.tensor(keys))
        rows = router(x, context)
        seen.append((rows, context))
    from megaflow_trainer.ops.dropout import jitter

    one, other = (jitter(x, context.rows, -2, 0.1) for _, context in seen)
    assert torch.equal(one[0], other[1])
    assert not torch.equal(one[0], one[1])
    assert 0.9 <= one.min() < 0.91
    assert 1.09 < one.max() <= 1.1
    assert one.mean().item() == pytest.approx(1.0, abs=0.02)
    router.eval()
    assert torch.equal(router(x, seen[0][1]).chosen, router(x, seen[1][1]).chosen)


def choose_at_random(config: ModelConfig, keys: Tensor, *, layer: int = 0, length: int = 1024) -> Tensor:
    """Choices of a layer's router for samples with these keys, `[b, s, k]`; in training and in evaluation."""
    router = Router(config, -2 - layer)
    torch.nn.init.zeros_(router.weight)
    x = torch.ones(len(keys), length, H)
    context = make_context(Places(config), torch.zeros(len(keys), length), keys=keys)
    chosen = router(x, context).chosen
    assert torch.equal(router.eval()(x, context).chosen, chosen)
    return chosen.view(len(keys), length, -1)


@pytest.mark.parametrize("kind", ["softmax", "one", "sigmoid", "groups"])
def test_random_choices_are_even_and_follow_from_layer_and_token(kind: str) -> None:
    config = dataclasses.replace(PLAIN, is_router_random=True, **KINDS[kind])
    keys = torch.arange(4) * 7919
    chosen = choose_at_random(config, keys)
    counts = torch.bincount(chosen.flatten(), minlength=E).double()
    assert (counts / counts.mean() - 1).abs().max() < 0.1  # 4096 tokens; one expert of one choice: 3.5 % as a rule
    halves = [choose_at_random(config, part) for part in keys.split(2)]
    assert torch.equal(torch.cat(halves), chosen)
    other = choose_at_random(config, keys, layer=1)
    assert (chosen == other).all(dim=-1).double().mean() < 0.2  # by chance 1 of 6 single experts, 1 of 30 pairs
    assert not torch.equal(chosen[0], chosen[1])


@pytest.mark.parametrize("kind", ["softmax", "pre_softmax", "sigmoid", "groups"])
def test_scores_that_random_numbers_stand_in_for_get_their_gradient(kind: str) -> None:
    config, layer = make(is_router_random=True, capacity_factor=1.0, **KINDS[kind])
    router, x = layer.router, make_input()
    context = make_context(Places(config), torch.zeros(B, S))
    assert context.rows is not None
    drawn = draw_scores(context.rows, router.site, E, torch.float64).flatten(0, 1).requires_grad_()
    chosen, weights = choose(drawn, config, None)
    routing = router(x, context)
    assert torch.equal(routing.chosen, chosen)
    assert torch.equal(routing.weights, weights)
    slope = torch.randn(weights.shape, dtype=torch.float64)
    (by_score,) = torch.autograd.grad((weights * slope).sum(), drawn)
    found = torch.autograd.grad((routing.weights * slope).sum(), [x, router.weight])
    torch.testing.assert_close(found[0], (by_score @ router.weight).view_as(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], by_score.T @ x.flatten(0, 1), rtol=1e-12, atol=1e-12)
    assert found[1].abs().max() > 1e-3
    (by_layer,) = torch.autograd.grad(layer(x, context).square().sum(), router.weight)
    assert by_layer.abs().max() > 1e-3


def test_experts_are_drawn_one_by_one_so_that_a_part_is_drawn_alike() -> None:
    from megaflow_trainer.parallel.shards import Piece, Shard

    config = PLAIN
    whole, part = Experts(config, Sockets()), Experts(dataclasses.replace(config, num_experts=2), Sockets())
    init_weights(whole, config, seed=9)
    shape = tuple(whole.up.weight.shape)
    shard = Shard(shape, 0, (Piece(3 * 12, 12), Piece(4 * 12, 12)))
    init_weights(part, config, seed=9, parts={"up.weight": shard})
    assert torch.equal(part.up.weight, whole.up.weight[36:60])
    assert not torch.equal(whole.up.weight[:12], whole.up.weight[12:24])
