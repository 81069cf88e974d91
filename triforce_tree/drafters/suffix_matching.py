"""A drafter by suffix matching: it proposes the tokens after an earlier occurrence of the newest ones.

Prompt lookup (Saxena 2023) searches for n-grams of one to three tokens. Like SuffixDecoding (Oliaro et al.,
arXiv 2411.04975) and SAM Decoding (Hu et al., arXiv 2411.10666), this drafter proposes more tokens after a
longer match. Those papers use a suffix tree or automaton on the host; here an index of n-grams is kept there
(``suffix_index.py``), and one on the device for provisional chains (``kernels.suffix``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.matching import MatchingDrafter
from triforce_tree.kernels.suffix import index_ngrams, match_suffix
from triforce_tree.kernels.suffix.ngrams import MOST_ENTRIES, powers
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.policy.matched_tokens import EXPECTED, LEAST, LONGEST
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Lookup
from triforce_tree.verify.probs import Sampler

LENGTH = 15
"""The most tokens to propose in a round of three levels, and where nothing is chosen."""
# Lengths of indexed n-grams. The class of a match is the longest of them that it has.
_NGRAMS = [length for length in EXPECTED if length <= LONGEST]


class SuffixMatching(MatchingDrafter):
    """A drafter without a model. The time of a proposal does not depend on the sequence's length.

    Tokens after a committed text follow a match that was found on the host. In passes of three levels a tree
    may also follow a provisional chain, which is on the device. For these ``kernels.suffix.match_suffix``
    chooses the occurrence and the length of the proposal.

    Args:
        lengths: most tokens to propose; each length is a shape of its own.
    """

    name = "lookup"
    deterministic = True
    capturable = True

    def __init__(self, *lengths: int) -> None:
        super().__init__(*(lengths or (LENGTH,)))
        self.length = self.lengths[0]
        self.tree = f"chain:{self.length}"
        self.shapes = tuple(map(Lookup, self.lengths))

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        sizes = {"drafter's buffers": 8 * batch * max(self.lengths)}
        if limits.chain:
            sizes["suffix index"] = 4 * batch * len(_NGRAMS) * _entries(capacity)
            sizes["drafter's buffers"] += batch * (8 * (self.length + 3) + 8 * len(_NGRAMS))
        return sizes

    def bind(self, state: SequenceState) -> None:
        super().bind(state)
        self._after_chains = state.max_draft_tokens > 0
        if not self._after_chains:
            return
        batch, device, classes = state.batch, state.device, len(_NGRAMS)
        self._lengths = torch.tensor(_NGRAMS, device=device)
        expected = [EXPECTED[length] for length in _NGRAMS]
        self._expected = torch.tensor(expected, dtype=torch.float32, device=device)
        self._powers = powers(LONGEST, device)
        shape = (batch, classes, _entries(state.capacity))
        self._table = torch.full(shape, -1, dtype=torch.int32, device=device)
        # The index holds the n-grams that end before this position.
        self._indexed = torch.zeros(batch, dtype=torch.int64, device=device)
        self._chain = torch.full((batch, self.length), -1, device=device)
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
        super().start(sequences)
        if not self._state.made_up:
            self.take_likely(sequences)
        if not self._after_chains:
            return
        # An index of a prefix of the new text is kept: it equals the beginning of a new index.
        for b, (sequence, indexed) in enumerate(zip(sequences, self._indexed.tolist(), strict=True)):
            text = self._texts[b]
            if text is None or indexed > min(common_prefix(text, sequence), len(sequence) - 1):
                self._table[b].fill_(-1)
                self._indexed[b] = 0
        self._texts = [None if self._state.made_up else sequence for sequence in sequences]
        self._last.copy_(self._no_match)
        self._counts.zero_()
        self._known = [len(sequence) for sequence in sequences]
        self._catch_up()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        super().start_one(b, sequences)
        if not self._after_chains:
            return
        self._table[b] = -1
        self._indexed[b] = 0
        self._last[b] = self._no_match
        self._counts[b] = 0
        self._texts[b], self._known[b] = sequences[b], len(sequences[b])
        self._catch_up()

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.take_likely(sequences)
        if not self._after_chains:
            return
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

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        self._write(state, tree)
        if self._after_chains and not tree.shape:
            committed = (state.chain == 0)[:, None]
            tree.tokens[:, 1:] = torch.where(committed, tree.tokens[:, 1:], self._matched(state))

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
            self._expected, state.length, state.end, LEAST,
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
