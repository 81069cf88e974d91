"""A drafter by suffix matching: it proposes the tokens after an earlier occurrence of the newest ones.

Prompt lookup (Saxena 2023) searches for n-grams of one to three tokens. Like SuffixDecoding (Oliaro et al.,
arXiv 2411.04975) and SAM Decoding (Hu et al., arXiv 2411.10666), this drafter looks for the longest match,
and proposes more tokens after a longer match. Those papers use a suffix tree or automaton on the host; here
an index of n-grams of a few lengths is kept on the device (``kernels.suffix``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.kernels.suffix import index_ngrams, match_suffix
from triforce_tree.kernels.suffix.ngrams import MOST_ENTRIES, powers
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.runtime.devices import overwrite
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import chain_shape
from triforce_tree.verify.probs import Sampler

# Maps each length of indexed n-grams to the expected acceptance rate after a match of at least this length.
_EXPECTED = {2: 0.3, 3: 0.45, 4: 0.55, 6: 0.65, 8: 0.8, 16: 0.93, 32: 0.97, 64: 0.99}
# A token is proposed if it and all before it are accepted with at least this probability. Verifying one more
# token takes about this fraction of a pass.
_LEAST = 0.1


class SuffixMatching(Drafter):
    """A drafter without a model. The time of a proposal does not depend on the sequence's length.

    It searches all committed tokens for the newest tokens, which include the provisional chain. See
    ``kernels.suffix.match_suffix`` for the choice of the occurrence and the length of a proposal.

    Args:
        length: most tokens to propose.
    """

    name = "lookup"
    deterministic = True
    capturable = True

    def __init__(self, length: int = 15) -> None:
        self.tree = chain_shape(length)
        self.length = length

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        index = 4 * batch * len(_EXPECTED) * _entries(capacity)
        counts = batch * (8 * (self.length + 3) + 8 * len(_EXPECTED))
        return {"suffix index": index, "drafter's buffers": counts}

    def bind(self, state: SequenceState) -> None:
        batch, device, classes = state.batch, state.device, len(_EXPECTED)
        self._state = state
        self._lengths = torch.tensor(list(_EXPECTED), device=device)
        self._expected = torch.tensor(list(_EXPECTED.values()), dtype=torch.float32, device=device)
        self._powers = powers(max(_EXPECTED), device)
        shape = (batch, classes, _entries(state.capacity))
        self._table = torch.full(shape, -1, dtype=torch.int32, device=device)
        # The index holds the n-grams that end before this position.
        self._indexed = torch.zeros(batch, dtype=torch.int64, device=device)
        self._chain = torch.full((batch, self.length), -1, device=device)
        self._forced = torch.full_like(self._chain, -1)
        self._no_match = torch.tensor([-1, 0], device=device)
        self._last = self._no_match.repeat(batch, 1)
        self._counts = torch.zeros(batch, classes, 2, dtype=torch.float32, device=device)
        # The most tokens that a pass commits.
        self._most_new = state.new_tokens.shape[1]
        # The number of committed tokens of each sequence at the last call of ``prepare``.
        self._known = [0] * batch
        # The committed tokens of each sequence that the index was made from; None if they are unknown.
        self._texts: list[Sequence[int] | None] = [None] * batch

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        # An index of a prefix of the new text is kept: it equals the beginning of a new index.
        for b, (sequence, indexed) in enumerate(zip(sequences, self._indexed.tolist(), strict=True)):
            text = self._texts[b]
            if text is None or indexed > min(common_prefix(text, sequence), len(sequence) - 1):
                self._table[b].fill_(-1)
                self._indexed[b] = 0
        self._texts = [None if self._state.made_up else sequence for sequence in sequences]
        self._last.copy_(self._no_match)
        self._counts.zero_()
        self._forced.fill_(-1)
        self._known = [len(sequence) for sequence in sequences]
        self._catch_up()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self._table[b] = -1
        self._indexed[b] = 0
        self._last[b] = self._no_match
        self._counts[b] = 0
        self._forced[b] = -1
        self._texts[b], self._known[b] = sequences[b], len(sequences[b])
        self._catch_up()

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        grown = [
            len(sequence) - known if sequence is not None else 0
            for sequence, known in zip(sequences, self._known, strict=True)
        ]
        self._known = [known + more for known, more in zip(self._known, grown, strict=True)]
        for b, sequence in enumerate(sequences):
            if sequence is not None and self._texts[b] is not None:
                self._texts[b] = sequence
        if max(grown) > self._most_new:
            self._catch_up()

    def force(self, tokens: Sequence[Sequence[int]]) -> None:
        padded = [[*own[: self.length], *[-1] * (self.length - len(own))] for own in tokens]
        overwrite(self._forced, torch.tensor(padded, device="cpu"))

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        # After a committed text, tokens that its grammar forces take the place of a match.
        forced = (self._forced[:, :1] >= 0) & (state.chain == 0)[:, None]
        tree.tokens[:, 1:] = torch.where(forced, self._forced, self._matched(state))

    def _matched(self, state: SequenceState) -> Tensor:
        """Returns the tokens after an earlier occurrence of the newest ones, int64 ``[B, length]``, padded
        with -1.
        """
        # A state that was rolled back may be shorter than the index.
        torch.minimum(self._indexed, state.length, out=self._indexed)
        self._index(state.length, self._most_new)
        torch.minimum(self._indexed + self._most_new, state.length, out=self._indexed)
        match_suffix(
            self._chain, self._last, self._counts, self._table, state.tokens, self._lengths, self._powers,
            self._expected, state.length, state.end, _LEAST,
        )  # fmt: skip
        return self._chain

    def _catch_up(self) -> None:
        """Indexes all n-grams of the known tokens of each sequence."""
        until = id_tensor([known - 1 for known in self._known], self._indexed.device)
        self._index(until, max(1, *self._known))
        self._indexed.copy_(until)

    def _index(self, until: Tensor, count: int) -> None:
        index_ngrams(
            self._table, self._state.tokens, self._lengths, self._powers, self._indexed, until, count
        )


def _entries(capacity: int) -> int:
    """Returns the table entries per n-gram length for a sequence of at most ``capacity`` tokens."""
    return int(min(1 << (2 * capacity - 1).bit_length(), MOST_ENTRIES))
