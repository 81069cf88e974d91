"""Keeps the mean keys of the retrieval cache's chunks up to date with the committed tokens."""

from collections.abc import Sequence

import torch

from triforce_tree.kv.view import RetrievalView

# Chunks are updated in multiples of this number, so that few kernels are compiled. Chunks after the text are
# not read.
_STEP = 64


class ChunkMeans:
    """Records which chunk means are up to date; passes without the retrieval level do not update them.

    Args:
        view: the view of the retrieval level; None without that level.
        batch: the number of sequences, B.
        max_seq_len: the most tokens of a sequence.
        device: the device of the KV slots.
    """

    def __init__(
        self, view: RetrievalView | None, batch: int, max_seq_len: int, device: torch.device
    ) -> None:
        self._view, self._most, self._device = view, max_seq_len, device
        # The tokens of each sequence, and how many of them its means include.
        self._lengths, self._known = [0] * batch, [0] * batch

    def begin(self, lengths: Sequence[int]) -> None:
        """Starts from sequences of these lengths in tokens."""
        self._lengths = list(lengths)
        self._known = [min(pair) for pair in zip(self._known, lengths, strict=True)]

    def replace(self, b: int, length: int) -> None:
        """Records that sequence b is another one of ``length`` tokens, whose means are not up to date."""
        self._lengths[b], self._known[b] = length, 0

    def committed(self, counts: Sequence[int], with_means: bool) -> None:
        """Records how many tokens a pass added to each sequence.

        Args:
            with_means: whether the pass has updated the means, which were up to date before.
        """
        before = self._lengths
        self._lengths = [length + count for length, count in zip(before, counts, strict=True)]
        self._known = list(self._lengths) if with_means else list(map(min, self._known, before))

    def written(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Updates the means after a prefill that wrote each sequence's KV slots ``starts[b]`` to
        ``lengths[b]``; the means of whole chunks before ``starts[b]`` stay as they are.
        """
        self._known = [min(pair) for pair in zip(self._known, starts, strict=True)]
        self._lengths = list(lengths)
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
        pairs = list(zip(self._known, self._lengths, strict=True))
        if self._view is None or all(known >= length for known, length in pairs):
            return
        chunk = self._view.config.chunk
        first = [min(pair) // chunk for pair in pairs]
        self._update(first, max(self._lengths) // chunk + 1 - min(first))
        self._known = list(self._lengths)

    def _update(self, first: Sequence[int], count: int) -> None:
        assert self._view is not None
        starts = torch.tensor(first, device=self._device)
        self._view.update_chunk_means(starts, -(-count // _STEP) * _STEP)
