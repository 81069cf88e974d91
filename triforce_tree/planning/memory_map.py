"""How many bytes each use of the device's memory takes, of an engine that keeps its cache elsewhere."""

from collections import Counter
from dataclasses import dataclass

from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_view import TOGETHER
from triforce_tree.kv.store import RING_PAGE
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import shards_of
from triforce_tree.trees.device_shapes import Extent

MIB, GIB = 1 << 20, 1 << 30
# Graphs, libraries' workspaces, and what the allocator rounds up.
_WORKSPACE = 384 * MIB
# Query rows that all programs of a GPU work on at once: of 132 multiprocessors, 128 each.
_ROWS_AT_WORK = 132 * 128
_LEAST_RESERVE, _RESERVE = 192 * MIB, 0.015

MOST_GAMMA = 48
"""The largest gamma that is chosen: rows for it are laid out before the choice."""


@dataclass(frozen=True)
class WindowedLayers:
    """Layers that keep a window alone.

    Attributes:
        layers: how many.
        window: positions that a query sees.
        row: bytes of a token's keys and values in one of them.
    """

    layers: int
    window: int
    row: int


@dataclass(frozen=True)
class Sizes:
    """What of the models decides about memory and time, in bytes and counts; on several cards, of one.

    ``weights``, ``draft``: parameters and buffers, of the draft with its cache. ``streamed`` of the weights
    are in host memory, and pass through ``slots`` on the device. ``kv_heads`` and ``head_dim`` are those of
    layers without a window; ``windowed`` of the ``layers`` have one.
    """

    weights: int
    draft: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocabulary: int
    itemsize: int = 2
    streamed: int = 0
    slots: int = 0
    windowed: tuple[WindowedLayers, ...] = ()

    @property
    def whole_layers(self) -> int:
        """Layers that keep the keys and values of whole texts."""
        return self.layers - sum(some.layers for some in self.windowed)

    def window_bytes(self, tokens: int) -> int:
        """Keys and values that a token behind so many others sees in layers with a window."""
        return sum(some.layers * some.row * min(some.window, tokens) for some in self.windowed)

    @property
    def row(self) -> int:
        """Keys and values of one token in one layer without a window."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @classmethod
    def of(cls, target: HFModel, draft: HFModel | None, config: HierarchyConfig) -> "Sizes":
        own = target.model.config.get_text_config(decoder=True)
        small = 0
        if draft is not None:
            rows = config.streaming.sinks + 2 * config.streaming.window + 3 * MOST_GAMMA
            cache = rows * sum(shape.elements for shape in draft.kv_shapes) * draft.dtype.itemsize
            small = tensor_bytes(draft.model) + cache
        mlp = (getattr(own, "intermediate_size", None) or 4 * own.hidden_size) // shards_of(target.model)
        size, far = target.dtype.itemsize, target.streamed
        whole = [shape for shape in target.kv_shapes if shape.window is None]
        heads = max(whole or target.kv_shapes, key=lambda shape: shape.elements).heads
        windowed = Counter(shape for shape in target.kv_shapes if shape.window is not None)
        return cls(
            tensor_bytes(target.model), small, target.layers, heads.query, heads.kv, heads.dim,
            own.hidden_size, mlp, target.vocab_size, size,
            *((far.bytes, far.slot_bytes) if far is not None else (0, 0)),
            tuple(WindowedLayers(n, s.window or 0, s.elements * size) for s, n in windowed.items()),
        )  # fmt: skip


def tensor_bytes(model: PreTrainedModel) -> int:
    """Of parameters and buffers, each counted once, streamed ones included."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def device_bytes(model: HFModel) -> int:
    """What of a model is on its device."""
    own = model.streamed
    return tensor_bytes(model.model) - (own.bytes - own.slot_bytes if own is not None else 0)


@dataclass(frozen=True)
class HostRate:
    """How fast the CPU attends to rows in host memory.

    Attributes:
        points: (query rows, bytes of keys and values a second), measured, by growing rows.
    """

    points: tuple[tuple[int, float], ...]

    def at(self, queries: int) -> float:
        """Bytes a second at so many query rows.

        Between two points the time of a byte is interpolated: reading it costs the same at any number of
        rows, and every row adds the same arithmetic. Beyond the last one only the arithmetic counts.
        """
        low, *others = self.points
        for high in others:
            if queries <= high[0]:
                part = max(0.0, (queries - low[0]) / (high[0] - low[0]))
                return 1 / ((1 - part) / low[1] + part / high[1])
            low = high
        return low[1] * min(1.0, low[0] / queries)


@dataclass(frozen=True)
class Machine:
    """Memory that can be had, in bytes, and bandwidths in bytes a second.

    Attributes:
        device: for the whole engine; ``others`` of it is taken by tensors that are not the engine's.
        host: for page-locked rows and weights, those that are there included.
        bus: host to device; ``read``: of the device's own memory.
        limit, host_limit: whose the limits on device and host memory are, for messages.
        most_device, most_host: what there would be if the user allowed all of it; 0 for no more.
        ranks: processes that share the machine's host memory, of which ``host`` is one's part.
        host_attention: of the CPU on rows in host memory; None where it is not to attend.
    """

    device: int
    host: int
    bus: float
    read: float
    others: int = 0
    limit: str = "the device"
    host_limit: str = "the machine"
    most_device: int = 0
    most_host: int = 0
    ranks: int = 1
    host_attention: HostRate | None = None


def reserve(available: int) -> int:
    """Of so much device memory, what no plan gives out."""
    return max(_LEAST_RESERVE, int(_RESERVE * available))


def weights_fit(weights: int, available: int) -> bool:
    """Whether so many bytes of weights fit into ``available`` bytes of device memory, workspace included."""
    return weights + _WORKSPACE + reserve(available) <= available


def prefill(
    sizes: Sizes, config: HierarchyConfig, prompt: int, store: int, aside: int, split: Offload
) -> int:
    """What feeding one text takes beside level 1's memory, and beside the last layer's if that is resident.

    Args:
        store: bytes of level 1's memory, which holds one layer's rows meanwhile, or hidden states.
        aside: rows that belong into the window and wait for it.
        split: says where rows are computed, and where hidden states wait; where that is the host, three
            chunks' of them are on the device.
    """
    layer = 0 if split.last_resident or not sizes.whole_layers else max(0, prompt * sizes.row - store)
    chunk = config.prefill_chunk or 4096
    waiting = min(prompt, 3 * chunk) if split.states_on_host else prompt
    if split.last_resident and hidden_states(sizes, prompt) <= store:
        waiting = 0
    hidden = (waiting * sizes.hidden + prompt * 2 * sizes.head_dim) * sizes.itemsize
    return layer + aside * sizes.whole_layers * sizes.row + hidden + chunk * token(sizes)


def hidden_states(sizes: Sizes, prompt: int) -> int:
    """Of all tokens of one prompt, between two layers."""
    return prompt * sizes.hidden * sizes.itemsize


def token(sizes: Sizes) -> int:
    """Bytes of one layer's intermediate results for a token of prefill."""
    wide = 3 * sizes.mlp + 6 * sizes.hidden + 3 * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    return wide * sizes.itemsize


def workspace(sizes: Sizes, config: HierarchyConfig, levels: int, batch: int) -> int:
    """Laws, noise, logits and activations of the passes, and what graphs keep of them."""
    nodes = Extent.of(config, levels).nodes
    rows = 2 * config.gamma + 1 if levels == 3 else nodes
    probs = (6 * rows + 8 * nodes) * sizes.vocabulary * 4
    return _WORKSPACE + batch * (probs + 2 * (rows + 2 * nodes) * token(sizes))


def rings(sizes: Sizes, config: HierarchyConfig, levels: int, max_seq_len: int, batch: int) -> int:
    """Keys and values of layers with a window, for texts of ``max_seq_len`` tokens (``kv/store.py``)."""
    scratch_slots = Extent.of(config, levels).scratch_slots
    slots = [min(some.window, max_seq_len) + scratch_slots for some in sizes.windowed]
    kept = zip(sizes.windowed, slots, strict=True)
    return batch * sum(some.layers * some.row * -(-count // RING_PAGE) * RING_PAGE for some, count in kept)


def partials(sizes: Sizes, config: HierarchyConfig, max_seq_len: int, piece: int) -> int:
    """One layer's attention to each piece, before it is merged, and the workspace of several at once."""
    pieces = -(-max_seq_len * sizes.row // piece)
    rows = (2 * config.gamma + 1) * sizes.heads
    states = 3 * pieces * rows * sizes.itemsize + min(pieces, TOGETHER) * (rows + _ROWS_AT_WORK) * 4
    return states * (sizes.head_dim + 1)


def low_bit(sizes: Sizes, config: HierarchyConfig, levels: int) -> int:
    """Level 1's copy of the weights in fewer bits."""
    if config.retrieval_weight_bits == 16 or levels < 3:
        return 0
    if not sizes.streamed:
        return sizes.weights * config.retrieval_weight_bits // 16
    # Just these are copied; in 4 bits 128 of them have a scale of two bytes.
    count = sizes.streamed // sizes.itemsize
    return count * config.retrieval_weight_bits // 8 + (
        count // 64 if config.retrieval_weight_bits == 4 else 0
    )
