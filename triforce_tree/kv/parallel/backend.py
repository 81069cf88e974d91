"""The KV backend of several ranks, each of which keeps a part of the positions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from triforce_tree.kv.backend import CacheSpec, KVBackend
from triforce_tree.kv.parallel.store import SequenceSplit, SplitStore
from triforce_tree.kv.parallel.views import SplitPromptCache, SplitRetrievalView, SplitView
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.recurrent_states import RecurrentStates


class SplitBackend(KVBackend):
    """Stores this rank's positions in layers that see all of them, and the windows of the others.

    Args:
        spec: what the slots of all ranks together are needed for.
        split: this rank's positions.

    Attributes:
        slots: both kinds of layers.
    """

    replaces = False

    def __init__(self, spec: CacheSpec, split: SequenceSplit) -> None:
        super().__init__(spec)
        self.slots = SplitStore(spec, split)
        self.store = self.slots.whole
        self.retrieval = spec.retrieval(SplitRetrievalView, self.slots)

    def view(self, queries: int, mask: Tensor | None, depths: Sequence[int] | None) -> SplitView:
        return SplitView(self.slots, queries, mask, depths)

    @property
    def bytes(self) -> int:
        """See :class:`KVBackend`; of this rank."""
        return self.slots.part.nbytes + self.store.nbytes

    def prompt_cache(self, b: int, states: RecurrentStates | None, length: int) -> PromptCache:
        return SplitPromptCache(self.slots, b, states, length)

    @contextmanager
    def trial(self, length: int, count: int) -> Iterator[None]:
        if any(self.cached.held):
            # Slots of a rank are not those of the positions.
            self.store.initialise([None] * self.batch)
        own = self.slots.split.count(length)
        with super().trial(length, count), self.slots.part.saved(own, count):
            yield
