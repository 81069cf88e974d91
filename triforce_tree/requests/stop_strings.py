"""Stop strings as a criterion of transformers: a text ends with the token that completes one."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from triforce_tree.decoding.sequence import Stop
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

    # See ``kept_state.py``: each text is searched by itself.
    keeps_state = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_tokens: int = 0
    ) -> None:
        self._vocabulary, self._strings, self._width = Vocabulary(tokenizer), tuple(strings), prompt_tokens

    def of_one(self, prompt_tokens: int, end_tokens: Collection[int]) -> Stop:
        """Returns a function that tells whether one sequence ends. It is called after each token, and may be
        called again after an earlier token.
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
