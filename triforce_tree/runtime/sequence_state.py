"""The tokens of the sequences of a batch during decoding, in buffers that CUDA graphs read and write."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from triforce_tree.runtime.features import Features


class SequenceState:
    """The tokens of B sequences, and the chain of drafted tokens after each.

    The committed tokens of a sequence are at positions 0 to ``length``. The last of them is the root, whose
    keys and values are not cached yet. With ``levels=3`` the tokens that the retrieval model emits follow it
    as the *chain*, until the target verifies them. A pass is one run of drafting, verification by the
    retrieval model (with ``levels=3``) and verification by the target.

    Args:
        batch: B.
        capacity: most tokens of a sequence, including those that passes write after its end.
        max_draft_tokens: most tokens of a chain; 0 if there are no chains.
        extra: most tokens that one verification may write beyond ``max_draft_tokens``.
        vocabulary: V of the distributions that are kept for the chain; 0 if there are no chains.
        device: device of the buffers.
        features: keeps hidden states of the target for the drafter; None if the drafter reads none.
        ranks: (D, R), the number of depths and of sibling ranks by which acceptance is counted; None to count
            nothing.
        tail_rows: most distributions of a tree that the drafter adds at the end of a chain, the tail.

    Attributes:
        tokens: int64 ``[B, capacity]``.
        length: int64 ``[B]``, the number of committed tokens before the root, which is the root's position.
        chain: int64 ``[B]``, the number of drafted tokens after the root.
        chain_probs: fp32 ``[B, max_draft_tokens + extra + tail_rows, V]``. Entry i is the distribution that
            token i of the chain was drawn from; the last ``tail_rows`` entries belong to the tail.
        runner_ups: int64 ``[B, max_draft_tokens + extra]``, the retrieval model's second choice for each
            token of the chain, -1 if there is none.
        active: int64 ``[B]``, 0 for a sequence that has ended, to which nothing is committed any more.
        count, proposed, retrieval_emitted: int64 ``[B]``: the number of tokens that the last pass committed,
            of draft tokens that it verified, and of tokens that the retrieval model emitted in it.
        has_nan: int64 ``[]``, 1 if logits contained NaN.
        new_tokens: int64 ``[B, F]``. The last pass committed the first ``count`` of them.
        features: hidden states of the target for the newest positions before ``end``, where the state at
            position p gave the token at p + 1. With levels=3 those of the chain are from the retrieval model
            until the target has verified it. None if the drafter reads none; see :meth:`newest_features`.
        made_up: whether the sequences are made-up ones for a trial run, with tokens not in ``tokens``.
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
        self._results = zeros(batch, max_draft_tokens + extra + 5)
        self.count, self.proposed, self.retrieval_emitted = self._results[:, :3].unbind(1)
        self.has_nan, self.new_tokens = self._results[0, 3], self._results[:, 4:]
        self.features = features
        self.made_up = False
        self.recurrent: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def newest(self) -> Tensor:
        """Returns the token at position ``end``, int64 ``[B]``, which is the root of the next tree."""
        return self.tokens.gather(1, self.end[:, None])[:, 0]

    def sequence(self, b: int) -> list[int]:
        """Returns the tokens of sequence b up to position ``end``. Waits for the device."""
        tokens: list[int] = self.tokens[b, : int(self.end[b]) + 1].tolist()
        return tokens

    @property
    def end(self) -> Tensor:
        """Returns the position of the newest token including the chain, int64 ``[B]``."""
        return self.length + self.chain

    def save(self) -> list[Tensor]:
        """Returns a copy of all buffers that passes change and later passes read."""
        return [tensor.clone() for tensor in self._state]

    def restore(self, saved: list[Tensor]) -> None:
        """Restores the state that :meth:`save` copied, except ``has_nan``."""
        for tensor, value in zip(self._state, saved, strict=True):
            tensor.copy_(value)

    @property
    def _state(self) -> list[Tensor]:
        counts = [self.length, self.chain, self.active, self.retrieval_emitted]
        kept = self.features.buffers if self.features is not None else []
        return [self.tokens, *counts, *kept, *self.recurrent]

    def pass_results(self) -> Tensor:
        """Returns everything that the host reads after a pass in one tensor, so that one copy is enough.

        It is int64 ``[B, F + 4]`` with the columns ``count``, ``proposed``, ``retrieval_emitted``,
        ``has_nan``, which is in the first row alone, and ``new_tokens``. The next pass overwrites it.
        """
        return self._results

    def check_nan(self, numbers: Tensor) -> None:
        """Sets ``has_nan`` if any number ``[B, ...]`` of a sequence that runs is NaN. The host reads it once
        per pass.
        """
        self.has_nan |= (torch.isnan(numbers).flatten(1).any(1) & (self.active != 0)).any()

    def keep_features(self, hidden: dict[int, Tensor], path: Tensor, root: Tensor) -> None:
        """Keeps the hidden states of accepted nodes for the drafter.

        Args:
            hidden: ``[B, N, hidden_size]`` for each element of ``features.layers``.
            path: int64 ``[B, D + 1]``, indices of the accepted nodes, -1 after the last. States written for
                -1 are overwritten before they are read.
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
        """Returns hidden states of the positions ``end - count`` to ``end - 1``, ``[B, count, hidden_size]``.

        The last ``feature_count`` of them are valid, and the others arbitrary.

        Args:
            layer: an element of the drafter's ``features``.
        """
        assert self.features is not None, "the drafter's attribute features is empty"
        offsets = torch.arange(-count, 0, device=self.device)
        return self.features.read(layer, self.end[:, None] + offsets)

    @property
    def feature_count(self) -> Tensor:
        """Returns the number of positions before ``end`` that have hidden states, int64 ``[B]``."""
        if self.features is None:
            return torch.zeros_like(self.length)
        return (self.end - self.features.first).clamp(0, self.features.history)

    @contextmanager
    def trial(self, length: int) -> Iterator[None]:
        """Lets passes run on made-up sequences of ``length`` tokens, and then restores hidden states."""
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
        """Appends tokens that the retrieval model emitted to the chain, up to ``max_draft_tokens``.

        Args:
            emitted: int64 ``[B, D + 1]``, tokens of each sequence.
            count: int64 ``[B]``, how many of them to append.
            probs: fp32 ``[B, D + 1, V]``, the distributions that they were drawn from; None if greedy.
        """
        offsets = self._write(self.end, emitted)
        if probs is not None:
            rows = self.chain[:, None] + offsets
            self.chain_probs.scatter_(1, rows[..., None].expand_as(probs), probs)
        self.retrieval_emitted += count
        self.chain.copy_((self.chain + count).clamp_max(self.max_draft_tokens))

    def add_runner_ups(self, runner_ups: Tensor) -> None:
        """Stores the runner-ups, int64 ``[B, D + 1]``, of the tokens that ``append_drafted`` appends next."""
        rows = self.chain[:, None] + torch.arange(runner_ups.shape[1], device=runner_ups.device)
        self.runner_ups.scatter_(1, rows, runner_ups)

    def commit(self, emitted: Tensor, count: Tensor) -> None:
        """Commits the first ``count`` ``[B]`` tokens of ``emitted`` ``[B, D + 1]``, and removes the chain."""
        count = count * self.active
        self._write(self.length, emitted)
        self.new_tokens[:, : emitted.shape[1]] = emitted
        self.count.copy_(count)
        self.proposed.copy_(self.chain)
        self.length += count
        self.chain.zero_()

    def _write(self, root: Tensor, emitted: Tensor) -> Tensor:
        """Writes all tokens of ``emitted`` ``[B, T]`` after position ``root``, and returns 0 to T - 1.

        Tokens beyond the committed or appended ones are never read.
        """
        offsets = torch.arange(emitted.shape[1], device=emitted.device)
        positions = root[:, None] + 1 + offsets
        self.tokens.scatter_(1, positions.clamp_max(self.capacity - 1), emitted)
        return offsets
