"""The KV slots of a tree of texts: their pages, the forwards that fill them, and the logits of these
forwards.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.forward import MOST_QUERIES, Ahead, TreeForward
from triforce_tree.branching.layout import Feed
from triforce_tree.branching.node import Node
from triforce_tree.branching.pool import KVPool
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.prefill import PromptCache, prefill, windowed_attention
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.stats import Progress


class NodeCache(PromptCache):
    """The text up to a node, as a cache that a prefill of the node's next tokens continues.

    Args:
        pool: keys and values.
        node: whose tokens are computed; its pages must hold them, and all tokens before them be stored.
    """

    def __init__(self, pool: KVPool, node: Node) -> None:
        super().__init__(pool.store, 0, length=node.start + node.stored)
        self._pool, self._node = pool, node
        # By tokens of the chunk and positions that its layers see, the slots of both.
        self._places: dict[tuple[int, int], tuple[Tensor, slice | Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        node, page, count = self._node, self._pool.page, k.shape[2]
        length = self.length + count
        visible = length if params.window is None else min(length, params.window + count - 1)
        if (count, visible) not in self._places:
            stop = length - node.start
            own = torch.from_numpy(node.slots(stop - count, stop, page)).to(k.device)
            self._places[count, visible] = own, _selection(node.path_slots(stop, visible, page), k.device)
        fresh, seen = self._places[count, visible]
        cached = self.store.layer(layer)
        for slots, new in zip(cached, (k, v), strict=True):
            slots[0].index_copy_(1, fresh, new[0].to(slots.dtype))
        keys, values = (slots[:, :, seen] for slots in cached)
        # Layers that share another's keys may have been left with the last queries alone.
        return windowed_attention(q, keys, values, params, length - q.shape[2]).transpose(1, 2)

    def advance(self, count: int) -> None:
        super().advance(count)
        self._places.clear()
        self._node.stored = self.length - self._node.start


def _selection(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """Returns an index of the slots. For consecutive slots it is a slice, which selects without a copy."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


class TreeSlots:
    """The keys and values of a tree's nodes; each token is stored once.

    All methods that compute are called inside ``target.active()``.

    Args:
        target: the model that computes the keys and values.
        pool: the pages for them.
        chunk: tokens per forward for a long run of one node's tokens.

    Attributes:
        queues: whether :meth:`next_logits` returns before the device has computed anything.
    """

    def __init__(self, target: HFModel, pool: KVPool, chunk: int) -> None:
        self._target, self.pool, self._chunk = target, pool, chunk
        # A CPU computes at once, so a forward for a text that ends there would be time lost.
        self.queues = target.device.type == "cuda"
        self._forward = TreeForward(target)

    def missing_pages(self, needs: Mapping[Node, int]) -> int:
        """Returns the number of pages that so many tokens of each node need beyond those that the node
        owns.
        """
        return sum(max(0, self.pool.pages_of(count) - len(node.pages)) for node, count in needs.items())

    def reserve(self, needs: Mapping[Node, int]) -> None:
        """Give each node pages for so many tokens.

        Raises:
            TreeFullError: too few pages are free; no node has got any.
        """
        self.pool.check(self.missing_pages(needs))
        for node, count in needs.items():
            missing = self.pool.pages_of(count) - len(node.pages)
            if missing > 0:
                node.pages += self.pool.allocate(missing, node.pages[-1] if node.pages else None)

    def fill(self, needs: Mapping[Node, int], progress: Progress | None = None) -> None:
        """Store the first so many tokens of each node. Parents must precede their children.

        Args:
            progress: called with the tokens of each chunk of a long run.
        """
        self.reserve(needs)
        feeds: list[Feed] = []
        for node, count in needs.items():
            missing = count - node.stored
            if missing > MOST_QUERIES:
                self.logits(feeds)
                feeds = []
                cache = NodeCache(self.pool, node)
                prefill(self._target, cache, node.tokens[:count], self._chunk, progress, node.stored)
            elif missing > 0:
                if sum(feed.size for feed in feeds) + missing > MOST_QUERIES:
                    self.logits(feeds)
                    feeds = []
                feeds.append(Feed(node, node.stored, missing))
        self.logits(feeds)

    def logits(self, feeds: Sequence[Feed], ahead: Ahead | None = None) -> Tensor:
        """Returns logits ``[T, V]`` after each token of the feeds. They are valid until the next call.

        Tokens that are not stored yet are stored, in pages that the nodes own. At most ``MOST_QUERIES``
        tokens may be fed, and one run of tokens per node. ``ahead``: see :class:`Ahead`.
        """
        return self._forward(self.pool, feeds, ahead) if feeds else torch.empty(0)

    def last_logits(
        self, tips: Sequence[Node], ahead: Ahead | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yields logits after the last tokens of nodes, all of whose earlier tokens are stored.

        Args:
            ahead: shared by a series of calls for the same nodes (or some of them), with one token more each
                time.

        Yields:
            Indices of some of the nodes and their logits ``[n, V]``, which are valid until the next item.
        """
        self.reserve({tip: len(tip.tokens) for tip in tips})
        distinct = list(dict.fromkeys(tips))
        for first in range(0, len(distinct), MOST_QUERIES):
            part = distinct[first : first + MOST_QUERIES]
            logits = self.logits([Feed(node, len(node.tokens) - 1, 1) for node in part], ahead)
            if len(part) == len(tips):
                yield list(range(len(tips))), logits
                return
            place = {node: number for number, node in enumerate(part)}
            numbers = [number for number, tip in enumerate(tips) if tip in place]
            yield numbers, logits[[place[tips[number]] for number in numbers]]

    def next_logits(self, nodes: Sequence[Node], tokens: Tensor, ahead: Ahead) -> Tensor:
        """Returns logits ``[N, V]`` after one more token of each node, all of whose own tokens are stored.

        The tokens are not in the nodes yet, because the host may not know them. They are stored in KV slots.
        Call :meth:`add_stored` after they were appended to the nodes.

        Args:
            nodes: at most ``MOST_QUERIES``, each once.
            tokens: int64 ``[N]`` on the device.
            ahead: see :meth:`last_logits`.
        """
        self.reserve({node: len(node.tokens) + 1 for node in nodes})
        return self._forward(self.pool, [Feed(node, len(node.tokens), 1) for node in nodes], ahead, tokens)

    def add_stored(self, nodes: Sequence[Node]) -> None:
        """Count the tokens of :meth:`next_logits` as stored. Called after they were appended to the nodes."""
        for node in nodes:
            node.stored = len(node.tokens)

    def join(self, node: Node) -> None:
        """Merge the only child of a node into the node; the child's slots are copied after the node's own.

        Raises:
            TreeFullError: there are too few slots for copies of the child's tokens.
        """
        [child] = node.children
        first, page = len(node.tokens), self.pool.page
        assert node.stored == first, "the tokens of a node with children that were computed are stored"
        self.reserve({node: first + len(child.tokens)})
        self.pool.move(child.slots(0, child.stored, page), node.slots(first, first + child.stored, page))
        node.append(child.tokens, child.logprobs)
        node.stored += child.stored
        node.children, child.children = child.children, []
        for below in node.children:
            below.parent = node
        child.parent = None
        self.release(child)

    def release(self, node: Node) -> None:
        """Remove a node and its descendants from the tree, and free their pages."""
        if node.parent is not None:
            node.parent.children.remove(node)
        stack = [node]
        while stack:
            gone = stack.pop()
            stack += gone.children
            self.pool.release(gone.pages)
            gone.pages, gone.children, gone.stored, gone.alive = [], [], 0, False
        node.parent = None


def needs_before(leaves: Sequence[Node]) -> dict[Node, int]:
    """Returns for each node, parents first, how many of its tokens the last tokens of the leaves' texts
    depend on.

    These are all tokens but the last, and also the last token if another leaf's text continues after it.
    """
    needs: dict[Node, int] = {}
    for leaf in leaves:
        tip = leaf.tip
        for node in leaf.path:
            count = len(node.tokens)
            needs[node] = max(needs.get(node, 0), count - 1 if node is tip else count)
    return needs
