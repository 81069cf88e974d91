"""Keeps the mean keys of the retrieval cache's chunks up to date with the committed tokens."""

from collections.abc import Sequence

import torch

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.view import RetrievalView

# Chunks are updated in multiples of this number, so that few kernels are compiled. Chunks after the text are
# not read.
_STEP = 64


class ChunkMeans:
    """Records which chunk means are up to date; passes without the retrieval level do not update them.

    Args:
        view: the view of the retrieval level; None without that level.
        cached: the tokens of each sequence.
        max_seq_len: the most tokens of a sequence.
        device: the device of the KV slots.
    """

    def __init__(
        self, view: RetrievalView | None, cached: CachedTokens, max_seq_len: int, device: torch.device
    ) -> None:
        self._view, self._cached, self._most, self._device = view, cached, max_seq_len, device
        # How many tokens of each sequence its means include.
        self._known = [0] * len(cached.held)

    def begin(self) -> None:
        """Starts from the sequences as they are now, which may have become shorter."""
        self._known = [min(pair) for pair in zip(self._known, self._cached.lengths, strict=True)]

    def updated(self) -> None:
        """Records that a pass has updated the means, which were up to date before."""
        self._known = self._cached.lengths

    def written(self, starts: Sequence[int]) -> None:
        """Updates the means after a prefill that wrote each sequence's KV slots from ``starts[b]`` on; the
        means of whole chunks before ``starts[b]`` stay as they are.
        """
        self._known = [min(pair) for pair in zip(self._known, starts, strict=True)]
        self.catch_up()

    def lost(self, b: int, start: int) -> None:
        """Records that sequence b has another text from position ``start`` on, whose means are unknown."""
        self._known[b] = min(self._known[b], start)

    def update_all(self) -> None:
        """Computes all means again, after something other than a pass has written KV slots."""
        if self._view is not None:
            self._update([0] * len(self._known), -(-self._most // self._view.config.chunk))
        self._known = [self._most] * len(self._known)

    def catch_up(self) -> None:
        """Computes the means of chunks with tokens that were committed by passes without the retrieval
        level.
        """
        lengths = self._cached.lengths
        pairs = list(zip(self._known, lengths, strict=True))
        if self._view is None or all(known >= length for known, length in pairs):
            return
        chunk = self._view.config.chunk
        first = [min(pair) // chunk for pair in pairs]
        behind = [length // chunk + 1 - known // chunk for known, length in pairs if known < length]
        self._update(first, max(behind))
        self._known = lengths

    def _update(self, first: Sequence[int], count: int) -> None:
        assert self._view is not None
        starts = torch.tensor(first, device=self._device)
        self._view.update_chunk_means(starts, -(-count // _STEP) * _STEP)
