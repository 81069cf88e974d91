"""The protocol of a drafter, and the token tree that it writes.

A drafter proposes one token tree per sequence; the next level of the hierarchy verifies it. To add one, write
a class with the attributes and methods of :class:`Drafter` (``examples/custom_drafter.py`` is a complete one)
and pass an instance to ``triforce_tree.load(drafter=...)``. However poor its proposals are, the output
follows the target's own distribution if the drafter is *honest* (``docs/losslessness.md``):

* the children of a node are drawn, without replacement and in the order of their slots, from the distribution
  that the drafter reports for that node (:meth:`Sampler.children` does this); or they are deterministic: a
  function of the tokens before them alone, with no distribution reported; or some are drawn and those after
  them deterministic;
* how many children a node gets may depend on anything but the draws of these children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.kernels.step.accept import FIXED
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits, device_tree_shape
from triforce_tree.trees.shapes import Shape, parse_shape
from triforce_tree.verify.probs import Sampler

# A return to the prompt after so many tokens, as in measurements, finds the hidden states before its end.
_REWOUND = 64


@dataclass
class TokenTree:
    """Buffers of one token tree for each of B sequences.

    Node 0 is the root, the newest token of the sequence. The N nodes are laid out by depth, parents before
    children, siblings in the order of their draws. Token -1 marks a node that is not used. The buffers keep
    their addresses and contents from call to call.

    Attributes:
        tokens: int64 ``[B, N]``.
        parents: int64 ``[B, N]``, the parent of each node, -1 for the root. Fixed for chains and static
            shapes; best-first shapes choose them anew for each tree.
        depths: int64 ``[N]``, 0 for the root; ``[B, N]`` where they differ between sequences.
        mask_words: int64 ``[B, N, L]``, the tree attention mask in words of 64 bits: bit j of word l says
            that node 64 l + j is the node itself or its ancestor.
        probs: fp32 ``[B, M, V]``, the distributions that children were drawn from.
        probs_rows: int64 ``[B, N]``, the row of ``probs`` for the children of each node, -1 if these are
            deterministic, and ``kernels.step.accept.FIXED`` if it is deterministic itself besides, whatever
            its siblings before it are. Initially row n for node n, or -1 everywhere for a deterministic
            drafter; ``FIXED`` for a chain beside the tree.
        depth: depth of the deepest node, the most tokens that can be accepted.
        shape: number of its shape among those of the drafter, see :class:`GrowsShapes`.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask_words: Tensor
    probs: Tensor
    probs_rows: Tensor
    depth: int
    shape: int = 0

    @classmethod
    def of(
        cls, shape: DeviceTreeShape, batch: int, vocabulary: int, device: torch.device, number: int = 0
    ) -> "TokenTree":
        """A tree without tokens.

        Args:
            shape: nodes of each depth, and their parents if they are fixed.
            batch: B.
            vocabulary: V; distributions are kept for the M = N - widths[-1] nodes above the last depth. 0 for
                a deterministic drafter, which reports none.
            number: of the shape among those of the drafter.
        """
        depths = torch.tensor(shape.depths)
        count, grown = len(depths), shape.tree_nodes
        expanding = grown - sum(shape.widths[-1:]) if vocabulary else 0
        rows = torch.arange(count) if vocabulary else torch.full((count,), -1)
        rows[grown:] = FIXED
        tree = cls(
            tokens=torch.full((batch, count), -1, device=device),
            parents=torch.tensor(shape.parents, device=device).repeat(batch, 1),
            depths=depths.to(device),
            mask_words=torch.zeros(batch, count, -(-count // 64), dtype=torch.int64, device=device),
            probs=torch.zeros(batch, expanding, vocabulary, dtype=torch.float32, device=device),
            probs_rows=rows.to(device).repeat(batch, 1),
            depth=shape.depth,
            shape=number,
        )
        tree.update_masks()
        return tree

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]

    @property
    def used_nodes(self) -> int:
        """Nodes up to the last one that any sequence uses, at least 1. Waits for the device."""
        # The root counts even if its token is -1.
        used = (self.tokens[:, 1:] >= 0).any(0).nonzero()
        return 2 + int(used[-1]) if len(used) else 1

    def first(self, count: int) -> "TokenTree":
        """The tree of the first ``count`` nodes, a view."""
        if count == self.nodes:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :count],
            parents=self.parents[:, :count],
            depths=self.depths[..., :count],
            mask_words=self.mask_words[:, :count],
            probs_rows=self.probs_rows[:, :count],
        )

    def update_masks(self) -> None:
        """Compute ``mask_words`` from ``parents``; needed only after ``parents`` were written."""
        self_bits = pack_mask(torch.eye(self.nodes, dtype=torch.bool, device=self.mask_words.device))
        self.mask_words.copy_(self_bits)
        parents = self.parents[..., None].expand_as(self.mask_words)
        for _ in range(self.depth):
            parent_bits = self.mask_words.gather(1, parents.clamp_min(0))
            self.mask_words.copy_(torch.where(parents < 0, self_bits, parent_bits | self_bits))

    def paths(self, state: SequenceState, root: Tensor, nodes: slice = slice(None)) -> list[Tensor | None]:
        """The tokens up to and including each of ``nodes``, int64 ``[L]``; None for a node that is not used.

        For a batch of one. Waits for the device: only logits processors that depend on the tokens need it.

        Args:
            root: int64 ``[1]``, the position of node 0 in the sequence.
        """
        prefix = state.tokens[0, : int(root[0]) + 1]
        tokens, parents = self.tokens[0].tolist(), self.parents[0].tolist()
        paths: list[list[int]] = [[]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])
        return [
            torch.cat([prefix, prefix.new_tensor(path)]) if min(path, default=0) >= 0 else None
            for path in paths[nodes]
        ]


@runtime_checkable
class ReadsTarget(Protocol):
    """What a drafter has besides if it computes with parts of the target.

    Attributes:
        feature_window: how many of a sequence's first and of its newest positions it reads the hidden states
            of, prompt included. Other drafters get those of the tokens of the last passes alone.
    """

    feature_window: tuple[int, int]

    def attach(self, target: HFModel) -> None:
        """Take from the target what drafting needs; called before ``bind`` and the reading of ``features``.

        Raises:
            ValueError: the drafter was made for another target.
        """


@runtime_checkable
class StartsOne(Protocol):
    """What a drafter has besides if it can begin one sequence of a batch while the others go on.

    Of other drafters ``start`` is called again with all sequences.
    """

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        """Begin a new sequence in the place of sequence b, which has ended; arguments as of ``start``."""


def start_one(drafter: "Drafter", b: int, sequences: Sequence[Sequence[int]]) -> None:
    """Begin a new sequence in the place of sequence b; ``sequences`` are all tokens of each."""
    if isinstance(drafter, StartsOne):
        drafter.start_one(b, sequences)
    else:
        drafter.start(sequences)


@runtime_checkable
class GrowsShapes(Protocol):
    """What a drafter has besides if it grows trees of several shapes, among which decoding chooses.

    Attributes:
        shapes: the attribute ``tree`` first. ``propose`` grows the one whose number is ``tree.shape`` of the
            buffers that it is given; which one that is was chosen before the pass began.
    """

    shapes: tuple[str | Shape, ...]


@runtime_checkable
class CountsBytes(Protocol):
    """What a drafter has besides if memory plans count what it allocates.

    Attributes:
        weight_bytes: on the device, of weights of its own; known after ``attach``.
    """

    weight_bytes: int

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        """Bytes that ``bind`` allocates on the device, by use.

        Args:
            batch: sequences.
            capacity: most tokens of a sequence, with all that passes write after its end.
            limits: of the passes.
        """


def drafter_bytes(
    drafter: "Drafter", batch: int, capacity: int, limits: PassLimits, size: int, itemsize: int
) -> dict[str, int]:
    """Bytes on the device, by use, of a drafter and of the hidden states that are kept for it.

    Args:
        batch, capacity, limits: as for :class:`CountsBytes`.
        size, itemsize: of the target's hidden states, in elements, and of an element in bytes.
    """
    if not isinstance(drafter, CountsBytes):
        found: dict[str, int] = {}
    else:
        found = {"heads": drafter.weight_bytes, **drafter.buffer_bytes(batch, capacity, limits)}
    if drafter.features:
        leading, history, beyond = _positions(drafter, limits.max_draft_tokens + limits.depth + 2)
        kept = batch * (leading + history + beyond)
        found["hidden states for the drafter"] = len(drafter.features) * kept * size * itemsize
    return {use: size for use, size in found.items() if size}


def shapes_of(drafter: "Drafter") -> tuple[str | Shape, ...]:
    """The shapes of a drafter's trees, its attribute ``tree`` first."""
    return drafter.shapes if isinstance(drafter, GrowsShapes) else (drafter.tree,)


def grown_shapes(drafter: "Drafter") -> list[DeviceTreeShape]:
    """The layouts of a drafter's trees, that of the attribute ``tree`` first."""
    return [device_tree_shape(parse_shape(shape)) for shape in shapes_of(drafter)]


def features_of(drafter: "Drafter | None", target: HFModel, batch: int, verified: int) -> Features | None:
    """Where hidden states are kept for a drafter; None if it reads none.

    Args:
        target: whose hidden states these are.
        batch: sequences.
        verified: most positions after the committed tokens that passes write.
    """
    if drafter is None or not drafter.features:
        return None
    size = target.model.config.get_text_config(decoder=True).hidden_size
    positions = _positions(drafter, verified)
    return Features(drafter.features, batch, size, *positions, target.device, target.dtype)


def _positions(drafter: "Drafter", verified: int) -> tuple[int, int, int]:
    """First positions whose hidden states are kept, newest ones, and those that passes write after them."""
    leading, newest = drafter.feature_window if isinstance(drafter, ReadsTarget) else (0, 1)
    return leading, max(newest, verified), verified + _REWOUND


class Drafter(Protocol):
    """Proposes token trees for a batch of B sequences.

    Calls come in this order: ``bind`` once; ``start`` for every new batch of prompts; then, until all
    sequences have ended, ``prepare`` and at least one ``propose`` before each verification by the target.
    Where a sequence that has ended makes room for another one, ``start`` is called again with all of them, or
    ``start_one`` if the drafter has it (:class:`StartsOne`).
    With ``levels=2`` the target verifies each tree. With ``levels=3`` the retrieval model verifies each tree
    and appends the tokens that it emits to a provisional chain, at whose end the next tree begins; after
    several such rounds the target verifies the chain.

    Attributes:
        name: in statistics.
        tree: the shape of its trees, as :func:`triforce_tree.trees.shapes.parse_shape` reads it: ``chain:8``.
        deterministic: whether proposed tokens are a function of the tokens before them alone. If False,
            ``tree.probs`` must hold the distributions that they were drawn from.
        capturable: whether ``propose`` can be captured as a CUDA graph: only torch operations, on tensors
            that keep their addresses, and no wait for the device. False for a drafter that reads tokens on
            the host.
        features: which hidden states of the target it reads (``state.newest_features``): i for the output of
            decoder layer i, the number of layers for the state after the final norm, which the language
            model head reads; ``()`` for none.
    """

    name: str
    tree: str | Shape
    deterministic: bool
    capturable: bool
    features: tuple[int, ...]

    def bind(self, state: SequenceState) -> None:
        """Allocate what drafting needs for ``state.batch`` sequences of at most ``state.capacity`` tokens.

        Called first, and again whenever the engine allocates new buffers.
        """

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        """Begin new sequences; also called with made-up ones when stages are captured or timed.

        Args:
            sequences: the token ids of each prompt, or of a sequence that goes on; the last token is the root
                of the first tree.
        """

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Catch up with newly committed tokens; called on the host before the proposals of each verification.

        Args:
            sequences: all committed tokens of each sequence, prompt included; None for one that has ended.
            resumed: whether tokens were committed by autoregressive passes, without a proposal of this
                drafter, since the last call.
        """

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Write one tree per sequence into ``tree``; proposals for sequences that have ended are ignored.

        Every entry of ``tree.tokens`` must be written: the root ``tree.tokens[:, 0]`` with ``state.newest``,
        nodes that are not used with -1. A drafter that is not deterministic calls :meth:`Sampler.children`
        for each depth in turn. After a change of ``tree.parents`` call ``tree.update_masks()``.

        Args:
            state: the sequences. ``state.tokens`` up to position ``state.length`` are committed, those after
                it up to position ``state.end`` are the provisional chain.
            tree: buffers of the shape that the attribute :attr:`tree` names.
            sampler: turns logits into distributions by the options of the request, and draws from them.
        """


def check_drafter(drafter: Drafter, layers: int) -> None:
    """Raise ValueError where a drafter's tree is no tree shape, or it reads layers that are not there."""
    parse_shape(drafter.tree)
    for layer in drafter.features:
        if not 0 <= layer <= layers:
            raise ValueError(
                f"drafter {drafter.name!r} reads features of layer {layer}, but the target's layers are 0 to "
                f"{layers - 1}, and {layers} is the state after its final norm; change drafter.features"
            )
