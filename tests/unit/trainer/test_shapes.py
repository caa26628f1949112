"""The family of models: each part against its definition, and every published shape's parameters."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megaflow_trainer.config.arithmetic import count_flops_per_token, count_parameters
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.attention import Attention, LatentAttention
from megaflow_trainer.model.context import Places, make_context
from megaflow_trainer.model.gpt import GPT, FurtherPrediction, build_gpt, stack_labels
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.rope import Rotary, compute_frequencies, make_rotary, rotate
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import attend_math, attend_sdpa

CPU = torch.device("cpu")
# GPT-2 and Llama: the sizes of the published checkpoints. GPT-3 and Nemotron-4 were published rounded: by hand from
# their shapes, 12 L h^2 + 13 L h + (v + p) h + 2 h for the former.
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gpt3_1.3b": 1_315_723_264,
    "gpt3_2.7b": 2_651_553_280,
    "gpt3_6.7b": 6_658_404_352,
    "gpt3_13b": 12_853_386_240,
    "gpt3_175b": 174_604_259_328,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "nemotron4_340b": 341_029_195_776,
    "mixtral_8x7b": 46_702_792_704,
}
ROPE: dict[str, object] = {"position_kind": "rope"}
LATENT = {**ROPE, "is_latent": True, "kv_latent_dim": 12, "qk_dim": 8, "qk_rotary_dim": 4, "v_dim": 6}
LLAMA = {**ROPE, "norm": "RMSNorm", "activation": "swiglu", "linear_bias": False, "tied_embeddings": False}
KINDS: dict[str, dict[str, object]] = {
    "llama": {**LLAMA, "num_kv_heads": 2},
    "multi_query": {**ROPE, "num_kv_heads": 1},
    "wide_heads": {**ROPE, "head_dim": 16},
    "qwen": {**LLAMA, "qkv_bias": True, "qk_norm": True},
    "nemotron": {**LLAMA, "activation": "squared_relu", "norm": "LayerNorm", "rotary_fraction": 0.5},
    "no_positions": {"position_kind": "none"},
    "window": {"window": 4},
    "latent": LATENT,
    "latent_queries": {**LATENT, **LLAMA, "q_latent_dim": 10},
    "further": {"num_mtp_layers": 2},
    "further_llama": {**LLAMA, "num_mtp_layers": 1},
}


def make_config(**shape: object) -> ModelConfig:
    base: dict[str, object] = {"num_layers": 2, "hidden_dim": 32, "num_heads": 4, "max_positions": 16, "vocab_size": 61}
    base |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_multiple": 1}
    return ModelConfig(**(base | shape))  # type: ignore[arg-type]


def make_model(**shape: object) -> GPT:
    config = make_config(**shape)
    model = build_gpt(config, Sockets(), device=CPU, dtype=torch.float32)
    init_weights(model, config, seed=1)
    return model


def make_tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(0))


def count_real(config: ModelConfig) -> int:
    model = build_gpt(config, Sockets(), device=torch.device("meta"), dtype=torch.bfloat16)
    return sum(weight.numel() for weight in model.parameters())


def test_every_preset_has_a_published_count() -> None:
    assert PRESETS.keys() == PUBLISHED.keys() | {"deepseek_v3"}  # which test_moe_arithmetic.py counts part by part


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters_and_the_real_model_too(name: str) -> None:
    config = ModelConfig(**PRESETS[name])
    assert count_parameters(config) == PUBLISHED[name] == count_real(config)


@pytest.mark.parametrize("shape", KINDS.values(), ids=KINDS)
def test_every_kind_trains_sees_no_future_and_has_the_counted_parameters(shape: dict[str, object]) -> None:
    model, tokens = make_model(**shape), make_tokens(17)
    assert count_parameters(model.config) == sum(weight.numel() for weight in model.parameters())
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.mean().item() == pytest.approx(math.log(61), abs=0.1)
    loss.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    changed = tokens[:, :16].clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 61
    before, after = model.compute_logits(tokens[:, :16]), model.compute_logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], atol=1e-6, rtol=0)
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_llama_block_is_the_textbook_one() -> None:
    model, tokens = make_model(num_layers=1, **LLAMA, num_kv_heads=2), make_tokens()
    w = dict(model.named_parameters())

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"blocks.0.{name}.weight"].T

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def turn(x: torch.Tensor) -> torch.Tensor:  # complex numbers made of the two halves of a head
        angle = torch.outer(torch.arange(16), 10000.0 ** (-torch.arange(4) / 4))
        pair = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    x = w["embedding.weight"][tokens]
    q, k, v = apply("attention.qkv", norm(x)).split([32, 16, 16], dim=-1)
    q, k, v = (part.reshape(2, 16, -1, 8).transpose(1, 2) for part in (q, k, v))
    k, v = k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]
    y = attend_math(turn(q), turn(k), v, dropout=0.0).transpose(1, 2).reshape(2, 16, 32)
    x = x + apply("attention.proj", y)
    x = x + apply("mlp.down", F.silu(apply("mlp.gate", norm(x))) * apply("mlp.up", norm(x)))
    torch.testing.assert_close(model.compute_logits(tokens), norm(x) @ w["head.weight"].T)


def test_squared_relu_is_what_it_says() -> None:
    mlp, x = make_model(**KINDS["nemotron"]).blocks[0].mlp, torch.randn(3, 32)
    torch.testing.assert_close(mlp(x), torch.relu(x @ mlp.up.weight.T) ** 2 @ mlp.down.weight.T)


def test_rotary_positions_are_relative() -> None:
    rotary = make_rotary(make_config(**ROPE), torch.arange(16), CPU)
    assert rotary is not None
    q, k = torch.randn(2, 8)
    turned_q, turned_k = (rotate(x.expand(1, 1, 16, 8), rotary)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(16):
        torch.testing.assert_close(scores.diagonal(-distance), scores[distance, 0].expand(16 - distance))


def test_the_two_pairings_are_the_same_up_to_the_order_of_channels() -> None:
    halves = make_rotary(make_config(**ROPE), torch.arange(16), CPU)
    assert halves is not None
    neighbours = Rotary(halves.cos, halves.sin, is_interleaved=True)
    x = torch.randn(1, 2, 16, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even channels, then odd ones
    torch.testing.assert_close(rotate(x, neighbours)[..., order], rotate(x[..., order], halves))
    assert not torch.equal(rotate(x, neighbours), rotate(x, halves))


def test_only_the_rotated_part_of_a_head_turns() -> None:
    rotary = make_rotary(make_config(**ROPE, rotary_fraction=0.5), torch.arange(16), CPU)
    assert rotary is not None
    x = torch.randn(1, 2, 16, 8)
    assert torch.equal(rotate(x, rotary)[..., 4:], x[..., 4:])
    assert not torch.equal(rotate(x, rotary)[..., 1:, :4], x[..., 1:, :4])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_gradients_of_rotated_channels_are_those_of_differences(is_interleaved: bool, fraction: float) -> None:
    """In fp64, with the gain of yarn: turning back is not undoing."""
    config = make_config(**ROPE, rotary_fraction=fraction, rotary_scaling="yarn", rotary_factor=4.0)
    rotary = make_rotary(config, torch.arange(5), CPU)
    assert rotary is not None
    wide = Rotary(rotary.cos.double(), rotary.sin.double(), is_interleaved)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    assert rotate(x, wide).norm() > 1.01 * x.norm()
    assert torch.autograd.gradcheck(lambda x: rotate(x, wide), (x,))


@pytest.mark.parametrize("scaling", ["linear", "ntk", "llama3", "yarn"])
def test_scaling_leaves_fast_pairs_and_stretches_the_slowest_by_the_factor(scaling: str) -> None:
    shape: dict[str, object] = {**ROPE, "head_dim": 128, "max_positions": 8192, "rotary_base": 500000.0}
    plain, gain = compute_frequencies(make_config(**shape))
    assert gain == 1.0
    given = {"rotary_scaling": scaling, "rotary_factor": 4.0, "rotary_original_positions": 2048}
    scaled, gain = compute_frequencies(make_config(**shape, **given))
    ratio = plain / scaled
    assert ratio[0].item() == pytest.approx(4.0 if scaling == "linear" else 1.0, rel=1e-5)
    assert ratio[-1].item() == pytest.approx(4.0, rel=1e-4)
    assert (ratio.diff() > -1e-4).all()
    assert gain == pytest.approx(0.1 * math.log(4) + 1 if scaling == "yarn" else 1.0)


YARN = {"rotary_scaling": "yarn", "rotary_factor": 40.0, "rotary_original_positions": 4096}


@pytest.mark.parametrize("mscale, all_dim", [(1.0, 1.0), (0.707, 0.707), (1.0, 0.0), (1.0, 0.8)])
def test_yarn_grows_scores_of_latent_attention_as_deepseek_publishes(mscale: float, all_dim: float) -> None:
    growth = {"rotary_mscale": mscale, "rotary_mscale_all_dim": all_dim}
    model = make_model(**{**LATENT, **LLAMA, **YARN, **growth, "max_positions": 163840})
    seen: dict[str, object] = {}
    model.blocks[0].attention.core = lambda q, k, v, **options: seen.update(options) or v
    model.compute_logits(make_tokens())
    _, gain = compute_frequencies(model.config)
    assert gain == pytest.approx((0.1 * mscale * math.log(40) + 1) / (0.1 * all_dim * math.log(40) + 1))
    published = 12**-0.5 * (0.1 * all_dim * math.log(40) + 1) ** 2  # softmax_scale of heads 8 + 4 wide
    assert seen.get("scale", 12**-0.5) == pytest.approx(published)


def test_a_scale_of_scores_is_the_same_in_every_kernel_and_counts() -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    found = attend_sdpa(q, k, v, dropout=0.0, scale=0.7)
    torch.testing.assert_close(found, attend_math(q, k, v, dropout=0.0, scale=0.7))
    written = (q @ k.transpose(-2, -1) * 0.7).masked_fill(~torch.ones(16, 16).bool().tril(), -math.inf).softmax(-1) @ v
    torch.testing.assert_close(found, written)
    assert not torch.allclose(found, attend_sdpa(q, k, v, dropout=0.0))


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 5, 99])
def test_grouped_and_windowed_kernels_equal_attention_written_out(heads: int, groups: int, window: int | None) -> None:
    q, k, v = torch.randn(2, heads, 16, 8), torch.randn(2, groups, 16, 8), torch.randn(2, groups, 16, 8)
    expected = attend_math(q, k, v, dropout=0.0, window=window)
    torch.testing.assert_close(attend_sdpa(q, k, v, dropout=0.0, window=window), expected)


def test_a_window_forgets_what_lies_before_it() -> None:
    model, tokens = make_model(num_layers=1, window=4), make_tokens()
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 61
    before, after = model.compute_logits(tokens), model.compute_logits(changed)
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_queries_and_keys_are_normalised_per_head() -> None:
    model = make_model(**KINDS["qwen"])
    seen: list[torch.Tensor] = []
    model.blocks[0].attention.core = lambda q, k, v, *, dropout: seen.extend([q, k]) or v
    model.compute_logits(make_tokens())
    for x in seen:
        torch.testing.assert_close(x.square().mean(-1), torch.ones(2, 4, 16), atol=5e-2, rtol=0)


def test_further_predictions_enter_the_gradient_and_not_the_loss() -> None:
    tokens = make_tokens(17)
    plain, more = make_model(), make_model(num_mtp_layers=1, mtp_loss_scale=0.5)
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, more)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.sum().backward()
    assert not torch.equal(plain.embedding.weight.grad, more.embedding.weight.grad)  # type: ignore[arg-type]
    more.eval()
    assert torch.equal(more(tokens[:, :-1], tokens[:, 1:]), losses[0])


def test_a_further_prediction_is_scored_on_the_token_after_the_next() -> None:
    model, tokens = make_model(num_mtp_layers=1, mtp_loss_scale=1.0, **LLAMA), make_tokens(17)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    context = make_context(Places(model.config), inputs)
    x = model.run_blocks(model.embed(inputs, context), context)
    part = model.further[0]
    _, normed = part(x, model.embedding(labels), context)  # token i + 1 beside what is known at i
    scores = model.project(normed)[:, :15]
    expected = F.cross_entropy(scores.flatten(0, 1), tokens[:, 2:].flatten(), reduction="none").view(2, 15)
    found = model.compute_further(x, stack_labels(labels, 1), context)
    torch.testing.assert_close(found[:, :15], expected)
    assert found[:, 15].count_nonzero() == 0


def test_losses_of_further_predictions_are_kept_apart_of_the_last_forward_in_training() -> None:
    model, tokens = make_model(num_mtp_layers=2, mtp_loss_scale=0.3, **LLAMA), make_tokens(17)
    model(tokens[:, :-1], tokens[:, 1:])
    for depth in (1, 2):  # the last tokens have no label so far on
        losses, is_known = model.side_losses[f"mtp_{depth}"]
        assert losses.shape == (2, 16)
        assert torch.equal(is_known, torch.arange(16).expand(2, -1) < 16 - depth)
        assert torch.equal(losses != 0, is_known)
        assert not losses.requires_grad
    assert len(model.side_losses) == 2
    context = make_context(Places(model.config), tokens[:, :-1])
    x = model.run_blocks(model.embed(tokens[:, :-1], context), context)
    total = model.compute_further(x, stack_labels(tokens[:, 1:], 2), context)
    torch.testing.assert_close(total.sum(), 0.15 * sum(losses.sum() for losses, _ in model.side_losses.values()))
    model.eval()
    model(tokens[:, :-1], tokens[:, 1:])
    assert model.side_losses == {}


def test_output_scaling_can_be_turned_off() -> None:
    model = make_model(hidden_dim=128, is_output_scaled=False)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_mu_p_keeps_the_base_and_narrows_inner_matrices_and_scores() -> None:
    base, wide = make_model(mup_base_dim=32), make_model(mup_base_dim=32, hidden_dim=128, num_heads=16)
    assert torch.equal(base.compute_logits(make_tokens()), make_model().compute_logits(make_tokens()))
    assert wide.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert wide.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    x = torch.randn(2, 128)
    torch.testing.assert_close(wide.project(x), x @ wide.embedding.weight.T / 4)


def test_flops_of_grouped_untied_and_windowed_models() -> None:
    config = ModelConfig(**PRESETS["llama3_8b"])
    matrices = PUBLISHED["llama3_8b"] - 128256 * 4096  # the input embedding is looked up
    assert count_flops_per_token(config, seq_len=8192, is_causal=False) == 6 * matrices + 12 * 32 * 4096 * 8192
    windowed = make_config(window=4)
    full = count_flops_per_token(windowed, seq_len=16, is_causal=False)
    assert full == 6 * count_parameters(windowed) + 12 * 2 * 32 * 4


def turn_by_hand(x: torch.Tensor, base: float) -> torch.Tensor:
    """Channels i and i + r/2 of `[b, n, s, r]` as complex numbers, turned by position x base^(-2i/r)."""
    r = x.shape[-1]
    angle = torch.arange(x.shape[-2])[:, None] * base ** (-torch.arange(0, r, 2) / r)  # [s, r/2]
    turned = torch.complex(x[..., : r // 2], x[..., r // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_latent_attention_follows_its_equations() -> None:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: one turned key part for all heads, beside the latent vector."""
    torch.manual_seed(0)
    config = ModelConfig(**{**LATENT, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    attention = LatentAttention(config, Sockets(attention=attend_math))
    b, s, n, d, r, v = 2, 5, config.num_heads, config.qk_dim, config.qk_rotary_dim, config.v_dim
    x = torch.randn(b, s, config.hidden_dim)
    context = make_context(Places(config), torch.zeros(1, s, dtype=torch.int64))
    q = attention.q_up(x).view(b, s, n, d + r).transpose(1, 2)
    latent, shared = attention.kv_down(x).split([config.kv_latent_dim, r], dim=-1)
    k_plain, value = (
        attention.kv_up(attention.kv_norm(latent)).view(b, s, n, d + v).transpose(1, 2).split([d, v], dim=-1)
    )
    turned = turn_by_hand(q[..., d:], config.rotary_base)
    key = turn_by_hand(shared.unsqueeze(1), config.rotary_base)  # [b, 1, s, r]
    scores = (q[..., :d] @ k_plain.mT + turned @ key.mT) / math.sqrt(d + r)
    weights = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf).softmax(-1)
    expected = attention.proj((weights @ value).transpose(1, 2).reshape(b, s, n * v))
    torch.testing.assert_close(attention(x, context), expected, rtol=1e-5, atol=1e-6)


def test_queries_and_keys_are_normed_before_they_turn() -> None:
    """A norm with unequal gains does not commute with turning: the order is that of Qwen3."""
    torch.manual_seed(0)
    config = ModelConfig(**{**ROPE, "qk_norm": True, "hidden_dropout": 0.0, "attention_dropout": 0.0})
    seen: list[torch.Tensor] = []

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        seen.extend((q, k))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    attention = Attention(config, Sockets(attention=core))
    assert attention.q_norm is not None
    attention.q_norm.weight.data.normal_()
    x, context = (
        torch.randn(1, 4, config.hidden_dim),
        make_context(Places(config), torch.zeros(1, 4, dtype=torch.int64)),
    )
    attention(x, context)
    rotary = context.rotary
    assert rotary is not None
    queries = attention.qkv(x).view(1, 4, -1, config.head_width).transpose(1, 2)[:, : config.num_heads]
    torch.testing.assert_close(seen[0], rotate(attention.q_norm(queries), rotary))


def test_llama3_scaling_is_smooth_between_wavelengths_of_a_quarter_and_the_whole_original_length() -> None:
    """As published with Llama 3.1: factor 8, high-frequency factor 4, low-frequency factor 1, 8192 positions before."""
    config = ModelConfig(
        **ROPE,
        hidden_dim=256,
        num_heads=2,
        rotary_base=500000.0,
        rotary_scaling="llama3",
        rotary_factor=8.0,
        rotary_original_positions=8192,
    )
    found, _ = compute_frequencies(config)
    for pair, frequency in enumerate(found.tolist()):
        plain = 500000.0 ** (-2 * pair / 128)
        turns = 8192 * plain / (2 * math.pi)  # of this pair over the original length
        kept = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        assert frequency == pytest.approx(plain * (kept + (1 - kept) / 8), rel=1e-5)


def test_a_further_prediction_hands_on_states_that_are_not_normed() -> None:
    torch.manual_seed(0)
    config = ModelConfig(hidden_dim=16, num_heads=2, hidden_dropout=0.0, attention_dropout=0.0, num_mtp_layers=2)
    depth = FurtherPrediction(config, Sockets(), 12)
    states, normed = depth(torch.randn(1, 3, 16), torch.randn(1, 3, 16), None)
    torch.testing.assert_close(normed, depth.norm(states))
    assert not torch.allclose(states, normed, atol=1e-3)
