"""The loss over rows of the vocabulary, in chunks: ranks hold unequal rows and take equal chunks of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.ranks import RankPool
from megaflow_trainer.config.layout import split_vocab
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.vocabulary import VocabularyLoss

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
    loss = VocabularyLoss(mesh.world_group, rows, is_sequence=False, chunk_scores=chunk_scores)
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


@pytest.mark.parametrize("chunk_scores", [1, 600, 1000, 1 << 26])
def test_unequal_rows_take_equal_chunks(two_ranks: RankPool, chunk_scores: int) -> None:
    first, second = two_ranks.run(compute, chunk_scores)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[1][1] - first[1][0] != min(second[1][1], VOCAB) - second[1][0], "real rows are unequal"
