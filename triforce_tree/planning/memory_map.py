"""Bytes of each use of device memory with an offloaded KV cache; sizes of models and machines."""

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter, drafter_bytes
from triforce_tree.kernels.attention.prefill import FLASH_DIM, block_bytes, capacity
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.views import TOGETHER
from triforce_tree.kv.store import RING_PAGE
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import mlp_shards_of
from triforce_tree.planning.expert_sizes import ExpertSizes
from triforce_tree.trees.device_shapes import most_sequences, pass_limits, tree_shapes

MIB, GIB = 1 << 20, 1 << 30
# CUDA graphs, libraries' workspaces, and the allocator's rounding.
_WORKSPACE = 384 * MIB
# Queries that the attention programs of a GPU process at once: 128 on each of 132 multiprocessors.
_CONCURRENT_QUERIES = 132 * 128
_LEAST_RESERVE, _RESERVE = 192 * MIB, 0.015

MOST_GAMMA = 48
"""The largest gamma that is chosen; memory is first planned for it."""


@dataclass(frozen=True)
class WindowedLayers:
    """Layers with a sliding window.

    Attributes:
        layers: number of layers.
        window: number of positions that a query attends to.
        row: bytes of one token's keys and values in one of the layers.
    """

    layers: int
    window: int
    row: int


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models that decide memory and time, in bytes and counts, per rank.

    Attributes:
        weights, draft: bytes of parameters and buffers; those of the draft include its cache.
        layers: number of the target's layers that keep keys and values.
        heads: number of query heads.
        kv_heads, head_dim, value_dim: number of KV heads and widths of keys and values in the full-attention
            layers; a ``value_dim`` of 0 stands for ``head_dim``.
        hidden: width of the hidden states.
        mlp: width of the inner activations of the MLP, or of all experts of one token if that is more.
        vocabulary: number of token ids.
        itemsize: bytes per element of the model's dtype.
        streamed: bytes of the weights that are in host memory, including experts, if there are any.
        slots: bytes on the device into which streamed weights are copied.
        windowed: the layers with a sliding window.
        experts: the sizes of the experts; None if there are none.
        states: bytes of one sequence's states in recurrent layers.
        state_inputs: bytes of what recurrent layers read for one token.
        kv_bits: number of bits of each element of the target's keys and values.
        drafter: the drafter that proposes the trees; None if only a draft model does.
        chains: whether trees must not branch, since the target or the draft has recurrent layers.
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
    experts: ExpertSizes | None = None
    value_dim: int = 0
    states: int = 0
    state_inputs: int = 0
    kv_bits: int = 16
    drafter: Drafter | None = None
    chains: bool = False

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def streams_experts_only(self) -> bool:
        """Returns whether all weights in host memory are experts."""
        return self.experts is not None and 0 < self.streamed <= self.experts.total * 1.01

    def copied_weights(self, tokens: int, resident: int = 0) -> int:
        """Returns the expected bytes of weights that a forward of ``tokens`` tokens copies to the device.

        Args:
            resident: number of layers whose experts stay on the device.
        """
        if not self.streamed or self.experts is None:
            return self.streamed
        routed = self.experts.routed_bytes(tokens, resident)
        return max(0, self.streamed - self.experts.total) + routed

    def read_weights(self, tokens: int) -> int:
        """Returns the expected bytes of weights that a forward of ``tokens`` tokens reads, wherever they
        are.
        """
        if self.experts is None:
            return self.weights
        return self.weights - self.experts.total + self.experts.routed_bytes(tokens)

    @property
    def full_layers(self) -> int:
        """Returns the number of full-attention layers, which keep the keys and values of all tokens."""
        return self.layers - sum(group.layers for group in self.windowed)

    def window_bytes(self, tokens: int) -> int:
        """Returns the bytes that a query after ``tokens`` tokens reads in all layers with a window."""
        return sum(group.layers * group.row * min(group.window, tokens) for group in self.windowed)

    @property
    def row(self) -> int:
        """Returns the bytes of one token's keys and values in one full-attention layer."""
        return slot_bytes(self.kv_heads, self.head_dim + self.value_dim, self.itemsize, self.kv_bits)

    @property
    def prefill_row(self) -> int:
        """Returns the bytes that prefill attention needs in addition for one token's keys and values.

        Keys and values in 8 bits are dequantised. If keys and values differ in width, the narrower ones are
        copied with zeros appended (``kernels/attention/prefill.py``).
        """
        elements = 0 if self.kv_bits == 16 else self.head_dim + self.value_dim
        if self.head_dim != self.value_dim:
            elements += max(self.head_dim, self.value_dim)
        return self.kv_heads * elements * self.itemsize

    @property
    def prefill_blocks(self) -> int:
        """Returns the bytes that prefill attention over wide heads uses for the scores and outputs of its
        blocks.
        """
        if max(self.head_dim, self.value_dim) <= FLASH_DIM:
            return 0
        return block_bytes(self.heads, self.head_dim, self.value_dim, self.itemsize)

    @classmethod
    def of(
        cls, target: HFModel, draft: HFModel | None, config: HierarchyConfig, drafter: Drafter | None = None
    ) -> "Sizes":
        text_config = target.model.config.get_text_config(decoder=True)
        hidden, draft_bytes = text_config.hidden_size, 0
        if draft is not None:
            slots = config.streaming.sinks + 2 * config.streaming.window + 3 * MOST_GAMMA
            cache = slots * sum(shape.elements for shape in draft.kv_shapes) * draft.dtype.itemsize
            draft_bytes = tensor_bytes(draft.model) + cache
            head = draft.model.get_output_embeddings()
            if head is not None and draft.device.type == "cuda":
                draft_bytes += head.weight.numel()  # its copy of 8 bits
        inner = getattr(text_config, "intermediate_size", None) or 4 * hidden
        # Gemma 3n and others have one for each layer.
        inner = max(inner) if isinstance(inner, list | tuple) else inner
        mlp = inner // mlp_shards_of(target.model)
        size, bits, streamed = target.dtype.itemsize, config.kv_bits, target.streamed
        experts = ExpertSizes.of(target.model, text_config)
        if experts is not None:
            # Rows are repeated for each expert of a token.
            mlp = max(mlp, experts.per_token * experts.width)
        full = [shape for shape in target.kv_shapes if shape.window is None]
        heads = max(full or target.kv_shapes, key=lambda shape: shape.elements).heads
        windowed = Counter(shape for shape in target.kv_shapes if shape.window is not None)
        return cls(
            tensor_bytes(target.model), draft_bytes, len(target.kv_shapes), heads.query, heads.kv, heads.dim,
            hidden, mlp, target.vocab_size, size,
            *((streamed.bytes, streamed.least_slot_bytes) if streamed is not None else (0, 0)),
            tuple(
                WindowedLayers(n, s.window or 0, slot_bytes(s.heads.kv, s.elements // s.heads.kv, size, bits))
                for s, n in windowed.items()
            ),
            experts,
            heads.value_dim,
            0 if target.states is None else target.states.bytes(size),
            0 if target.states is None else target.states.token_bytes(size),
            bits,
            drafter,
            any(model is not None and model.states is not None for model in (target, draft)),
        )  # fmt: skip

    @property
    def heads_bytes(self) -> int:
        """Returns the bytes of the drafter's own weights on the device."""
        return self.drafter.weight_bytes if self.drafter is not None else 0


def slot_bytes(kv_heads: int, elements: int, itemsize: int, bits: int) -> int:
    """Returns the bytes of one token's keys and values in one layer.

    Args:
        elements: number of elements of a key and a value of one head together.
        itemsize: bytes per element of the model's dtype, which is used if ``bits`` is 16. With 8 bits a key
            and a value of a head each have a scale of four bytes.
    """
    return kv_heads * (elements * itemsize if bits == 16 else elements + 8)


def tensor_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of parameters and buffers, each counted once, including streamed ones."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(map(_stored_bytes, tensors.values()))


def _stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor. For a subclass, which may be quantised, these are its plain tensors'
    bytes.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def device_bytes(model: HFModel) -> int:
    """Returns the bytes of a model's tensors on its device."""
    streamed = model.streamed
    on_host = streamed.bytes - streamed.slot_bytes if streamed is not None else 0
    return tensor_bytes(model.model) - on_host


@dataclass(frozen=True)
class HostRate:
    """The speed at which the CPU attends to keys and values in host memory.

    Attributes:
        points: measured (queries, bytes of keys and values per second), by ascending queries.
    """

    points: tuple[tuple[int, float], ...]

    def at(self, queries: int) -> float:
        """Returns the bytes per second for this number of queries.

        Between two points the time per byte is interpolated linearly: reading it costs the same for any
        number of queries, and each query adds the same arithmetic. Beyond the last point only the arithmetic
        counts.
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
    """Available memory in bytes, and bandwidths in bytes per second.

    Attributes:
        device: device memory for the whole engine.
        host: host memory for page-locked KV slots and weights, including those already allocated.
        bus: bandwidth from host to device.
        read: bandwidth of the device's own memory.
        others: bytes of ``device`` that other tensors use.
        limit, host_limit: names of what limits device and host memory, for messages.
        most_device, most_host: device and host memory without the user's limits; 0 if that is not more.
        ranks: number of processes that share the machine's host memory; ``host`` is the share of one.
        host_attention: rate of attention on the CPU; None if the CPU must not attend.
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
    """Returns the bytes of ``available`` device memory that plans leave unused."""
    return max(_LEAST_RESERVE, int(_RESERVE * available))


def weights_fit(weights: int, available: int) -> bool:
    """Returns whether ``weights`` bytes and the workspace fit into ``available`` bytes of device memory."""
    return weights + _WORKSPACE + reserve(available) <= available


def prefill(
    sizes: Sizes, config: HierarchyConfig, prompt: int, store: int, recent_slots: int, split: Offload
) -> int:
    """Returns the bytes for the prefill of one sequence, in addition to the retrieval cache and resident KV
    slots.

    Args:
        store: bytes of the retrieval cache, which during prefill holds one layer's keys and values, or hidden
            states.
        recent_slots: number of KV slots per layer that are copied into the window at the end of the prefill.
        split: where keys and values are computed, and where hidden states are kept. If these are kept on the
            host, those of three chunks are on the device.
    """
    layer = 0 if split.last_resident or not sizes.full_layers else max(0, prompt * sizes.row - store)
    chunk = config.prefill_chunk or 4096
    tokens = min(prompt, 3 * chunk) if split.states_on_host else prompt
    if split.last_resident and hidden_states(sizes, prompt) <= store:
        tokens = 0
    hidden = (tokens * sizes.hidden + prompt * 2 * sizes.head_dim) * sizes.itemsize
    recent = recent_slots * sizes.full_layers * sizes.row
    copied = capacity(prompt) * sizes.prefill_row
    working = sizes.prefill_blocks + copied + chunk * activations(sizes)
    return layer + recent + hidden + working


def hidden_states(sizes: Sizes, prompt: int) -> int:
    """Returns the bytes of the hidden states of one prompt between two layers."""
    return prompt * sizes.hidden * sizes.itemsize


def activations(sizes: Sizes) -> int:
    """Returns the bytes of one layer's activations per token."""
    width = 3 * sizes.mlp + 6 * sizes.hidden + 3 * (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    return width * sizes.itemsize


def workspace(sizes: Sizes, config: HierarchyConfig, levels: int, batch: int) -> int:
    """Returns the bytes of probs, noise, logits and activations of passes with each shape of tree, and of
    CUDA graphs.
    """
    limits = pass_limits(config, levels)
    tokens = limits.chain_nodes() if levels == 3 else limits.nodes
    nodes = batch
    if levels > 1:
        first, *others = tree_shapes(config)
        nodes = batch * (limits.tail + first.nodes)
        nodes += sum(min(batch, most_sequences(shape)) * shape.nodes for shape in others)
    # Any request may give seeds, so the rows include the buffer of noise by position and what a pass gathers
    # from it.
    rows = 6 * tokens + limits.max_draft_tokens + limits.extra + 1 + max(tokens, limits.nodes)
    own = batch * (4 * rows * sizes.vocabulary + 2 * tokens * activations(sizes))
    return _WORKSPACE + own + nodes * (32 * sizes.vocabulary + 4 * activations(sizes))


def rings(sizes: Sizes, config: HierarchyConfig, levels: int, max_seq_len: int, batch: int) -> int:
    """Returns the bytes of the ring buffers of all layers with a window (``kv/store.py``)."""
    scratch_slots = pass_limits(config, levels).scratch_slots
    size = 0
    for group in sizes.windowed:
        slots = min(group.window, max_seq_len) + scratch_slots
        size += group.layers * group.row * -(-slots // RING_PAGE) * RING_PAGE
    return batch * size


def drafter(
    sizes: Sizes, config: HierarchyConfig, levels: int, max_seq_len: int, batch: int
) -> dict[str, int]:
    """Returns the bytes of a drafter other than a draft model, by use: heads, their caches, hidden states and
    the index of suffix matching.
    """
    if sizes.drafter is None or levels == 1:
        return {"heads": sizes.heads_bytes} if sizes.heads_bytes else {}
    limits = pass_limits(config, levels)
    capacity = max_seq_len + limits.scratch_slots
    return drafter_bytes(sizes.drafter, batch, capacity, limits, sizes.hidden, sizes.itemsize)


def partials(sizes: Sizes, config: HierarchyConfig, max_seq_len: int, piece: int) -> int:
    """Returns the bytes of one layer's partial attention outputs by piece, and of the workspace of concurrent
    pieces.
    """
    pieces = -(-max_seq_len * sizes.row // piece)
    queries = pass_limits(config, 3).chain_nodes() * sizes.heads
    outputs = 3 * pieces * queries * sizes.itemsize
    concurrent = min(pieces, TOGETHER) * (queries + _CONCURRENT_QUERIES) * 4
    return (outputs + concurrent) * (sizes.value_dim + 1)


def low_bit(sizes: Sizes, config: HierarchyConfig, levels: int) -> int:
    """Returns the bytes of the retrieval model's copy of the weights in 8 or 4 bits; 0 if it uses the
    target's weights.
    """
    if config.weight_bits == 16 or levels < 3:
        return 0
    if not sizes.streamed:
        return sizes.weights * config.weight_bits // 16
    # Only streamed weights and linear layers are copied. In 4 bits each 128 weights have a scale of two
    # bytes.
    tables = 2 * sizes.vocabulary * sizes.hidden * sizes.itemsize
    copied = max(sizes.streamed, sizes.weights - tables) if sizes.streams_experts_only else sizes.streamed
    count = copied // sizes.itemsize
    scales = count // 64 if config.weight_bits == 4 else 0
    return count * config.weight_bits // 8 + scales
