"""Optional packages on a GPU, those that are installed: against the native way, in result and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaflow_trainer.ops.attention import ATTENTION, attend_math
from megaflow_trainer.ops.attention_packages import PACKAGES
from megaflow_trainer.ops.registry import Entry, Need

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CUDA = torch.device("cuda", 0)


def find_attention(name: str, width: int, value_width: int, window: int | None) -> Entry:
    """The entry, or a skip that says what it lacks."""
    need = Need(device=CUDA, dtype=torch.bfloat16, head_dim=width, value_dim=value_width, has_window=window is not None)
    (entry,) = [entry for entry in ATTENTION if entry.name == name]
    reason = entry.obstacle(need)
    if reason is not None:
        pytest.skip(reason)
    return entry


def make_heads(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, length, width, value_width = shape
    generator = torch.Generator(CUDA).manual_seed(3)
    sizes = ((heads, width), (groups, width), (groups, value_width))
    made = (torch.randn(2, length, *size, device=CUDA, generator=generator).bfloat16() for size in sizes)
    return tuple(x.transpose(1, 2).requires_grad_() for x in made)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore")  # packages warn of themselves
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [(4, 4, 512, 64, 64), (8, 2, 384, 128, 128), (4, 4, 256, 192, 128)], ids=str)
@pytest.mark.parametrize("name", [entry.name for entry in PACKAGES])
def test_attention_of_a_package_equals_attention_written_out(
    name: str, shape: tuple[int, ...], is_compiled: bool, window: int | None
) -> None:
    """The largest difference over the largest value, against fp32: bf16 factors and results round by 2^-9 each."""
    entry = find_attention(name, shape[3], shape[4], window)
    attend = entry.function
    if is_compiled:
        attend = torch.compile(attend, fullgraph=entry.is_traceable, dynamic=False)
    q, k, v = make_heads(shape)
    grad = torch.randn_like(v[:, :1].expand(-1, shape[0], -1, -1))
    y = attend(q, k, v, dropout=0.0, window=window)
    found = [y, *torch.autograd.grad(y, (q, k, v), grad)]
    wide = [part.detach().float().requires_grad_() for part in (q, k, v)]
    expected = attend_math(*wide, dropout=0.0, window=window)
    wanted = [expected, *torch.autograd.grad(expected, wide, grad.float())]
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other).abs().max() <= 2e-2 * other.abs().max()
