"""The contract of a drafter, and the token trees that drafters write.

A drafter proposes one token tree a sequence. It keeps *honesty*: every proposed token was drawn, without
replacement among its siblings, from the distribution that it reports at the parent; or the drafter is
``deterministic`` and the tokens are a function of the context alone. Which nodes are proposed may depend on
anything but the draws at hand. Whoever keeps this may draft for any level, and the output still follows the
target's own distribution (``docs/losslessness.md``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from triforce_tree.kernels.attention.plan import pack_mask
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.trees.shapes import Shape
from triforce_tree.verify.probs import Sampler


@dataclass
class TokenTree:
    """Buffers of one token tree for each of B sequences; node 0 is the root, parents come before children.

    Each node has a slot of fixed depth; which node is whose child may change from tree to tree. A slot that
    is not taken holds token -1.

    Attributes:
        tokens, parents: int64 ``[B, N]``; ``parents[:, 0]`` is -1.
        depths: int64 ``[N]``.
        words: int64 ``[B, N, L]``; bit j of a node's word l: node 64 l + j is the node or its ancestor.
        probs: fp32 ``[B, M, V]``, the distributions that children were drawn from.
        probs_rows: int64 ``[B, N]``, the row of ``probs`` for a node's children; -1: deterministic ones.
        depth: tokens of the longest path below the root.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    probs: Tensor
    probs_rows: Tensor
    depth: int

    @classmethod
    def of(cls, shape: DeviceTreeShape, batch: int, vocabulary: int, device: torch.device) -> "TokenTree":
        """An empty tree.

        Args:
            shape: slots of each depth, and their parents where they never change.
            batch: B.
            vocabulary: V, of the distributions of the first M = N - widths[-1] nodes; 0 for a deterministic
                drafter.
        """
        depths = torch.tensor(shape.depths)
        count = len(depths)
        expanding = count - sum(shape.widths[-1:]) if vocabulary else 0
        own = torch.arange(count) if vocabulary else torch.full((count,), -1)
        made = cls(
            tokens=torch.full((batch, count), -1, device=device),
            parents=torch.tensor(shape.parents, device=device).repeat(batch, 1),
            depths=depths.to(device),
            words=torch.zeros(batch, count, -(-count // 64), dtype=torch.int64, device=device),
            probs=torch.zeros(batch, expanding, vocabulary, device=device),
            probs_rows=own.to(device).repeat(batch, 1),
            depth=len(shape.widths),
        )
        made.connect()
        return made

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.tokens.shape[1]

    @property
    def taken(self) -> int:
        """Nodes up to the last slot that any sequence has taken, at least 1. Waits for the device."""
        # The root is there whatever its slot says.
        used = (self.tokens[:, 1:] >= 0).any(0).nonzero()
        return 2 + int(used[-1]) if len(used) else 1

    def first(self, count: int) -> "TokenTree":
        """The tree of the first ``count`` slots, a view."""
        if count == self.nodes:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :count],
            parents=self.parents[:, :count],
            depths=self.depths[:count],
            words=self.words[:, :count],
            probs_rows=self.probs_rows[:, :count],
        )

    def connect(self) -> None:
        """Bring ``words`` up to date after ``parents`` were written; fixed parents need none."""
        own = pack_mask(torch.eye(self.nodes, dtype=torch.bool, device=self.words.device))
        self.words.copy_(own)
        parents = self.parents[..., None].expand_as(self.words)
        for _ in range(self.depth):
            above = self.words.gather(1, parents.clamp_min(0))
            self.words.copy_(torch.where(parents < 0, own, above | own))

    def paths(self, state: SequenceState, root: Tensor, nodes: slice = slice(None)) -> list[Tensor | None]:
        """The text up to each of these nodes of a batch of one, int64 ``[L]``; None where no token is.

        Waits for the device: it is for logits processors that look at the text.

        Args:
            root: int64 ``[1]``, where node 0 stands in the text.
        """
        before = state.tokens[0, : int(root[0]) + 1]
        tokens, parents = self.tokens[0].tolist(), self.parents[0].tolist()
        below: list[list[int]] = [[]]
        for node in range(1, len(tokens)):
            below.append([*below[parents[node]], tokens[node]])
        return [
            torch.cat([before, before.new_tensor(path)]) if min(path, default=0) >= 0 else None
            for path in below[nodes]
        ]


class Drafter(Protocol):
    """Proposes continuations of B texts.

    Attributes:
        name: in statistics.
        tree: the shape of its trees, as :func:`triforce_tree.trees.shapes.parse_shape` reads it: ``chain:8``.
        deterministic: whether the tokens are a function of the context alone; else ``tree.probs`` must hold
            the distributions that they were drawn from.
        capturable: whether ``propose`` may become part of a CUDA graph: torch operations on buffers of fixed
            address that never wait for the device. False where it looks at the text on the host.
        features: decoder layers of the target whose hidden states it reads from ``state.features``.
    """

    name: str
    tree: str | Shape
    deterministic: bool
    capturable: bool
    features: tuple[int, ...]

    def bind(self, state: SequenceState) -> None:
        """Allocate what drafting for ``state.batch`` texts of up to ``state.capacity`` tokens takes.

        Called before anything else, and again when the buffers are made anew.
        """

    def start(self, texts: Sequence[Sequence[int]]) -> None:
        """New texts: ``texts[b]`` are all tokens of sequence b, the root of the next tree last."""

    def prepare(self, texts: Sequence[Sequence[int] | None], resumed: bool) -> None:
        """Called on the host before the proposals of each verification by the target.

        Args:
            texts: all committed tokens of each sequence; None for one that has ended.
            resumed: tokens were committed without a proposal of this drafter since the last call.
        """

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        """Write trees whose roots are the tokens at ``state.end`` into ``tree``.

        ``tree.tokens[:, 0]`` must receive the roots. The texts may be provisional behind ``state.length``.
        """
