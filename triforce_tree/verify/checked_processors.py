"""Logits processors whose results are checked, because those of the user may return anything."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList


class CheckedProcessors(LogitsProcessorList):
    """Applies logits processors in order, as transformers does.

    Raises:
        ValueError: a processor returns something that cannot be scores; the message names it.
    """

    def __call__(self, input_ids: Any, scores: Tensor, **kwargs: Any) -> Tensor:
        for processor in self:
            made: Any = LogitsProcessorList([processor])(input_ids, scores, **kwargs)
            if not _are_scores(made, scores):
                name = getattr(processor, "__name__", type(processor).__name__)
                kind = f"a tensor {_form(made)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
                raise ValueError(
                    f"the logits processor {name} returned {kind}; it must return scores of the form that "
                    f"it gets, a tensor {_form(scores)}"
                )
            scores = made
        return scores


def _are_scores(made: Any, scores: Tensor) -> bool:
    return (
        isinstance(made, Tensor)
        and made.shape == scores.shape
        and made.device == scores.device
        and made.dtype is not torch.bool
        and not made.is_complex()
    )


def _form(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
