"""The HTTP application: OpenAI's chat completions and completions over one engine."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from triforce_tree.engine import Engine
from triforce_tree.generation.inputs import prompts_of
from triforce_tree.server.metrics import Metrics
from triforce_tree.server.protocol import ChatRequest, CompletionRequest, error
from triforce_tree.server.replies import Asked, Reply, outputs_wanted
from triforce_tree.server.scheduler import Limits, QueueFullError, Scheduler, Sequence
from triforce_tree.server.text_stream import TokenLogprobs

# Seconds between looks at whether a client that waits for a whole reply is still there.
_LOOK = 0.2
# Which text, its next piece or None at its end, and the log-probabilities of the tokens since the last piece.
_Pieces = asyncio.Queue[tuple[int, str | None, list[TokenLogprobs]]]
_Emit = Callable[[int, Sequence, str | None], None]


@dataclass(frozen=True)
class Served:
    """What is served, and to whom.

    Attributes:
        name: of the model, which requests have to give.
        key: that clients must send as ``Authorization: Bearer KEY``; None for anyone.
        limits: see :class:`Limits`.
    """

    name: str
    key: str | None = None
    limits: Limits = field(default_factory=Limits)


def create_app(engine: Engine, served: Served) -> FastAPI:
    """The application; its scheduler starts and ends with it.

    Args:
        engine: with a tokenizer.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("a server needs a tokenizer; give one: load(..., tokenizer=...)")
    metrics = Metrics()
    service: list[_Service] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler = Scheduler(engine, served.limits, metrics.ended)
        metrics.watch(scheduler)
        service.append(_Service(engine, served, scheduler, metrics))
        try:
            yield
        finally:
            await asyncio.to_thread(scheduler.close)
            service.clear()

    async def allowed(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if served.key is not None and not hmac.compare_digest(sent, f"Bearer {served.key}".encode()):
            raise HTTPException(401, "wrong or missing API key; send Authorization: Bearer KEY")

    app = FastAPI(title="triforce-tree", lifespan=lifespan)
    guarded = [Depends(allowed)]

    @app.exception_handler(HTTPException)
    async def refused(request: Request, problem: HTTPException) -> JSONResponse:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        body = error(str(problem.detail), kind.get(problem.status_code, "invalid_request_error"))
        return JSONResponse(body, problem.status_code, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, problem: RequestValidationError) -> JSONResponse:
        first = problem.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(error(f"{name}: {first['msg']}", param=name or None), 400)

    @app.post("/v1/chat/completions", dependencies=guarded, response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await service[0].answer(asked, request)

    @app.post("/v1/completions", dependencies=guarded, response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await service[0].answer(asked, request)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        own = {"id": served.name, "object": "model", "created": 0, "owned_by": "triforce-tree"}
        return {"object": "list", "data": [own]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service[0].scheduler.alive else 503)

    @app.get("/metrics")
    async def exposed() -> Response:
        return Response(metrics.exposed(), media_type=CONTENT_TYPE_LATEST)

    return app


class _Streamed(StreamingResponse):
    """Server-sent events of some sequences, which are cancelled when the client has gone.

    Not by the iterator's own end: one that is left while an event is being sent is closed only when it is
    collected as garbage.
    """

    def __init__(self, events: AsyncIterator[str], sequences: list[Sequence]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _cancelled_at_the_end(self._sequences):
            await super().__call__(scope, receive, send)


class _Service:
    """Answers requests through the scheduler."""

    def __init__(self, engine: Engine, served: Served, scheduler: Scheduler, metrics: Metrics) -> None:
        self.engine, self.served, self.scheduler, self.metrics = engine, served, scheduler, metrics
        assert engine.tokenizer is not None
        self.tokenizer = engine.tokenizer

    async def answer(self, asked: Asked, request: Request) -> Response:
        """A whole reply, or a stream of pieces."""
        if asked.model != self.served.name:
            raise HTTPException(404, f"model {asked.model!r} is not served here; use {self.served.name!r}")
        if (name := asked.unsupported()) is not None:
            raise HTTPException(400, f"{name} is not supported; leave it out")
        pieces: _Pieces = asyncio.Queue()
        try:
            emit = _emitter(pieces, asyncio.get_running_loop())
            sequences = await asyncio.to_thread(self._sequences, asked, emit)
            self.scheduler.submit(sequences)
        except ValueError as problem:
            raise HTTPException(400, str(problem)) from problem
        except QueueFullError as problem:
            self.metrics.refused()
            raise HTTPException(429, str(problem), {"Retry-After": "1"}) from problem
        reply = Reply(asked, self.served.name, self.tokenizer)
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            stream = self._stream(reply, sequences, pieces, usage)
            return _Streamed(stream, sequences)
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

    async def _stream(
        self,
        reply: Reply,
        sequences: list[Sequence],
        pieces: _Pieces,
        usage: bool,
    ) -> AsyncIterator[str]:
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
            if sequence.error is not None:
                yield _event(error(_one_line(sequence.error), "server_error"))
            elif sequence.output is not None:
                yield _event(reply.last(index, sequence, logprobs))
        if usage and all(sequence.output is not None for sequence in sequences):
            yield _event(reply.usage_alone(sequences))
        yield "data: [DONE]\n\n"

    def _sequences(self, asked: Asked, emit: _Emit) -> list[Sequence]:
        """The sequences of a request; tokenising a long prompt takes a while.

        Raises:
            ValueError: a prompt that cannot be continued, or too many new tokens.
        """
        target, most = self.engine.hierarchy.target, self.served.limits.new_tokens
        limits = target.vocab_size, target.max_positions
        made: list[Sequence] = []
        for prompt in asked.prompts:
            ids = prompts_of(prompt, None, None, self.tokenizer, *limits, 0, False).ids[0].tolist()
            room = most if target.max_positions is None else min(most, target.max_positions - len(ids))
            new = asked.limit or max(1, room)
            if new > most:
                raise ValueError(f"{new} new tokens are more than the {most} that this server generates")
            target.check_length(len(ids), new)
            settings = {
                "max_new_tokens": new, "seed": asked.seed, **asked.sampling(),
                **outputs_wanted(asked.alternatives),
            }  # fmt: skip
            for number in range(asked.choices):
                # Choices of one seed differ, and repeat.
                own = settings | ({"seed": asked.seed + number} if asked.seed is not None else {})
                sequence = Sequence(ids, own, asked.stop_strings, _unheard)
                sequence.emit = partial(emit, len(made), sequence)
                made.append(sequence)
        return made


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
        if sequence.error is not None or sequence.output is None:
            problem = sequence.error or RuntimeError("the server is shutting down")
            raise HTTPException(500, _one_line(problem)) from problem


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:400]


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
