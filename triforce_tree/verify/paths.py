"""The tokens up to nodes of token trees, as lists on the host and as tensors on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.runtime.sequence_state import SequenceState


@dataclass(frozen=True)
class NodePaths:
    """The tokens of each sequence of a batch up to and including each of F nodes of its tree.

    A call returns them in host memory, and waits for the device. The methods do not wait, so that a CUDA
    graph can capture them.

    Attributes:
        state: the sequences.
        tokens, parents: int64 ``[B, N]``, of all nodes of the trees.
        depths: int64 ``[N]`` or ``[B, N]``.
        depth: depth of the deepest node.
        root: int64 ``[B]``, the position of node 0 in its sequence.
        nodes: which of the N nodes.
    """

    state: SequenceState
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    depth: int
    root: Tensor
    nodes: slice

    def __call__(self) -> list[Tensor | None]:
        """Returns the tokens up to each node, int64 ``[L]``, or None for an unused node.

        The batch must be 1. It is called only for logits processors that depend on the tokens.
        """
        prefix = self.state.tokens[0, : int(self.root[0]) + 1]
        tokens, parents = self.tokens[0].tolist(), self.parents[0].tolist()
        paths: list[list[int]] = [[]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])
        return [
            torch.cat([prefix, prefix.new_tensor(path)]) if min(path, default=0) >= 0 else None
            for path in paths[self.nodes]
        ]

    @property
    def lengths(self) -> Tensor:
        """Returns the number of tokens up to and including each node, int64 ``[B, F]``."""
        return self.root[:, None] + self.depths[..., self.nodes] + 1

    def chain(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens after the committed ones, int64 ``[B, max_draft_tokens]``, and how many of them
        lie before the children of node 0, int64 ``[B]``. The tokens after these are arbitrary.
        """
        state = self.state
        places = state.length[:, None] + torch.arange(1, state.max_draft_tokens + 1, device=state.device)
        return state.tokens.gather(1, places.clamp_max(state.capacity - 1)), self.root - state.length

    def uncommitted(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens of each path that are not committed yet, int64 ``[B, F, M]`` in any order, and
        bool ``[B, F, M]``: which entries are such tokens.
        """
        (chain, count), (in_tree, used) = self.chain(), self._upwards()
        drafted = torch.arange(chain.shape[1], device=chain.device) < count[:, None]
        nodes = in_tree.shape[1]
        chain, drafted = (each[:, None].expand(-1, nodes, -1) for each in (chain, drafted))
        return torch.cat([chain, in_tree], 2), torch.cat([drafted, used], 2)

    def newest(self, count: int) -> Tensor:
        """Returns the last ``count`` tokens of each path, int64 ``[B, F, count]``; -1 before its start."""
        in_tree, used = self._upwards()
        back, depths = torch.arange(count, device=in_tree.device), used.sum(-1, keepdim=True)
        places = self.root[:, None, None] - (back - depths).clamp_min(0)
        found = self.state.tokens.gather(1, places.clamp_min(0).flatten(1)).view_as(places)
        found = torch.where(places >= 0, found, -1)
        if self.depth:
            found = torch.where(back < depths, in_tree[..., back.clamp_max(self.depth - 1)], found)
        return found.flip(-1)

    def _upwards(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens from each node up to the child of the root, int64 ``[B, F, depth]``, and which
        entries are such nodes.
        """
        node = torch.arange(self.tokens.shape[1], device=self.tokens.device)[self.nodes]
        node = node.expand(len(self.tokens), -1)
        tokens, used = [], []
        for _ in range(self.depth):
            used.append(node > 0)
            tokens.append(self.tokens.gather(1, node).clamp_min(0))
            node = self.parents.gather(1, node).clamp_min(0)
        if not tokens:
            nothing = node.new_zeros(*node.shape, 0)
            return nothing, nothing.bool()
        return torch.stack(tokens, 2), torch.stack(used, 2)
