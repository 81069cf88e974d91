"""Converts request bodies to token ids by JSON, chat template and tokenizer. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from triforce_tree.requests.chat import check_chat, encoded
from triforce_tree.requests.tokenized_texts import TokenizedTexts
from triforce_tree.server.protocol import (
    ChatRequest,
    CompletionRequest,
    RefusedError,
    not_served,
    request_of,
    shown,
)

Asked = ChatRequest | CompletionRequest
Ids = np.ndarray[Any, np.dtype[np.int64]]

# So many texts of earlier requests are remembered, which the next request may continue.
_REMEMBERED = 16
# Keys of a message that are accepted even if the chat template does not read them.
_OF_MESSAGES = frozenset({"role", "content", "name", "tool_call_id"})


@dataclass(frozen=True)
class Sizes:
    """The limits for requests.

    Attributes:
        model: the model name that requests must give.
        vocabulary: size of the target's vocabulary.
        positions: most tokens of a sequence; None for no limit.
        texts: most texts that one request may ask for.
    """

    model: str
    vocabulary: int
    positions: int | None
    texts: int


@dataclass(frozen=True)
class Read:
    """A parsed request.

    Attributes:
        asked: the fields of the request; its prompts or messages are replaced by an empty list.
        prompts: the token ids of each prompt.
    """

    asked: Asked
    prompts: list[Ids]


class Reader:
    """Reads requests, and remembers their texts to tokenize continuations faster.

    Args:
        tokenizer: the target's tokenizer.
        sizes: the limits for requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> None:
        self._texts, self._sizes = TokenizedTexts(tokenizer, _REMEMBERED), sizes
        self._tokenizer = tokenizer
        self._template = str(getattr(tokenizer, "chat_template", None))

    def read(self, body: bytes, chat: bool) -> Read:
        """Parses a request, and tokenizes its prompts.

        Raises:
            RefusedError, PromptError: the request is not valid, with a message for the client.
        """
        asked = request_of(body, chat)
        sizes = self._sizes
        if asked.model != sizes.model:
            raise RefusedError(not_served(asked.model, sizes.model), 404, "model")
        texts = len(asked.prompts) * asked.choices
        if texts > sizes.texts:
            raise RefusedError(
                f"{texts} texts are more than the {sizes.texts} that may wait here; ask for fewer at once"
            )
        self._check_tokens([*asked.stop_token_ids, *(token for token, _ in asked.logit_bias)])
        asked = replace(asked, bad_word_ids=self._words(asked.bad_words))
        prompts = [np.array(self._ids(prompt, chat), np.int64) for prompt in asked.prompts]
        if isinstance(asked, ChatRequest):
            return Read(replace(asked, messages=[]), prompts)
        return Read(replace(asked, prompts=[]), prompts)

    def _ids(self, prompt: Any, chat: bool) -> list[int]:
        if chat:
            check_chat(prompt)
            self._check_keys(prompt)
        ids: list[int] = prompt
        if chat or isinstance(prompt, str):
            ids = encoded(self._texts, prompt, self._sizes.positions)
        if not ids:
            raise RefusedError("a prompt is empty; give at least one token")
        self._check_tokens(ids)
        return ids

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of words, at the beginning of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            first, after = (
                tuple(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
                for prefix in ("", " ")
            )
            found[first] = None
            # Some tokenizers write the space as a token of its own, and others ignore it.
            if len(after) == len(first) and after[:1] != first[:1]:
                found[after] = None
        return tuple(ids for ids in found if ids)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """Raises RefusedError if a token is not in the vocabulary."""
        least, most = min(ids, default=0), max(ids, default=0)
        if least < 0 or most >= self._sizes.vocabulary:
            worst = most if most >= self._sizes.vocabulary else least
            what = str(worst) if abs(worst) < 10**18 else "of many digits"
            raise RefusedError(f"token id {what} lies outside the vocabulary of {self._sizes.vocabulary}")

    def _check_keys(self, chat: list[dict[str, Any]]) -> None:
        """Raises RefusedError if a message has a key that the chat template does not read."""
        for number, message in enumerate(chat):
            for key, value in message.items():
                if value and key not in _OF_MESSAGES and key not in self._template:
                    raise RefusedError(
                        f"message {number} has {shown(key)}, which this model's chat template does not read; "
                        "leave it out",
                        param="messages",
                    )
