"""Converts request bodies to token ids by JSON, chat template and tokenizer.

Nothing here imports torch before the first request with a grammar.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from triforce_tree.requests.chat import check_chat, encoded
from triforce_tree.requests.tokenized_texts import TokenizedTexts
from triforce_tree.server.grammars import GrammarTexts
from triforce_tree.server.protocol import ChatRequest, CompletionRequest, parsed, request_of
from triforce_tree.server.refusals import RefusedError, not_served, shown, wrong
from triforce_tree.server.responses import chat_of
from triforce_tree.server.tools.formats import NO_CALLS, Parsing, format_name, reasoning_markers

Asked = ChatRequest | CompletionRequest
Ids = np.ndarray[Any, np.dtype[np.int64]]

# So many texts of earlier requests are remembered, which the next request may continue.
_REMEMBERED = 16
# Keys of a message that are accepted even if the chat template does not read them.
_OF_MESSAGES = frozenset({"role", "content", "name", "tool_call_id", "reasoning_content", "reasoning"})
# Characters at the end of a prompt in which an opened reasoning is looked for.
_END = 16


class Route(IntEnum):
    """What a request asks for."""

    COMPLETIONS = 0
    CHAT = 1
    RESPONSES = 2
    TOKENIZE = 3
    DETOKENIZE = 4


@dataclass(frozen=True)
class Sizes:
    """What requests are checked against.

    Attributes:
        model: the model name that requests must give.
        vocabulary: size of the target's vocabulary.
        positions: most tokens of a sequence; None for no limit.
        texts: most texts that one request may ask for.
        format: the format of tool calls, one of ``tools.formats.FORMATS``; None for the one of the chat
            template.
        reasoning: whether reasoning is separated from the content.
    """

    model: str
    vocabulary: int
    positions: int | None
    texts: int
    format: str | None = None
    reasoning: bool = True


@dataclass(frozen=True)
class Read:
    """A parsed request.

    Attributes:
        asked: the fields of the request; its prompts or messages are replaced by an empty list.
        prompts: the token ids of each prompt.
        parsing: how the texts are parsed.
        grammar: the EBNF grammar of the texts, or None.
        echoed: fields that the reply to ``/v1/responses`` repeats; None for other routes.
    """

    asked: Asked
    prompts: list[Ids]
    parsing: Parsing = field(default_factory=Parsing)
    grammar: str | None = None
    echoed: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answered:
    """A request that needs no decoding, and its reply."""

    body: dict[str, Any]


class Reader:
    """Reads requests, and remembers their texts to tokenize continuations faster.

    Args:
        tokenizer: the target's tokenizer.
        sizes: the limits for requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> None:
        self._tokenizer, self._texts = tokenizer, TokenizedTexts(tokenizer, _REMEMBERED)
        self._sizes = sizes
        self._template = str(getattr(tokenizer, "chat_template", None))
        self._format = sizes.format or format_name(self._template)
        known = reasoning_markers(self._template, tokenizer.get_vocab()) if sizes.reasoning else None
        self._reasoning = known
        self.grammars = GrammarTexts(tokenizer, sizes.vocabulary)

    def read(self, body: bytes, route: Route) -> Read | Answered:
        """Parses a request, and tokenizes its prompts.

        Raises:
            RefusedError, PromptError: the request is not valid, with a message for the client.
        """
        given = parsed(body)
        if route in (Route.TOKENIZE, Route.DETOKENIZE):
            own = {name: value for name, value in given.items() if value is not None}
            self._check_model(own.pop("model", self._sizes.model))
            return self._tokenized(own) if route == Route.TOKENIZE else self._detokenized(own)
        given, echoed = chat_of(given) if route == Route.RESPONSES else (given, None)
        asked = request_of(given, route != Route.COMPLETIONS)
        self._check_model(asked.model)
        texts = len(asked.prompts) * asked.choices
        if texts > self._sizes.texts:
            raise RefusedError(
                f"{texts} texts are more than the {self._sizes.texts} that may wait here; ask for fewer at "
                "once"
            )
        self._check_tokens([*asked.stop_token_ids, *(token for token, _ in asked.logit_bias)])
        asked = replace(asked, bad_word_ids=self._words(asked.bad_words))
        if not isinstance(asked, ChatRequest):
            prompts = [np.array(self._ids(prompt), np.int64) for prompt in asked.prompts]
            grammar = None if asked.shape is None else self.grammars.text(asked.shape)
            return Read(replace(asked, prompts=[], shape=None), prompts, grammar=grammar)
        ids = self._chat_ids(asked)
        parsing = self._parsing(asked, ids)
        read = replace(asked, messages=[], shape=None, template={}, offer=replace(asked.offer, tools=[]))
        return Read(read, [np.array(ids, np.int64)], parsing, self._grammar(asked, parsing), echoed)

    def _check_model(self, name: Any) -> None:
        if name != self._sizes.model:
            raise RefusedError(not_served(str(name), self._sizes.model), 404, "model")

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        """Returns the token ids of a chat."""
        check_chat(asked.messages)
        self._check_keys(asked.messages)
        offer, variables = asked.offer, dict(asked.template)
        for name, value in variables.items():
            if name in _RESERVED or not name.isidentifier() or name not in self._template:
                raise RefusedError(
                    f"{shown(name)} is no variable of this model's chat template; leave it out",
                    param=shown(name),
                )
            if not isinstance(value, str | int | float):
                raise wrong(name, value, "must be a text, a number, true or false")
        if offer.tools:
            if "tools" not in self._template:
                raise RefusedError(
                    "this model's chat template does not read tools; leave them out", param="tools"
                )
            if self._format == NO_CALLS and offer.enabled:
                raise RefusedError(
                    "how this model writes tool calls is not known; start the server with --tool-parser",
                    param="tools",
                )
            variables["tools"] = offer.tools
        return self._checked(encoded(self._texts, asked.messages, self._sizes.positions, **variables))

    def _parsing(self, asked: ChatRequest, ids: list[int]) -> Parsing:
        reasoning = self._reasoning
        if reasoning is not None:
            end = str(self._tokenizer.decode(ids[-_END:])).rstrip()
            # A prompt may have reasoning that has ended, as where the template is told to have none.
            inside, ended = end.endswith(reasoning.opening), end.endswith(reasoning.closing)
            reasoning = None if ended else replace(reasoning, inside=inside)
        offered = asked.offer.schemas if asked.offer.enabled else {}
        return Parsing(self._format, offered, reasoning)

    def _grammar(self, asked: ChatRequest, parsing: Parsing) -> str | None:
        """Returns the grammar of the texts, or None if they may be any text."""
        form, offer, content = parsing.format, asked.offer, asked.shape
        shapes = []
        if content is not None and not offer.forced:
            shapes.append(form.content_shape(content, parsing.reasoning))
        # A text with a demanded content may call tools instead.
        callable_tools = offer.forced or ((offer.guarded or parsing.tools) if content is not None else {})
        if callable_tools:
            shapes.append(form.calls_shape(callable_tools, parsing.reasoning, offer.parallel))
        elif offer.guarded:
            shapes.append(form.text_shape(offer.guarded, parsing.reasoning, offer.parallel))
        if not shapes:
            return None
        return self.grammars.text(shapes[0] if len(shapes) == 1 else {"type": "or", "elements": shapes})

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self._checked(
            encoded(self._texts, prompt, self._sizes.positions) if isinstance(prompt, str) else prompt
        )

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise RefusedError("a prompt is empty; give at least one token")
        self._check_tokens(ids)
        return ids

    def _words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of words, at the beginning of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            # Blanks before a word do not count, but a word may consist of blanks.
            bare = word.lstrip() or word
            first, after = (
                tuple(self._tokenizer.encode(prefix + bare, add_special_tokens=False)) for prefix in ("", " ")
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

    def _tokenized(self, given: dict[str, Any]) -> Answered:
        """Returns the reply to ``/tokenize``."""
        special, names = given.pop("add_special_tokens", True), given.pop("return_token_strs", False)
        if type(special) is not bool or type(names) is not bool:
            raise RefusedError("add_special_tokens and return_token_strs must be true or false")
        if "messages" in given:
            asked = request_of({**given, "model": self._sizes.model}, True)
            assert isinstance(asked, ChatRequest)
            ids = self._chat_ids(asked)
        else:
            text = given.pop("prompt", None)
            if not isinstance(text, str):
                raise wrong("prompt", text, "must be a text")
            if given:
                name = shown(next(iter(given)))
                raise RefusedError(f"{name} is not supported; leave it out", param=name)
            ids = self._texts(text, add_special_tokens=special)["input_ids"]
        strings = self._tokenizer.convert_ids_to_tokens(ids) if names else None
        return Answered(
            {
                "count": len(ids), "max_model_len": self._sizes.positions, "tokens": ids,
                "token_strs": strings,
            }
        )  # fmt: skip

    def _detokenized(self, given: dict[str, Any]) -> Answered:
        """Returns the reply to ``/detokenize``."""
        ids = given.pop("tokens", None)
        if given or not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise wrong("tokens", ids, "must be a list of token ids, and the only field")
        return Answered({"prompt": self._tokenizer.decode(self._checked(ids)) if ids else ""})

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


# Names that mean something else to ``apply_chat_template``.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages"
}
