"""The criteria by which a sequence ends, as transformers prepares them, with stop strings as one of them."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf_stop

from triforce_tree.decoding.sequence import Ending, Stop
from triforce_tree.option_checks import shortened
from triforce_tree.runtime.distributed import broadcast_flag
from triforce_tree.text.new_text import NewText
from triforce_tree.text.vocabulary import Vocabulary

# Tokens that a character of a stop string may have.
_TOKENS_OF_ONE = 4
# Number of tokens before the searched ones that are decoded together with them.
_BEHIND = 64


class StopStrings(StoppingCriteria):
    """Ends a sequence when its new text has a stop string. Special tokens are matched by their names.

    Args:
        tokenizer: the target's tokenizer.
        strings: the stop strings, none of them empty.
        prompt_tokens: width of the prompts, used when transformers' beam search calls this object itself.
    """

    # Each text is searched by itself (see ``kept_state.py``).
    keeps_state = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_tokens: int = 0
    ) -> None:
        self._vocabulary, self._strings, self._width = Vocabulary(tokenizer), tuple(strings), prompt_tokens

    def of_one(self, prompt_tokens: int, end_tokens: Collection[int]) -> Stop:
        """Returns a function that decides whether one sequence ends. It is called after each token, and may
        be called again after an earlier token.
        """
        text: NewText | None = None
        searched = prompt_tokens

        def stop(tokens: list[int]) -> bool:
            nonlocal text, searched
            if text is None or searched >= len(tokens):
                text = NewText(self._vocabulary, tokens[:prompt_tokens], end_tokens, self._strings)
                searched = prompt_tokens
            for token in tokens[searched:]:
                text.put(token)
            searched = len(tokens)
            return text.stopped

        return stop

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        """Returns bool ``[B]``: whether the last token of each sequence of ``input_ids``, int64 ``[B, L]``,
        completes a stop string.
        """
        searched = min(input_ids.shape[1] - self._width, _TOKENS_OF_ONE * max(map(len, self._strings)))
        found = []
        for row in input_ids[:, -(searched + _BEHIND) :].tolist():
            text = NewText(self._vocabulary, row[:-searched], (), self._strings)
            for token in row[-searched:]:
                text.put(token)
            found.append(text.stopped)
        return torch.tensor(found, device=input_ids.device)


def ending_of(
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    prompt_tokens: int,
    device: torch.device,
    padding: Sequence[int] = (),
) -> Ending:
    """Returns an object that evaluates transformers' stopping criteria after every token of an accepted
    block.

    Args:
        prompt_tokens: width of the prompt, padding included, as ``max_length`` counts it.
        padding: pad tokens that criteria see before the tokens of the sequence.
    """
    # A criterion of the user replaces transformers' own of the same class.
    lengths = [c.max_length for c in criteria if type(c) is hf_stop.MaxLengthCriteria]
    ends = [c.eos_token_id for c in criteria if type(c) is hf_stop.EosTokenCriteria]
    stop_tokens = frozenset(token for tensor in ends for token in tensor.flatten().tolist())
    known = (hf_stop.MaxLengthCriteria, hf_stop.EosTokenCriteria, StopStrings)
    others = StoppingCriteriaList(c for c in criteria if type(c) not in known)
    start = prompt_tokens - len(padding)
    stops = [c.of_one(start, stop_tokens) for c in criteria if type(c) is StopStrings]
    if others:
        stops.append(_asking(others, device, padding))
    most = min([*lengths] or [config.max_length]) - prompt_tokens
    return Ending(most, stop_tokens, _any(stops) if stops else None)


class CheckedCriterion(StoppingCriteria):
    """A stopping criterion that is checked by :func:`answer_of`, for a list by transformers."""

    def __init__(self, criterion: Any) -> None:
        self._own = criterion

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return answer_of(self._own, input_ids, scores, **kwargs)


def answer_of(criterion: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
    """Returns bool ``[B]``: which of B sequences a stopping criterion ends.

    Raises:
        ValueError: the criterion answers something else; the message names it.
    """
    said, count = criterion(input_ids, scores, **kwargs), len(input_ids)
    try:
        found = torch.as_tensor(said, device=input_ids.device)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.numel() not in (1, count) or found.is_floating_point() or found.is_complex():
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise ValueError(
            f"the stopping criterion {name} answered {shortened(said)}; return True or "
            f"False, or a bool tensor of shape ({count},)"
        )
    return found.flatten().bool().expand(count)


def _any(stops: Sequence[Stop]) -> Stop:
    def stop(tokens: list[int]) -> bool:
        # Each is called for every token, because ranks wait for each other in some.
        found = [each(tokens) for each in stops]
        return any(found)

    return stop


def _asking(criteria: StoppingCriteriaList, device: torch.device, padding: Sequence[int]) -> Stop:
    held = torch.tensor([list(padding)], dtype=torch.int64, device=device)
    first, asked, answers = 0, list[int](), list[bool]()

    def stop(tokens: list[int]) -> bool:
        nonlocal held, first
        # It is called after each token. A pass that is repeated (memory ran out) has called it before, and
        # criteria that keep state see each token once.
        first = first or len(tokens) - 1
        new = tokens[first:]
        if len(new) <= len(asked):
            if new == asked[: len(new)]:
                return answers[len(new) - 1]
            del asked[len(new) - 1 :], answers[len(new) - 1 :]
        known = min(held.shape[1] - len(padding), len(tokens) - 1)
        fresh = torch.tensor([tokens[known:]], dtype=torch.int64, device=device)
        held = torch.cat([held[:, : len(padding) + known], fresh], 1)
        asked.append(tokens[-1])
        found = [bool(answer_of(each, held, None).all()) for each in criteria]
        answers.append(broadcast_flag(any(found)))
        return answers[-1]

    return stop
