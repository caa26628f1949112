"""Positions and attention that stop at the end of a document: a packed sample against its documents one by one."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from helpers.pairs import write_pair
from helpers.runs import SHAPE, one_rank, read_curve, run_tiny
from megaflow import PreprocessOptions, preprocess
from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.context import number_documents, place_in_documents
from megaflow_trainer.model.gpt import GPT, build_gpt
from megaflow_trainer.model.init import init_weights
from megaflow_trainer.model.sockets import Sockets
from megaflow_trainer.ops.attention import attend_math, attend_sdpa
from megaflow_trainer.ops.attention_block import attend_block
from megaflow_trainer.training.build import build_model
from megaflow_trainer.training.run import train

END = 0
LENGTHS = ([5, 1, 10], [16], [3, 13])  # of the documents of three samples; the last ones go on behind them
SHAPES = {
    "learned": {},
    "no_positions": {"position_kind": "none"},
    "rope": {"position_kind": "rope", "num_kv_heads": 2, "activation": "swiglu", "norm": "RMSNorm"},
    "interleaved": {"position_kind": "rope", "rotary_interleaved": True},
    "window": {"position_kind": "rope", "window": 4},
    "latent": {
        "is_latent": True,
        "position_kind": "rope",
        "kv_latent_dim": 8,
        "qk_dim": 8,
        "qk_rotary_dim": 4,
        "v_dim": 6,
    },
}


def make_model(shape: dict[str, object], core: object = attend_sdpa, **flags: bool) -> GPT:
    base: dict[str, object] = {"num_layers": 2, "hidden_dim": 32, "num_heads": 4, "max_positions": 16, "vocab_size": 61}
    base |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, **shape, **flags}
    config = ModelConfig(**base)  # type: ignore[arg-type]
    model = build_gpt(config, Sockets(attention=core), device=torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]
    init_weights(model, config, seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # so that positions and far tokens matter
    return model


def make_samples() -> torch.Tensor:
    tokens = torch.randint(1, 61, (3, 17), generator=torch.Generator().manual_seed(0))
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0)[:-1] - 1] = END
    return tokens


def run_alone(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Losses `[3, 16]` of the documents, each a sample of its own."""
    rows = []
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        begins = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        parts = [model(row[None, begin:end], row[None, begin + 1 : end + 1]) for begin, end in pairwise(begins)]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def test_documents_are_numbered_and_their_tokens_placed() -> None:
    tokens = torch.tensor([[4, 0, 5, 6, 0, 0, 7], [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]])
    numbers = number_documents(tokens, 0)
    assert numbers.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
    assert place_in_documents(numbers).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("core", [attend_sdpa, attend_math])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_packed_sample_has_the_losses_and_gradients_of_its_documents_alone(kind: str, core: object) -> None:
    tokens = make_samples()
    alone, packed = (
        make_model(SHAPES[kind], core, **flags) for flags in ({}, {"resets_positions": True, "resets_attention": True})
    )
    expected = run_alone(alone, tokens)
    found = packed(tokens[:, :-1], tokens[:, 1:], documents=number_documents(tokens[:, :-1], END))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    crossing = alone(tokens[:, :-1], tokens[:, 1:])
    assert (crossing - expected).abs().max() > 1e-2  # documents that see each other have other losses
    torch.testing.assert_close(crossing[1], expected[1], atol=1e-5, rtol=1e-5)  # the sample that is one document
    expected.sum().backward()
    found.sum().backward()
    for (name, weight), other in zip(alone.named_parameters(), packed.parameters(), strict=True):
        assert weight.grad is not None
        assert other.grad is not None
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(other.grad, weight.grad, atol=1e-5 * max(scale, 1), rtol=1e-4, msg=name)


@pytest.mark.parametrize("flag", ["resets_positions", "resets_attention"])
def test_each_of_the_two_does_its_part_only(flag: str) -> None:
    tokens = make_samples()
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    given = {"documents": number_documents(inputs, END)}
    found, plain = make_model({}, **{flag: True})(inputs, labels, **given), make_model({})(inputs, labels)
    changed = inputs.clone()
    changed[0, 0] += 1
    again = make_model({}, **{flag: True})(changed, labels, **given)
    sees_the_other_document = not torch.equal(found[0, 6:], again[0, 6:])
    assert sees_the_other_document == (flag == "resets_positions")
    assert not torch.equal(found[0], plain[0])
    torch.testing.assert_close(found[1], plain[1], atol=1e-5, rtol=1e-5)


def test_documents_of_one_sample_drop_other_elements() -> None:
    model = make_model({"hidden_dropout": 0.5}, resets_positions=True, resets_attention=True).train()
    tokens = torch.tensor([[7, 8, 9, 0, 7, 8, 9, 0]])
    losses = model(tokens, tokens.roll(-1, 1), documents=number_documents(tokens, END))[0]
    assert not torch.equal(losses[:4], losses[4:])
    same = model.eval()(tokens, tokens.roll(-1, 1), documents=number_documents(tokens, END))[0]
    torch.testing.assert_close(same[:4], same[4:])


def test_a_block_that_a_query_does_not_see_adds_nothing() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    numbers = torch.tensor([[1, 1, 2, 2]]), torch.tensor([[0, 0, 0, 1]])
    out, lse = attend_block(q, k, v, offset=4, window=None, scale=0.3, documents=numbers)
    assert torch.equal(out[:, :, :2], v[:, :, 3:].expand(-1, -1, 2, -1))
    assert out[:, :, 2:].count_nonzero() == 0
    assert lse[:, :, 2:].isneginf().all()


def test_documents_are_kept_apart_by_the_data_where_no_token_ends_them(tmp_path: Path) -> None:
    text = "".join(f'{{"text": "document {n}, some words long"}}\n' for n in range(60))
    (tmp_path / "corpus.jsonl").write_text(text)
    flag, losses = "--dataloader-inter-document-masking", {}
    for name in ("ends", "none"):
        options = PreprocessOptions(output_prefix=str(tmp_path / name), append_eod=name == "ends")
        prefix = preprocess(tmp_path / "corpus.jsonl", options).pairs[0].prefix
        for own in ((), (flag,), ("--reset-position-ids", "--reset-attention-mask")):
            given = [*own, "--train-iters", "2", "--run-dir", str(tmp_path / f"{name}-{len(own)}")]
            assert run_tiny(prefix, given, base=SHAPE) == 0
            losses[name, len(own)] = [row[1] for row in read_curve(tmp_path / f"{name}-{len(own)}")]
    assert losses["ends", 1] == losses["ends", 2] != losses["ends", 0]
    assert losses["none", 1] != losses["none", 0] == losses["none", 2]
    with pytest.raises(ConfigError, match="predicts tokens beyond their ends"):
        read_command(["--data-path", "x", "--train-iters", "1", flag, "--mtp-num-layers", "1"], world_size=1)
    made_up = {
        own: tmp_path / f"mock{len(own)}" for own in ((flag,), ("--reset-position-ids", "--reset-attention-mask"), ())
    }
    for own, folder in made_up.items():
        words = [*SHAPE, "--mock-data", "--vocab-size", "64", *own, "--train-iters", "2", "--run-dir", str(folder)]
        config, notes = read_command(words, world_size=1)
        assert train(config, one_rank(), notes) == 0
    by_flag, by_token, plain = ([row[1] for row in read_curve(folder)] for folder in made_up.values())
    assert by_flag == by_token != plain
    stream = [flag, "--train-iters", "2", "--run-dir", str(tmp_path / "stream"), "--vocab-size", "50257"]
    assert run_tiny(str(tmp_path / "corpus.jsonl"), stream, base=SHAPE) == 0


def test_the_flags_train_by_the_ends_in_the_data_and_refuse_what_they_cannot(tmp_path: Path) -> None:
    text = "".join(f'{{"text": "document {n}, some words long"}}\n' for n in range(60))
    (tmp_path / "corpus.jsonl").write_text(text)
    prefix = preprocess(tmp_path / "corpus.jsonl").pairs[0].prefix
    flags = {"plain": (), "positions": ("--reset-position-ids",), "attention": ("--reset-attention-mask",)}
    flags["both"] = (*flags["positions"], *flags["attention"])
    losses = {}
    for name, own in flags.items():
        given = [*own, "--train-iters", "2", "--run-dir", str(tmp_path / name)]
        assert run_tiny(prefix, given, base=SHAPE) == 0
        losses[name] = [row[1] for row in read_curve(tmp_path / name)]
    assert len({tuple(row) for row in losses.values()}) == 4
    no_ends = write_pair(tmp_path / "no_ends")
    with pytest.raises(ConfigError, match="end-of-document token 50256 is outside the vocabulary of 64 tokens"):
        run_tiny(no_ends, ["--reset-position-ids", "--train-iters", "1", "--run-dir", str(tmp_path / "refused")])
    base = ["--data-path", prefix, "--train-iters", "1", *flags["both"]]
    with pytest.raises(ConfigError, match="predicts tokens beyond their ends"):
        read_command([*base, "--mtp-num-layers", "1"], world_size=1)
    config = read_command([*base, "--attention-backend", "flash", "--vocab-size", "64"], world_size=1)[0]
    with pytest.raises(ConfigError, match="flash attention needs a CUDA GPU"):
        build_model(config, one_rank())
