"""What a sliding window hides from the queries of a forward, computed on the device once for all layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import FirstRows, pack_mask


class Window:
    """The rows that T queries a sequence see under one window, in fixed buffers.

    Args:
        window: positions that a query sees, its own included.
        depths: position of each of the N tail rows, counted from the tail's first; the queries are the last T
            of them.
        queries: T.
        batch: sequences, B.
        device: of the buffers.

    Attributes:
        seen: the first visible row of each query. Rows of the tail are for the mask to hide: nodes of a tree
            are not at the positions of their rows.
    """

    def __init__(
        self, window: int, depths: Sequence[int], queries: int, batch: int, device: torch.device
    ) -> None:
        own = depths[len(depths) - queries :]
        before = [min(0, depth - window + 1) for depth in own]
        sequences: list[int] = []
        offsets: list[int] = []
        parts = []
        for steps in (before, [min(before)], [max(before)]):
            count = batch * len(steps)
            parts.append(slice(len(offsets), len(offsets) + count))
            # To 16 bytes: kernels are specialised on the alignment of their pointers.
            spare = [0] * (-count % 4)
            sequences += [*(b for b in range(batch) for _ in steps), *spare]
            offsets += [*steps * batch, *spare]
        self._sequences = torch.tensor(sequences, device=device)
        self._offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        self._rows = torch.zeros_like(self._offsets)
        self.seen = FirstRows(*(self._rows[part] for part in parts))
        self._near: Tensor | None = None
        self._mask: Tensor | None = None
        if max(own) - min(depths) >= window:
            places = torch.tensor(depths)
            near = places[len(depths) - queries :, None] - places < window
            self._near = pack_mask(near).repeat(batch, 1).to(device)
            self._mask = torch.zeros_like(self._near)

    def update(self, lengths: Tensor, mask: Tensor) -> None:
        """Say where this forward stands.

        Args:
            lengths: int32 ``[B]``, rows before the tail.
            mask: int64 ``[B * T, words]``, the tail rows that queries see without a window.
        """
        torch.index_select(lengths, 0, self._sequences, out=self._rows)
        self._rows.add_(self._offsets).clamp_(min=0)
        if self._near is not None:
            torch.bitwise_and(mask, self._near, out=self._mask)

    def narrowed(self, mask: Tensor) -> Tensor:
        """The buffer of the mask under the window: ``mask`` itself where no path is as long as the window."""
        return mask if self._mask is None else self._mask
