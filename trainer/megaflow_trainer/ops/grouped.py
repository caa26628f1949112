"""Products of rows with one matrix a group of them: `rows[i] @ matrix[group of i]`.

Two ways: `loop` multiplies group by group, anywhere, and is the reference; its sizes are read by the host. `grouped` is
torch's grouped product, one kernel whose sizes stay on the device. Rows of one group lie one after the other.

Legend: r rows, e groups, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megaflow.errors import ConfigError

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows `[r, i]`, matrices `[e, i, o]`, rows of each group `[e]` int64, to `[r, o]`."""


def multiply_loop(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """One product a group; groups without rows give their matrix a gradient of zeros."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)])


def multiply_grouped(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """One kernel for all groups. Rows behind the last group are not computed."""
    return F.grouped_mm(rows, matrices, offs=counts.cumsum(0).to(torch.int32))


def choose_product(wanted: str, device: torch.device, dtype: torch.dtype) -> Product:
    """The product that the configuration names; `auto` is grouped on GPUs in bf16 and a loop elsewhere.

    Raises:
        ConfigError: if the grouped product cannot run on this device in this dtype.
    """
    can_group = hasattr(F, "grouped_mm") and dtype in (torch.bfloat16, torch.float32)
    if device.type == "cuda":
        can_group = can_group and dtype == torch.bfloat16
    if wanted == "grouped" and not can_group:
        raise ConfigError(
            f"the grouped product of experts cannot run on {device.type} in {str(dtype).removeprefix('torch.')}; use "
            "bf16, or --moe-expert-kernel loop"
        )
    is_grouped = wanted == "grouped" or (wanted == "auto" and can_group and device.type == "cuda")
    return multiply_grouped if is_grouped else multiply_loop
