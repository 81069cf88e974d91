"""Comparison of a model's rows alone and together, bit for bit, by the forwards that decoding runs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triforce_tree.kv.view import KVView
from triforce_tree.models.step_model import StepModel
from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.trees.ancestors import ancestor_mask

_CHAIN = 8
"""Depth of the compared tree: so many tokens are also computed one by one."""


def check_row_bits(
    model: StepModel,
    view: Callable[[int, Tensor | None, Sequence[int] | None], KVView],
    batch: int,
    nodes: int,
    vocabulary: int,
    name: str,
) -> None:
    """Compare logits of a tree's tokens with those of the same tokens one by one, after no text.

    Nodes at even places are a chain, those between them its runner-ups, so that no slot but the first is that
    of its token's position. Keys and values are written to the first ``nodes`` slots of every sequence.

    Args:
        model: the target.
        view: makes views of its cache.
        batch: sequences.
        nodes: of a tree, as decoding verifies them.
        vocabulary: V.
        name: of the model.

    Raises:
        UnsupportedModelError: bits differ.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, nodes), generator=generator).to(model.device)
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
        own = model(tokens[:, node : node + 1], (start + depth)[:, None], alone)
        if not torch.equal(own[:, 0], logits[:, depth]):
            raise UnsupportedModelError(
                f"exact=True does not serve {name}: the logits of a token that is computed alone differ in "
                f"their last bits from those among {nodes} tokens, so a layer of it depends on their number; "
                "leave out exact"
            )
