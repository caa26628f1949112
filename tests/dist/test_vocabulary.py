"""The loss over rows of the vocabulary, in chunks: ranks hold unequal rows and take equal chunks of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.ranks import RankPool
from megaflow_trainer.config.layout import split_vocab
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.overlap import name_sharers
from megaflow_trainer.parallel.vocabulary import AccumulatingVocabularyLoss, VocabularyLoss

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
VOCAB, ROWS, WIDTH, TOKENS = 257, 288, 8, 40


def compute(mesh: Mesh, chunk_scores: int) -> tuple[list[float], tuple[int, int]]:
    """Losses and rows of a rank; losses and gradients are compared with those of one rank."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    target = torch.randint(0, VOCAB, (2, TOKENS // 2))
    rows = split_vocab(ROWS, 2, multiple=32)[mesh.rank]
    own = weight[rows.start : rows.stop].clone().requires_grad_()
    assert mesh.world_group is not None
    ranks = name_sharers(mesh.world_group, is_sequence=False, dim=1, meter=None)
    loss = VocabularyLoss(ranks, rows, chunk_scores=chunk_scores)
    losses = loss(x, own, target, vocab_size=VOCAB, scale=1.0)
    losses.sum().backward()
    assert x.grad is not None
    assert own.grad is not None
    plain, full = x.detach().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy((plain @ full[:VOCAB].T).flatten(0, 1), target.flatten(), reduction="none").view(2, -1)
    expected.sum().backward()
    assert plain.grad is not None
    assert full.grad is not None
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, plain.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.grad, full.grad[rows.start : rows.stop], rtol=1e-4, atol=1e-5)
    return losses.flatten().tolist(), (rows.start, rows.stop)


def accumulate(mesh: Mesh, chunk_scores: int, vocab: int, is_sequence: bool) -> None:
    """The loss that adds to a main gradient equals the plain one: losses, gradients, padding, unequal weights."""
    torch.manual_seed(0)
    full_x, weight = torch.randn(2, TOKENS // 2, WIDTH), torch.randn(ROWS, WIDTH)
    target, weights = torch.randint(0, vocab, (2, TOKENS // 2)), torch.rand(2, TOKENS // 2)
    weights[0, 3:9] = 0
    rows = split_vocab(ROWS, 2, multiple=32)[mesh.rank]
    assert mesh.world_group is not None
    ranks = name_sharers(mesh.world_group, is_sequence=is_sequence, dim=0, meter=None)
    x = full_x[mesh.rank : mesh.rank + 1] if is_sequence else full_x
    x = x.clone().requires_grad_()
    main_grad = torch.full((len(rows), WIDTH), 3.0)
    loss = AccumulatingVocabularyLoss(ranks, rows, main_grad, chunk_scores=chunk_scores)
    own = weight[rows.start : rows.stop].clone().requires_grad_()
    losses = loss(x, own, target, weights, vocab_size=vocab, scale=0.5)
    (losses * weights).sum().backward()
    plain, whole = full_x.clone().requires_grad_(), weight.clone().requires_grad_()
    scores = (plain @ whole[:vocab].T).flatten(0, 1) * 0.5
    expected = F.cross_entropy(scores, target.flatten(), reduction="none").view(2, -1)
    (expected * weights).sum().backward()
    assert plain.grad is not None
    assert whole.grad is not None
    assert own.grad is None
    wanted = plain.grad[mesh.rank : mesh.rank + 1] if is_sequence else plain.grad
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(main_grad - 3, whole.grad[rows.start : rows.stop], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_sequence", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize("chunk_scores, vocab", [(1, 257), (600, 257), (1 << 26, 257), (1000, 100)])
def test_a_loss_that_adds_its_gradient_equals_the_plain_one(
    two_ranks: RankPool, chunk_scores: int, vocab: int, is_sequence: bool
) -> None:
    """With 100 tokens the second rank has padding only."""
    two_ranks.run(accumulate, chunk_scores, vocab, is_sequence)


@pytest.mark.parametrize("chunk_scores", [1, 600, 1000, 1 << 26])
def test_unequal_rows_take_equal_chunks(two_ranks: RankPool, chunk_scores: int) -> None:
    first, second = two_ranks.run(compute, chunk_scores)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[1][1] - first[1][0] != min(second[1][1], VOCAB) - second[1][0], "real rows are unequal"
