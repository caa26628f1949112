"""What every part of the model is told of the tokens of a micro-batch. Legend: b micro-batch, s sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaflow_trainer.config.sections import ModelConfig
from megaflow_trainer.model.rope import Rotary, make_rotary
from megaflow_trainer.ops.attention_mask import DocumentMask
from megaflow_trainer.ops.dropout import drop, number_rows


@dataclass(frozen=True, slots=True)
class Context:
    """Positions of the tokens, int64 `[s]` or `[b, s]`, their rotary table, and a number a token for its dropout.

    `documents` is there if tokens see those of their own document only. `weights`, `[b, s]`, is how much each token
    counts in the loss; without it all count alike.
    """

    positions: Tensor
    rotary: Rotary | None
    rows: Tensor | None
    documents: DocumentMask | None = None
    weights: Tensor | None = None


class Places:
    """Positions and rotary tables on the device, made once for each length: making them in every micro-batch would let
    the host wait for the device, which copies from memory that is not pinned.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.kept: dict[tuple[int, torch.device, int | None], tuple[Tensor | None, Tensor, Rotary | None]] = {}

    def find(self, length: int, device: torch.device, positions: Tensor | None = None) -> tuple[Tensor, Rotary | None]:
        """Places on the device, int64 `[s]`, and their table; 0, 1, ... without `positions`, which are not changed."""
        key = (length, device, None if positions is None else id(positions))
        if key not in self.kept:
            places = torch.arange(length) if positions is None else positions
            made = places.to(device), make_rotary(self.config, places, device)
            self.kept[key] = (positions, *made)  # which keeps the tensor alive, and so its id its own
        return self.kept[key][1:]


def make_context(
    places: Places,
    tokens: Tensor,
    *,
    keys: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    weights: Tensor | None = None,
) -> Context:
    """The context of a micro-batch.

    Args:
        places: the model's.
        tokens: `[b, s]`, on the model's device.
        keys: int64 `[b]`, one number a sample from which its dropout follows; 0, 1, ... if not given.
        positions: int64 `[s]` on the CPU, place of each token in its sample; 0, 1, ... if not given.
        documents: int64 `[b, S]`, the document of each token of the whole samples, as `number_documents` gives it.
            Needed where the configuration resets positions or attention at their bounds.
        weights: float32 `[b, s]`, how much each token counts in the loss; all alike if not given.
    """
    config = places.config
    (found, rotary), rows = places.find(tokens.shape[1], tokens.device, positions), None
    if config.has_noise:
        keys = torch.arange(tokens.shape[0], device=tokens.device) if keys is None else keys
        rows = number_rows(keys, found)  # by the place in the sample: documents in one sample drop differently
    seen = None
    if config.resets_attention:
        assert documents is not None, "given where the configuration asks for it"
        seen = DocumentMask(documents)
        if positions is None:  # made here, so that blocks that are compiled find it made
            seen.make_mask(0, tokens.shape[1], tokens.shape[1], config.window)
    if not config.resets_positions:
        return Context(found, rotary, rows, seen, weights)
    assert documents is not None, "given where the configuration asks for it"
    found = place_in_documents(documents).index_select(1, found)  # [b, s]
    table = places.find(documents.shape[1], tokens.device)[1]
    return Context(found, None if table is None else table.take(found), rows, seen, weights)


def number_documents(tokens: Tensor, end_id: int) -> Tensor:
    """The document of each token, counted in its sample, int64 `[b, S]`: each ends with `end_id`."""
    ends = (tokens == end_id).to(torch.int64)
    return ends.cumsum(1) - ends


def place_in_documents(documents: Tensor) -> Tensor:
    """Place of each token in its document, int64, both `[b, S]`."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - (places * is_first).cummax(1).values


class Dropout(nn.Module):
    """One of the model's dropouts; `site` tells them apart."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.take_own: Callable[[Tensor], Tensor] | None = None
        """This rank's part of what is given for all tokens, `[b, s]`, where ranks divide them."""

    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """`[b, s, h]` to `[b, s, h]`; unchanged in evaluation."""
        if not self.training or self.p == 0:
            return x
        assert context is not None
        assert context.rows is not None, "made where the configuration has dropout"
        rows = context.rows if self.take_own is None else self.take_own(context.rows)
        return drop(x, rows, self.site, self.p)
