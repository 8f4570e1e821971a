"""What a cache holds while a text goes by: for pictures of policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlearn.tasks.base import Run

MOST_COLUMNS, MOST_LINES = 96, 48
"""Positions and moments of a picture, at most."""


@dataclass
class WatchedRun(Run):
    """A run that notes, after every call, which tokens its first row still holds.

    Attributes:
        moments: tokens seen, and for each position the share of the KV heads of all layers that hold it.
    """

    moments: list[tuple[int, Tensor]] = field(default_factory=list)

    def feed(self, input_ids: Tensor, *, logits: bool = True, valid: Tensor | None = None) -> Tensor:
        """As any run; then note what is held."""
        result = super().feed(input_ids, logits=logits, valid=valid)
        seen = self.cache.get_seq_length()
        held = torch.zeros(seen, dtype=torch.float64)
        heads = 0
        for layer in self.cache.managed:
            positions = self.cache.positions(layer)[0]  # [H, S]
            heads += positions.shape[0]
            held += torch.bincount(positions[positions >= 0].long(), minlength=seen).cpu()
        if heads:
            self.moments.append((seen, held / heads))
        return result

    def kept(self) -> dict[str, Any] | None:
        """The picture, small enough for a row; ``None`` where a cache does not say what it holds.

        ``tokens`` of the text, ``seen`` at each line, and a line for each moment: a digit for each of ``columns`` equal
        parts of the text, 0 for nothing held to 9 for all.
        """
        if not self.moments:
            return None
        total = self.moments[-1][0]
        columns = min(total, MOST_COLUMNS)
        column = torch.arange(total) * columns // total
        size = torch.bincount(column, minlength=columns)
        every = -(-len(self.moments) // MOST_LINES)
        chosen = self.moments[::-1][::every][::-1]  # the last one always
        lines = []
        for seen, held in chosen:
            share = torch.zeros(columns, dtype=torch.float64).index_add_(0, column[:seen], held) / size
            lines.append("".join(str(round(9 * float(x))) for x in share))
        return {"tokens": total, "seen": [seen for seen, _ in chosen], "lines": lines}
