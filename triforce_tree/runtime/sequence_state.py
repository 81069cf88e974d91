"""Where every text of a batch stands, in buffers that captured graphs read and write."""

import torch
from torch import Tensor


class SequenceState:
    """B texts and the chains that grow behind them.

    Args:
        batch, capacity: sequences, and tokens of the longest.
        max_draft_tokens: most tokens of a chain; 0 where nothing but the text is written.
        extra: tokens by which one verification may overshoot it.
        vocabulary: width of the probs that are kept; 0 for greedy decoding, which needs none.

    Attributes:
        tokens: int64 ``[B, capacity]``: settled ones, the root at ``length``, then the chain.
        length: int64 ``[B]`` settled tokens that stand before the root.
        chain: int64 ``[B]`` tokens gathered behind the root.
        chain_probs: fp32 ``[B, max_draft_tokens + extra, V]``; row i is what the chain's
            token i was drawn from.
        runner_ups: int64 ``[B, max_draft_tokens + extra]``, the runner-up beside each token of the
            chain, -1 for none.
        active: int64 ``[B]``, 0 for a text that has ended: it stays as it is.
        fresh: int64 ``[B, F]``, tokens of the last verdict; the first ``count`` of them are new.
        count, proposed, gathered: int64 ``[B]``: new tokens of the last pass, the chain it was offered,
            and what level 1 had emitted for it.
        features: by decoder layer, ``[B, F, hidden_size]``: hidden states of the target from which the tokens
            of the last verification were predicted, the first ``feature_count`` ``[B]`` of each sequence. In
            levels=3 these are level 1's, until level 2 has verified the chain.
        broken: bool ``[]``, set when logits held NaN.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        max_draft_tokens: int,
        extra: int,
        vocabulary: int,
        device: torch.device,
        features: dict[int, Tensor] | None = None,
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
        self.chain_probs = torch.zeros(batch, max_draft_tokens + extra, vocabulary, device=device)
        self.runner_ups = zeros(batch, max_draft_tokens + extra)
        self.active = torch.ones_like(self.length)
        self.fresh, self.count = zeros(batch, max(max_draft_tokens, extra) + 1), zeros(batch)
        self.proposed, self.gathered = zeros(batch), zeros(batch)
        self.features, self.feature_count = features or {}, zeros(batch)
        self.broken = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def newest(self) -> Tensor:
        """int64 ``[B]``, the token at ``end``."""
        return self.tokens.gather(1, self.end[:, None])[:, 0]

    def text(self, b: int) -> list[int]:
        """Sequence b up to ``end``, on the host: waits for the device."""
        tokens: list[int] = self.tokens[b, : int(self.end[b]) + 1].tolist()
        return tokens

    @property
    def end(self) -> Tensor:
        """int64 ``[B]``, where the newest token of text and chain stands: the next tree's root."""
        return self.length + self.chain

    def save(self) -> list[Tensor]:
        """A copy of all that passes change and later ones read."""
        return [tensor.clone() for tensor in self._state]

    def restore(self, saved: list[Tensor]) -> None:
        """Stand where :meth:`save` was called; whether logits held NaN since then is not forgotten."""
        for tensor, before in zip(self._state, saved, strict=True):
            tensor.copy_(before)

    @property
    def _state(self) -> list[Tensor]:
        counts = [self.length, self.chain, self.active, self.gathered, self.feature_count]
        return [self.tokens, *counts, *self.features.values()]

    def report(self) -> Tensor:
        """What the host wants to know after a pass, int64 ``[B, F + 4]``: one copy, one wait."""
        columns = [self.count, self.proposed, self.gathered, self.broken.expand(self.batch).long()]
        return torch.cat([torch.stack(columns, 1), self.fresh], 1)

    def check(self, numbers: Tensor) -> None:
        """Remember whether any are NaN; the host asks once a pass."""
        self.broken |= torch.isnan(numbers).any()

    def keep_features(self, hidden: dict[int, Tensor], path: Tensor, count: Tensor) -> None:
        """Keep hidden states ``[B, N, hidden_size]`` of accepted nodes ``[B, D + 1]`` for the drafter."""
        for layer, kept in self.features.items():
            states = hidden[layer]
            at = path.clamp_min(0)[..., None].expand(-1, -1, states.shape[2])
            kept[:, : path.shape[1]] = states.gather(1, at)
        if self.features:
            self.feature_count.copy_(count)

    def lengthen(self, emitted: Tensor, count: Tensor, probs: Tensor | None) -> None:
        """Add what level 1 emitted to the chain, as far as it fits.

        Args:
            emitted: int64 ``[B, D + 1]``; the first ``count`` ``[B]`` of each row were.
            probs: fp32 ``[B, D + 1, V]`` that they were drawn from; None when greedy.
        """
        places = self._write(self.end, emitted)
        if probs is not None:
            rows = self.chain[:, None] + places
            self.chain_probs.scatter_(1, rows[..., None].expand_as(probs), probs)
        self.gathered += count
        self.chain.copy_((self.chain + count).clamp_max(self.max_draft_tokens))

    def add_runner_ups(self, runner_ups: Tensor) -> None:
        """Runner-ups int64 ``[B, D + 1]`` of the tokens that ``lengthen`` adds next."""
        rows = self.chain[:, None] + torch.arange(runner_ups.shape[1], device=runner_ups.device)
        self.runner_ups.scatter_(1, rows, runner_ups)

    def commit(self, emitted: Tensor, count: Tensor) -> None:
        """Level 2 has spoken: ``count`` tokens of ``emitted`` ``[B, D + 1]`` are text, the chain is over."""
        count = count * self.active
        self._write(self.length, emitted)
        self.fresh[:, : emitted.shape[1]] = emitted
        self.count.copy_(count)
        self.proposed.copy_(self.chain)
        self.length += count
        self.chain.zero_()

    def _write(self, root: Tensor, emitted: Tensor) -> Tensor:
        """Tokens behind the root; rows past the emitted ones are rubbish that nothing reads."""
        places = torch.arange(emitted.shape[1], device=emitted.device)
        at = root[:, None] + 1 + places
        self.tokens.scatter_(1, at.clamp_max(self.capacity - 1), emitted)
        return places
