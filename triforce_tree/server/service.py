"""Requests as sequences of the scheduler, and their texts as replies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from triforce_tree.engine import Engine
from triforce_tree.generation.inputs import prompt_of
from triforce_tree.generation.tokenized_texts import TokenizedTexts
from triforce_tree.server.metrics import Metrics
from triforce_tree.server.protocol import error
from triforce_tree.server.replies import Asked, Reply, outputs_wanted
from triforce_tree.server.scheduler import ClosedError, QueueFullError, Scheduler, Sequence
from triforce_tree.server.text_stream import TokenLogprobs
from triforce_tree.verify.draws import sequence_seed

ENDING = "the server is shutting down; ask again"
# Seconds between looks at whether a client that waits for a whole reply is still there.
_LOOK = 0.2
# Texts of requests of which the next one may be a continuation.
_REMEMBERED = 16
# Which text, its next piece or None at its end, and the log-probabilities of the tokens since the last piece.
_Pieces = asyncio.Queue[tuple[int, str | None, list[TokenLogprobs]]]
_Emit = Callable[[int, Sequence, str | None], None]


class Service:
    """Answers requests by one engine.

    Args:
        engine: with a tokenizer.
        name: of the model, for replies.
        scheduler: decodes.
        metrics: count what is refused.

    Raises:
        ValueError: the engine has no tokenizer.
    """

    def __init__(self, engine: Engine, name: str, scheduler: Scheduler, metrics: Metrics) -> None:
        if engine.tokenizer is None:
            raise ValueError("a server needs a tokenizer; give one: load(..., tokenizer=...)")
        self.engine, self.name, self.scheduler, self.metrics = engine, name, scheduler, metrics
        self.tokenizer, self.texts = engine.tokenizer, TokenizedTexts(engine.tokenizer, _REMEMBERED)

    async def answer(self, asked: Asked, request: Request) -> Response:
        """A whole reply, or a stream of pieces."""
        pieces: _Pieces = asyncio.Queue()
        try:
            emit = _emitter(pieces, asyncio.get_running_loop())
            sequences = await asyncio.to_thread(self._sequences, asked, emit)
            self.scheduler.submit(sequences)
        except ValueError as problem:
            raise HTTPException(400, _one_line(problem)) from problem
        except QueueFullError as problem:
            self.metrics.refused()
            raise HTTPException(429, str(problem), {"Retry-After": "1"}) from problem
        except ClosedError as problem:
            raise HTTPException(503, ENDING, {"Retry-After": "5"}) from problem
        reply = Reply(asked, self.name)
        if asked.stream:
            return _Streamed(self._stream(reply, sequences, pieces), sequences)
        with _cancelled_at_the_end(sequences):
            running = len(sequences)
            while running:
                with contextlib.suppress(TimeoutError):
                    _, piece, _ = await asyncio.wait_for(pieces.get(), _LOOK)
                    running -= piece is None
                if await request.is_disconnected():
                    return Response(status_code=499)
        _raise_errors(sequences)
        return JSONResponse(reply.whole(sequences))

    async def _stream(self, reply: Reply, sequences: list[Sequence], pieces: _Pieces) -> AsyncIterator[str]:
        """Server-sent events."""
        for index in range(len(sequences)):
            yield _event(reply.piece(index, "", first=True))
        running = len(sequences)
        while running:
            index, text, logprobs = await pieces.get()
            if text is not None:
                yield _event(reply.piece(index, text, logprobs))
                continue
            running -= 1
            sequence = sequences[index]
            if sequence.complete:
                yield _event(reply.last(index, sequence, logprobs))
            else:
                why = ENDING if sequence.error is None else _one_line(sequence.error)
                yield _event(error(why, "server_error"))
        if reply.usage_wanted and all(sequence.complete for sequence in sequences):
            yield _event(reply.usage_alone(sequences))
        yield "data: [DONE]\n\n"

    def _sequences(self, asked: Asked, emit: _Emit) -> list[Sequence]:
        """The sequences of a request; tokenising a long prompt takes a while.

        Raises:
            ValueError: a prompt that cannot be continued, too many new tokens, or too many texts.
        """
        target, limits = self.engine.hierarchy.target, self.scheduler.limits
        texts, most = len(asked.prompts) * asked.choices, limits.new_tokens
        if texts > limits.waiting:
            raise ValueError(
                f"{texts} texts are more than the {limits.waiting} that may wait here; ask for fewer at once"
            )
        made: list[Sequence] = []
        for prompt in asked.prompts:
            ids = prompt_of(target, self.texts, prompt)
            room = most if target.max_positions is None else min(most, target.max_positions - len(ids))
            new = asked.limit or max(1, room)
            if new > most:
                raise ValueError(f"{new} new tokens are more than the {most} that this server generates")
            target.check_length(len(ids), new)
            settings = {
                "max_new_tokens": new, **asked.sampling(), **outputs_wanted(asked.alternatives),
            }  # fmt: skip
            for number in range(asked.choices):
                # Choices of one seed differ, and repeat.
                seed = None if asked.seed is None else sequence_seed(asked.seed, number)
                sequence = Sequence(
                    ids, settings, asked.stop_strings, _unheard, seed, asked.alternatives or 0
                )
                sequence.emit = partial(emit, len(made), sequence)
                made.append(sequence)
        return made


class _Streamed(StreamingResponse):
    """Server-sent events of some sequences, which are cancelled when the client has gone.

    Not by the iterator's own end: one that is left while an event is being sent is closed only when it is
    collected as garbage.
    """

    def __init__(self, events: AsyncIterator[str], sequences: list[Sequence]) -> None:
        # Proxies that hold responses back, such as nginx, pass these on at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _cancelled_at_the_end(self._sequences):
            await super().__call__(scope, receive, send)


def _unheard(text: str | None) -> None:
    """Before the sequence knows whom to tell."""


def _emitter(pieces: _Pieces, loop: asyncio.AbstractEventLoop) -> _Emit:
    """A function that another thread calls to queue a piece of the text with this index."""

    def emit(index: int, sequence: Sequence, text: str | None) -> None:
        logprobs = sequence.stream.take_logprobs() if sequence.stream is not None else []
        # The loop may have ended with the server.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(pieces.put_nowait, (index, text, logprobs))

    return emit


@contextlib.contextmanager
def _cancelled_at_the_end(sequences: list[Sequence]) -> Iterator[None]:
    """Cancels what still runs when nobody waits any more; what has ended is not changed by it."""
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.cancelled = True


def _raise_errors(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if isinstance(sequence.error, ValueError):
            raise HTTPException(400, _one_line(sequence.error)) from sequence.error
        if sequence.error is not None:
            raise HTTPException(500, _one_line(sequence.error)) from sequence.error
        if not sequence.complete:
            raise HTTPException(503, ENDING, {"Retry-After": "5"})


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:400]


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
