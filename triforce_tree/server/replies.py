"""Makes the bodies of replies in the form of OpenAI's API."""

import time
import uuid
from collections.abc import Sequence as Sequences
from typing import Any

from triforce_tree.server.protocol import ChatRequest
from triforce_tree.server.reading import Asked
from triforce_tree.server.scheduler import ServedText
from triforce_tree.server.text_stream import LevelText, ScoredToken, TokenLogprobs


class Reply:
    """Makes the reply to one request, whole or in chunks.

    Args:
        asked: the request.
        model: the name of the model.

    Attributes:
        usage_wanted: whether a stream ends with a chunk of token counts.
    """

    def __init__(self, asked: Asked, model: str) -> None:
        self._chat = isinstance(asked, ChatRequest)
        self.usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
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
            text = sequence.stream.text
            choice: dict[str, Any] = {
                "index": index, "finish_reason": reason(sequence),
                "logprobs": self._logprobs(sequence.stream.logprobs),
            }  # fmt: skip
            choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(choice)
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage(sequences)}

    def piece(
        self, index: int, text: str, logprobs: Sequences[TokenLogprobs] = (), first: bool = False
    ) -> dict[str, Any]:
        """Returns the chunk for a piece of one text.

        Args:
            index: index of the text.
            text: the piece.
            logprobs: log-probabilities of the tokens since the last piece.
            first: whether it is the first piece of the text.
        """
        return self._chunk(index, text, None, logprobs, first)

    def last(
        self, index: int, sequence: ServedText, logprobs: Sequences[TokenLogprobs] = ()
    ) -> dict[str, Any]:
        """Returns the chunk for the end of one text."""
        return self._chunk(index, "", reason(sequence), logprobs, False)

    def usage_alone(self, sequences: Sequences[ServedText]) -> dict[str, Any]:
        """Returns the chunk of token counts that ends a stream with ``include_usage``."""
        return self._stream_head() | {"choices": [], "usage": usage(sequences)}

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind}

    def _chunk(
        self, index: int, text: str, why: str | None, logprobs: Sequences[TokenLogprobs], first: bool
    ) -> dict[str, Any]:
        scores = self._logprobs(logprobs) if logprobs else None
        choice: dict[str, Any] = {"index": index, "finish_reason": why, "logprobs": scores}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text else {})
        else:
            choice["text"] = text
        more = {"usage": None} if self.usage_wanted else {}
        return self._stream_head() | {"choices": [choice]} | more

    def _logprobs(self, entries: Sequences[TokenLogprobs]) -> dict[str, Any] | None:
        """Returns log-probabilities of the target's distribution before the sampling options apply."""
        if not self._scored:
            return None
        return _chat_logprobs(entries) if self._chat else _completion_logprobs(entries)


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


def with_levels(chunk: dict[str, Any], levels: Sequences[LevelText]) -> dict[str, Any]:
    """Returns a chunk of one text, and in it what proposed its tokens, if that is known."""
    if levels:
        chunk["choices"][0]["levels"] = [each._asdict() for each in levels]
    return chunk


def reason(sequence: ServedText) -> str:
    """Returns the API's finish reason of a text: "length" or "stop"."""
    assert sequence.stream is not None
    return (
        "length" if not sequence.stream.stopped and sequence.result("finish_reason") == "length" else "stop"
    )


def usage(sequences: Sequences[ServedText]) -> dict[str, Any]:
    """Returns the token counts of a request; ``accepted_prediction_tokens`` are accepted draft tokens.

    Sequences that were decoded in one batch share its statistics. The draft tokens of a batch count once.
    """
    new = 0
    for sequence in sequences:
        assert sequence.stream is not None
        # The last pass may have emitted tokens after a stop string, which do not count.
        new += sequence.stream.count if sequence.stream.stopped else int(sequence.result("new_tokens"))
    # A prompt counts once, even if several texts continue it.
    prompts = {id(sequence.prompt): len(sequence.prompt) for sequence in sequences}
    outputs = {id(sequence.output): sequence.output for sequence in sequences}.values()
    targets = [output.levels[-1] for output in outputs if output is not None and output.levels]
    accepted = sum(level.accepted for level in targets)
    prompt = sum(prompts.values())
    limits = [sequence.speculation for sequence in sequences if sequence.speculation is not None]
    more = {"speculation": {**limits[0], "passes": sum(each.forwards for each in targets)}} if limits else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(level.proposed for level in targets) - accepted,
        },
        **more,
    }


def outputs_wanted(alternatives: int | None) -> dict[str, Any]:
    """Returns the options of ``generate`` for log-probabilities and this number of alternatives."""
    if alternatives is None:
        return {}
    return {"logprobs": True} | ({"output_logits": True} if alternatives else {})
