"""The base class of drafters, and the token tree that they write.

A drafter proposes one token tree per sequence, and the retrieval model or the target verifies it. To add a
drafter, write a subclass of :class:`Drafter` (``examples/custom_drafter.py`` is a complete one) and pass an
object of it to ``triforce_tree.load(drafter=...)``. However poor its proposals are,
the output follows the target's own distribution if the drafter is *honest* (``docs/losslessness.md``):

* The children of a node are drawn without replacement from the distribution that the drafter reports for that
  node, and stand in the order of the draws (:meth:`Sampler.children` does this). Or they are deterministic: a
  function of the preceding tokens alone, with no reported distribution. Drawn children may also be followed
  by deterministic ones.
* The number of children of a node does not depend on the draws of these children.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits, device_tree_shape
from triforce_tree.trees.shapes import Shape, parse_shape
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.probs import Sampler

# Benchmarks reset a sequence to its prompt after short runs. Hidden states before the prompt's end are still
# there if at most this many tokens were generated since.
_REWOUND = 64


class UnusableDrafterError(ValueError):
    """A drafter cannot be used with the target; without it, another one drafts."""


@dataclass
class TokenTree:
    """Buffers of one token tree for each of B sequences.

    Node 0 is the root, the newest token of the sequence. The N nodes are ordered by depth, and siblings in
    the order of their draws. Token -1 marks an unused node. The buffers keep their addresses and contents
    from call to call.

    Attributes:
        tokens: int64 ``[B, N]``.
        parents: int64 ``[B, N]``, the parent of each node, -1 for the root. They are fixed for chains and
            static shapes; best-first shapes choose them for each tree.
        depths: int64 ``[N]``, 0 for the root; ``[B, N]`` if depths differ between sequences.
        mask_words: int64 ``[B, N, L]``, the tree attention mask in words of 64 bits: bit j of word l says
            that node 64 l + j is the node itself or its ancestor.
        probs: fp32 ``[B, M, V]``, the distributions that children were drawn from.
        probs_rows: int64 ``[B, N]``, the index m in ``probs`` of the distribution that the children of each
            node were drawn from; -1 if the children are deterministic; ``kernels.step.accept.FIXED`` if the
            node itself is deterministic too, whether or not its earlier siblings were drawn. Initially n for
            node n, or -1 everywhere for a deterministic drafter.
        depth: depth of the deepest node, the most tokens that can be accepted.
        shape: index of the tree's shape in the drafter's ``shapes``.
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
        """Allocates the buffers of a tree. All nodes are unused.

        Args:
            shape: the number of nodes at each depth, and their parents if they are fixed.
            batch: B.
            vocabulary: V, or 0 for a deterministic drafter, which reports no distributions. Distributions are
                kept for the M = N - widths[-1] nodes that can have children.
            number: index of the shape in the drafter's ``shapes``.
        """
        depths = torch.tensor(shape.depths, device="cpu")
        count = len(depths)
        expanding = count - sum(shape.widths[-1:]) if vocabulary else 0
        rows = torch.arange(count, device="cpu") if vocabulary else torch.full((count,), -1, device="cpu")
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
        """N, including the root."""
        return self.tokens.shape[1]

    @property
    def used_nodes(self) -> int:
        """Returns 1 + the index of the last node that any sequence uses. Waits for the device."""
        # The root counts even if its token is -1.
        used = (self.tokens[:, 1:] >= 0).any(0).nonzero()
        return 2 + int(used[-1]) if len(used) else 1

    def first(self, count: int) -> "TokenTree":
        """Returns a view of the first ``count`` nodes."""
        if count == self.tokens.shape[1]:
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
        """Computes ``mask_words`` from ``parents``. Call it after writing ``parents``."""
        self_bits = pack_mask(torch.eye(self.nodes, dtype=torch.bool, device=self.mask_words.device))
        self.mask_words.copy_(self_bits)
        parents = self.parents[..., None].expand_as(self.mask_words)
        for _ in range(self.depth):
            parent_bits = self.mask_words.gather(1, parents.clamp_min(0))
            self.mask_words.copy_(torch.where(parents < 0, self_bits, parent_bits | self_bits))

    def paths(self, state: SequenceState, root: Tensor, nodes: slice = slice(None)) -> NodePaths:
        """Returns the tokens of the sequences up to and including each of ``nodes``.

        Args:
            root: int64 ``[B]``, the position of node 0 in each sequence.
        """
        return NodePaths(state, self.tokens, self.parents, self.depths, self.depth, root, nodes)


class Drafter:
    """Proposes token trees for a batch of B sequences. A drafter of your own is a subclass.

    Calls come in this order: ``attach`` and ``bind`` once; ``start`` for every new batch of prompts; then,
    until all sequences have ended, ``prepare`` and at least one ``propose`` before each verification by the
    target. ``start_one`` is called if another sequence replaces one that has ended.
    With ``levels=2`` the target verifies each tree. With ``levels=3`` the retrieval model verifies each tree
    and appends the tokens that it emits to a provisional chain. The last token of the chain is the root of
    the next tree. After several trees the target verifies the chain.

    Attributes:
        name: the drafter's name in statistics.
        tree: the shape of its trees in a form that :func:`triforce_tree.trees.shapes.parse_shape` reads,
            such as ``chain:8``.
        shapes: all shapes of its trees, if there are several; the first equals ``tree``. ``propose`` writes a
            tree of shape ``shapes[tree.shape]``, which was chosen before the pass began.
        deterministic: whether proposed tokens are a function of the preceding tokens alone. If False,
            ``tree.probs`` must hold the distributions that the tokens were drawn from.
        capturable: whether ``propose`` can be captured as a CUDA graph: it uses only torch operations on
            tensors that keep their addresses, and never waits for the device. False for a drafter that reads
            tokens on the host.
        features: the hidden states of the target that the drafter reads (``state.newest_features``): i means
            the output of decoder layer i, and the number of layers means the state after the final norm.
        feature_window: (number of first positions, number of newest positions) of a sequence, prompt
            included, whose hidden states the drafter reads. The default (0, 1) suffices for a drafter that
            reads those of the tokens that the last pass verified.
        weight_bytes: bytes on the device of the drafter's own weights; known after ``attach``.
        reads_slots: whether the drafter attends to keys and values of the target, see :meth:`read`.
    """

    name = "drafter"
    tree: str | Shape
    shapes: tuple[str | Shape, ...] = ()
    deterministic: bool
    capturable = False
    features: tuple[int, ...] = ()
    feature_window: tuple[int, int] = (0, 1)
    weight_bytes = 0
    reads_slots = False

    def attach(self, target: HFModel) -> None:
        """Takes the weights of the target that drafting needs. ``features`` are read after it.

        Raises:
            ValueError: the drafter was made for another target.
        """

    def buffer_bytes(self, batch: int, capacity: int, limits: PassLimits) -> dict[str, int]:
        """Returns the bytes that ``bind`` allocates on the device, by a name of their use, for memory plans.

        Args:
            batch: number of sequences.
            capacity: most tokens of a sequence, including those that passes write after its end.
            limits: most tokens that a pass drafts and writes.
        """
        return {}

    def bind(self, state: SequenceState) -> None:
        """Allocates buffers for ``state.batch`` sequences of at most ``state.capacity`` tokens.

        The engine calls it first, and again whenever it allocates new buffers.
        """

    def read(self, store: KVStore) -> None:
        """Takes the KV slots of the target, if the drafter ``reads_slots``; called after ``bind``.

        In ``propose`` all layers have the keys and values of positions 0 to ``state.end - 1``; those of a
        chain are from the retrieval model.
        """

    def take_over(self, earlier: "Drafter") -> None:
        """Takes over what an earlier drafter with the same settings has computed of its prompts.

        Called after ``bind``, if the target's cache is taken over too.
        """

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        """Begins new sequences. The engine also calls it with made-up ones to capture or time stages.

        Args:
            sequences: the token ids of each prompt or continued sequence. The last token is the root of the
                first tree.
        """

    def start_one(self, b: int, sequences: Sequence[Sequence[int]]) -> None:
        """Begins a new sequence at batch index b while the others continue; the default begins all again.

        Args:
            sequences: the token ids of all sequences.
        """
        self.start(sequences)

    def prepare(self, sequences: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Reads newly committed tokens. Called on the host once before each verification by the target.

        Args:
            sequences: all committed tokens of each sequence, prompt included; None for one that has ended.
            resumed: whether tokens were committed by plain decoding, without a proposal of this drafter,
                since the last call.
        """

    def force(self, tokens: Sequence[Sequence[int]]) -> None:
        """Takes the tokens that must follow each committed text by its grammar. Called before each pass of
        sequences with grammars; a drafter may propose them without computing anything.
        """

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Writes one tree per sequence into ``tree``. Proposals for sequences that have ended are ignored.

        Every entry of ``tree.tokens`` must be written: the root ``tree.tokens[:, 0]`` with ``state.newest``,
        and unused nodes with -1. A drafter that is not deterministic calls :meth:`Sampler.children` for one
        depth after the other. After a change of ``tree.parents`` call ``tree.update_masks()``.

        Args:
            state: the sequences. ``state.tokens`` up to position ``state.length`` are committed; those from
                there to position ``state.end`` are the provisional chain.
            tree: buffers of the shape that the attribute :attr:`tree` names.
            sampler: turns logits into distributions by the sampling options of the request, and draws tokens.
        """
        raise NotImplementedError


def drafter_bytes(
    drafter: Drafter, batch: int, capacity: int, limits: PassLimits, size: int, itemsize: int
) -> dict[str, int]:
    """Returns the bytes on the device of a drafter and of the hidden states that are kept for it, by use.

    Args:
        batch, capacity, limits: as in :meth:`Drafter.buffer_bytes`.
        size: hidden size of the target.
        itemsize: bytes per element of its hidden states.
    """
    by_use = {"heads": drafter.weight_bytes, **drafter.buffer_bytes(batch, capacity, limits)}
    if drafter.features:
        leading, history, beyond = _positions(drafter, limits.max_draft_tokens + limits.depth + 2)
        kept = batch * (leading + history + beyond)
        by_use["hidden states for the drafter"] = len(drafter.features) * kept * size * itemsize
    return {use: size for use, size in by_use.items() if size}


def shapes_of(drafter: Drafter) -> tuple[str | Shape, ...]:
    """Returns the shapes of a drafter's trees; the first is its attribute ``tree``."""
    return drafter.shapes or (drafter.tree,)


def grown_shapes(drafter: Drafter) -> list[DeviceTreeShape]:
    """Returns the node layout of each of a drafter's tree shapes, in the order of :func:`shapes_of`."""
    return [device_tree_shape(parse_shape(shape)) for shape in shapes_of(drafter)]


def features_of(drafter: Drafter | None, target: HFModel, batch: int, verified: int) -> Features | None:
    """Allocates the buffers that keep the target's hidden states for a drafter; None if it reads none.

    Args:
        batch: number of sequences.
        verified: most positions after the committed tokens that a pass writes.
    """
    if drafter is None or not drafter.features:
        return None
    size = target.model.config.get_text_config(decoder=True).hidden_size
    positions = _positions(drafter, verified)
    return Features(drafter.features, batch, size, *positions, target.device, target.dtype)


def _positions(drafter: Drafter, verified: int) -> tuple[int, int, int]:
    """Returns how many positions' hidden states are kept: first ones, newest ones, and uncommitted ones."""
    leading, newest = drafter.feature_window
    return leading, max(newest, verified), verified + _REWOUND


def check_members(drafter: object) -> None:
    """Raises ValueError if an object is not a :class:`Drafter`, or has no ``tree`` or ``deterministic``."""
    kind = type(drafter).__name__
    if not isinstance(drafter, Drafter):
        raise ValueError(f"{kind} is no drafter: make it a subclass of triforce_tree.Drafter")
    missing = [name for name in ("tree", "deterministic") if not hasattr(drafter, name)]
    if missing:
        raise ValueError(
            f"{kind} is no drafter: it has no {', '.join(missing)} (triforce_tree.Drafter describes each)"
        )


def check_drafter(drafter: Drafter, target: HFModel) -> None:
    """Attaches a drafter to the target, and checks its tree and the layers that it reads.

    Raises:
        ValueError: see :func:`check_members`; or the drafter was made for another target or reads a layer
            that the target does not have, or ``drafter.tree`` is no tree shape.
    """
    check_members(drafter)
    drafter.attach(target)
    parse_shape(drafter.tree)
    layers = target.layers
    for layer in drafter.features:
        if not 0 <= layer <= layers:
            raise ValueError(
                f"drafter {drafter.name!r} reads features of layer {layer}, but the target's layers are 0 to "
                f"{layers - 1}, and {layers} is the state after its final norm; change drafter.features"
            )
