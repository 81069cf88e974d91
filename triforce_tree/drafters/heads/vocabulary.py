"""Draft vocabularies, which hold a part of the target's tokens."""

import torch
from torch import Tensor

from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.token_map import ABSENT


class DraftVocabulary:
    """Maps logits over a draft vocabulary to the target's, by the tensor ``d2t`` of a checkpoint.

    Token i of the draft vocabulary has the id i + d2t[i].

    Args:
        weights: the checkpoint.
        drafted, vocabulary: sizes of the draft vocabulary and of the target's.
        device: device of the logits.

    Raises:
        ValueError: ``d2t`` is missing, or does not map to different tokens of the target.
    """

    def __init__(self, weights: HeadWeights, drafted: int, vocabulary: int, device: torch.device) -> None:
        ids = weights.take("d2t", drafted).long() + torch.arange(drafted)
        if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"d2t in {str(weights.folder)!r} does not map {drafted} draft tokens to different ones of "
                f"the target's {vocabulary}; give heads that were trained for this target"
            )
        columns = torch.full((vocabulary,), -1)
        columns[ids] = torch.arange(drafted)
        self._columns, self._absent = columns.clamp_min(0).to(device), (columns < 0).to(device)
        self.nbytes = self._columns.nbytes + self._absent.nbytes

    def target_logits(self, logits: Tensor) -> Tensor:
        """Returns logits over the target's vocabulary, fp32 ``[..., V]``."""
        return logits.index_select(-1, self._columns).float().masked_fill_(self._absent, ABSENT)
