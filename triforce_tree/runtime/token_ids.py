"""Token ids as tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def id_tensor(ids: Sequence[int], device: torch.device | None = None) -> Tensor:
    """int64 ``[L]``: ``torch.tensor(ids)``, which takes seven times as long, 15 ms for 122,880 ids."""
    return torch.from_numpy(np.array(ids, dtype=np.int64)).to(device)


def left_padded(
    rows: Sequence[Sequence[int] | np.ndarray[Any, Any]], padding: int, device: torch.device | None = None
) -> Tensor:
    """int64 ``[B, L]``, shorter rows behind ``padding``."""
    width = max(map(len, rows))
    padded = np.full((len(rows), width), padding, dtype=np.int64)
    for own, row in zip(padded, rows, strict=True):
        own[width - len(row) :] = row
    return torch.from_numpy(padded).to(device)
