"""Programs of one generation, within the memory plan."""

from collections.abc import Callable, Sequence

from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.pool.size import PoolSize


class PlannedPrograms:
    """Makes the programs of a generation, each within the memory plan of its time.

    Args:
        hierarchy: the models, the plan, and the buffers of the last generation.
        first: texts that the first program is made for. Its levels are those of later ones, however short
            the texts that have joined.
        max_seq_len: most tokens of a sequence, new ones included.
        reuse: which tokens that the cache holds from earlier generations are kept.
        pinned: called with bytes of host memory as they are taken.
        pool: the pool of KV slots that the texts share, under the settings at the time of a call.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        first: Sequence[Sequence[int]],
        max_seq_len: int,
        reuse: Reuse = "none",
        pinned: Callable[[int], None] | None = None,
        pool: Callable[[], PoolSize | None] = lambda: None,
    ) -> None:
        self._hierarchy, self._first, self._max_seq_len = hierarchy, first, max_seq_len
        self._reuse, self._pinned, self._pool = reuse, pinned, pool
        self._least = min(map(len, first))

    def make(self, texts: Sequence[Sequence[int]]) -> DecodingProgram:
        """Returns a program with a batch index for each of these texts."""
        alike = [text if len(text) >= self._least else self._first[0] for text in texts]
        reuse: Reuse = "all" if len(texts) > len(self._first) else self._reuse
        left = self._max_seq_len - max(map(len, alike))
        program = self._hierarchy.program(alike, left, self._pinned, reuse, self._pool())
        self._max_seq_len = program.max_seq_len
        return program

    def shrink(self) -> bool:
        """Reduces the memory plan; returns False if it cannot be reduced further."""
        return self._hierarchy.shrink()
