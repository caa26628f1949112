"""Dropout by place: the right share, independent of what a rank holds, other in every site, sample and token."""

from __future__ import annotations

import pytest
import torch

from megaflow_trainer.ops.dropout import drop, make_mask, number_rows

ROWS = number_rows(torch.arange(100, 108), torch.arange(64))  # [8, 64]
CHANNELS = 128
N = ROWS.numel() * CHANNELS


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_dropped_share_is_p_in_all_and_along_every_axis(p: float) -> None:
    dropped = ~make_mask(ROWS, 3, CHANNELS, p)
    six_sigma = 6 * (p * (1 - p)) ** 0.5
    assert abs(dropped.float().mean().item() - p) < six_sigma / N**0.5
    for dim in range(3):
        others = tuple(d for d in range(3) if d != dim)
        worst = (dropped.float().mean(others) - p).abs().max().item()
        assert worst < six_sigma / (N / dropped.shape[dim]) ** 0.5


def test_masks_of_two_sites_samples_tokens_and_channels_are_independent() -> None:
    one, other = make_mask(ROWS, 0, CHANNELS, 0.5), make_mask(ROWS, 1, CHANNELS, 0.5)
    pairs = {
        "site": (one, other),
        "sample": (one[:-1], one[1:]),
        "token": (one[:, :-1], one[:, 1:]),
        "channel": (one[..., :-1], one[..., 1:]),
    }
    for name, (a, b) in pairs.items():
        assert abs((a == b).float().mean().item() - 0.5) < 6 * 0.5 / a.numel() ** 0.5, name


def test_a_slice_of_the_tokens_has_that_slice_of_the_mask() -> None:
    whole = make_mask(ROWS, 5, CHANNELS, 0.3)
    part = number_rows(torch.arange(103, 105), torch.tensor([40, 7, 8]))
    assert torch.equal(make_mask(part, 5, CHANNELS, 0.3), whole[3:5][:, [40, 7, 8]])


def test_what_is_kept_is_divided_by_the_kept_share_and_the_gradient_too() -> None:
    x = torch.randn(8, 64, CHANNELS, requires_grad=True)
    y = drop(x, ROWS, 2, 0.25)
    mask = make_mask(ROWS, 2, CHANNELS, 0.25)
    torch.testing.assert_close(y, x * mask / 0.75)
    y.backward(torch.full_like(y, 3.0))
    torch.testing.assert_close(x.grad, mask * 3.0 / 0.75)


def test_the_mask_of_a_place_is_pinned() -> None:
    row = make_mask(number_rows(torch.tensor([1234]), torch.tensor([5])), 7, 32, 0.5)[0, 0]
    assert "".join(str(int(kept)) for kept in row) == "00111100100010101110001000110011"


def test_a_compiled_mask_is_the_same() -> None:
    """Numbers that wrap are no indices: as such the compiler made other masks of them."""
    compiled = torch.compile(make_mask, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(ROWS, 3, CHANNELS, 0.2), make_mask(ROWS, 3, CHANNELS, 0.2))
