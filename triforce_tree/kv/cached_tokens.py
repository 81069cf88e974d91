"""Records which tokens a KV cache holds, so that a later prompt can reuse them without prefill."""

from collections.abc import Sequence
from typing import Literal

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.prefill import forward_end

Reuse = Literal["none", "chunks", "all"]
"""Which cached tokens a prefill keeps: none; those computed in whole chunks from a prompt's beginning, as the
same prefill would compute them again, bit by bit, and prefixes that are stored once; or all of them, those of
decoding passes included."""

_BLOCK = 4096


def reuse_of(config: HierarchyConfig) -> Reuse:
    """Returns what prompts reuse under some settings, outside of sessions."""
    if not config.prefix_cache:
        return "none"
    return "all" if config.prefix_bytes and not config.exact else "chunks"


class CachedTokens:
    """Records the tokens of B sequences, as the host knows them from prefills and committed passes.

    The last token of a sequence is the root of its next pass, whose keys and values are not cached yet.

    Args:
        batch: B.
        chunk: tokens of one forward of a prefill.

    Attributes:
        held: tokens of each sequence whose keys and values the cache holds.
        whole: how many of them, a multiple of ``chunk``, were computed in whole chunks from the beginning.
        ends: where prefixes of each sequence end that are stored once for several, also within a chunk.
    """

    def __init__(self, batch: int, chunk: int) -> None:
        self.chunk = chunk
        self.held: list[list[int]] = [[] for _ in range(batch)]
        self.whole = [0] * batch
        self.ends: list[list[int]] = [[] for _ in range(batch)]
        self._roots: list[int | None] = [None] * batch
        # Where the last forward ended of those that compute a sequence from its beginning without a pause.
        self._steps = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Returns how many tokens of each sequence are in the cache."""
        return [len(tokens) for tokens in self.held]

    def clear(self) -> None:
        """Records that no token is in the cache any more."""
        for b in range(len(self.held)):
            self.keep(b, 0)

    def keep(self, b: int, count: int) -> None:
        """Records that sequence b is overwritten from position ``count`` on."""
        del self.held[b][count:]
        self.whole[b] = min(self.whole[b], count // self.chunk * self.chunk)
        if count < self._steps[b]:
            self._steps[b] = self.whole[b]
        self._roots[b] = None

    def take(self, kept: "CachedTokens", lengths: Sequence[int]) -> None:
        """Takes over the first sequences of another cache, with so many tokens of each; it has none then."""
        for b, length in enumerate(lengths):
            kept.keep(b, length)
            self.held[b], kept.held[b] = kept.held[b], []
            alike = kept.chunk == self.chunk
            self.whole[b], self.ends[b] = (kept.whole[b], kept.ends[b]) if alike else (0, [])
            self._steps[b], self._roots[b] = self.whole[b], None

    def renumber(self, order: Sequence[int]) -> None:
        """Lets sequence ``order[i]`` be sequence i, and drops those that are not in ``order``."""
        rest = len(self.held) - len(order)
        self.held = [self.held[b] for b in order] + [[] for _ in range(rest)]
        self.ends = [self.ends[b] for b in order] + [[] for _ in range(rest)]
        self.whole = [self.whole[b] for b in order] + [0] * rest
        self._steps = list(self.whole)
        self._roots = [self._roots[b] for b in order] + [None] * rest

    def copied(self, b: int, prompt: Sequence[int], count: int, whole: int) -> None:
        """Records that sequence b has the first ``count`` tokens of a prompt, ``whole`` in whole chunks."""
        self.keep(b, 0)
        self.held[b], self.whole[b] = list(prompt[:count]), min(whole, count) // self.chunk * self.chunk

    def fed(self, b: int, prompt: Sequence[int], start: int) -> None:
        """Records that a prefill from ``start`` on has stored all but the last token of a prompt."""
        self.keep(b, start)
        if start in (self.whole[b], self._steps[b]):
            while (end := forward_end(start, len(prompt), self.chunk)) < len(prompt):
                self._steps[b] = start = end
            self.whole[b] = start // self.chunk * self.chunk
        self.held[b] = list(prompt[:-1])

    def begin(self, b: int, prompt: Sequence[int]) -> None:
        """Records that a sequence continues from a prompt, whose tokens but the last are in the cache."""
        self.keep(b, len(prompt) - 1)
        self.held[b], self._roots[b] = list(prompt[:-1]), prompt[-1]

    def grown(self, tokens: Sequence[Sequence[int]]) -> None:
        """Records the tokens of each sequence that a pass committed."""
        for b, (root, new) in enumerate(zip(self._roots, tokens, strict=True)):
            if root is not None and new:
                self.held[b] += [root, *new[:-1]]
                self._roots[b] = new[-1]

    def common(self, b: int, prompt: Sequence[int], reuse: Reuse, newest: int = 0) -> int:
        """Returns how many tokens at the beginning of a prompt can be reused from the cache, at most all but
        the last.

        Args:
            newest: tokens before the last one that are not counted either: a drafter needs their states.
        """
        if reuse == "none":
            return 0
        limit = max(0, min(len(prompt) - 1 - newest, len(self.held[b])))
        if reuse == "chunks":
            limit = min(limit, max([self.whole[b], *self.ends[b]]))
        count = common_prefix(self.held[b], prompt, limit)
        if reuse == "all":
            return count
        whole = min(count, self.whole[b]) // self.chunk * self.chunk
        return max([whole, *(end for end in self.ends[b] if end <= count)])


def common_prefix(a: Sequence[int], b: Sequence[int], most: int | None = None) -> int:
    """Returns the length of the prefix that two texts share, or ``most`` if that is less."""
    count = min(len(a), len(b)) if most is None else min(len(a), len(b), most)
    # Whole blocks are compared at once: a kept prefix may have 100,000 tokens.
    for start in range(0, count, _BLOCK):
        parts = (text[start : min(start + _BLOCK, count)] for text in (a, b))
        one, other = (part if isinstance(part, list) else list(part) for part in parts)
        if one != other:
            return start + next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)
    return count
