"""Bodies of the OpenAI API's replies."""

import time
import uuid
from collections.abc import Sequence as Sequences
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from triforce_tree.server.protocol import ChatRequest, CompletionRequest
from triforce_tree.server.scheduler import Sequence
from triforce_tree.server.text_stream import TokenLogprobs

Asked = ChatRequest | CompletionRequest


class Reply:
    """The replies to one request.

    Args:
        asked: the request.
        model: name of the model that is served.
        tokenizer: of it.

    Attributes:
        usage_wanted: whether a stream ends with its usage.
    """

    def __init__(self, asked: Asked, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat = isinstance(asked, ChatRequest)
        self.usage_wanted = asked.stream_options is not None and asked.stream_options.include_usage
        self._alternatives, self._tokenizer = asked.alternatives, tokenizer
        # Characters of each text's tokens so far.
        self._offsets: dict[int, int] = {}
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._kind = kind
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def whole(self, sequences: Sequences[Sequence]) -> dict[str, Any]:
        """All texts, after they have ended."""
        choices = []
        for index, sequence in enumerate(sequences):
            assert sequence.stream is not None
            text = sequence.stream.text
            choice: dict[str, Any] = {
                "index": index, "finish_reason": reason(sequence),
                "logprobs": self._logprobs(sequence.stream.logprobs, index),
            }  # fmt: skip
            choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(choice)
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage(sequences)}

    def piece(
        self, index: int, text: str, logprobs: Sequences[TokenLogprobs] = (), first: bool = False
    ) -> dict[str, Any]:
        """A piece of one text, with the log-probabilities of the tokens since the last piece."""
        return self._chunk(index, text, None, logprobs, first)

    def last(self, index: int, sequence: Sequence, logprobs: Sequences[TokenLogprobs] = ()) -> dict[str, Any]:
        """The end of one text."""
        return self._chunk(index, "", reason(sequence), logprobs, False)

    def usage_alone(self, sequences: Sequences[Sequence]) -> dict[str, Any]:
        """The chunk that ends a stream with ``include_usage``."""
        return self._stream_head() | {"choices": [], "usage": usage(sequences)}

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self._chat else self._kind}

    def _chunk(
        self, index: int, text: str, why: str | None, logprobs: Sequences[TokenLogprobs], first: bool
    ) -> dict[str, Any]:
        own = self._logprobs(logprobs, index) if logprobs else None
        choice: dict[str, Any] = {"index": index, "finish_reason": why, "logprobs": own}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text else {})
        else:
            choice["text"] = text
        more = {"usage": None} if self.usage_wanted else {}
        return self._stream_head() | {"choices": [choice]} | more

    def _logprobs(self, entries: Sequences[TokenLogprobs], index: int) -> dict[str, Any] | None:
        """Log-probabilities of the target's own distribution, whatever the sampling options.

        Args:
            entries: of new tokens that follow those of the last call for this text.
        """
        if self._alternatives is None:
            return None
        entries = [entry._replace(best=entry.best[: self._alternatives]) for entry in entries]
        return self._chat_logprobs(entries) if self._chat else self._completion_logprobs(entries, index)

    def _chat_logprobs(self, entries: Sequences[TokenLogprobs]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._text(token)
            # A part of a character has no text, and its bytes are not known.
            known = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": value, "bytes": known}

        content = [
            entry(token, value) | {"top_logprobs": [entry(*pair) for pair in best]}
            for token, value, best in entries
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, entries: Sequences[TokenLogprobs], index: int) -> dict[str, Any]:
        tokens = [self._text(token) for token, _, _ in entries]
        start = self._offsets.get(index, 0)
        ends = [start + length for length in accumulate(map(len, tokens))]
        self._offsets[index] = ends[-1] if ends else start
        return {
            "tokens": tokens,
            "token_logprobs": [value for _, value, _ in entries],
            "top_logprobs": [{self._text(token): value for token, value in best} for _, _, best in entries],
            "text_offset": [start, *ends[:-1]] if ends else [],
        }

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def reason(sequence: Sequence) -> str:
    """Why a text ended, in the API's words."""
    assert sequence.stream is not None
    return (
        "length" if not sequence.stream.stopped and sequence.result("finish_reason") == "length" else "stop"
    )


def usage(sequences: Sequences[Sequence]) -> dict[str, Any]:
    """Tokens of a request; ``accepted_prediction_tokens`` are those that drafting saved a pass for.

    Sequences that were decoded in one batch share its statistics: their counts are those of the batch, once.
    """
    new = 0
    for sequence in sequences:
        assert sequence.stream is not None
        # The pass that brought a stop string may have brought tokens after it.
        new += sequence.stream.count if sequence.stream.stopped else int(sequence.result("new_tokens"))
    # A prompt counts once, however many texts continue it.
    prompts = {id(sequence.prompt): len(sequence.prompt) for sequence in sequences}
    outputs = {id(sequence.output): sequence.output for sequence in sequences}.values()
    targets = [output.levels[-1] for output in outputs if output is not None and output.levels]
    accepted = sum(level.accepted for level in targets)
    prompt = sum(prompts.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(level.proposed for level in targets) - accepted,
        },
    }


def outputs_wanted(alternatives: int | None) -> dict[str, Any]:
    """Options of ``generate`` for log-probabilities and so many alternatives."""
    if alternatives is None:
        return {}
    return {"logprobs": True} | ({"output_logits": True} if alternatives else {})
