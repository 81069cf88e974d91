"""KV slots of a batch whose prompts are all known before it begins: their prefixes, then each one's own."""

import sys
from collections.abc import Sequence

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.shared.store import SharedStore, SlotLayout
from triforce_tree.kv.shared.tree import PrefixTree, Run
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.features import Features


class TreeStore(SharedStore):
    """The slots of each KV head are ``[prefixes | sequence 0 | sequence 1 | ...]``.

    Prefixes may change between batches, as far as they fit.

    Args:
        layout: of the batch.
        capacity: slots of all prefixes, a multiple of the page.
        own: slots of a sequence after its prefixes, scratch slots included, rounded up to whole pages.
    """

    def __init__(self, layout: SlotLayout, capacity: int, own: int) -> None:
        batch, page = layout.batch, layout.page
        own = -(-own // page) * page
        super().__init__(layout, capacity + batch * own)
        self.capacity, self.own = capacity, own
        self._tree = PrefixTree()
        self._apart = [capacity + b * own for b in range(batch)]
        self._set(self.paths, self._apart)

    def share(
        self,
        tree: PrefixTree,
        cached: CachedTokens,
        prompts: Sequence[Sequence[int]],
        features: Features | None = None,
    ) -> list[int]:
        """See :class:`SharedStore`."""
        if tree.size.slots > self.capacity:
            raise ValueError(
                f"common prefixes of {tree.size.slots} tokens exceed {self.capacity} KV slots; "
                "make another store"
            )
        self._tree, before = tree, self.paths
        after = [[node.run for node in tree.path(prompt)] for prompt in prompts]
        kept, whole = [], []
        for b, prompt in enumerate(prompts):
            # Of every sequence, what is where this one has it from now on.
            found = [
                min(cached.common(other, prompt, "chunks"), _same(before[other], after[b], other == b))
                for other in range(self.batch)
            ]
            end = after[b][-1].stop if after[b] else 0
            most = max(found)
            kept.append((most, cached.whole[found.index(most)], found[b]))
            # Its own slots hold what they did, and so do all runs of prefixes that it has.
            whole.append(before[b] == after[b] and cached.common(b, prompt, "chunks") >= end)
        for b, (prompt, (most, of_them, _)) in enumerate(zip(prompts, kept, strict=True)):
            if not whole[b]:
                cached.copied(b, prompt, most, of_them)
                cached.ends[b] = [most, *(run.stop for run in after[b])]
        self._set(after, self._apart)
        return [own for *_, own in kept]

    def join(
        self, b: int, prompt: Sequence[int], cached: CachedTokens, features: Features | None = None
    ) -> None:
        """See :class:`SharedStore`."""
        path = [node.run for node in self._tree.path(prompt)]
        if path != self.paths[b]:
            same = _same(self.paths[b], path, own=False)
            cached.keep(b, same)
            cached.ends[b] = [same, *(run.stop for run in path)]
            self._set([path if row == b else other for row, other in enumerate(self.paths)], self._apart)

    def take_over(self, source: KVStore, b: int, kept: CachedTokens, cached: CachedTokens) -> None:
        """Begin with what the sequence holds in whole chunks of a prefill and in prefixes, as far as there is
        room."""
        tokens = kept.held[b] if kept.chunk == cached.chunk else []
        reached = min(max([kept.whole[b], *kept.ends[b]]), len(tokens), self.capacity)
        count = reached // self.page * self.page
        self.copy_from(source, b, 0, count, 0)
        self._set([[Run(0, count, 0)] if count else []] * self.batch, self._apart)
        cached.copied(0, tokens, count, kept.whole[b])
        cached.ends[0] = [count]

    def fits(self, max_seq_len: int, tree: PrefixTree) -> bool:
        """See :class:`SharedStore`."""
        assert self.scratch is not None
        own = max_seq_len - tree.size.saved + self.scratch
        return bool(tree.roots) and tree.size.slots <= self.capacity and own <= self.own

    def layout_of_trial(self, start: int) -> tuple[list[list[Run]], list[int]]:
        """See :class:`SharedStore`."""
        length = min(self.capacity, start // self.page * self.page)
        return [[Run(0, length, 0)] if length else []] * self.batch, self._apart


def _same(one: Sequence[Run], other: Sequence[Run], own: bool) -> int:
    """How many positions from 0 on two paths have in the same slots.

    ``own``: those after both paths are in the same slots, too.
    """
    position = 0
    while True:
        found = [next((r for r in path if r.start <= position < r.stop), None) for path in (one, other)]
        x, y = found
        if x is None or y is None or x.place - x.start != y.place - y.start:
            break
        position = min(x.stop, y.stop)
    ends = {path[-1].stop if path else 0 for path in (one, other)}
    return sys.maxsize if own and ends == {position} else position
