"""A fault that checks must find: proposals are accepted without verification."""

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels import step


def accept_all_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the first child of every node, as if it were the target's choice."""
    monkeypatch.setattr(step, "accept_greedy", _accept_first_children)


def _accept_first_children(
    tokens: Tensor, parents: Tensor, best: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    paths = torch.full((tokens.shape[0], depth + 1), -1)
    counts, following = torch.zeros(tokens.shape[0], dtype=torch.int64), []
    for b, (ids, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        path = [0]
        while len(path) <= depth and (
            children := [n for n, parent in enumerate(above) if parent == path[-1] and ids[n] >= 0]
        ):
            path.append(children[0])
        paths[b, : len(path)], counts[b] = torch.tensor(path), len(path)
        following.append(best[b, path[-1]])
    return paths, counts, torch.stack(following)
