"""``mask_logits`` on a CPU, where numpy unpacks bits several times as fast as shifts of torch."""

import numpy as np
import torch
from torch import Tensor


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """See ``masked.mask_logits``."""
    packed = words.contiguous().numpy().view(np.uint8)
    allowed = torch.from_numpy(np.unpackbits(packed, -1, logits.shape[-1], "little")).view(torch.bool)
    return torch.where(allowed, logits, -torch.inf)
