"""Logits processors whose results are checked, because those of the user may return anything."""

from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList


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


class CheckedProcessor(LogitsProcessor):
    """A logits processor that is checked as in :class:`CheckedProcessors`, for a list by transformers."""

    def __init__(self, processor: Any) -> None:
        self._own = CheckedProcessors([processor])

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        return self._own(input_ids, scores)


class Drawable(LogitsProcessor):
    """Raises an error where no token can be drawn from the scores of all processors before it.

    Args:
        message: the message of the ValueError.
        rows: the number of consecutive rows of the scores from which tokens are drawn together.
    """

    def __init__(self, message: str, rows: int = 1) -> None:
        self._message, self._rows = message, rows

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not scores.amax(-1).view(-1, self._rows).amax(-1).isfinite().all():
            raise ValueError(self._message)
        return scores


def _are_scores(made: Any, scores: Tensor) -> bool:
    return (
        isinstance(made, Tensor)
        and made.shape == scores.shape
        and made.device == scores.device
        and made.is_floating_point()
    )


def _form(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
