"""The KV backend on the device: each sequence has slots of its own."""

from collections.abc import Sequence

from torch import Tensor

from triforce_tree.kv.backend import CacheSpec, KVBackend
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView


class DeviceBackend(KVBackend):
    """Stores slots of B sequences on the device; layers with a window keep a ring if that takes less.

    Args:
        spec: what the slots are needed for.
        store: slots to work on, with whatever they hold; with None those of ``kept`` if they serve, else new
            ones.
        kept: slots of an earlier backend, which is not used any more, or None.

    Raises:
        ValueError: a store that is too small, of other bits, or cannot be paged by chunks.
    """

    readable = True

    def __init__(self, spec: CacheSpec, store: KVStore | None, kept: KVStore | None) -> None:
        super().__init__(spec)
        config, bits, scratch = spec.config, spec.config.kv_bits, spec.scratch
        page = config.retrieval.chunk if spec.levels == 3 else 64
        positions = spec.max_seq_len + scratch
        least = max(positions, config.retrieval.budget)
        if store is None and kept is not None and kept.serves(spec.batch, least, scratch, page, bits):
            store = kept
        if store is None:
            target = spec.target
            store = KVStore(
                target.kv_layers,
                spec.batch,
                spec.slots,
                target.device,
                target.dtype,
                page,
                scratch,
                bits=bits,
            )
        if store.bits != bits:
            raise ValueError(f"kv_bits={bits}, but the given store has {store.bits}; make another")
        store.check_size(spec.batch, positions, scratch)
        self.store = store.in_pages(page)
        self.store.attention = spec.attention
        self.retrieval = spec.retrieval(PagedRetrievalView, self.store)

    def view(self, queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> TreeAttentionView:
        return TreeAttentionView(self.store, queries, mask=mask, depths=depths, exact=self.spec.config.exact)

    def gives(self, bits: int, prompts: Sequence[Sequence[int]], reuse: Reuse, pool: PoolSize | None) -> bool:
        if self.store.bits != bits:
            return False
        if pool is not None:
            return any(self.cached.common(b, prompts[0], "chunks") for b in range(self.batch))
        found = (self.cached.common(b, prompt, reuse) for b, prompt in enumerate(prompts[: self.batch]))
        return self.batch <= len(prompts) and any(found)

    def take_over(self, kept: KVBackend) -> bool:
        """See :class:`KVBackend`: in the same memory, or as a copy."""
        lengths = [len(tokens) for tokens in kept.cached.held]
        if self.store.memory is not kept.store.memory:
            copied = [self.store.take(kept.store, b, length) for b, length in enumerate(lengths)]
            lengths = [n if done else 0 for n, done in zip(lengths, copied, strict=True)]
        self.cached.take(kept.cached, lengths)
        return True
