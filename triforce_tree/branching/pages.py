"""Keys and values of a tree of texts: pages of KV slots that nodes own."""

from collections.abc import Mapping

from triforce_tree.branching.node import Node
from triforce_tree.kernels.attention.backend import AttentionBackend
from triforce_tree.kv.pool.pages import FreePages
from triforce_tree.kv.pool.store import PagedStore
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
        self.store = PagedStore(target, (count + 1) * self.page, self.page)
        self.store.attention = attention
        self._pages = FreePages(count + 1)
        self._pages.take(1)

    @property
    def free(self) -> int:
        """Returns the number of pages that no node owns."""
        return self._pages.free

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
            after = node.pages[-1] if node.pages else -1
            node.pages += self._pages.take(self._missing(node, tokens), after)

    def release(self, node: Node) -> None:
        """Frees the pages of a node."""
        self._pages.give_back(node.pages)
        node.pages, node.stored = [], 0
