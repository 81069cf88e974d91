"""Drafts with a network over pairs of a target's hidden state and the token after it.

EAGLE-3 heads and MTP layers share the KV cache of sinks and a window, the filling, and the growth of trees.
They differ in the network, see :class:`PairNetwork`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.attention import Attended, attend, rotated, rotated_one
from triforce_tree.drafters.heads.growth import TreeGrowth
from triforce_tree.drafters.heads.ring import Ring, RingDrafter
from triforce_tree.kernels.attention.plan import unpack_mask
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler


class PairNetwork(Protocol):
    """K decoder layers over pairs, which predict the token after a pair's token.

    Pair i of layer 0 is the fused hidden state at position i and the token at i + 1. Pair i of layer k is the
    output of layer k - 1 for pair i - 1 and the same token; for pair i if the layers are ``stacked``.

    Attributes:
        inputs: the hidden states of the target that are fused (as in ``Drafter.features``), in the order of
            ``fuse``; they may repeat.
        layers: K.
        stacked: whether all layers are applied one after the other to the same pairs.
        size: H, the size of the layers' inputs and outputs.
        kv_heads, key_size, value_size: sizes of each layer's keys and values.
        windows: for each layer the number of newest positions that it attends to; None for all.
        rotates: whether the layers rotate queries and keys themselves, by the positions in the text.
            Otherwise the drafter rotates them, by positions within its cache.
        dtype: dtype of hidden states, keys and values.
        capturable: whether a CUDA graph can hold its forwards.
        weight_bytes: bytes of the network's own weights on the device.
    """

    inputs: tuple[int, ...]
    layers: int
    stacked: bool
    size: int
    kv_heads: int
    key_size: int
    value_size: int
    windows: tuple[int | None, ...]
    rotates: bool
    capturable: bool
    dtype: torch.dtype
    weight_bytes: int

    def angles(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines, fp32 ``[count, D]``, of positions 0 to ``count - 1``. Not called if
        ``rotates``.
        """

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Returns the inputs ``[B, T, H]`` of layer 0 for hidden states of the target, ``[B, T, size]``
        each.
        """

    def forward(
        self, layer: int, tokens: Tensor, hidden: Tensor, positions: Tensor, attended: Attended, outputs: int
    ) -> tuple[Tensor, Tensor]:
        """Computes T pairs in one layer.

        Args:
            tokens: int64 ``[B, T]``.
            hidden: ``[B, T, H]``.
            positions: int64 ``[B, T]``, the positions of the tokens in the text.
            attended: takes queries ``[B, H_q, T, D]``, keys ``[B, H_kv, T, D]``, values ``[B, H_kv, T, D_v]``
                and the scale of the scores, and returns ``[B, H_q, outputs, D_v]`` for the last queries.
            outputs: for how many of the last pairs outputs are needed; 0 if only keys and values are.

        Returns:
            the hidden states that the next layer or depth reads, and what ``logits`` reads, each
            ``[B, outputs, H]``.
        """

    def logits(self, normed: Tensor) -> Tensor:
        """Returns logits ``[B, T, V]`` over the target's vocabulary."""


class PairDrafter(RingDrafter):
    """Drafts with a :class:`PairNetwork`.

    A node of the tree at depth d is computed in the layers from min(d, K - 1) on; the first of them predicts
    its children. The pair of a node is its token and the output for its parent: of the layer before, or of
    the last layer if d >= K. So each of K layers predicts one depth, as it was trained, and the last layer
    is applied again at greater depths.

    The KV cache of a layer keeps the first ``sinks`` and the newest ``window`` pairs (StreamingLLM, arXiv
    2309.17453). Layers that do not rotate keys attend by positions counted within the cache, so that heads
    trained on short texts work at any context; their keys are stored before rotation. Others attend by the
    positions in the text. With one layer, keys and values of committed tokens do not depend on
    attention, so they are computed once, when the target's hidden states become known.

    Args:
        name: the drafter's name in statistics and in ``DEFAULT_TREES``.
        network: makes the network for a target.
        tree, other_trees: shapes, see :class:`GrowingDrafter`.
        sinks, window: numbers of pairs in the cache.
        deepest, source: see :class:`GrowingDrafter`.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        name: str,
        network: Callable[[HFModel], PairNetwork],
        tree: str | Shape | None = None,
        sinks: int = 4,
        window: int = 512,
        other_trees: str | Sequence[str | Shape] | None = None,
        deepest: int | None = None,
        source: str = "",
    ) -> None:
        super().__init__(sinks, window, name, tree, other_trees, deepest, source)
        self._network_for = network

    def attach(self, target: HFModel) -> None:
        super().attach(target)
        self.network = self._network_for(target)
        # Each further layer reads the output for the pair before, unless the layers are stacked.
        self._shift = 0 if self.network.stacked else 1
        self.features = tuple(dict.fromkeys(self.network.inputs))
        self.feature_window = (self.sinks, self.window + self._shift * (self.network.layers - 1))
        self.weight_bytes, self.capturable = self.network.weight_bytes, self.network.capturable

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        network = self.network
        # These sizes must equal those in ``bind`` and ``DecodingProgram``.
        slots = self.sinks + self.window + limits.chain + self._depth + 3 + network.layers + 1
        keys = slots + self._nodes + (0 if network.rotates else slots)
        elements = keys * network.key_size + (slots + self._nodes) * network.value_size
        item = network.dtype.itemsize * batch * network.layers
        found = super().buffer_bytes(batch, capacity, limits)
        found["drafter's buffers"] += item * self._nodes * network.size
        found["drafter's buffers"] += 0 if network.rotates else 2 * 4 * self._positions * network.key_size
        return found | {"head's cache": item * network.kv_heads * elements}

    @property
    def _positions(self) -> int:
        """Returns the number of positions within the cache."""
        return self.sinks + self.window + self._depth + 1

    def bind(self, state: SequenceState) -> None:
        super().bind(state)
        network, device = self.network, state.device
        beyond = state.max_draft_tokens + self._depth + 3 + network.layers
        self._ring = Ring(self.sinks, self.window, beyond)
        # The slots of the tree's nodes follow those of the cache.
        self._nodes_at = self._ring.slots + 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(network.layers, state.batch, *shape, device=device, dtype=network.dtype)

        slots = self._nodes_at + self._nodes
        self._keys = zeros(network.kv_heads, slots, network.key_size)
        self._values = zeros(network.kv_heads, slots, network.value_size)
        self._hidden = zeros(self._nodes, network.size)
        # The keys as the layers return them, before any rotation.
        self._raw_keys = self._keys
        if not network.rotates:
            self._angles = network.angles(self._positions, device)
            self._raw_keys = zeros(network.kv_heads, self._nodes_at, network.key_size)
        self._depths = torch.arange(self._depth, device=device)
        self._is_sink = torch.arange(self._nodes_at, device=device) < self.sinks

    def _newest(self, end: Tensor, count: int) -> Tensor:
        return super()._newest(end, count + self._shift * (self.network.layers - 1))

    def _store(self, end: Tensor, positions: Tensor, kept: Tensor) -> None:
        self._advance(end, positions, kept)

    def _advance(
        self, end: Tensor, pairs: Tensor, kept: Tensor, newest: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Computes the pairs ``pairs`` ``[B, T]`` in all layers, and stores keys and values of those in
        ``kept``, bool ``[B, T]``.

        Args:
            end: int64 ``[B, 1]``, the position of the newest token.
            newest: whether the last pair is the newest, and its outputs are needed.

        Returns:
            for each layer the outputs ``[B, 1, H]`` for the last pair, if ``newest``, see
            ``PairNetwork.forward``.
        """
        state, network = self._state, self.network
        assert state.features is not None
        # The pair in each slot of the cache, and whether a layer may attend to it, for this ``end``.
        self._cached = cached = self._ring.positions(end)
        self._seen = [self._ring.visible(end, cached, state.features)]
        self._dropped = self._ring.dropped(end)
        if not network.rotates:
            # The angles of the nodes at each depth, [B, D, key_size].
            places = (end - 1 - self._dropped + self._depths).clamp(0, self._positions - 1)
            self._turns = [angles[places] for angles in self._angles]
        for layer in range(1, network.layers):
            # The first pairs of a later layer would need states that are not known.
            first = torch.where(self._is_sink, 0, state.features.first[:, None]) + layer * self._shift
            self._seen.append(self._seen[0] & (cached >= first))
        hidden = network.fuse(state.features.read_all(network.inputs, pairs))
        tokens = state.tokens.gather(1, (pairs + 1).clamp(0, state.capacity - 1))
        found = []
        for layer in range(network.layers):
            outputs = int(newest) if layer == network.layers - 1 else hidden.shape[1]
            stored = kept & (pairs >= layer * self._shift)
            attended = partial(self._attend_to_cache, layer, pairs, stored, outputs)
            hidden, normed = network.forward(layer, tokens, hidden, pairs + 1, attended, outputs)
            found.append((hidden[:, -1:], normed[:, -1:]))
            if self._shift:
                hidden, tokens, pairs, kept = hidden[:, :-1], tokens[:, 1:], pairs[:, 1:], kept[:, 1:]
            if not pairs.shape[1]:
                break
        return found

    def _attend_to_cache(
        self, layer: int, pairs: Tensor, kept: Tensor, outputs: int,
        q: Tensor, k: Tensor, v: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """Stores keys and values of ``pairs``, and returns the attention of the last ``outputs`` of them to
        the cache, see ``PairNetwork.forward``.
        """
        index = self._ring.slots_of(pairs, kept)[:, None, :, None]
        self._raw_keys[layer].scatter_(2, index.expand_as(k), k)
        self._values[layer].scatter_(2, index.expand_as(v), v)
        if not outputs:
            return q[:, :, :0, : v.shape[3]]
        pairs = pairs[:, -outputs:]
        q, mask = q[:, :, -outputs:], self._visible(layer, pairs)
        if not self.network.rotates:
            self._rotate_cache(layer)
            # With one layer, only the newest pair attends.
            turns = self._angles_at(slice(1), 1) if self.network.layers == 1 else self._angles_of(pairs)
            q = rotated_one(q, *turns)
        return self._attend(layer, q, mask, scale)

    def _attend(self, layer: int, q: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Returns the attention of rotated queries to the slots of a layer that ``mask`` covers."""
        slots = slice(0, mask.shape[2])
        return attend(q, self._keys[layer, :, :, slots], self._values[layer, :, :, slots], mask, scale)

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        growth, end = self._growths[tree.shape], state.end[:, None]
        tree.tokens[:, 0] = state.newest
        fresh = self._newest(end, self._fresh)
        roots = self._advance(end, fresh, fresh >= 0, newest=True)
        for layer, (hidden, _) in enumerate(roots):
            self._hidden[layer, :, :1] = hidden
        normed = roots[0][1]
        for depth in range(growth.depth):
            if depth:
                normed = self._grow(growth, depth, end, tree)
            logits = broadcast_tensor(self.network.logits(normed).contiguous())
            growth.place(depth, logits, state, tree, sampler)

    def _grow(self, growth: TreeGrowth, depth: int, end: Tensor, tree: TokenTree) -> Tensor:
        """Computes the F nodes at ``depth``, and returns what the logits of their children are computed from,
        ``[B, F, H]``.
        """
        network, nodes, tokens = self.network, growth.frontiers[depth], growth.ids[depth - 1]
        parents = tree.parents[:, nodes, None].expand(-1, -1, network.size)
        # The position of a pair is that of its hidden state, one before its token.
        pairs = (end - 1 + depth).expand_as(tokens)
        ancestors = unpack_mask(tree.mask_words[:, nodes])[:, :, : nodes.stop]
        # The root is left out, since its pair is in the cache.
        ancestors[:, :, 0] = False
        normed, first = None, min(depth, network.layers - 1)
        # Layers that no deeper node reads are left out.
        for layer in range(first, min(network.layers, growth.depth)):
            source = layer if depth >= network.layers else layer - 1
            above = self._hidden[source].gather(1, parents)
            mask = torch.cat([self._visible(layer, pairs, follow=True), ancestors], 2)
            attended = partial(self._attend_to_tree, layer, slice(depth, depth + 1), nodes, mask)
            hidden, read = network.forward(layer, tokens, above, pairs + 1, attended, tokens.shape[1])
            self._hidden[layer, :, nodes] = hidden
            normed = read if normed is None else normed
        assert normed is not None
        return normed

    def _attend_to_tree(
        self, layer: int, depths: slice, nodes: slice, mask: Tensor,
        q: Tensor, k: Tensor, v: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        """Stores keys and values of nodes, and returns their attention, see ``PairNetwork.forward``.

        Args:
            depths: the depth of each node, or the one of all.
        """
        slots = slice(self._nodes_at + nodes.start, self._nodes_at + nodes.stop)
        if not self.network.rotates:
            q, k = rotated(q, k, *self._angles_at(depths, q.shape[2]))
        self._keys[layer, :, :, slots], self._values[layer, :, :, slots] = k, v
        return self._attend(layer, q, mask, scale)

    def _angles_at(self, depths: slice, count: int) -> Iterator[Tensor]:
        """Returns cosines and sines ``[B, count, key_size]`` of the positions within the cache of nodes that
        have these depths, or all the same one.
        """
        return (each[:, depths].expand(-1, count, -1) for each in self._turns)

    def _angles_of(self, pairs: Tensor) -> Iterator[Tensor]:
        """Returns cosines and sines ``[B, T, key_size]`` of the positions of ``pairs`` within the cache."""
        places = torch.where(pairs < self.sinks, pairs, pairs - self._dropped).clamp(0, self._positions - 1)
        return (angles[places] for angles in self._angles)

    def _visible(self, layer: int, queries: Tensor, follow: bool = False) -> Tensor:
        """Returns bool ``[B, T, slots + 1]``: whether each slot holds a pair that each of T pairs attends to.

        Args:
            queries: int64 ``[B, T]``, indices of pairs.
            follow: whether all pairs in the cache precede them.
        """
        visible, most = self._seen[layer][:, None], self.network.windows[layer]
        if follow and most is None:
            return visible.expand(-1, queries.shape[1], -1)
        distance = queries[:, :, None] - self._cached[:, None]
        near = distance >= 0 if most is None else (distance >= 0) & (distance < most)
        return visible & near

    def _rotate_cache(self, layer: int) -> None:
        """Rotates the cached keys of a layer by their positions within the cache."""
        # A sink's slot and pair have the same number.
        positions = torch.where(self._is_sink, self._cached, self._cached - self._dropped)
        positions = positions.clamp(0, self._positions - 1)
        cos, sin = self._angles
        keys = rotated_one(self._raw_keys[layer], cos[positions], sin[positions])
        self._keys[layer, :, :, : self._nodes_at] = keys
