"""Masks of grammars in transformers' own loop, which calls logits processors once per new token."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from triforce_tree.grammar.matching import Matcher, words_of
from triforce_tree.kernels.probs.masked import mask_logits


class GrammarProcessor(LogitsProcessor):
    """Sets the scores of tokens that the grammars of a batch do not allow to -inf.

    Args:
        matchers: the state of each sequence's grammar before its first new token; None without a grammar.
        width: tokens of the prompts, padding included.
    """

    def __init__(self, matchers: Sequence[Matcher | None], width: int) -> None:
        self._matchers = [matcher and matcher.copy() for matcher in matchers]
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the masked scores, ``[B, V]``, of the tokens after ``input_ids``, int64 ``[B, L]``."""
        words = torch.full((len(scores), words_of(scores.shape[1])), -1, dtype=torch.int32, device="cpu")
        newest = input_ids[:, -1].tolist()
        going: dict[int, Matcher] = {}
        for b, matcher in enumerate(self._matchers):
            if matcher is None or matcher.ended:
                continue
            if input_ids.shape[1] > self._width:
                matcher.accept(newest[b : b + 1])
            if not matcher.ended:
                going[b] = matcher
        Matcher.fill(list(going.values()), words, list(going))
        return mask_logits(scores, words.to(scores.device))
