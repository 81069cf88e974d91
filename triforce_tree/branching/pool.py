"""Keys and values of a tree of texts: pages of KV slots that nodes own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel

_PAGE = {"cuda": 64}
_CPU_PAGE = 16
SCRATCH = 1
"""Pages at the front that no node owns: passes write there what is stored already, and nobody reads it."""


class TreeFullError(ValueError):
    """The KV slots of a tree are too few for a call, which has had no effect."""


class KVPool:
    """Pages of KV slots of all layers, on the target's device.

    All layers keep every position, those with a sliding window too: a node may be forked anywhere.

    Args:
        target: whose layers keep keys and values here.
        slots: KV slots, rounded down to whole pages.
        page: slots of a page; by default 64 on a GPU, which the kernel copies in bulk, and 16 elsewhere.

    Attributes:
        store: the slots, as one sequence.
        page: slots of a page.
        pages: that nodes can own.
    """

    def __init__(self, target: HFModel, slots: int, page: int | None = None) -> None:
        self.page = page or _PAGE.get(target.device.type, _CPU_PAGE)
        self.pages = slots // self.page
        shapes = [shape and replace(shape, window=None, chunked=False) for shape in target.kv_layers]
        count = (self.pages + SCRATCH) * self.page
        self.store = KVStore(shapes, 1, count, target.device, target.dtype, self.page)
        self._slot_bytes = slot_bytes(target)
        self._free = np.ones(self.pages + SCRATCH, dtype=bool)
        self._free[:SCRATCH] = False

    @property
    def free_pages(self) -> int:
        return int(self._free.sum())

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one page in all layers."""
        return self.page * self._slot_bytes

    @property
    def bytes(self) -> int:
        """Returns the bytes of all pages that nodes can own."""
        return self.pages * self.page_bytes

    def pages_of(self, tokens: int) -> int:
        """Returns the number of pages for so many tokens of a node."""
        return -(-tokens // self.page)

    def check(self, pages: int) -> None:
        """Raise TreeFullError where fewer than ``pages`` are free."""
        free = self.free_pages
        if pages > free:
            used = self.pages - free
            raise TreeFullError(
                f"{pages * self.page} more KV slots are needed, and {free * self.page} of the tree's "
                f"{self.pages * self.page} are free; prune nodes, ask for fewer tokens, or make a tree with "
                f"max_bytes={(used + pages) * self.page_bytes}"
            )

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` pages. They are consecutive if possible, and begin at ``after + 1`` if that page is
        free.

        Raises:
            TreeFullError: fewer pages are free.
        """
        self.check(count)
        if after is not None and after + count < len(self._free) and self._free[after + 1 :][:count].all():
            first = after + 1
        else:
            first = self._run(count)
        pages = np.flatnonzero(self._free)[:count] if first < 0 else np.arange(first, first + count)
        self._free[pages] = False
        found: list[int] = pages.tolist()
        return found

    def _run(self, count: int) -> int:
        """Returns the first of ``count`` consecutive free pages, or -1 if there are none."""
        edges = np.flatnonzero(np.diff(self._free, prepend=False, append=False)).reshape(-1, 2)
        long = edges[edges[:, 1] - edges[:, 0] >= count]
        return int(long[0, 0]) if len(long) else -1

    def release(self, pages: Sequence[int]) -> None:
        self._free[list(pages)] = True

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the slots ``source`` of all layers to the slots ``target``, int64 ``[n]``."""
        old, new = (torch.from_numpy(slots).to(self.store.device) for slots in (source, target))
        for group in self.store.groups:
            for slots in group.kv:
                slots[:, 0].index_copy_(2, new, slots[:, 0].index_select(2, old))


def slot_bytes(target: HFModel) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    return sum(shape.elements for shape in target.kv_shapes) * target.dtype.itemsize
