"""Long runs of one node's tokens into its pages, in chunks, as prompts are prefilled."""

import numpy as np
import torch
from torch import Tensor

from triforce_tree.branching.node import Node
from triforce_tree.branching.pool import KVPool
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.kv.prefill import windowed_attention
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.stats import Progress


class PathRows:
    """The rows of one text up to a node, as a cache that a model's forward continues.

    Args:
        pool: keys and values.
        node: whose tokens are computed; its pages must hold them, and all rows before them be stored.
    """

    recurrent = None

    def __init__(self, pool: KVPool, node: Node) -> None:
        self._pool, self._node, self._row = pool, node, node.stored
        # By tokens of the chunk and positions that its layers see, the slots of both.
        self._places: dict[tuple[int, int], tuple[Tensor, slice | Tensor]] = {}

    def positions(self, count: int) -> Tensor:
        first = self._node.start + self._row
        return torch.arange(first, first + count, device=self._pool.store.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        pool, node, count = self._pool, self._node, k.shape[2]
        stop = self._row + count
        visible = length = node.start + stop
        if params.window is not None:
            visible = min(length, params.window + count - 1)
        if (count, visible) not in self._places:
            rows = torch.from_numpy(node.slots(self._row, stop, pool.page)).to(k.device)
            path = node.path_slots(stop, visible, pool.page)
            self._places[count, visible] = rows, _selection(path, k.device)
        fresh, seen = self._places[count, visible]
        cached = pool.store.layer(layer)
        for slots, new in zip(cached, (k, v), strict=True):
            slots[0].index_copy_(1, fresh, new[0].to(slots.dtype))
        keys, values = (slots[:, :, seen] for slots in cached)
        # Layers that share another's keys may have been left with the last queries alone.
        return windowed_attention(q, keys, values, params, length - q.shape[2]).transpose(1, 2)

    def advance(self, count: int) -> None:
        self._places.clear()
        self._row += count
        self._node.stored = self._row


def _selection(slots: np.ndarray, device: torch.device) -> slice | Tensor:
    """The slots as an index, without a copy of what it selects where they are consecutive."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


def prefill_path(
    target: HFModel, pool: KVPool, node: Node, count: int, chunk: int, progress: Progress | None = None
) -> None:
    """Store the rows of a node's next ``count`` tokens.

    Args:
        chunk: tokens of a forward.
        progress: called with the tokens of each chunk.
    """
    cache, stop = PathRows(pool, node), node.stored + count
    for first in range(node.stored, stop, chunk):
        part = node.tokens[first : min(stop, first + chunk)]
        target.forward(part, cache, last_only=True)
        if progress:
            progress(len(part))
