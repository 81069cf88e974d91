"""Checks that the logits of a token are bit-identical in a forward of one token and of a whole tree."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triforce_tree.kv.view import KVView
from triforce_tree.models.step_model import StepModel
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.trees.ancestors import ancestor_mask

_CHAIN = 8
"""Depth of the compared tree. The tokens of its longest path are also computed one by one."""


def check_row_bits(
    model: StepModel,
    view: Callable[[int, Tensor | None, Sequence[int] | None], KVView],
    batch: int,
    nodes: int,
    vocabulary: int,
    name: str,
) -> None:
    """Compares the logits of a tree's longest path with those of the same tokens fed one by one.

    The sequences are empty before. Nodes with even index form a chain, and the others are second children of
    its nodes, so that except for the root no token's KV slot equals its position. Keys and values are written
    to the first ``nodes`` KV slots of every sequence.

    Args:
        model: the target.
        view: makes a view of the target's KV cache from the number of tokens, their mask and their depths.
        batch: number of sequences.
        nodes: number of tree nodes that decoding verifies in one forward.
        vocabulary: V.
        name: the model's name for messages.

    Raises:
        UnsupportedModelError: the logits are not bit-identical.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, nodes), generator=generator, device="cpu").to(model.device)
    start = torch.zeros(batch, dtype=torch.int64, device=model.device)
    parents = [-1, *(max(0, (node - 1) // 2 * 2) for node in range(1, nodes))]
    parents = [parent if parent < 2 * _CHAIN else 0 for parent in parents]
    mask = ancestor_mask(parents)
    depths = (mask.sum(1) - 1).tolist()
    path = mask[min(2 * _CHAIN, (nodes - 1) // 2 * 2)].nonzero()[:, 0].tolist()
    together = view(nodes, mask, depths)
    together.begin(start)
    positions = start[:, None] + torch.tensor(depths, device=model.device)
    logits = model(tokens, positions, together)[:, path]
    alone = view(1, None, None)
    for depth, node in enumerate(path):
        alone.begin(start + depth)
        single = model(tokens[:, node : node + 1], (start + depth)[:, None], alone)
        if not torch.equal(single[:, 0], logits[:, depth]):
            raise UnsupportedModelError(
                f"exact=True does not serve {name}: the logits of a token that is computed alone differ in "
                f"their last bits from those among {nodes} tokens, so a layer of it depends on their number; "
                "leave out exact"
            )
