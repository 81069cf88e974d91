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
        kept: slots of an earlier backend, which is not used any more, or None. They are used if they serve.
    """

    readable = True

    def __init__(self, spec: CacheSpec, kept: KVStore | None) -> None:
        super().__init__(spec)
        config, bits, scratch = spec.config, spec.config.kv_bits, spec.scratch
        page = config.retrieval.chunk if spec.levels == 3 else 64
        least = max(spec.max_seq_len + scratch, config.retrieval.budget)
        if kept is not None and kept.serves(spec.batch, least, scratch, page, bits):
            self.store = kept.in_pages(page)
        else:
            target, sizes = spec.target, (spec.batch, spec.slots)
            self.store = KVStore(
                target.kv_layers, *sizes, target.device, target.dtype, page, scratch, bits=bits
            )
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
        lengths = kept.cached.lengths
        if self.store.memory is not kept.store.memory:
            copied = [self.store.take(kept.store, b, length) for b, length in enumerate(lengths)]
            lengths = [n if done else 0 for n, done in zip(lengths, copied, strict=True)]
        self.cached.take(kept.cached, lengths)
        return True
