"""One forward of the target over a tree of texts, in buffers that a CUDA graph may hold."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.attention import PathAttention, TextAttention, attention_of
from triforce_tree.branching.layout import Layout, Sizes
from triforce_tree.branching.pages import KVPages
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.attention import KVShape
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.devices import pinned, sent
from triforce_tree.runtime.executor import Step, executor


class TreeForward:
    """Computes the logits of many nodes' tokens at once, with one attention call per layer for all of them.

    On a GPU a forward with one token per node is captured if the model allows it.

    Args:
        model: the target's forwards; every call is inside ``Engine.generation``.
        shapes: the shapes of the target's layers, with their windows.
        pages: keys and values.
        sizes: capacities.
    """

    def __init__(self, model: StepModel, shapes: Sequence[KVShape], pages: KVPages, sizes: Sizes) -> None:
        store = pages.store
        self._model, self._pages, self.sizes = model, pages, sizes
        # Token ids, positions, and the KV slots that are written.
        self._ids = torch.zeros(3, sizes.queries, dtype=torch.int64, device=store.device)
        self._attentions: dict[tuple[int, bool] | None, TextAttention] = {}
        for window in dict.fromkeys(map(_window, shapes)):
            kinds = sorted({shape.heads for shape in shapes if _window(shape) == window}, key=repr)
            if window is None:
                self._attentions[window] = attention_of(kinds, pages, sizes)
            else:
                self._attentions[window] = PathAttention(kinds, pages, sizes, *window)
        self._logits = torch.empty(0, device="cpu")
        # A forward of several tokens per node comes once, and is not worth a capture. The trial runs of a
        # capture write to slot 0, which nothing reads.
        capturable = model.capturable and not sizes.tail and store.attention.can.captures
        self._run = executor([Step(self._forward, capturable)], store.device)

    def __call__(self, layout: Layout, tokens: Tensor | None, places: np.ndarray) -> Tensor:
        """Returns logits ``[T, V]``. Stores the keys and values of tokens that are not stored yet.

        Args:
            layout: the layout of the forward; the nodes own pages for its tokens.
            tokens: int64 ``[T]`` on the device, or None for the tokens that the nodes have.
            places: int64 ``[T]``, the queries of the layout to which ``tokens`` and the result belong.
        """
        page, device = self._pages.page, self._ids.device
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for node, start, count in layout.feeds:
            stop = start + count
            ids += node.tokens[start:stop] if tokens is None else [0] * count
            positions += range(node.start + start, node.start + stop)
            fresh = max(start, node.stored)
            slots += [index % page for index in range(start, min(fresh, stop))]
            slots += node.slots(fresh, stop, page).tolist()
        self._ids.zero_()
        given = pinned(torch.tensor([ids, positions, slots], device="cpu"), device)
        self._ids[:, : len(ids)].copy_(given, non_blocking=True)
        indices = sent(torch.from_numpy(places), device)
        if tokens is not None:
            self._ids[0].index_copy_(0, indices, tokens)
        for attention in self._attentions.values():
            attention.set(layout)
        self._run()
        return self._logits[0].index_select(0, indices)

    def prepare(self, layout: Layout) -> None:
        """Plans a forward that may come next while this one runs, if its tokens have pages already."""
        fits = Sizes.of(layout, on_gpu=True) == self.sizes
        if fits and all(feed.stop <= len(feed.node.pages) * self._pages.page for feed in layout.feeds):
            for attention in self._attentions.values():
                attention.prepare(layout)

    def _forward(self) -> None:
        tokens, positions, _ = self._ids
        self._logits = self._model(tokens[None], positions[None], self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        slots = self._pages.store.layers[layer]
        for cached, new in zip(slots.kv, (k, v), strict=True):
            cached[0].index_copy_(1, self._ids[2], new[0].to(cached.dtype))
        queries = q[0].transpose(0, 1)
        attend = self._attentions[_window(params)]
        return attend(slots.group.shape.heads, queries, slots.group.paged(slots.place), params)[None]


def _window(layer: KVShape | AttentionParams) -> tuple[int, bool] | None:
    """Returns a layer's window and whether it is chunked, or None without a window."""
    return None if layer.window is None else (layer.window, layer.chunked)
