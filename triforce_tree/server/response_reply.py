"""Makes the reply to ``POST /v1/responses``, whole or as events."""

import itertools
import json
import time
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from typing import Any

from triforce_tree.server.reading import Read
from triforce_tree.server.replies import Piece, messages, reason, usage
from triforce_tree.server.text_stream import ServedText
from triforce_tree.server.tools.message import Delta, ToolCall

# Values of fields that a request leaves out.
_DEFAULTS: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "top_p": 1.0, "error": None, "previous_response_id": None, "store": False, "truncation": "disabled",
}  # fmt: skip


class ResponseReply:
    """A reply of one message: its reasoning, content and calls are items, in the order of the text.

    Args:
        read: the request.
        echoed: fields that the reply repeats.
        model: the name of the model.
    """

    closing = ""

    def __init__(self, read: Read, echoed: dict[str, Any], model: str) -> None:
        [self._message] = messages(read)
        self._head = {
            **_DEFAULTS, **echoed, "id": _new_id("resp"), "object": "response", "model": model,
            "created_at": int(time.time()),
        }  # fmt: skip
        self._numbers = itertools.count()
        # The items that are complete, and the one that is being written, if there is one.
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def whole(self, sequences: Sequences[ServedText]) -> dict[str, Any]:
        [sequence] = sequences
        assert sequence.stream is not None
        # The items are those of the events of a stream, which are not sent.
        for _ in self._rest(self._message.put_whole(sequence.stream.text), sequence):
            pass
        return self._ended(sequences)

    def begin(self, texts: int) -> list[dict[str, Any]]:
        shown = {**self._head, "status": "in_progress", "output": []}
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=shown) for name in names]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return list(self._written(self._message.put(piece.text)))

    def last(self, index: int, sequence: ServedText, piece: Piece) -> list[dict[str, Any]]:
        return list(self._rest(self._message.end(), sequence))

    def end(self, sequences: Sequences[ServedText]) -> list[dict[str, Any]]:
        body = self._ended(sequences)
        return [self._event(f"response.{body['status']}", response=body)]

    def failure(self, message: str) -> dict[str, Any]:
        return self._event("error", code="server_error", message=message, param=None)

    def encoded(self, event: dict[str, Any]) -> str:
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _ended(self, sequences: Sequences[ServedText]) -> dict[str, Any]:
        cut = _cut(sequences[0])
        counts = usage(sequences, [self._message])
        return {
            **self._head, "status": "incomplete" if cut else "completed", "output": self._output,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
                },
                "total_tokens": counts["total_tokens"],
                **({"speculation": counts["speculation"]} if "speculation" in counts else {}),
            },
        }  # fmt: skip

    def _rest(self, deltas: list[Delta], sequence: ServedText) -> Iterator[dict[str, Any]]:
        """Yields the events of the last additions to the message, and of its end."""
        yield from self._written(deltas)
        if self._open is None and not self._output:
            yield from self._opened(_text())
        if self._open is not None and _cut(sequence):
            self._open["status"] = "incomplete"
        yield from self._closed()

    def _written(self, deltas: list[Delta]) -> Iterator[dict[str, Any]]:
        """Yields the events of what is added to the message."""
        for delta in deltas:
            if delta.call is not None:
                yield from self._called(delta, delta.call)
                continue
            kind = "reasoning" if delta.reasoning else "message"
            if self._open is None or self._open["type"] != kind:
                yield from self._closed()
                yield from self._opened(_reasoning() if delta.reasoning else _text())
            assert self._open is not None
            [part], added = self._open["content"], delta.reasoning or delta.content
            part["text"] += added
            yield self._in_part(f"response.{part['type']}.delta", delta=added)

    def _opened(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of a new item of text."""
        self._open = item
        yield self._of_item("response.output_item.added", {**item, "content": [], "status": "in_progress"})
        yield self._in_part("response.content_part.added", part=dict(item["content"][0]))

    def _closed(self) -> Iterator[dict[str, Any]]:
        """Yields the events of the end of the item that is being written, if there is one."""
        if self._open is None:
            return
        item = self._open
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_call("response.function_call_arguments.done", **named)
        else:
            [part] = item["content"]
            yield self._in_part(f"response.{part['type']}.done", text=part["text"])
            yield self._in_part("response.content_part.done", part=part)
        yield self._of_item("response.output_item.done", item)
        self._output.append(item)
        self._open = None

    def _called(self, delta: Delta, call: ToolCall) -> Iterator[dict[str, Any]]:
        """Yields the events of a call that begins or goes on."""
        if delta.begins:
            yield from self._closed()
            self._open = {**_call(call), "arguments": ""}
            yield self._of_item("response.output_item.added", {**self._open, "status": "in_progress"})
        assert self._open is not None
        self._open["arguments"] += delta.arguments
        if delta.arguments:
            yield self._of_call("response.function_call_arguments.delta", delta=delta.arguments)

    def _of_item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._output), item=item)

    def _of_call(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output), **fields)

    def _in_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        more: dict[str, Any] = {"logprobs": []} if kind.startswith("response.output_text") else {}
        place = {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields, **more)


def _cut(sequence: ServedText) -> bool:
    return reason(sequence) == "length"


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": [part], "status": "completed"}


def _text() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "type": "message", "id": _new_id("msg"), "role": "assistant", "status": "completed",
        "content": [part],
    }  # fmt: skip


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name,
        "arguments": call.arguments, "status": "completed",
    }  # fmt: skip
