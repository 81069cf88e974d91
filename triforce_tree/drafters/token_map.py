"""Runs a draft model on the target's token ids if its vocabulary differs or has another padded size."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_tree.models.running_forward import Attend, RecurrentPass

# The logit of a target id that the draft lacks. Its probability is 0 in fp32. It is finite because the user's
# logits processors may set the logits of all ids of the draft to -inf. If the other logits were -inf too, the
# softmax would be NaN; with this value the other ids, which are allowed, are proposed.
ABSENT = -1e30


@dataclass(frozen=True)
class TokenMap:
    """Maps the V_t token ids of the target to the V_d ids of the draft.

    Attributes:
        inputs: int64 ``[V_t]``, the id that the draft reads for each id of the target; several may be equal.
        proposals: int64 ``[V_t]``, the index of the draft's logit for each id of the target, or -1 if the
            draft lacks it; the others are distinct.
    """

    inputs: Tensor
    proposals: Tensor

    @classmethod
    def padded(cls, target: int, draft: int) -> "TokenMap":
        """Returns the map for one tokenizer whose vocabulary the two models pad to different sizes.

        Args:
            target, draft: V_t and V_d. Ids from V_d on are padding, and the draft reads them as id 0.
        """
        ids = torch.arange(target, device="cpu")
        return cls(torch.where(ids < draft, ids, 0), torch.where(ids < draft, ids, -1))


class TargetLogits:
    """Maps logits over a draft's vocabulary to the target's.

    Args:
        columns: int64 ``[V_t]``, the index of the draft's logit for each id of the target, -1 if it lacks it.
        device: device of the logits.
    """

    def __init__(self, columns: Tensor, device: torch.device) -> None:
        self._columns, self._absent = columns.clamp_min(0).to(device), (columns < 0).to(device)
        self.nbytes = self._columns.nbytes + self._absent.nbytes

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns logits over the target's vocabulary, fp32 ``[..., V_t]``."""
        # fp16 cannot represent ABSENT.
        return logits.index_select(-1, self._columns).float().masked_fill_(self._absent, ABSENT)


class Forwards(Protocol):
    """The protocol of a model's forward, see :class:`~triforce_tree.models.step_model.StepModel`."""

    model: PreTrainedModel
    capturable: bool

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        last: int = 0,
        states: RecurrentPass | None = None,
    ) -> Tensor: ...


class MappedModel:
    """Runs forwards of the draft on the target's token ids; logits are over the target's vocabulary.

    Tokens are drawn from the softmax of these logits: the draft's distribution, renormalised over the ids
    that both vocabularies have. The same distribution is reported, so proposals stay honest
    (``drafters.base``). The ids that the draft reads affect the acceptance rate alone. This is the
    token-level intersection of Timor et al. (arXiv 2502.05202), implemented with tables of fixed size that a
    CUDA graph can use.

    Args:
        model: the draft.
        tokens: maps the target's ids to the draft's.
    """

    def __init__(self, model: Forwards, tokens: TokenMap) -> None:
        self._forwards, self.model, self.capturable = model, model.model, model.capturable
        self._inputs = tokens.inputs.to(model.device)
        self._target_logits = TargetLogits(tokens.proposals, model.device)

    @property
    def device(self) -> torch.device:
        return self._forwards.device

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        last: int = 0,
        states: RecurrentPass | None = None,
    ) -> Tensor:
        """Returns logits, fp32 ``[B, T, V_t]``, of int64 ``[B, T]`` target ids; see ``StepModel``."""
        return self._target_logits(self._forwards(self._inputs[tokens], positions, attend, last, states))
