"""A draft model over the target's token ids, where its own vocabulary is another, or padded differently."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.models.attention import Attend

# The logit of a target id that the draft cannot propose. Its probability is 0 in fp32. It is finite because
# the user's logits processors may forbid every id that the draft can propose: with -inf for all others no
# distribution would be left, only NaN; with this one the others, which are allowed, are proposed.
ABSENT = -1e30


@dataclass(frozen=True)
class TokenMap:
    """Which of the draft's V_d token ids stand for the target's V_t.

    Attributes:
        inputs: int64 ``[V_t]``, the draft's id for each id of the target, as it reads the sequence; several
            may be equal.
        proposals: int64 ``[V_t]``, the draft's logit for each id of the target, -1 where it has none; no
            other two are equal.
    """

    inputs: Tensor
    proposals: Tensor

    @classmethod
    def padded(cls, target: int, draft: int) -> "TokenMap":
        """The map of equal ids, for vocabularies of one tokenizer that are padded to different sizes.

        Args:
            target, draft: V_t and V_d. The draft reads ids from V_d on, which are padding, as id 0.
        """
        ids = torch.arange(target)
        return cls(torch.where(ids < draft, ids, 0), torch.where(ids < draft, ids, -1))


class Forwards(Protocol):
    """A model over fixed buffers, see :class:`~triforce_tree.models.step_model.StepModel`."""

    model: PreTrainedModel
    capturable: bool

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, last: int = 0) -> Tensor: ...


class MappedModel:
    """A draft's forwards that take the target's token ids and return logits over the target's vocabulary.

    The draft proposes from the softmax of these logits, which is its own distribution renormalised over the
    ids that both vocabularies have: the one that it reports, so proposals stay honest (``drafters.base``).
    How the draft reads the context affects the acceptance alone. This is the token-level intersection of
    Timor et al. (arXiv 2502.05202), as lookups in tables of fixed size, which a CUDA graph can capture.

    Args:
        model: the draft.
        tokens: its token ids for the target's.
    """

    def __init__(self, model: Forwards, tokens: TokenMap) -> None:
        self._forwards, self.model, self.capturable = model, model.model, model.capturable
        self._inputs = tokens.inputs.to(model.device)
        self._columns = tokens.proposals.clamp_min(0).to(model.device)
        self._absent = (tokens.proposals < 0).to(model.device)

    @property
    def device(self) -> torch.device:
        return self._forwards.device

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, last: int = 0) -> Tensor:
        """fp32 ``[B, T, V_t]`` of int64 ``[B, T]``, see ``StepModel``."""
        logits = self._forwards(self._inputs[tokens], positions, attend, last)
        # 16 bits do not all hold ABSENT.
        return logits.index_select(2, self._columns).float().masked_fill_(self._absent, ABSENT)
