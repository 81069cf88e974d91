"""The tokens up to nodes of token trees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_tree.runtime.sequence_state import SequenceState


@dataclass(frozen=True)
class NodePaths:
    """The tokens of each sequence of a batch up to and including each of F nodes of its tree.

    Attributes:
        state: the sequences.
        tokens, parents: int64 ``[B, N]``, of all nodes of the trees.
        root: int64 ``[B]``, the position of node 0 in its sequence.
        nodes: which of the N nodes.
    """

    state: SequenceState
    tokens: Tensor
    parents: Tensor
    root: Tensor
    nodes: slice

    def __call__(self) -> list[Tensor | None]:
        """Returns the tokens up to each node, int64 ``[L]``, or None for an unused node.

        The batch must be 1. This waits for the device, so it is called only for logits processors that depend
        on the tokens.
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
