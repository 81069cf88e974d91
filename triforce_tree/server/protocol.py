"""Requests of the OpenAI API as options of ``Engine.generate``; what is not supported is refused by name."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# What the API allows, and what changes nothing in the text of a server with one model.
_WITHOUT_EFFECT = {
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
# Values of unsupported options that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, [], {}, "none", {"type": "text"}, ["text"])
MOST_TOP_LOGPROBS = 20

Count = Annotated[int, Field(ge=1)]
Strings = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=4)]


class StreamOptions(BaseModel):
    """``include_usage`` adds a chunk with the usage to a stream."""

    include_usage: bool = False


class Sampled(BaseModel):
    """What chats and completions share. ``temperature`` 0 takes the most probable token.

    ``top_k`` (0: all) and ``repetition_penalty`` are not of OpenAI's API, but of other servers' with it.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[str, Field(min_length=1)] | Strings | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def problem(self) -> str | None:
        """What is wrong with the options: one that is not supported, or that does not go with another."""
        for name, value in (self.model_extra or {}).items():
            # Clients of completions send best_of as n.
            idle = value in _NOTHING or (name == "best_of" and value == self.choices)
            if name not in _WITHOUT_EFFECT and not idle:
                return f"{name} is not supported; leave it out"
        if self.stream_options is not None and not self.stream:
            return "stream_options is given without a stream; leave it out, or set stream to true"
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    def sampling(self) -> dict[str, Any]:
        """Options of ``generate``."""
        temperature = 1.0 if self.temperature is None else self.temperature
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            top_p = 1.0 if self.top_p is None else self.top_p
            options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": self.top_k}
        if self.repetition_penalty != 1:
            options["repetition_penalty"] = self.repetition_penalty
        return options


class ChatRequest(Sampled):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        return [self.messages]

    def problem(self) -> str | None:
        if self.top_logprobs and not self.logprobs:
            return "top_logprobs is given without logprobs; set logprobs to true"
        return super().problem()

    @property
    def alternatives(self) -> int | None:
        """Most probable tokens to report beside each token; None where no log-probability is wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampled):
    """``POST /v1/completions``."""

    prompt: str | Annotated[list[int] | list[str] | list[list[int]], Field(min_length=1)]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """Each a text, or token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


def error(message: str, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    """The body of an error, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
