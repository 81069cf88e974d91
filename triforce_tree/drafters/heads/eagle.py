"""EAGLE-3 heads, which draft with one decoder layer from the target's hidden states (arXiv 2503.01840)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.heads.eagle_format import canonical, eagle_format
from triforce_tree.drafters.heads.eagle_layer import EagleLayer, attend, rotated
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.growth import TreeGrowth
from triforce_tree.drafters.registry import WEIGHTS
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Shape, other_shapes
from triforce_tree.verify.probs import Sampler

DEFAULT_TREE = "best-first:6,6,5,4,3"


class Eagle3(Drafter):
    """Drafts with one decoder layer over pairs of a target's hidden state and the token after it.

    Pair i is the fused hidden state at position i and the token at i + 1. From the pairs up to i the layer
    predicts the token at i + 2. In the tree, the pair of a node is its token and the layer's output for its
    parent. Keys and values do not depend on the layer's attention, so those of committed tokens are computed
    once, when the target's hidden states become known.

    The KV cache of the layer keeps the first ``sinks`` and the newest ``window`` pairs, at positions counted
    within the cache (StreamingLLM, arXiv 2309.17453), so that heads trained on short texts work at any
    context. Keys are stored before rotation.

    Args:
        folder: has ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin`` in a layout of
            ``heads/eagle_format.py``. If ``embed_tokens`` or ``lm_head`` is missing, the target's is used.
        tree: a shape or its name; the default chooses its topology by the head's probabilities.
        sinks, window: numbers of pairs in the cache.
        other_trees: at most two further shapes; decoding chooses one for each pass.

    Raises:
        OSError, ValueError: the folder has no such files, or a size is out of range.
    """

    name = "eagle3"
    deterministic = False
    capturable = True

    def __init__(
        self,
        folder: str | Path,
        tree: str | Shape = DEFAULT_TREE,
        sinks: int = 4,
        window: int = 512,
        other_trees: str | Sequence[str | Shape] = (),
    ) -> None:
        self.folder, self.tree = Path(folder), tree
        if not 0 <= sinks <= window or window < 1:
            raise ValueError(f"sinks={sinks} and window={window} must be 0 <= sinks <= window, window >= 1")
        self.sinks, self.window = sinks, window
        self.feature_window = (sinks, window)
        self.format = eagle_format(self.folder)
        self._weights = HeadWeights(self.folder, WEIGHTS, canonical)
        if "fc.weight" not in self._weights or not any(n.startswith("midlayer.") for n in self._weights):
            raise ValueError(
                f"{str(self.folder)!r} holds no EAGLE-3 head: it has no fc and midlayer (heads of EAGLE 1 "
                "and 2 read other hidden states, and are not supported)"
            )
        self.shapes: tuple[str | Shape, ...] = (tree, *other_shapes(other_trees))
        self._growths = [TreeGrowth(shape) for shape in self.shapes]
        self._depth = max(growth.depth for growth in self._growths)
        self._nodes = max(growth.nodes for growth in self._growths)
        trained, seen = self.format.sliding_window, sinks + window + self._depth
        if trained is not None and trained < seen:
            raise ValueError(
                f"the head in {str(folder)!r} attends to the newest {trained} tokens, fewer than "
                f"sinks={sinks}, window={window} and the tree's {self._depth} depths; set window to at most "
                f"{trained - sinks - self._depth}"
            )

    def attach(self, target: HFModel) -> None:
        self._layers = self._feature_layers(target.layers)
        self.features = tuple(dict.fromkeys(self._layers))
        model = target.model
        self.layer = EagleLayer(
            self._weights, self.format, len(self._layers), model.get_input_embeddings(),
            model.get_output_embeddings(), model.config.get_text_config(decoder=True).hidden_size,
            target.vocab_size, target.device, target.dtype,
        )  # fmt: skip
        self.weight_bytes = self.layer.weight_bytes

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        layer = self.layer
        # These sizes must equal those in ``bind`` and ``DecodingProgram``.
        slots = self.sinks + self.window + limits.chain + limits.extra + 4 + 1
        rows = 3 * slots + 2 * self._nodes
        cache = batch * layer.kv_heads * rows * layer.head_dim * layer.fc.element_size()
        hidden = batch * self._nodes * layer.fc.shape[0] * layer.fc.element_size()
        angles = 2 * 4 * (self.sinks + self.window + self._depth + 1) * layer.head_dim
        grown = sum(growth.buffer_bytes(batch) for growth in self._growths)
        return {"drafter's buffers": grown + hidden + angles, "head's cache": cache}

    def _feature_layers(self, layers: int) -> list[int]:
        """Returns the layers whose outputs are fused.

        ``config.json`` lists layers whose inputs are read, so each number there is one higher.
        """
        inputs = self.format.inputs or (2, layers // 2, layers - 3)
        if not all(isinstance(j, int) and 1 <= j <= layers for j in inputs):
            raise ValueError(
                f"the head in {str(self.folder)!r} reads the inputs of layers {list(inputs)}, and must read "
                f"some of 1 to {layers}, as many as the target has; give a head that was trained for it"
            )
        return [j - 1 for j in inputs]

    def bind(self, state: SequenceState) -> None:
        self._state, layer = state, self.layer
        for growth in self._growths:
            growth.bind(state.batch, state.device)
        # The most pairs that one pass can add.
        self._fresh = max(state.max_draft_tokens, self._depth) + 2
        # The ring buffer of the newest pairs is longer than the window, so that pairs of uncommitted tokens
        # do not overwrite pairs in the window.
        self._ring = self.window + state.max_draft_tokens + state.extra + 4
        self._slots = self.sinks + self._ring
        # One more slot receives pairs that must not be kept. The slots of the tree's nodes follow it.
        self._nodes_at = self._slots + 1
        shape = (state.batch, layer.kv_heads, self._nodes_at + self._nodes, layer.head_dim)
        self._keys, self._values = (
            torch.zeros(shape, device=state.device, dtype=layer.fc.dtype) for _ in range(2)
        )
        self._raw_keys = torch.zeros_like(self._keys[:, :, : self._slots + 1])
        self._cos, self._sin = layer.angles(self.sinks + self.window + self._depth + 1, state.device)
        self._bits = torch.arange(64, device=state.device)
        self._hidden = torch.zeros(
            state.batch, self._nodes, layer.fc.shape[0], device=state.device, dtype=layer.fc.dtype
        )

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self._fill([len(tokens) - 1 for tokens in sequences])

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        # End 0 stores nothing for the other sequences.
        ends = [0] * self._state.batch
        ends[b] = len(sequences[b]) - 1
        self._fill(ends)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        if resumed:
            self._fill([0 if tokens is None else len(tokens) - 1 for tokens in sequences])

    @torch.no_grad()
    def _fill(self, ends: list[int]) -> None:
        """Computes all cached pairs of sequence b that precede its token ``ends[b]``."""
        end = torch.tensor(ends, device=self._state.device)[:, None]
        newest = end + torch.arange(-self.window, 0, device=end.device)
        first = torch.arange(self.sinks, device=end.device).expand(len(ends), -1)
        self._store(first, first < end)
        self._store(newest, newest >= self.sinks)

    def _store(self, positions: Tensor, kept: Tensor) -> Tensor:
        """Computes keys and values of the pairs at ``positions`` ``[B, T]``, and stores those in ``kept``.

        It also sets ``self._fused`` to the fused hidden states ``[B, T, H]``.

        Args:
            kept: bool ``[B, T]``.

        Returns:
            queries ``[B, H_q, T, D]``.
        """
        state = self._state
        assert state.features is not None
        tokens = state.tokens.gather(1, (positions + 1).clamp(0, state.capacity - 1))
        self._fused = self.layer.fuse([state.features.read(layer, positions) for layer in self._layers])
        q, k, v = self.layer.project(tokens, self._fused)
        ring = self.sinks + (positions - self.sinks) % self._ring
        slots = torch.where(positions < self.sinks, positions, ring)
        index = torch.where(kept & (positions >= 0), slots, self._slots)[:, None, :, None].expand_as(k)
        self._raw_keys.scatter_(2, index, k)
        self._values.scatter_(2, index, v)
        return q

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        growth, layer, end = self._growths[tree.shape], self.layer, state.end[:, None]
        growth.begin(state, tree)
        fresh = end + torch.arange(-self._fresh, 0, device=state.device)
        q = self._store(fresh, fresh >= 0)[:, :, -1:]
        dropped = (end - self.window - self.sinks).clamp_min(0)
        visible = self._rotate_cache(end, dropped)
        hidden = self._fused[:, -1:]
        for d, nodes in enumerate(growth.frontiers):
            count = nodes.stop - nodes.start
            if d:
                above = self._hidden.gather(1, tree.parents[:, nodes, None].expand(-1, -1, hidden.shape[2]))
                q, k, v = layer.project(growth.ids[d - 1], above)
                hidden = above
            # The position of a pair is that of its hidden state, one before its token.
            position = (end - 1 - dropped + d).clamp(0, len(self._cos) - 1).expand(-1, count)
            cos, sin = self._cos[position], self._sin[position]
            slots = slice(self._nodes_at + nodes.start, self._nodes_at + nodes.stop)
            if d:
                self._keys[:, :, slots], self._values[:, :, slots] = rotated(k, cos, sin), v
            mask = torch.cat([visible[:, None].expand(-1, count, -1), self._ancestors(tree, nodes)], 2)
            seen = slice(0, slots.stop)
            attended = attend(
                rotated(q, cos, sin), self._keys[:, :, seen], self._values[:, :, seen], mask, layer.scale
            )
            self._hidden[:, nodes], logits = layer.finish(hidden, attended)
            logits = broadcast_tensor(logits.contiguous())
            growth.place(d, logits, state, tree, sampler)

    def _rotate_cache(self, end: Tensor, dropped: Tensor) -> Tensor:
        """Rotates the cached keys by their positions within the cache.

        Returns:
            bool ``[B, slots + 1]``: whether each slot holds a pair that the newest token may attend to.
        """
        state = self._state
        assert state.features is not None
        slot = torch.arange(self._slots + 1, device=end.device)
        # The newest pair that each slot of the ring buffer can hold.
        newest = end - 1 - (end - 1 - slot) % self._ring
        sink = slot < self.sinks
        pairs = torch.where(sink, slot, newest)
        known, first = state.features.known_leading[:, None], state.features.first[:, None]
        visible = torch.where(
            sink,
            (pairs < end) & ((pairs < known) | (pairs >= first)),
            (pairs >= self.sinks + dropped) & (pairs >= first) & (slot < self._slots),
        )
        positions = torch.where(sink, slot, pairs - dropped).clamp(0, len(self._cos) - 1)
        keys = rotated(self._raw_keys, self._cos[positions], self._sin[positions])
        self._keys[:, :, : self._nodes_at] = keys
        return visible

    def _ancestors(self, tree: TokenTree, nodes: slice) -> Tensor:
        """Returns bool ``[B, F, nodes.stop]``: which nodes are each of the F ``nodes`` or its ancestors."""
        bits = (tree.mask_words[:, nodes, :, None] >> self._bits & 1).flatten(2).bool()
        # The root is left out, since its pair is in the cache.
        return bits[:, :, : nodes.stop] & (torch.arange(nodes.stop, device=bits.device) > 0)
