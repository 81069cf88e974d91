"""Chunks of a pool that are dropped, in host memory: what a later prompt may begin with."""

from collections.abc import Callable, Sequence

from triforce_tree.kv.kept_prefixes import KeptPrefixes, digests_of, settle
from triforce_tree.kv.pool.blocks import Block, PrefixPool
from triforce_tree.kv.pool.store import PooledStore
from triforce_tree.runtime.features import Features


class PoolExchange:
    """Is the :class:`Exchange` of a pool.

    Chunks after a tail are not kept, because they do not begin at a multiple of the chunk size.

    Args:
        prefixes: texts of all caches of the same models.
        pool, store: the chunks, and their pages of KV slots.
        found: called with a sequence and its prompt, more of which is in the pool than before.
    """

    def __init__(
        self,
        prefixes: KeptPrefixes,
        pool: PrefixPool,
        store: PooledStore,
        found: Callable[[int, Sequence[int], Features | None], None],
    ) -> None:
        self.prefixes, self._pool, self._store, self._found = prefixes, pool, store, found
        self._function: object = None
        pool.dropping = self._keep

    def keep(self, function: object) -> None:
        """See :class:`Exchange`."""
        self._function = function
        for block in self._pool.blocks():
            self._keep(block)

    def _keep(self, block: Block) -> None:
        """Copies a chunk whose text consists of whole chunks."""
        if not block.written or block.stop % self._pool.unit or self._function is None:
            return
        tokens, now = list[int](), block
        while now.parent is not None:
            if now.stop % self._pool.unit:
                return
            tokens, now = [*now.tokens, *tokens], now.parent
        *_, digest = digests_of(tokens, self._pool.unit, self._function, self._store)
        if digest in self.prefixes:
            return
        chosen = self._store.slots_of(block.pages)
        self.prefixes.put(digest, [layer[:, chosen] for layer in self._store.stored])
        settle(self._store)

    def before(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        function: object,
        now: object,
        features: Features | None,
    ) -> None:
        """See :class:`Exchange`."""
        self._function = now
        for b, prompt in enumerate(prompts):
            own = list(digests_of(prompt[:-1], self._pool.unit, now, self._store))
            self.prefixes.use(own)
            brought = False
            for digest, block in zip(own, self._pool.path(b), strict=False):
                if block.stop % self._pool.unit or not (block.written or digest in self.prefixes):
                    break
                if not block.written:
                    chosen = self._store.slots_of(block.pages)
                    for layer, kept in zip(self._store.stored, self.prefixes.slots(digest), strict=True):
                        layer[:, chosen] = kept.to(layer.device, non_blocking=True)
                    block.written = brought = True
            if brought:
                self._found(b, prompt, features)
