"""Drafts a tree from the distributions of one block (DFlash, arXiv 2602.06036)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.blocks.format import block_format, canonical
from triforce_tree.drafters.blocks.network import BlockNetwork, near
from triforce_tree.drafters.blocks.reference import check_network
from triforce_tree.drafters.heads.attention import rotated_one
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.heads.ring import Ring, RingDrafter
from triforce_tree.drafters.registry import WEIGHTS
from triforce_tree.drafters.token_map import TargetLogits
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.host.gguf_linears import GgufEmbedding
from triforce_tree.runtime.distributed import broadcast_tensor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler

_SINKS, _WINDOW = 4, 2048


class BlockDrafter(RingDrafter):
    """Predicts the tokens after the newest one in a single forward over a block of mask tokens.

    The distribution at a slot does not depend on the tokens in between, so it is that of all nodes of a
    depth, and their children are drawn from it independently. A causal block (JetSpec, arXiv 2606.18394)
    differs in the mask alone. DSpark and DFlash2 correct the distribution by the token of each node
    (``blocks/conditioned.py``).

    Keys and values of committed positions are kept for the first ``sinks`` and the newest ``window``
    positions. Keys are rotated by positions in the text, but those of the sinks as if the window followed
    them (StreamingLLM, arXiv 2309.17453). Layers that were trained with a window see no more than that.

    Args:
        folder: has ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin`` in a layout of
            ``blocks/format.py``.
        tree, other_trees: shapes, see :class:`GrowingDrafter`, at most as deep as the block.
        sinks: number of first positions in the cache; by default 4, or 0 if all layers have windows.
        window: number of newest positions in the cache; by default the layers' own windows, or 2048.

    Raises:
        OSError, ValueError: the folder has no such files, or a size is out of range.
    """

    capturable = True

    def __init__(
        self,
        folder: str | Path,
        tree: str | Shape | None = None,
        sinks: int | None = None,
        window: int | None = None,
        other_trees: str | Sequence[str | Shape] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.format = block_format(self.folder)
        source = f"the block of {str(self.folder)!r}"
        shapes = "block", tree, other_trees, self.format.depth, source
        super().__init__(*self._cached(sinks, window), *shapes)
        self._weights = HeadWeights(self.folder, WEIGHTS, canonical)
        self._kinds = list(zip(self.format.causal, self.format.windows, strict=True))
        self.feature_window = (self.sinks, self.window)

    def _cached(self, sinks: int | None, window: int | None) -> tuple[int, int]:
        """Returns the numbers of first and of newest positions in the cache."""
        windows = self.format.windows
        most = max(most for most in windows if most is not None) if None not in windows else None
        if most is not None and (sinks or (window or 0) > most):
            raise ValueError(
                f"all layers of the drafter in {str(self.folder)!r} attend to at most {most} positions, so "
                f"that sinks={sinks} and window={window} would keep some that none reads; leave sinks out "
                f"and set window to at most {most}"
            )
        sinks = (_SINKS if most is None else 0) if sinks is None else sinks
        return sinks, (most or _WINDOW) if window is None else window

    def attach(self, target: HFModel) -> None:
        super().attach(target)
        format, folder = self.format, str(self.folder)
        size = target.model.config.get_text_config(decoder=True).hidden_size
        if max(format.inputs) >= target.layers - 1:
            raise ValueError(
                f"the drafter in {folder!r} reads the outputs of layers {list(format.inputs)}, and must read "
                f"some of 0 to {target.layers - 2} of this target (implementations differ on whether the "
                "output of the last layer is normalised); give a drafter that was trained for it"
            )
        trained = format.target_size or format.layers.hidden_size
        if not size == trained == format.layers.hidden_size:
            raise ValueError(
                f"the drafter in {folder!r} has hidden size {format.layers.hidden_size} and was trained for "
                f"a target of {trained}, and this one has {size}; they must be equal"
            )
        if format.mask_token >= target.vocab_size:
            raise ValueError(
                f"mask_token_id={format.mask_token} in {folder!r} is not in the target's vocabulary of "
                f"{target.vocab_size}; give a drafter that was trained for this target"
            )
        self.features = tuple(dict.fromkeys(format.inputs))
        network = self.network = BlockNetwork.load(
            format, size, target.vocab_size, self._weights, target.device, target.dtype
        )
        drafted = target.vocab_size if network.lm_head is None else len(network.lm_head.weight)
        self._vocabulary: TargetLogits | None = None
        if "d2t" in self._weights or drafted != target.vocab_size:
            self._vocabulary = self._weights.vocabulary(drafted, target.vocab_size, target.device)
        # Checkpoints may hold copies of the target's matrices.
        shared = target.source.get_input_embeddings(), target.source.get_output_embeddings()
        if _equal(network.lm_head, shared[1]):
            network.lm_head = None
        self._head: nn.Module = network.lm_head or shared[1]
        raw = network.embed_tokens is not None or format.raw_embeddings
        if _equal(network.embed_tokens, shared[0]):
            network.embed_tokens = None
        self._embedding = self._checked(network.embed_tokens or shared[0], raw)
        self.weight_bytes = sum(p.nbytes for p in network.parameters())
        self.weight_bytes += 0 if self._vocabulary is None else self._vocabulary.nbytes
        newest = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        check_network(network, self._weights, self._embedding(self._slots(newest)), self._head, size)

    def _checked(self, embeddings: nn.Module, raw: bool) -> Callable[[Tensor], Tensor]:
        """Returns what embeds the tokens of a block.

        Args:
            embeddings: the module with the table.
            raw: whether the rows of the table are read as they are.
        """
        if isinstance(embeddings, GgufEmbedding):
            return (lambda ids: embeddings(ids) * self.format.embedding_scale) if raw else embeddings
        table: Any = embeddings.weight
        if raw:
            return lambda ids: F.embedding(ids, table) * self.format.embedding_scale
        if type(embeddings).forward is not nn.Embedding.forward:
            ids = torch.zeros(1, dtype=torch.int64, device=table.device)
            if not torch.equal(embeddings(ids), F.embedding(ids, table)):
                raise ValueError(
                    f"the target's embeddings ({type(embeddings).__name__}) are scaled or normalised after "
                    f"the lookup, and implementations differ on whether the drafter in {str(self.folder)!r} "
                    "reads them so; this is not supported"
                )
        return embeddings

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        network = self.network
        # These sizes must equal those in ``bind`` and ``DecodingProgram``.
        slots = self.sinks + self.window + limits.chain + self._depth + 4 + 1 + self.format.block
        keys = 2 * slots + self.sinks + 1
        item = network.fc.weight.element_size() * batch * len(network.layers)
        cache = {"head's cache": item * network.kv_heads * keys * network.head_dim}
        return super().buffer_bytes(batch, capacity, limits) | cache

    def bind(self, state: SequenceState) -> None:
        super().bind(state)
        self._ring = Ring(self.sinks, self.window, state.max_draft_tokens + self._depth + 4)
        network = self.network

        def zeros(slots: int) -> Tensor:
            shape = (len(network.layers), state.batch, network.kv_heads, slots, network.head_dim)
            return torch.zeros(shape, device=state.device, dtype=network.fc.weight.dtype)

        # The slots of the block follow those of the cache.
        slots = self._ring.slots + 1 + self.format.block
        self._keys, self._values = zeros(slots), zeros(slots)
        # Keys of the sinks before rotation, and one slot that is never read.
        self._raw_keys = zeros(self.sinks + 1)

    @torch.no_grad()
    def _store(self, end: Tensor, positions: Tensor, kept: Tensor) -> None:
        state, network = self._state, self.network
        assert state.features is not None
        fused = network.fuse(state.features.read_all(self.format.inputs, positions))
        keys, values = network.context(fused)
        slots = self._ring.slots_of(positions, kept)[:, None, :, None].expand_as(keys)
        self._keys.scatter_(3, slots, rotated_one(keys, *network.angles(positions)))
        self._values.scatter_(3, slots, values)
        self._raw_keys.scatter_(3, torch.where(slots < self.sinks, slots, self.sinks), keys)

    @torch.no_grad()
    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        growth, end = self._growths[tree.shape], state.end[:, None]
        tree.tokens[:, 0] = state.newest
        fresh = self._newest(end, self._fresh)
        self._store(end, fresh, fresh >= 0)
        self._rotate_sinks(end)
        hidden = self._hidden(state.newest[:, None], end)
        first = self.format.first_slot
        hidden = hidden[:, first : first + growth.depth]
        logits = broadcast_tensor(self._head(hidden).contiguous())
        tokens, states = state.newest[:, None], self.network.first_states(state.batch)
        for depth, nodes in enumerate(growth.frontiers):
            if depth:
                tokens = growth.ids[depth - 1]
                above = tree.parents[:, nodes, None] - growth.frontiers[depth - 1].start
                states = states.gather(1, above.expand(-1, -1, states.shape[2]))
            if (head := self.network.parent_head) is None:
                # All nodes of a depth have one distribution, and their draws are independent.
                own = logits[:, depth : depth + 1].expand(-1, tokens.shape[1], -1)
            else:
                own, states = head(logits[:, depth], hidden[:, depth], tokens, states)
                own = broadcast_tensor(own.contiguous())
            if self._vocabulary is not None:
                own = self._vocabulary(own)
            growth.place(depth, own, state, tree, sampler)

    def _slots(self, newest: Tensor) -> Tensor:
        """Returns the tokens of a block, int64 ``[B, T]``, after the ``newest`` ``[B, 1]``."""
        return F.pad(newest, (0, self.format.block - 1), value=self.format.mask_token)

    def _hidden(self, newest: Tensor, end: Tensor) -> Tensor:
        """Returns what the language model head reads for each slot, ``[B, T, H]``.

        Args:
            newest: int64 ``[B, 1]``, the newest token.
            end: int64 ``[B, 1]``, its position.
        """
        assert self._state.features is not None
        block, first = self.format.block, self._ring.slots + 1
        own = end + torch.arange(block, device=end.device)
        cached = self._ring.positions(end)
        positions = torch.cat([cached, own], 1)
        visible = self._ring.visible(end, cached, self._state.features)
        visible = F.pad(visible, (0, block), value=True)[:, None]
        masks: dict[tuple[bool, int | None], Tensor] = {}
        for i, kind in enumerate(self._kinds):
            if kind not in masks:
                masks[kind] = visible & near(self.format, i, own, positions)

        def seen(i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self._keys[i, :, :, first:], self._values[i, :, :, first:] = keys, values
            return self._keys[i], self._values[i], masks[self._kinds[i]]

        hidden: Tensor = self.network(self._embedding(self._slots(newest)), own, seen)
        return hidden

    def _rotate_sinks(self, end: Tensor) -> None:
        """Rotates the keys of the sinks as if the window followed them."""
        if not self.sinks:
            return
        positions = torch.arange(self.sinks, device=end.device) + self._ring.dropped(end)
        raw = self._raw_keys[..., : self.sinks, :]
        self._keys[..., : self.sinks, :] = rotated_one(raw, *self.network.angles(positions))


def _equal(own: nn.Module | None, shared: nn.Module) -> bool:
    """Returns whether two modules have the same matrix."""
    if own is None or not isinstance(table := getattr(shared, "weight", None), Tensor):
        return False
    matrix: Any = own.weight
    same = matrix.shape == table.shape and matrix.dtype == table.dtype and matrix.device == table.device
    return same and torch.equal(matrix, table)
