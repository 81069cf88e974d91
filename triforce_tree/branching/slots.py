"""The forwards that fill the KV slots of a tree of texts, and their logits."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.forward import TreeForward
from triforce_tree.branching.layout import MOST_QUERIES, Feed, Layout, Sizes, arranged
from triforce_tree.branching.node import Node
from triforce_tree.branching.pages import KVPages
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.pool.pages import selection
from triforce_tree.kv.prefill import PromptCache, chunk_tokens, prefill, windowed_attention
from triforce_tree.models.step_model import step_model
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.runtime.stats import Progress


class NodeCache(PromptCache):
    """Lets a prefill write the next tokens of a node.

    Args:
        pages: keys and values.
        node: owns pages for its tokens; all tokens before it are stored.
    """

    def __init__(self, pages: KVPages, node: Node) -> None:
        super().__init__(pages.store, 0, length=node.start + node.stored)
        self._pages, self._node = pages, node
        # Maps (tokens of the chunk, positions that the layer sees) to the slots of both.
        self._places: dict[tuple[int, int], tuple[slice | Tensor, slice | Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        node, page, count = self._node, self._pages.page, k.shape[2]
        length = self.length + count
        visible = length if params.window is None else min(length, params.window + count - 1)
        if (count, visible) not in self._places:
            stop = length - node.start
            self._places[count, visible] = (
                selection(node.slots(stop - count, stop, page), k.device),
                selection(node.path_slots(stop, visible, page), k.device, spare=True),
            )
        keys, values = self._pages.store.append_at(layer, *self._places[count, visible], visible, k, v)
        # Layers that share another's keys may have been left with the last queries alone.
        return windowed_attention(q, keys, values, params, length - q.shape[2]).transpose(1, 2)

    def advance(self, count: int) -> None:
        super().advance(count)
        self._places.clear()
        self._node.stored = self.length - self._node.start


class TreeSlots:
    """The keys and values of the nodes of a tree. Those of each token are stored once.

    All methods that compute are called inside ``engine.generation()``.

    Args:
        engine: its target computes.
        pages: number of pages that nodes can own, of ``page_slots`` KV slots.

    Attributes:
        pages: the KV slots.
        queues: whether a forward returns before the device has computed it.
        most_queries: most tokens of a forward.
    """

    def __init__(self, engine: LoadedEngine, pages: int) -> None:
        target, config = engine.target, engine.config
        self.pages = KVPages(target, pages, chosen(config.attention_backend, target.device))
        self.queues, self.most_queries = target.device.type == "cuda", MOST_QUERIES
        self._target, self._chunk = target, chunk_tokens(config.prefill_chunk, target.device)
        self._on_gpu = target.device.type == "cuda"
        self._model = step_model(target, compiled=self._on_gpu)
        self._forwards: dict[Sizes, TreeForward] = {}
        # The forward that probably comes next. No change of the tree changes the layout of given feeds that
        # follow stored tokens of their nodes.
        self._expected: tuple[list[Feed], Layout] | None = None

    def fill(self, needs: Mapping[Node, int], progress: Progress | None = None) -> None:
        """Stores the first so many tokens of each node. Parents must precede their children.

        Args:
            progress: called with the number of tokens of each chunk of a long run.
        """
        self.pages.reserve(needs)
        feeds: list[Feed] = []
        for node, count in needs.items():
            missing = count - node.stored
            if missing > 0 and sum(feed.size for feed in feeds) + missing > self.most_queries:
                self.logits(feeds)
                feeds = []
            if missing > self.most_queries:
                cache = NodeCache(self.pages, node)
                prefill(self._target, cache, node.tokens[:count], self._chunk, progress, node.stored)
            elif missing > 0:
                feeds.append(Feed(node, node.stored, missing))
        self.logits(feeds)

    def logits(self, feeds: Sequence[Feed], tokens: Tensor | None = None, repeated: bool = False) -> Tensor:
        """Returns logits ``[T, V]`` after each token of the feeds.

        Tokens that are not stored yet are stored, in pages that the nodes own.

        Args:
            feeds: at most ``most_queries`` tokens, at most one feed per node.
            tokens: int64 ``[T]`` on the device, if the nodes do not have these tokens yet. The caller appends
                them, and sets ``Node.stored``.
            repeated: whether the next forward probably has the next token of each of these nodes. If the
                device computes while the host goes on, that forward is laid out in the meantime.
        """
        if not feeds:
            return torch.empty(0, device="cpu")
        feeds, expected, self._expected = list(feeds), self._expected, None
        layout = expected[1] if expected is not None and expected[0] == feeds else arranged(feeds)
        sizes = Sizes.of(layout, self._on_gpu)
        if sizes not in self._forwards:
            if not self._on_gpu:
                self._forwards.clear()
            made = TreeForward(self._model, self._target.kv_shapes, self.pages, sizes)
            self._forwards[sizes] = made
        begins = np.cumsum([0, *(feed.size for feed in layout.feeds)])
        begin = {feed.node: first for feed, first in zip(layout.feeds, begins, strict=False)}
        places = np.concatenate([begin[feed.node] + np.arange(feed.size) for feed in feeds])
        logits = self._forwards[sizes](layout, tokens, places)
        if tokens is None:
            for node, start, count in feeds:
                node.stored = max(node.stored, start + count)
        if repeated and self.queues:
            following = [Feed(node, start + 1, 1) for node, start, _ in feeds]
            self._expected = following, arranged(following)
            self._forwards[sizes].prepare(self._expected[1])
        return logits

    def last_logits(self, nodes: Sequence[Node]) -> Tensor:
        """Returns logits ``[N, V]`` after the texts of nodes, all of whose earlier tokens are stored."""
        tips = [node.tip for node in nodes]
        place = {tip: number for number, tip in enumerate(dict.fromkeys(tips))}
        self.pages.reserve({tip: len(tip.tokens) for tip in place})
        feeds = [Feed(tip, len(tip.tokens) - 1, 1) for tip in place]
        firsts = range(0, len(feeds), self.most_queries)
        parts = [self.logits(feeds[first : first + self.most_queries], repeated=True) for first in firsts]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return logits if len(place) == len(tips) else logits[[place[tip] for tip in tips]]

    def next_logits(self, nodes: Sequence[Node], tokens: Tensor) -> Tensor:
        """Returns logits ``[N, V]`` after one more token of each node, which the host need not know yet.

        The caller appends the tokens to the nodes, and sets ``Node.stored``.

        Args:
            nodes: at most ``most_queries``, each once; all their own tokens are stored.
            tokens: int64 ``[N]`` on the device.
        """
        self.pages.reserve({node: len(node.tokens) + 1 for node in nodes})
        return self.logits([Feed(node, len(node.tokens), 1) for node in nodes], tokens, repeated=True)

    def copy(self, source: Node, target: Node) -> None:
        """Replaces the tokens of a node by those of another node with the same parent."""
        first = min(common_prefix(target.tokens, source.tokens), target.stored, source.stored)
        target.tokens, target.logprobs = list(source.tokens), list(source.logprobs)
        target.stored = source.stored
        self.pages.reserve({target: source.stored})
        if first < source.stored:
            old, new = (node.slots(first, source.stored, self.pages.page) for node in (source, target))
            self.pages.store.copy_slots(old, new)

    def release(self, node: Node) -> None:
        """Removes a node and its descendants from the tree, and frees their pages."""
        if node.parent is not None:
            node.parent.children.remove(node)
        stack = [node]
        while stack:
            gone = stack.pop()
            stack += gone.children
            self.pages.release(gone)
            gone.children, gone.alive = [], False
        node.parent = None


def needs_before(leaves: Sequence[Node]) -> dict[Node, int]:
    """Returns how many tokens of each node, parents first, the last tokens of the leaves' texts depend on.

    These are all tokens but the last, and also the last token if another leaf's text continues after it.
    """
    needs: dict[Node, int] = {}
    for leaf in leaves:
        tip = leaf.tip
        for node in leaf.path:
            count = len(node.tokens)
            needs[node] = max(needs.get(node, 0), count - 1 if node is tip else count)
    return needs
