"""What a careless verification would do, to be planted as a fault."""

import torch
from torch import Tensor


def accept_first(tokens: Tensor, parents: Tensor, best: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """In place of ``step.accept_greedy``: the first child of each node is accepted unseen."""
    path = torch.full((len(tokens), depth + 1), -1)
    count, last = torch.zeros_like(tokens[:, 0]), torch.zeros_like(tokens[:, 0])
    for b, (own, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        nodes = [0]
        while len(nodes) <= depth:
            children = [i for i, node in enumerate(above) if node == nodes[-1] and own[i] >= 0]
            if not children:
                break
            nodes.append(children[0])
        path[b, : len(nodes)] = torch.tensor(nodes)
        count[b], last[b] = len(nodes), best[b, nodes[-1]]
    return path, count, last
