"""Computes what a window hides from the queries of a forward, once for all layers, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import FirstVisible, pack_mask, unpack_mask


class Window:
    """The KV slots that T queries a sequence see under one window, in fixed buffers.

    Args:
        window: positions that a query sees, its own included.
        chunked: it does not slide, see ``AttentionParams``.
        depths: position of each of the N tail tokens, counted from the tail's first; the queries are the last
            T of them. None where forwards bring trees of any topology: then all of the tail is new, and a
            token is as deep as its mask has ancestors.
        queries: T.
        batch: sequences, B.
        device: the device of the buffers.

    Attributes:
        size, chunked: ``window`` and ``chunked``.
        first_visible: the first visible slot of each query. Which slots of the tail are visible is left to
            the mask: the positions of tree nodes are not those of their slots.
    """

    def __init__(
        self,
        window: int,
        depths: Sequence[int] | None,
        queries: int,
        batch: int,
        device: torch.device,
        chunked: bool,
    ) -> None:
        self.size, self.chunked = window, chunked
        self._vary = depths is None
        depths = [0] * queries if depths is None else depths
        query_depths = depths[len(depths) - queries :]
        first = [*query_depths] if chunked else [min(0, depth - window + 1) for depth in query_depths]
        sequences: list[int] = []
        offsets: list[int] = []
        parts = []
        for steps in (first, [min(first)], [max(first)]):
            count = batch * len(steps)
            parts.append(slice(len(offsets), len(offsets) + count))
            # Padded to 16 bytes: kernels are specialised on the alignment of their pointers.
            padding = [0] * (-count % 4)
            sequences += [*(b for b in range(batch) for _ in steps), *padding]
            offsets += [*steps * batch, *padding]
        self._sequences = torch.tensor(sequences, device=device)
        self._offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        self._first = torch.zeros_like(self._offsets)
        self.first_visible = FirstVisible(*(self._first[part] for part in parts))
        self._in_window: Tensor | None = None
        self._mask: Tensor | None = None
        self._depths = torch.tensor(depths, device=device)
        if chunked or self._vary:
            self._mask = torch.zeros(batch * queries, -(-len(depths) // 64), dtype=torch.int64, device=device)
        elif max(query_depths) - min(depths) >= window:
            positions = torch.tensor(depths, device="cpu")
            in_window = positions[len(depths) - queries :, None] - positions < window
            self._in_window = pack_mask(in_window).repeat(batch, 1).to(device)
            self._mask = torch.zeros_like(self._in_window)

    def update(self, lengths: Tensor, mask: Tensor) -> None:
        """Computes the buffers of the coming forward.

        Args:
            lengths: int32 ``[B]``, tokens before the tail.
            mask: int64 ``[B * T, words]``, the tail slots that queries see without a window.
        """
        if self._vary:
            self._update_depths(lengths, mask)
            return
        torch.index_select(lengths, 0, self._sequences, out=self._first)
        if self.chunked:
            self._update_chunks(lengths, mask)
            return
        self._first.add_(self._offsets).clamp_(min=0)
        if self._in_window is not None:
            torch.bitwise_and(mask, self._in_window, out=self._mask)

    def _update_chunks(self, lengths: Tensor, mask: Tensor) -> None:
        """Computes which slots of the tail are in each query's chunk; this depends on the length."""
        starts = (self._first + self._offsets) // self.size * self.size
        torch.minimum(starts, self._first, out=self._first)
        chunks = (lengths[:, None] + self._depths) // self.size  # [B, N]
        queries = len(mask) // len(lengths)
        self._mask_with(mask, chunks[:, -queries:, None] == chunks[:, None])

    def _update_depths(self, lengths: Tensor, mask: Tensor) -> None:
        """Computes the buffers for depths that vary from forward to forward."""
        depths = unpack_mask(mask).sum(1).view(len(lengths), -1) - 1  # [B, T]
        positions = lengths[:, None] + depths
        if self.chunked:
            first = positions // self.size * self.size
            chunks = positions // self.size
            near = chunks[:, :, None] == chunks[:, None]
        else:
            first = (positions - self.size + 1).clamp_min(0)
            near = depths[:, :, None] - depths[:, None] < self.size
        first = torch.minimum(first, lengths[:, None])
        for part, values in zip(self.first_visible, (first, first.amin(1), first.amax(1)), strict=True):
            part.copy_(values.flatten())
        self._mask_with(mask, near)

    def _mask_with(self, mask: Tensor, near: Tensor) -> None:
        """Hides from queries all of the tail but what is ``near``, bool ``[B, T, N]``."""
        torch.bitwise_and(mask, pack_mask(near.flatten(0, 1)), out=self._mask)

    def masked(self, mask: Tensor) -> Tensor:
        """Returns the mask under the window: ``mask`` itself if no path is as long as the window."""
        return mask if self._mask is None else self._mask


def ring_table(batch: int, heads: int, ring_pages: int, pages: int, device: torch.device) -> Tensor:
    """Returns the table int32 ``[B, pages]`` of sequences that keep their newest pages, see ``KVGroup``."""
    numbers = torch.arange(pages, dtype=torch.int32, device=device)
    sequences = torch.arange(batch, dtype=torch.int32, device=device)
    return numbers % ring_pages + heads * ring_pages * sequences[:, None]
