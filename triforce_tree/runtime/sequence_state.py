"""The sequences of a batch while they are decoded, in buffers that CUDA graphs read and write."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.runtime.features import Features


class SequenceState:
    """B sequences, and the chain of drafted tokens after each.

    The committed tokens of a sequence are at positions 0 to ``length``; the last of them is the root, whose
    keys and values are not cached yet. In ``levels=3`` the tokens that level 1 emits follow it as the chain,
    until level 2 verifies them.

    Args:
        batch: B.
        capacity: most tokens of a sequence, with all that passes write after its end.
        max_draft_tokens: most tokens of a chain; 0 if there are no chains.
        extra: most tokens that one verification may write beyond ``max_draft_tokens``.
        vocabulary: V of the distributions that are kept for the chain; 0 if there are no chains.
        device: of the buffers.
        features: where hidden states of the target are kept; None for none.
        ranks: (D, R), depths and sibling ranks to count acceptance by; None to count nothing.
        tail_rows: most distributions of a tree at the end of a chain.

    Attributes:
        tokens: int64 ``[B, capacity]``.
        length: int64 ``[B]``, committed tokens before the root: the root's position.
        chain: int64 ``[B]``, drafted tokens after the root.
        chain_probs: fp32 ``[B, max_draft_tokens + extra + tail_rows, V]``; row i is the distribution that the
            chain's token i was drawn from. The last rows are those of the tree at its end.
        runner_ups: int64 ``[B, max_draft_tokens + extra]``, the runner-up of each chain token, -1 if none.
        active: int64 ``[B]``, 0 for a sequence that has ended; nothing is committed to it any more.
        new_tokens: int64 ``[B, F]``, the first ``count`` of which the last pass committed.
        count, proposed, retrieval_emitted: int64 ``[B]``: tokens that the last pass committed, draft tokens
            that it verified, and tokens that level 1 had emitted for it.
        features: hidden states of the target, of the newest positions before ``end``: the token at position
            p + 1 was drawn by the state at p. In levels=3 those of the chain are level 1's, until level 2
            has verified it. None where the drafter reads none; see :meth:`newest_features`.
        rank_counts: int64 ``[2, B, D, R]``, of the drafter's trees that were verified since ``commit``: how
            often the accepted path reached a node of depth d with a child of rank r, and how often that
            child was accepted. None where nothing is counted.
        has_nan: bool ``[]``, whether logits held NaN.
        made_up: whether sequences are made-up ones, whose tokens are not in ``tokens``.
        recurrent: states of the target's recurrent layers, which :meth:`save` copies too.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        max_draft_tokens: int,
        extra: int,
        vocabulary: int,
        device: torch.device,
        features: Features | None = None,
        ranks: tuple[int, int] | None = None,
        tail_rows: int = 0,
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.batch, self.capacity, self.max_draft_tokens, self.extra = (
            batch,
            capacity,
            max_draft_tokens,
            extra,
        )
        self.tokens, self.length, self.chain = zeros(batch, capacity), zeros(batch), zeros(batch)
        rows = max_draft_tokens + extra + tail_rows
        self.chain_probs = torch.zeros(batch, rows, vocabulary, dtype=torch.float32, device=device)
        self.runner_ups = zeros(batch, max_draft_tokens + extra)
        self.active = torch.ones_like(self.length)
        self.new_tokens, self.count = zeros(batch, max_draft_tokens + extra + 1), zeros(batch)
        self.proposed, self.retrieval_emitted = zeros(batch), zeros(batch)
        self.features = features
        self.rank_counts = zeros(2, batch, *ranks) if ranks is not None else None
        self.has_nan = torch.zeros((), dtype=torch.bool, device=device)
        self.made_up = False
        self.recurrent: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def newest(self) -> Tensor:
        """int64 ``[B]``, the token at position ``end``: the root of the next tree."""
        return self.tokens.gather(1, self.end[:, None])[:, 0]

    def sequence(self, b: int) -> list[int]:
        """The tokens of sequence b up to position ``end``, on the host; waits for the device."""
        tokens: list[int] = self.tokens[b, : int(self.end[b]) + 1].tolist()
        return tokens

    @property
    def end(self) -> Tensor:
        """int64 ``[B]``, the position of the newest token, chain included."""
        return self.length + self.chain

    def save(self) -> list[Tensor]:
        """A copy of all buffers that passes change and later passes read."""
        return [tensor.clone() for tensor in self._state]

    def restore(self, saved: list[Tensor]) -> None:
        """Return to the state that :meth:`save` copied; ``has_nan`` stays as it is."""
        for tensor, value in zip(self._state, saved, strict=True):
            tensor.copy_(value)

    @property
    def _state(self) -> list[Tensor]:
        counts = [self.length, self.chain, self.active, self.retrieval_emitted]
        kept = self.features.buffers if self.features is not None else []
        return [self.tokens, *counts, *kept, *self.recurrent]

    def pass_results(self) -> Tensor:
        """What the host reads after a pass, in one tensor and so with one copy: int64 ``[B, F + 4]``.

        ``count``, ``proposed``, ``retrieval_emitted``, ``has_nan``, then ``new_tokens``; where they are kept,
        then ``rank_counts`` too.
        """
        columns = [self.count, self.proposed, self.retrieval_emitted, self.has_nan.expand(self.batch).long()]
        counted = [] if self.rank_counts is None else [part.flatten(1) for part in self.rank_counts]
        return torch.cat([torch.stack(columns, 1), self.new_tokens, *counted], 1)

    def ranks_of(self, report: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """``rank_counts`` of a report's rows of :meth:`pass_results`, summed: ``[D][R]`` each."""
        assert self.rank_counts is not None
        depths, ranks = self.rank_counts.shape[2:]
        first, size = 4 + self.new_tokens.shape[1], depths * ranks
        sums = [
            sum(column) for column in zip(*(row[first : first + 2 * size] for row in report), strict=True)
        ]
        tried, accepted = (
            [sums[at + d * ranks : at + (d + 1) * ranks] for d in range(depths)] for at in (0, size)
        )
        return tried, accepted

    def count_ranks(self, tokens: Tensor, parents: Tensor, path: Tensor) -> None:
        """Add the acceptance of one verification of the drafter's trees to ``rank_counts``.

        Args:
            tokens, parents: int64 ``[B, N]``, of the trees.
            path: int64 ``[B, D + 1]``, accepted nodes from the root on, -1 after the last.
        """
        if self.rank_counts is None:
            return
        depths, ranks = self.rank_counts.shape[2:]
        depths = min(depths, path.shape[1] - 1)
        parent, child = path[:, :depths, None], path[:, 1 : depths + 1, None]
        node = torch.arange(tokens.shape[1], device=tokens.device)
        children = (parents[:, None] == parent) & (parent >= 0) & (tokens >= 0)[:, None] & (node > 0)
        rank = torch.arange(ranks, device=tokens.device)
        running = self.active[:, None, None] > 0
        tried = (rank < children.sum(2, keepdim=True)) & running
        earlier = (children & (node < child)).sum(2, keepdim=True)
        self.rank_counts[0, :, :depths] += tried
        self.rank_counts[1, :, :depths] += tried & (child >= 0) & (rank == earlier)

    def check_nan(self, numbers: Tensor) -> None:
        """Set ``has_nan`` if any are NaN; the host reads it once per pass."""
        self.has_nan |= torch.isnan(numbers).any()

    def keep_features(self, hidden: dict[int, Tensor], path: Tensor, root: Tensor) -> None:
        """Keep the hidden states of accepted nodes for the drafter.

        Args:
            hidden: by element of ``features.layers``, ``[B, N, hidden_size]``.
            path: int64 ``[B, D + 1]``, accepted nodes, -1 after the last; what is kept for those is
                overwritten before it is read.
            root: int64 ``[B]``, the position of node 0.
        """
        if self.features is None:
            return
        index = path.clamp_min(0)[..., None]
        accepted = {
            layer: hidden[layer].gather(1, index.expand(-1, -1, hidden[layer].shape[2]))
            for layer in self.features.layers
        }
        self.features.write(accepted, root)

    def newest_features(self, layer: int, count: int) -> Tensor:
        """Hidden states of the positions ``end - count`` to ``end - 1``, ``[B, count, hidden_size]``.

        The last ``feature_count`` of them are known, the others arbitrary.

        Args:
            layer: an element of the drafter's ``features``.
        """
        assert self.features is not None, "the drafter's attribute features is empty"
        offsets = torch.arange(-count, 0, device=self.device)
        return self.features.read(layer, self.end[:, None] + offsets)

    @property
    def feature_count(self) -> Tensor:
        """int64 ``[B]``, how many positions before ``end`` have hidden states; 0 without any."""
        if self.features is None:
            return torch.zeros_like(self.length)
        return (self.end - self.features.first).clamp(0, self.features.history)

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Inside, passes may write hidden states after made-up sequences; afterwards all are as before."""
        kept = self.features.save() if self.features is not None else []
        if self.features is not None:
            self.features.rewind(torch.full_like(self.length, length))
        self.made_up = True
        try:
            yield
        finally:
            self.made_up = False
            if self.features is not None:
                self.features.restore(kept)

    def append_drafted(self, emitted: Tensor, count: Tensor, probs: Tensor | None) -> None:
        """Append the tokens that level 1 emitted to the chain, as far as ``max_draft_tokens`` allows.

        Args:
            emitted: int64 ``[B, D + 1]``, the first ``count`` ``[B]`` of each row.
            probs: fp32 ``[B, D + 1, V]``, the distributions that they were drawn from; None if greedy.
        """
        offsets = self._write(self.end, emitted)
        if probs is not None:
            rows = self.chain[:, None] + offsets
            self.chain_probs.scatter_(1, rows[..., None].expand_as(probs), probs)
        self.retrieval_emitted += count
        self.chain.copy_((self.chain + count).clamp_max(self.max_draft_tokens))

    def add_runner_ups(self, runner_ups: Tensor) -> None:
        """Keep the runner-ups int64 ``[B, D + 1]`` of the tokens that ``append_drafted`` appends next."""
        rows = self.chain[:, None] + torch.arange(runner_ups.shape[1], device=runner_ups.device)
        self.runner_ups.scatter_(1, rows, runner_ups)

    def commit(self, emitted: Tensor, count: Tensor) -> None:
        """Commit the first ``count`` tokens of ``emitted`` ``[B, D + 1]``, and drop the chain."""
        count = count * self.active
        self._write(self.length, emitted)
        self.new_tokens[:, : emitted.shape[1]] = emitted
        self.count.copy_(count)
        self.proposed.copy_(self.chain)
        self.length += count
        self.chain.zero_()

    def _write(self, root: Tensor, emitted: Tensor) -> Tensor:
        """Write all columns of ``emitted`` after the root; those past ``count`` are never read."""
        offsets = torch.arange(emitted.shape[1], device=emitted.device)
        positions = root[:, None] + 1 + offsets
        self.tokens.scatter_(1, positions.clamp_max(self.capacity - 1), emitted)
        return offsets
