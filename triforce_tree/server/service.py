"""Submits requests to the scheduler as sequences, and returns their texts as replies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from triforce_tree.engine import Engine
from triforce_tree.grammar import EBNF
from triforce_tree.runtime.token_ids import listed_ids
from triforce_tree.server.errors import LateError, client_message
from triforce_tree.server.metrics import Metrics
from triforce_tree.server.outbox import Outbox, Pieces
from triforce_tree.server.protocol import CompletionRequest, check_least
from triforce_tree.server.readers import Readers
from triforce_tree.server.reading import Answered, Read, Route
from triforce_tree.server.refusals import RefusedError
from triforce_tree.server.replies import ChatReply, Piece
from triforce_tree.server.response_reply import ResponseReply
from triforce_tree.server.scheduler import ClosedError, QueueFullError, Scheduler
from triforce_tree.server.text_stream import ServedText
from triforce_tree.verify.draws import sequence_seed

ENDING = "the server is shutting down; ask again"
# Seconds between checks whether a client that waits for a whole reply is still connected.
_LOOK = 0.2
Reply = ChatReply | ResponseReply
_Emit = Callable[[list[ServedText], int, str | None], None]


class Service:
    """Answers requests with one engine.

    Args:
        engine: an engine with a tokenizer.
        name: the name of the model in replies.
        scheduler: decodes the sequences.
        readers: the processes that read requests.
        metrics: counts refused requests.
    """

    def __init__(
        self, engine: Engine, name: str, scheduler: Scheduler, readers: Readers, metrics: Metrics
    ) -> None:
        assert engine.tokenizer is not None
        self.engine, self.name, self.scheduler, self.metrics = engine, name, scheduler, metrics
        self.readers = readers
        self._outbox: Outbox | None = None

    async def answer(self, body: bytes, route: Route, request: Request) -> Response:
        """Returns a whole reply or a stream of chunks.

        Raises:
            RefusedError: the request is not valid, or the server cannot accept it now.
        """
        read = await self.readers.read(body, route)
        if isinstance(read, Answered):
            return Response(await asyncio.to_thread(_encoded, read.body), media_type="application/json")
        pieces = Pieces()
        if self._outbox is None:
            self._outbox = Outbox(asyncio.get_running_loop())
        emit = _emitter(pieces, self._outbox, read.asked.stream)
        # This runs in a thread, because lists of millions of tokens and compiling a grammar would block the
        # event loop.
        sequences = await asyncio.to_thread(self._sequences, read, emit)
        for sequence in sequences:
            # Without a name of the end user, all requests from one address are one client's.
            sequence.client = read.asked.user or (request.client.host if request.client is not None else "")
        try:
            self.scheduler.submit(sequences)
        except QueueFullError as problem:
            self.metrics.refused()
            raise RefusedError(str(problem), 429, retry=1) from problem
        except ClosedError as problem:
            raise RefusedError(ENDING, 503, retry=5) from problem
        reply: Reply = (
            ChatReply(read, self.name) if read.echoed is None else ResponseReply(read, read.echoed, self.name)
        )
        if read.asked.stream:
            return _Streamed(self._stream(reply, sequences, pieces), sequences)
        with _cancelled_at_the_end(sequences):
            running = len(sequences)
            while running:
                with contextlib.suppress(TimeoutError):
                    _, _, last = await asyncio.wait_for(pieces.get(), _LOOK)
                    running -= last
                if await request.is_disconnected():
                    return Response(status_code=499)
        _raise_errors(sequences)
        # This runs in a thread, because the log-probabilities of a long text would block the event loop.
        encoded = await asyncio.to_thread(lambda: _encoded(reply.whole(sequences)))
        return Response(encoded, media_type="application/json")

    async def _stream(self, reply: Reply, sequences: list[ServedText], pieces: Pieces) -> AsyncIterator[str]:
        """Yields the server-sent events of a stream, with an error event if an exception ends it."""
        try:
            for event in reply.begin(len(sequences)):
                yield reply.encoded(event)
            running = len(sequences)
            while running:
                index, piece, last = await pieces.get()
                sequence = sequences[index]
                running -= last
                if not last:
                    events = reply.piece(index, piece)
                elif sequence.complete:
                    events = reply.last(index, sequence, piece)
                else:
                    why = ENDING if sequence.error is None else client_message(sequence.error)
                    events = [reply.failure(why)]
                for event in events:
                    yield reply.encoded(event)
            if all(sequence.complete for sequence in sequences):
                for event in reply.end(sequences):
                    yield reply.encoded(event)
            yield reply.closing
        except Exception as problem:
            yield reply.encoded(reply.failure(client_message(problem)))

    def _sequences(self, read: Read, emit: _Emit) -> list[ServedText]:
        """Returns the sequences of a request.

        Raises:
            RefusedError: the request asks for too many new tokens, for more than the model has positions, or
                for a grammar that cannot be compiled for this model.
        """
        target, most, asked = self.engine.target, self.scheduler.limits.new_tokens, read.asked
        grammar: dict[str, Any] = {}
        if read.grammar is not None:
            grammar = {"grammar": EBNF(read.grammar)}
            # The grammar is compiled in this thread, so that the thread that decodes need not wait for it.
            try:
                self.engine.compile(grammar["grammar"])
            except ValueError as problem:
                raise RefusedError(str(problem)) from problem
        shown = self._shown_tokens(read.parsing.markers)
        wanted = {} if asked.alternatives is None else {"logprobs": True}
        if asked.alternatives:
            wanted["output_logits"] = True
        sequences: list[ServedText] = []
        for prompt in read.prompts:
            ids: list[int] = prompt.tolist()
            left = most if target.max_positions is None else min(most, target.max_positions - len(ids))
            new = asked.limit or max(1, left)
            if new > most:
                raise RefusedError(f"{new} new tokens are more than the {most} that this server generates")
            check_least(asked.min_tokens, new)
            try:
                target.check_length(len(ids), new)
            except ValueError as problem:  # the message contains only lengths, no prompt
                raise RefusedError(str(problem)) from problem
            ends = listed_ids(target.settings.eos_token_id)
            settings = {"max_new_tokens": new, **asked.sampling(ends), **wanted, **grammar}
            for number in range(asked.choices):
                # The choices of a request with a seed differ from each other, and are reproducible.
                seed = None if asked.seed is None else sequence_seed(asked.seed, number)
                sequences.append(ServedText(
                    ids, settings, asked.stop_strings, partial(emit, sequences, len(sequences)), seed,
                    asked.alternatives or 0,
                    asked.stream_options is not None and asked.stream_options.include_levels,
                    speculation=asked.speculation,
                    echo=isinstance(asked, CompletionRequest) and asked.echo,
                    shown=shown,
                ))  # fmt: skip
        return sequences

    def _shown_tokens(self, names: Sequence[str]) -> frozenset[int]:
        """Returns the ids of the special tokens of these names, where they are tokens."""
        tokens = self.engine.tokenizer.get_vocab() if names and self.engine.tokenizer is not None else {}
        return frozenset(tokens[name] for name in names if name in tokens)


class _Streamed(StreamingResponse):
    """A stream of server-sent events, whose sequences are cancelled when the client disconnects.

    The iterator of events cannot cancel them itself: if the client disconnects while an event is being sent,
    the iterator ends only when it is garbage-collected.
    """

    def __init__(self, events: AsyncIterator[str], sequences: list[ServedText]) -> None:
        # These headers make buffering proxies, such as nginx, forward events at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._sequences = sequences

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _cancelled_at_the_end(self._sequences):
            await super().__call__(scope, receive, send)


def _emitter(pieces: Pieces, outbox: Outbox, stream: bool) -> _Emit:
    """Returns a function that the decoding thread calls with pieces of text, which come into ``pieces``.

    Args:
        stream: whether the reply has pieces. Otherwise only the ends of the texts are of interest.
    """

    def emit(sequences: list[ServedText], index: int, text: str | None) -> None:
        if text is None or stream:
            of = sequences[index].stream
            scores = ([], []) if of is None else of.take_scores()
            outbox.put(pieces, index, Piece(text or "", *scores), text is None)

    return emit


@contextlib.contextmanager
def _cancelled_at_the_end(sequences: list[ServedText]) -> Iterator[None]:
    """Cancels sequences that still run at the end of the context, when nobody waits for them any more."""
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.cancelled = True


def _raise_errors(sequences: list[ServedText]) -> None:
    for sequence in sequences:
        # Another request in the same batch may have caused the error, so it is never reported as status 400.
        if sequence.error is not None:
            late = isinstance(sequence.error, LateError)
            raise RefusedError(client_message(sequence.error), 504 if late else 500)
        if not sequence.complete:
            raise RefusedError(ENDING, 503, retry=5)


def _encoded(body: dict[str, Any]) -> bytes:
    """Encodes JSON in small pieces, so that other threads can run in between."""
    return "".join(json.JSONEncoder().iterencode(body)).encode()
