"""Adds chains of suffix-matched tokens to a drafter; a pass proposes either a tree or such a chain.

Suffix-matched tokens are those that followed an earlier occurrence of the newest tokens of the sequence. They
are a function of the preceding tokens, and so honest without a distribution. Occurrences are found on the
host before the pass is chosen, so that their lengths can be taken into account (``policy/pass_policy.py``).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from triforce_tree.drafters.base import Drafter, TokenTree, shapes_of
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.store import KVStore
from triforce_tree.policy.estimates import FORCED
from triforce_tree.runtime.devices import overwrite
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Lookup
from triforce_tree.verify.probs import Sampler

LENGTHS = 8, 2
"""An occurrence of the last 8 tokens of the text counts; without one, an occurrence of the last 2."""
LONGEST = 64
"""Matching tokens are counted up to this number."""
# N-grams have a polynomial hash with this odd factor, modulo 2**64.
_FACTOR, _MODULUS = 0x9E3779B97F4A7C15, 2**64


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a sequence, or tokens that must follow by its grammar.

    Attributes:
        end: the position after the occurrence.
        common: the number of tokens before ``end`` that equal the end of the sequence; 0 without an
            occurrence, and ``FORCED`` for forced tokens.
        forced: the tokens that must follow.
    """

    end: int
    common: int
    forced: Sequence[int] = ()

    @property
    def most(self) -> int:
        """Returns the most tokens to propose."""
        return len(self.forced) or LONGEST


class WithLookup(Drafter):
    """Proposes the trees of ``drafter`` or chains of matched tokens, which are the last of its ``shapes``.

    Args:
        drafter: grows the trees. After passes with a chain it is called with ``prepare(resumed=True)``.
        lengths: most matched tokens of a pass; each length is a shape of its own.
    """

    def __init__(self, drafter: Drafter, *lengths: int) -> None:
        self.drafter, self.lengths, grown = drafter, lengths, shapes_of(drafter)
        self.shapes = (*grown, *map(Lookup, lengths))
        self.tree = grown[0]
        self._lookup = len(grown)
        self.name, self.deterministic = drafter.name, drafter.deterministic
        self.capturable, self.weight_bytes = drafter.capturable, drafter.weight_bytes
        self.features, self.feature_window = drafter.features, drafter.feature_window
        self.reads_slots = drafter.reads_slots
        # The indices of an earlier drafter, for the sequences that begin next.
        self._earlier: list[SuffixIndex] = []

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        return self.drafter.buffer_bytes(batch, capacity, limits)

    def read(self, store: KVStore) -> None:
        self.drafter.read(store)

    def take_over(self, earlier: Drafter) -> None:
        if isinstance(earlier, WithLookup):
            self._earlier = earlier._indices
        self.drafter.take_over(earlier.drafter if isinstance(earlier, WithLookup) else earlier)

    def bind(self, state: SequenceState) -> None:
        self.drafter.bind(state)
        self._state = state
        self._proposed = torch.full((state.batch, max(self.lengths)), -1, device=state.device)
        self._indices = [SuffixIndex(()) for _ in range(state.batch)]
        self._forced: list[Sequence[int]] = [()] * state.batch

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start(sequences)
        if self._state.made_up:
            # What made-up sequences hold does not matter.
            sequences = [()] * len(sequences)
        known = {id(index): index for index in (*self._indices, *self._earlier)}
        for b, sequence in enumerate(sequences):
            found = next((index for index in known.values() if index.grows_to(sequence)), None)
            self._indices[b] = SuffixIndex(sequence) if found is None else known.pop(id(found))
        self._earlier = []
        self._forced = [()] * len(sequences)
        # Captured and timed stages verify a chain of full length.
        self._proposed.zero_()

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        self.drafter.start_one(b, sequences)
        if not self._indices[b].grows_to(sequences[b]):
            self._indices[b] = SuffixIndex(sequences[b])
        self._forced[b] = ()

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        self.drafter.prepare(sequences, resumed)

    def force(self, tokens: Sequence[Sequence[int]]) -> None:
        self.drafter.force(tokens)
        self._forced = list(tokens)

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        if tree.shape < self._lookup:
            self.drafter.propose(state, tree, sampler)
            return
        tree.tokens[:, 0] = state.newest
        tree.tokens[:, 1:] = self._proposed[:, : tree.nodes - 1]
        tree.probs_rows.fill_(-1)

    def match(self, sequences: Sequence[Sequence[int] | None]) -> list[Match | None]:
        """Returns an earlier occurrence of the last tokens of each sequence; None if that has ended.

        If a grammar forces other tokens than those after the occurrence, the forced ones take their place.
        """
        matches: list[Match | None] = []
        for index, forced, sequence in zip(self._indices, self._forced, sequences, strict=True):
            if sequence is None:
                matches.append(None)
                continue
            index.extend(sequence)
            end, common = index.match()
            if forced and (not common or index.continuation(end, len(forced)) != list(forced)):
                matches.append(Match(end, FORCED, forced))
            else:
                matches.append(Match(end, common))
        return matches

    def take(self, matches: Sequence[Match | None], counts: Sequence[int]) -> None:
        """Sets the tokens after each match as the chain that the next ``propose`` writes.

        Args:
            counts: the number of tokens to propose for each sequence, at most the length of the pass's shape.
        """
        chains = np.full(self._proposed.shape, -1)
        for chain, index, match, count in zip(chains, self._indices, matches, counts, strict=True):
            if match is not None and count:
                count = min(count, match.most)
                following = match.forced or index.continuation(match.end, count)
                chain[:count] = following[:count]
        overwrite(self._proposed, torch.from_numpy(chains))


class SuffixIndex:
    """Finds earlier occurrences of the end of one growing text.

    Args:
        tokens: the initial text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = list(tokens)
        # The last n-gram is left out: it is no earlier occurrence of itself.
        before = np.asarray(tokens[:-1], dtype=np.uint64)
        self._ngrams = [_NGrams(length, before) for length in LENGTHS]

    def grows_to(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` is the indexed text with few new tokens, which :meth:`extend` then adds. A token
        takes about four times as long there as in a new index.
        """
        known = len(self._text)
        if not 0 < known <= len(tokens) < 4 / 3 * known or self._text[-1] != tokens[known - 1]:
            return False
        return common_prefix(self._text, tokens) == known

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the new tokens at the end of ``tokens``, which is the whole text."""
        known = len(self._text)
        self._text.extend(tokens[known:])
        for ngrams in self._ngrams:
            ngrams.extend(self._text, known)

    def match(self) -> tuple[int, int]:
        """Finds the latest earlier occurrence of the last tokens of the text: of as many as the first of
        ``LENGTHS`` that has one.

        Returns:
            the position after that occurrence, and the number of tokens before it that equal the end of the
            text; (0, 0) if there is no occurrence.
        """
        text = self._text
        for ngrams in self._ngrams:
            if end := ngrams.latest(text):
                common, most = ngrams.length, min(LONGEST, end)
                while common < most and text[end - 1 - common] == text[-1 - common]:
                    common += 1
                return end, common
        return 0, 0

    def continuation(self, end: int, count: int) -> list[int]:
        """Returns the ``count`` tokens from position ``end`` on; past the end of the text they repeat."""
        following = self._text[end : end + count]
        return (following * -(-count // len(following)))[:count]


class _NGrams:
    """Maps the n-grams of one growing text to the positions after their latest occurrences.

    N-grams of the initial text are in arrays sorted by hash, 16 bytes per token; those of tokens appended
    later are in a dictionary. A lookup takes O(log L) time, where L is the number of initial tokens.

    Args:
        length: n.
        tokens: uint64 ``[L]``, of the initial text.
    """

    def __init__(self, length: int, tokens: np.ndarray) -> None:
        self.length = length
        self._later: dict[tuple[int, ...], int] = {}
        hashes = _hashes(tokens, length)
        order = np.argsort(hashes, kind="stable")
        # Their elements are read one by one, which takes longer in arrays.
        self._sorted, self._ends = hashes[order].data, (order + length).data

    def extend(self, text: Sequence[int], known: int) -> None:
        """Indexes the n-grams of a text that the tokens from position ``known`` on follow."""
        for end in range(max(known, self.length), len(text)):
            self._later[tuple(text[end - self.length : end])] = end

    def latest(self, text: Sequence[int]) -> int:
        """Returns the position after the latest earlier occurrence of the last n-gram; 0 without one."""
        gram = tuple(text[-self.length :])
        if len(gram) < self.length:
            return 0
        return self._later.get(gram) or self._initial(gram, text)

    def _initial(self, gram: tuple[int, ...], text: Sequence[int]) -> int:
        # The hash is that of ``_hashes``; numpy arrays of few numbers would take longer than the search.
        wanted = 0
        for token in gram:
            wanted = (wanted * _FACTOR + token) % _MODULUS
        # numpy's search releases Python's lock, which another thread may then keep for a while.
        at = bisect_right(self._sorted, wanted) - 1
        if at < 0 or self._sorted[at] != wanted:
            return 0
        end = self._ends[at]
        return end if tuple(text[end - self.length : end]) == gram else 0


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns the uint64 hash of each n-gram of ``length`` tokens."""
    count = max(0, len(tokens) - length + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(length):
        hashes = hashes * np.uint64(_FACTOR) + tokens[i : i + count]
    return hashes
