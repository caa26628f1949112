"""Parts of context parallelism on one process: pieces of a sequence, blocks of attention and how they are merged."""

from __future__ import annotations

import pytest
import torch

from megaflow_trainer.ops.attention import attend_math
from megaflow_trainer.ops.attention_block import attend_block, attend_block_backward
from megaflow_trainer.parallel.context import _merge, cut_positions, make_mask


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_every_token_is_on_one_rank(kind: str) -> None:
    cut = [cut_positions(24, 3, rank, kind) for rank in range(3)]
    assert torch.cat(cut).sort().values.tolist() == list(range(24))
    assert {len(part) for part in cut} == {8}


def test_pieces_of_a_rank_see_equally_much_on_every_rank() -> None:
    seen = [int((cut_positions(64, 4, rank, "p2p") + 1).sum()) for rank in range(4)]
    assert len(set(seen)) == 1
    runs = [int((cut_positions(64, 4, rank, "a2a") + 1).sum()) for rank in range(4)]
    assert runs[3] > 6 * runs[0]


def test_a_mask_is_causal_within_its_window() -> None:
    assert make_mask(2, 2, 4, 2, torch.device("cpu")).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")  # first backward
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("groups, value_dim", [(4, 8), (2, 8), (2, 6)])
def test_two_blocks_merged_are_the_whole_attention_and_so_are_their_gradients(
    dtype: torch.dtype, window: int | None, groups: int, value_dim: int, device: str
) -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 16, dim, generator=make, dtype=torch.float64).to(device, dtype).requires_grad_()
        for heads, dim in ((4, 8), (groups, 8), (groups, value_dim))
    )
    expected = attend_math(q, k, v, dropout=0.0, window=window, scale=0.3)
    grad = torch.randn(expected.shape, generator=make, dtype=torch.float64).to(device, dtype)
    expected.backward(grad)
    q_late = q.detach()[:, :, 8:]
    grads = [torch.zeros(x.shape, dtype=torch.float64, device=device) for x in (q, k, v)]
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(2, 4, 8, value_dim, dtype=wide, device=device)
    lse = torch.full((2, 4, 8), -torch.inf, dtype=wide, device=device)
    blocks = [(slice(0, 8), 8), (slice(8, 16), 0)]
    for keys, offset in blocks:
        part = (k.detach()[:, :, keys], v.detach()[:, :, keys])
        _merge(out, lse, *attend_block(q_late, *part, offset=offset, window=window, scale=0.3))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.to(dtype), expected.detach()[:, :, 8:], atol=tolerance, rtol=tolerance)
    for keys, offset in blocks:
        given = (q_late, k.detach()[:, :, keys], v.detach()[:, :, keys])
        whole = (out.to(dtype), lse)
        options = {"offset": offset, "window": window, "scale": 0.3}
        found = attend_block_backward(grad[:, :, 8:].contiguous(), given, whole, **options)  # type: ignore[arg-type]
        grads[0][:, :, 8:] += found[0]
        grads[1][:, :, keys] += found[1]
        grads[2][:, :, keys] += found[2]
    assert q.grad is not None
    torch.testing.assert_close(grads[0][:, :, 8:].to(dtype), q.grad[:, :, 8:], atol=tolerance, rtol=tolerance)
    # keys of the second half are seen by late queries only
    for found_grad, x in zip(grads[1:], (k, v), strict=True):
        assert x.grad is not None
        torch.testing.assert_close(
            found_grad[:, :, 8:].to(dtype), x.grad[:, :, 8:], atol=3 * tolerance, rtol=3 * tolerance
        )
