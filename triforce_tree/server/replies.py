"""Makes the bodies of replies in the form of OpenAI's API."""

import json
import time
import uuid
from collections.abc import Sequence as Sequences
from itertools import zip_longest
from typing import Any, NamedTuple

from triforce_tree.server.protocol import ChatRequest
from triforce_tree.server.reading import Read
from triforce_tree.server.refusals import error
from triforce_tree.server.text_stream import LevelText, ScoredToken, ServedText, TokenLogprobs
from triforce_tree.server.tools.message import Delta, Message, ToolCall


class Piece(NamedTuple):
    """A piece of a text, the log-probabilities of the tokens since the last one, and what proposed them."""

    text: str
    logprobs: Sequences[TokenLogprobs] = ()
    levels: Sequences[LevelText] = ()

    def joined(self, later: "Piece") -> "Piece":
        """Returns this piece and the one after it as one."""
        return Piece(
            self.text + later.text,
            [*self.logprobs, *later.logprobs],
            [*self.levels, *later.levels],
        )


_NOTHING = Piece("")


class ChatReply:
    """The reply to a chat or a completion, whole or as the events of a stream.

    Args:
        read: the request.
        model: the name of the model.

    Attributes:
        closing: what is sent after all events.
    """

    closing = "data: [DONE]\n\n"

    def __init__(self, read: Read, model: str) -> None:
        asked = read.asked
        self._chat, self._messages = isinstance(asked, ChatRequest), messages(read)
        self._usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
        self._scored = asked.alternatives is not None
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, sequences: Sequences[ServedText]) -> dict[str, Any]:
        """Returns the body of a reply with all texts, which must have ended."""
        choices = []
        for index, sequence in enumerate(sequences):
            assert sequence.stream is not None
            text, why = sequence.stream.text, reason(sequence)
            choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(sequence.stream.logprobs)}
            if self._chat:
                message = self._messages[index]
                message.put_whole(text)
                choice |= {"finish_reason": _reason(why, message), "message": _message(message)}
            else:
                choice |= {"finish_reason": why, "text": text}
            choices.append(choice)
        return {**self._head, "object": self._kind, "choices": choices, "usage": self._usage(sequences)}

    def begin(self, texts: int) -> list[dict[str, Any]]:
        """Returns the events before the first text."""
        delta = {"role": "assistant"}
        return [self._chunk(index, delta if self._chat else "") for index in range(texts)]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Returns the events for a piece of the text of this index."""
        if not self._chat:
            return [self._chunk(index, piece.text, piece=piece)]
        return self._deltas(index, self._messages[index].put(piece.text), piece)

    def last(self, index: int, sequence: ServedText, piece: Piece) -> list[dict[str, Any]]:
        """Returns the events for the end of one text, after a last piece without text."""
        why = reason(sequence)
        if not self._chat:
            return [self._chunk(index, "", why, piece)]
        message = self._messages[index]
        chunks = self._deltas(index, message.end(), piece)
        return [*chunks, self._chunk(index, {}, _reason(why, message))]

    def end(self, sequences: Sequences[ServedText]) -> list[dict[str, Any]]:
        """Returns the events after all texts, which have ended as the request demands."""
        if not self._usage_wanted:
            return []
        return [self._stream_head() | {"choices": [], "usage": self._usage(sequences)}]

    def failure(self, message: str) -> dict[str, Any]:
        """Returns the event for an error of the server."""
        return error(message, "server_error")

    def encoded(self, event: dict[str, Any]) -> str:
        """Returns an event as it is sent."""
        return f"data: {json.dumps(event)}\n\n"

    def _deltas(self, index: int, deltas: list[Delta], piece: Piece) -> list[dict[str, Any]]:
        """Returns a chunk for each delta; the first one has what is known of the tokens."""
        known = bool(piece.logprobs or piece.levels)
        shown = [_delta(delta) for delta in deltas] or ([{}] if known else [])
        return [
            self._chunk(index, delta, piece=_NOTHING if number else piece)
            for number, delta in enumerate(shown)
        ]

    def _usage(self, sequences: Sequences[ServedText]) -> dict[str, Any]:
        return usage(sequences, self._messages if self._chat else ())

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind}

    def _chunk(
        self, index: int, added: str | dict[str, Any], why: str | None = None, piece: Piece = _NOTHING
    ) -> dict[str, Any]:
        scores = self._logprobs(piece.logprobs) if piece.logprobs else None
        choice: dict[str, Any] = {"index": index, "finish_reason": why, "logprobs": scores}
        choice["delta" if self._chat else "text"] = added
        if piece.levels:
            choice["levels"] = [each._asdict() for each in piece.levels]
        more = {"usage": None} if self._usage_wanted else {}
        return self._stream_head() | {"choices": [choice]} | more

    def _logprobs(self, entries: Sequences[TokenLogprobs]) -> dict[str, Any] | None:
        """Returns log-probabilities of the target's distribution before the sampling options apply."""
        if not self._scored:
            return None
        return _chat_logprobs(entries) if self._chat else _completion_logprobs(entries)


def messages(read: Read) -> list[Message]:
    """Returns a message for each text of a request, before its first piece."""
    parallel = not isinstance(read.asked, ChatRequest) or read.asked.offer.parallel
    return [Message(read.parsing, parallel) for _ in range(read.asked.choices)]


def _message(message: Message) -> dict[str, Any]:
    """Returns a whole message of a chat."""
    shown: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown |= {"content": message.content or None, "tool_calls": [_call(each) for each in message.calls]}
    return shown


def _delta(delta: Delta) -> dict[str, Any]:
    if (call := delta.call) is not None:
        shown = _call(call) if delta.begins else {"function": {}}
        shown["function"]["arguments"] = delta.arguments
        return {"tool_calls": [{"index": call.number, **shown}]}
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(why: str, message: Message) -> str:
    """Returns the finish reason of a message."""
    return "tool_calls" if message.calls and why == "stop" else why


def _chat_logprobs(entries: Sequences[TokenLogprobs]) -> dict[str, Any]:
    def entry(scored: ScoredToken) -> dict[str, Any]:
        known = None if scored.bytes is None else list(scored.bytes)
        return {"token": scored.text, "logprob": scored.logprob, "bytes": known}

    content = [
        entry(each.chosen) | {"top_logprobs": [entry(other) for other in each.best]} for each in entries
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(entries: Sequences[TokenLogprobs]) -> dict[str, Any]:
    return {
        "tokens": [each.chosen.text for each in entries],
        "token_logprobs": [each.chosen.logprob for each in entries],
        "top_logprobs": [None if each.chosen.logprob is None else _by_text(each) for each in entries],
        "text_offset": [each.offset for each in entries],
    }


def _by_text(entry: TokenLogprobs) -> dict[str, float | None]:
    """Returns the log-probabilities of the chosen token and of the most probable tokens, by text.

    If a text is already used, because several tokens have it, the key is ``token_id:ID``.
    """
    logprobs = {entry.chosen.text: entry.chosen.logprob}
    for other in entry.best:
        if other.token != entry.chosen.token:
            name = f"token_id:{other.token}" if other.text in logprobs else other.text
            logprobs[name] = other.logprob
    return logprobs


def reason(sequence: ServedText) -> str:
    """Returns the API's finish reason of a text: "length" or "stop"."""
    assert sequence.stream is not None
    return (
        "length" if not sequence.stream.stopped and sequence.result("finish_reason") == "length" else "stop"
    )


def usage(sequences: Sequences[ServedText], messages: Sequences[Message] = ()) -> dict[str, Any]:
    """Returns the token counts of a request; ``accepted_prediction_tokens`` are accepted draft tokens, and
    ``cached_tokens`` those of prompts whose keys and values were kept.

    Args:
        messages: the messages of a chat, whose reasoning is counted.

    Sequences that were decoded in one batch share its statistics. The draft tokens of a batch count once.
    """
    new = reasoning = 0
    for sequence, message in zip_longest(sequences, messages):
        assert sequence.stream is not None
        reasoning += message.reasoning_tokens(sequence.stream.starts) if message is not None else 0
        # The last pass may have emitted tokens after a stop string, which do not count.
        new += sequence.stream.count if sequence.stream.stopped else int(sequence.result("new_tokens"))
    # A prompt counts once, even if several texts continue it.
    prompts = {id(sequence.prompt): sequence for sequence in reversed(sequences)}.values()
    outputs = {id(sequence.output): sequence.output for sequence in sequences}.values()
    targets = [output.levels[-1] for output in outputs if output is not None and output.levels]
    accepted = sum(level.accepted for level in targets)
    prompt = sum(len(sequence.prompt) for sequence in prompts)
    cached = sum(int(sequence.result("reused_tokens") or 0) for sequence in prompts)
    limits = [sequence.speculation for sequence in sequences if sequence.speculation is not None]
    more = {"speculation": {**limits[0], "passes": sum(each.forwards for each in targets)}} if limits else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(level.proposed for level in targets) - accepted,
            "reasoning_tokens": reasoning,
        },
        **more,
    }
