"""Keys and values of a tree of texts: pages of KV slots that nodes own."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention.backend import AttentionBackend
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel


class TreeFullError(ValueError):
    """A call needs more KV slots than a tree has. The call has had no effect."""


def slot_bytes(target: HFModel) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    return sum(shape.elements for shape in target.kv_shapes) * target.dtype.itemsize


def page_slots(target: HFModel) -> int:
    """Returns the KV slots of a page. The kernels of a GPU copy 64 slots in bulk."""
    return 64 if target.device.type == "cuda" else 16


class KVPages:
    """Pages of KV slots of all layers, on the target's device.

    All layers keep every position, also those with a sliding window, because a node may be forked anywhere.

    Args:
        target: the model.
        count: number of pages that nodes can own.
        attention: attends to the slots.

    Attributes:
        store: the slots, as one sequence. No node owns page 0: a forward writes there the keys and values
            of tokens that are stored already, and nothing reads it.
        page: KV slots of a page.
        count: number of pages that nodes can own.
        page_bytes: bytes of a page in all layers.
    """

    def __init__(self, target: HFModel, count: int, attention: AttentionBackend) -> None:
        self.page, self.count = page_slots(target), count
        self.page_bytes = self.page * slot_bytes(target)
        shapes = [shape and replace(shape, window=None, chunked=False) for shape in target.kv_layers]
        total = (count + 1) * self.page
        self.store = KVStore(shapes, 1, total, target.device, target.dtype, self.page)
        self.store.attention = attention
        self._free = np.ones(count + 1, dtype=bool)
        self._free[0] = False

    @property
    def free(self) -> int:
        """Returns the number of pages that no node owns."""
        return int(self._free.sum())

    def _missing(self, node: Node, tokens: int) -> int:
        return max(0, -(-tokens // self.page) - len(node.pages))

    def check(self, needs: Mapping[Node, int]) -> None:
        """Raises TreeFullError if there are too few pages for so many tokens of each node."""
        pages, free = sum(self._missing(node, tokens) for node, tokens in needs.items()), self.free
        if pages > free:
            used = self.count - free
            raise TreeFullError(
                f"{pages * self.page} more KV slots are needed, and {free * self.page} of the tree's "
                f"{self.count * self.page} are free; prune nodes, ask for fewer tokens, or make a tree with "
                f"max_bytes={(used + pages) * self.page_bytes}"
            )

    def reserve(self, needs: Mapping[Node, int]) -> None:
        """Gives each node pages for so many tokens.

        Raises:
            TreeFullError: there are too few pages. No node has got any.
        """
        self.check(needs)
        for node, tokens in needs.items():
            pages = np.flatnonzero(self._free)[: self._missing(node, tokens)]
            self._free[pages] = False
            node.pages += pages.tolist()

    def release(self, node: Node) -> None:
        """Frees the pages of a node."""
        self._free[node.pages] = True
        node.pages, node.stored = [], 0

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the KV slots ``source`` of all layers to the slots ``target``, int64 ``[n]``."""
        old, new = (torch.from_numpy(slots).to(self.store.device) for slots in (source, target))
        for group in self.store.groups:
            for slots in (group.k, group.v):
                slots[:, 0].index_copy_(2, new, slots[:, 0].index_select(2, old))
