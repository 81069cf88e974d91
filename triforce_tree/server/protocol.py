"""Parses requests of the OpenAI API strictly. Unsupported options are refused by name.

Nothing here imports torch, so that the processes that read requests start quickly.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from triforce_tree.server.constraints import Offer, content_shape, offer
from triforce_tree.server.refusals import SHOWN_CHARACTERS, RefusedError, shown, wrong
from triforce_tree.server.tools.calls import Shape

MOST_TOP_LOGPROBS = 20
# The largest bias of a token, and the most tokens that have one; the largest penalty for a generated token.
_MOST_BIAS, _MOST_BIASED, _MOST_SUBTRACTED = 100.0, 4096, 2.0
_MOST_WORDS = 256
_MOST_CHOICES, _MOST_STOPS = 128, 4
# Within these limits fp32 logits divided by a temperature and multiplied by a penalty neither overflow nor
# underflow.
_LEAST, _MOST_TEMPERATURE, _MOST_PENALTY = 1e-30, 1e6, 100.0
_MOST_USER = 256

# Options that are accepted with any value, since they do not change the text of this server.
_WITHOUT_EFFECT = frozenset(
    """
    guided_decoding_backend metadata parallel_tool_calls prediction priority prompt_cache_key
    prompt_cache_retention request_id rid service_tier store
    """.split()  # noqa: SIM905 - a list would take a line for each name
)
# Unsupported options are accepted with these values, which are the defaults of OpenAI, vLLM or SGLang. The
# value null is accepted for every option.
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    Attributes:
        include_usage: adds a chunk with the numbers of tokens.
        include_levels: adds ``levels`` to choices: what proposed the tokens of each piece of text.
    """

    include_usage: bool = False
    include_levels: bool = False


@dataclass(frozen=True)
class Sampled:
    """The fields that chat and completion requests share.

    ``temperature`` 0 means greedy decoding. ``top_k`` (0 or -1 means all tokens) and others are additions of
    vLLM to OpenAI's API; ``speculation`` is ours.

    Attributes:
        logit_bias: (token id, bias).
        bad_words: texts, and ``bad_word_ids`` their tokens, which the reader of the request finds.
        speculation: the option of ``Engine.generate``; None for no limit.
        choices: number of texts per prompt.
        limit: most new tokens; None for the limit of the server.
        alternatives: number of most probable tokens to report for each token; None if the client wants no
            log-probabilities.
        shape: the structure that the text must have, see ``constraints.py``; None for any text.
        user: the end user to whom the queue is fair; "" if the client names none.
    """

    model: str
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    bad_words: tuple[str, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    speculation: Mapping[str, Any] | None
    choices: int
    seed: int | None
    stop_strings: tuple[str, ...]
    stream: bool
    stream_options: StreamOptions | None
    limit: int | None
    alternatives: int | None
    shape: Shape | None
    user: str

    def sampling(self, ends: Iterable[int] = ()) -> dict[str, Any]:
        """Returns the sampling options for ``Engine.generate``.

        Args:
            ends: tokens that end texts of the model.
        """
        options: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            options = {
                "do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
                "min_p": self.min_p or None,
            }  # fmt: skip
        if self.repetition_penalty != 1:
            options["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            options["sequence_bias"] = {(token,): bias for token, bias in self.logit_bias}
        if self.stop_token_ids:
            options["eos_token_id"] = sorted({*ends, *self.stop_token_ids})
        for name, value in (
            ("frequency_penalty", self.frequency_penalty),
            ("presence_penalty", self.presence_penalty),
            ("min_new_tokens", self.min_tokens),
            ("bad_words_ids", [list(ids) for ids in self.bad_word_ids]),
        ):
            if value:
                options[name] = value
        return options


@dataclass(frozen=True)
class ChatRequest(Sampled):
    """``POST /v1/chat/completions``. The elements of ``messages`` are checked later, with the template.

    Attributes:
        offer: the tools that the model may call.
        template: variables for the chat template.
    """

    messages: list[Any]
    offer: Offer
    template: dict[str, Any]

    @property
    def prompts(self) -> list[Any]:
        return [self.messages]


@dataclass(frozen=True)
class CompletionRequest(Sampled):
    """``POST /v1/completions``. Each prompt is a text or a list of token ids."""

    prompts: list[str | list[int]]
    echo: bool


def request_of(given: dict[str, Any], chat: bool) -> ChatRequest | CompletionRequest:
    """Returns a request with its fields checked.

    Raises:
        RefusedError: a field is missing, wrong or not supported.
    """
    fields = _Fields(given)
    shared = fields.shared()
    if chat:
        shown = fields.flag("logprobs")
        top = fields.whole("top_logprobs", 0, 0, MOST_TOP_LOGPROBS)
        if top and not shown:
            raise RefusedError("top_logprobs is given without logprobs; set logprobs to true")
        older = fields.whole("max_tokens", None, 1)
        limit = fields.whole("max_completion_tokens", None, 1) or older
        chosen, offered, template = fields.messages(), offer(fields.take), fields.template()
        if fields.flag("echo"):
            raise RefusedError("echo is not supported for chats; leave it out", param="echo")
        fields.end()
        check_least(shared["min_tokens"], limit)
        return ChatRequest(
            **shared, limit=limit, alternatives=top if shown else None, messages=chosen, offer=offered,
            template=template,
        )  # fmt: skip
    limit = fields.whole("max_tokens", 16, 1)
    alternatives = fields.whole("logprobs", None, 0, MOST_TOP_LOGPROBS)
    prompts, echo = fields.prompts(), fields.flag("echo")
    fields.end()
    check_least(shared["min_tokens"], limit)
    return CompletionRequest(**shared, limit=limit, alternatives=alternatives, prompts=prompts, echo=echo)


def check_least(least: int, most: int | None) -> None:
    """Refuses ``min_tokens`` above the most new tokens, where these are known."""
    if most is not None and least > most:
        raise RefusedError(
            f"min_tokens={least} exceeds the limit of {most} new tokens; give less",
            param="min_tokens",
        )


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in the body of a request.

    Raises:
        RefusedError: the body is no JSON object.
    """
    try:
        given = json.loads(body, parse_constant=_number, parse_float=_number)
    except json.JSONDecodeError as problem:
        why = f"{problem.msg} at byte {problem.pos}"
    except UnicodeDecodeError as problem:
        why = f"no UTF-8 at byte {problem.start}"
    except RecursionError:
        why = "lists or objects are nested too deeply"
    except _NotFiniteError as problem:
        why = f"{problem} is no finite number"
    except ValueError:  # Python limits the digits of a number
        why = "a number has thousands of digits"
    else:
        if isinstance(given, dict):
            return given
        raise RefusedError("the body is no JSON object; send one, with Content-Type application/json")
    raise RefusedError(f"the body is no JSON ({why}); send an object")


class _NotFiniteError(ValueError):
    """A number is infinite, or is none, which JSON does not have."""


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _NotFiniteError(shown(text))
    return value


class _Fields:
    """The fields of a request that were not read yet. A field with the value null counts as absent."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._left = {name: value for name, value in given.items() if value is not None}

    def shared(self) -> dict[str, Any]:
        """Reads the fields that chat and completion requests share."""
        model = self._required("model")
        if not isinstance(model, str):
            raise wrong("model", model, "must be a text")
        users = [str(self._left.pop(name, "")) for name in ("safety_identifier", "user")]
        fields = {
            "model": model,
            "temperature": self._number("temperature", _LEAST, _MOST_TEMPERATURE, zero=True),
            "top_p": self._number("top_p", _LEAST, 1),
            "repetition_penalty": self._number("repetition_penalty", 1 / _MOST_PENALTY, _MOST_PENALTY),
            "top_k": max(0, self.whole("top_k", 0, -1)),
            "min_p": self._number("min_p", 0, 1, default=0.0),
            "frequency_penalty": self._number(
                "frequency_penalty", -_MOST_SUBTRACTED, _MOST_SUBTRACTED, default=0.0
            ),
            "presence_penalty": self._number(
                "presence_penalty", -_MOST_SUBTRACTED, _MOST_SUBTRACTED, default=0.0
            ),
            "logit_bias": self._biases(),
            "min_tokens": self.whole("min_tokens", 0, 0),
            "bad_words": self._texts("bad_words", _MOST_WORDS),
            "bad_word_ids": (),
            "stop_token_ids": self._stop_token_ids(),
            "speculation": self._speculation(),
            "choices": self.whole("n", 1, 1, _MOST_CHOICES),
            "seed": self.whole("seed", None, 0, 2**63 - 1),
            "stop_strings": self._texts("stop", _MOST_STOPS),
            "stream": self.flag("stream"),
            "stream_options": self._stream_options(),
            "shape": content_shape(self.take),
            "user": (users[0] or users[1])[:_MOST_USER],
        }
        if fields["stream_options"] is not None and not fields["stream"]:
            raise RefusedError(
                "stream_options is given without a stream; leave it out, or set stream to true"
            )
        # Clients of completions send best_of with the value of n.
        if "best_of" in self._left:
            if not _same(self._left["best_of"], fields["choices"]):
                raise wrong(
                    "best_of", self._left["best_of"],
                    "is not supported, because the server returns every text that it draws; leave it out, "
                    "and ask for so many by n",
                )  # fmt: skip
            del self._left["best_of"]
        return fields

    def take(self, name: str) -> Any:
        """Returns the value of a field that is checked elsewhere, or None."""
        return self._left.pop(name, None)

    def template(self) -> dict[str, Any]:
        """Reads the variables for the chat template, whose names are checked later."""
        given = self._left.pop("chat_template_kwargs", {})
        if not isinstance(given, dict):
            raise wrong("chat_template_kwargs", given, 'must be an object, as {"enable_thinking": false}')
        effort = self._left.pop("reasoning_effort", None)
        return given if effort is None else {**given, "reasoning_effort": effort}

    def whole(self, name: str, default: int | None, least: int, most: int = 2**31) -> Any:
        value = self._left.pop(name, default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise wrong(name, value, f"must be a whole number from {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self._left.pop(name, False)
        if type(value) is not bool:
            raise wrong(name, value, "must be true or false")
        return value

    def messages(self) -> list[Any]:
        """Reads the list of messages, whose elements are checked later."""
        given = self._required("messages")
        if not isinstance(given, list) or not given:
            raise wrong("messages", given, 'must be a list as [{"role": "user", "content": "..."}]')
        last = given[-1]
        # If the last message is from the assistant, the server continues it; otherwise a new message begins.
        # The two options are accepted with the values that ask for this.
        continued = isinstance(last, dict) and last.get("role") == "assistant"
        for name, done in (("add_generation_prompt", not continued), ("continue_final_message", continued)):
            if self._left.get(name) is done:
                del self._left[name]
        return given

    def prompts(self) -> list[str | list[int]]:
        given = self._required("prompt")
        if isinstance(given, str):
            return [given]
        if isinstance(given, list) and given:
            kinds = set(map(type, given))
            if kinds == {int}:
                return [given]
            if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) <= {int} for ids in given)):
                return given
        raise wrong("prompt", given, "must be a text, a list of texts, token ids, or a list of such lists")

    def end(self) -> None:
        """Refuses remaining fields, unless they have no effect or a value in ``_NOTHING``."""
        for name, value in self._left.items():
            asks = name not in _WITHOUT_EFFECT and not any(
                _same(value, each) for each in _NOTHING.get(name, ())
            )
            if asks:
                raise RefusedError(f"{shown(name)} is not supported; leave it out", param=shown(name))

    def _required(self, name: str) -> Any:
        if name not in self._left:
            raise RefusedError(f"{name} is missing; give it", param=name)
        return self._left.pop(name)

    def _number(
        self, name: str, least: float, most: float, zero: bool = False, default: float = 1.0
    ) -> float:
        value = self._left.pop(name, default)
        within = type(value) in (int, float) and (least <= value <= most or (zero and value == 0))
        if not within:
            more = "0, or " if zero else ""
            raise wrong(name, value, f"must be {more}a number from {least:g} to {most:g}")
        return float(value)

    def _texts(self, name: str, most: int) -> tuple[str, ...]:
        given = self._left.pop(name, [])
        strings = [given] if isinstance(given, str) else given
        if not isinstance(strings, list) or len(strings) > most:
            raise wrong(name, given, f"must be a text, or a list of at most {most}")
        for each in strings:
            # A lone surrogate, which JSON may have, is half of a character.
            if not isinstance(each, str) or not each or re.search("[\ud800-\udfff]", each):
                raise wrong(name, each, "must be a text of whole characters that is not empty")
        return tuple(strings)

    def _stop_token_ids(self) -> tuple[int, ...]:
        given = self._left.pop("stop_token_ids", [])
        if not isinstance(given, list) or len(given) > _MOST_WORDS or not set(map(type, given)) <= {int}:
            raise wrong("stop_token_ids", given, f"must be a list of at most {_MOST_WORDS} token ids")
        return tuple(given)

    def _biases(self) -> tuple[tuple[int, float], ...]:
        given = self._left.pop("logit_bias", {})
        if not isinstance(given, dict) or len(given) > _MOST_BIASED:
            raise wrong("logit_bias", given, f"must be an object of at most {_MOST_BIASED} token ids")
        biases = []
        for token, bias in given.items():
            within = type(bias) in (int, float) and -_MOST_BIAS <= bias <= _MOST_BIAS
            if not re.fullmatch(r"[0-9]{1,18}", token, re.ASCII) or not within:
                pair = f"{shown(token)}: {bias}" if type(bias) in (int, float) else shown(token)
                raise RefusedError(
                    f"logit_bias has {pair[:SHOWN_CHARACTERS]}; give token ids with numbers from "
                    f"{-_MOST_BIAS:g} to {_MOST_BIAS:g}",
                    param="logit_bias",
                )
            biases.append((int(token), float(bias)))
        return tuple(biases)

    def _speculation(self) -> Mapping[str, Any] | None:
        given = self._left.pop("speculation", None)
        if given is None:
            return None
        if given == "off":
            return {"levels": 1}
        if not isinstance(given, dict):
            raise wrong(
                "speculation", given, 'must be "off", or an object such as {"levels": 2, "length": 8}'
            )
        options = _Fields(given)
        found = {"levels": options.whole("levels", 3, 1, 3), "length": options.whole("length", None, 1)}
        options.end()
        return found

    def _stream_options(self) -> StreamOptions | None:
        given = self._left.pop("stream_options", None)
        if given is None:
            return None
        if not isinstance(given, dict):
            raise wrong("stream_options", given, 'must be an object, as {"include_usage": true}')
        options = _Fields(given)
        known = StreamOptions(options.flag("include_usage"), options.flag("include_levels"))
        # OpenAI's option for random characters in each chunk, and vLLM's for the usage in each chunk.
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if options.flag(name):
                raise RefusedError(f"stream_options.{name} is not supported; leave it out", param=name)
        options.end()
        return known


def _same(a: Any, b: Any) -> bool:
    """Returns whether two JSON values are equal; 1 and true are not."""
    return (type(a) is bool) == (type(b) is bool) and bool(a == b)
