"""The attention mask of a token tree."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Returns bool ``[N, N]`` whose row t marks node t and its ancestors; a root has parent -1."""
    mask = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return torch.from_numpy(mask)
