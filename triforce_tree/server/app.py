"""The HTTP application: OpenAI's chat completions and completions over one engine."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from triforce_tree.engine import Engine
from triforce_tree.server.guard import Guard, reply
from triforce_tree.server.metrics import Metrics, log_throughput
from triforce_tree.server.readers import Readers
from triforce_tree.server.reading import Route as Asked
from triforce_tree.server.reading import Sizes
from triforce_tree.server.refusals import RefusedError, not_served, shown
from triforce_tree.server.scheduler import Limits, Scheduler
from triforce_tree.server.service import Service
from triforce_tree.server.text_stream import ServedText
from triforce_tree.server.tools.formats import FORMATS
from triforce_tree.server.warm_up import default_prompts, warm_up

# The most bytes of a request follow from the most tokens of a prompt, with 64 bytes of JSON per token (an
# escaped character takes up to twelve). The other limits are for models without a most number of tokens, and
# the least limit.
_TOKEN_BYTES, _ANY_BYTES, _LEAST_BYTES = 64, 16 * 2**20, 2**20
# Tokens of the longest prompt of a warm-up on a GPU, if there is no limit for those of a batch.
_WARM = 65_536

_PAGE = Path(__file__).with_name("page.html")
# The page needs nothing but this server.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


_ROUTES = {
    "/v1/chat/completions": Asked.CHAT,
    "/v1/completions": Asked.COMPLETIONS,
    "/v1/responses": Asked.RESPONSES,
    "/tokenize": Asked.TOKENIZE,
    "/detokenize": Asked.DETOKENIZE,
}


@dataclass(frozen=True)
class Served:
    """Settings of the server.

    Attributes:
        name: the name of the model, which requests must give.
        key: the API key that clients must send as ``Authorization: Bearer KEY``; None for no key.
        limits: see :class:`Limits`.
        body: most bytes of a request; None for a limit that follows from the model's longest prompt.
        origins: the origins of web pages whose scripts may send requests (CORS); ``*`` for all.
        reading: most seconds of CPU time to parse and tokenize a request, and as many more for each MiB.
        tool_parser: the format of the model's tool calls, one of ``tools.formats.FORMATS``; None for the one
            that the chat template teaches.
        separate_reasoning: whether replies have reasoning apart from the content.
        warm_up: tokens of the prompts that are decoded before requests are answered, so that stages are
            prepared; None for lengths that fit the device.
    """

    name: str
    key: str | None = None
    limits: Limits = field(default_factory=Limits)
    body: int | None = None
    origins: tuple[str, ...] = ()
    reading: float = 5.0
    warm_up: tuple[int, ...] | None = ()
    tool_parser: str | None = None
    separate_reasoning: bool = True


class _Running:
    """The state of the application: the service, once the engine is loaded, and its metrics."""

    def __init__(self, served: Served) -> None:
        self.served, self.metrics = served, Metrics(served.name)
        self.service: Service | None = None
        self.most_bytes = 0
        self._status, self._reason = "loading", "the model is being loaded"
        self._closed = False

    def begin(self, engine: Engine) -> None:
        """Creates the service for a loaded engine, which answers requests after its warm-up.

        Raises:
            ValueError: the engine has no tokenizer, or one that cannot be sent to another process, or the
                warm-up failed.
        """
        served, target = self.served, engine.target
        if engine.tokenizer is None:
            raise ValueError("a server needs a tokenizer; give one: load(..., tokenizer=...)")
        sizes = Sizes(
            served.name, target.vocab_size, target.max_positions, served.limits.waiting, served.tool_parser,
            served.separate_reasoning,
        )  # fmt: skip
        readers = Readers(engine.tokenizer, sizes, served.reading)
        longest = _ANY_BYTES if sizes.positions is None else sizes.positions * _TOKEN_BYTES
        self.most_bytes = served.body or max(_LEAST_BYTES, longest)
        scheduler = Scheduler(engine, served.limits, self._ended, self._passed)
        # Existing objects of libraries and models are excluded from garbage collection, which would stop the
        # server for a second. An engine that has already generated has captured graphs, which only garbage
        # collection frees.
        if engine.last_program is None:
            gc.collect()
            gc.freeze()
        self.service = Service(engine, served.name, scheduler, readers, self.metrics)
        if self._closed:
            scheduler.stop()
        elif served.warm_up != ():
            lengths = served.warm_up or default_prompts(engine, served.limits.batch_tokens or _WARM)
            warm_up(engine, scheduler, lengths, self._preparing)
        self.metrics.watch(scheduler)
        self._status = "ok"

    def _preparing(self, step: str) -> None:
        self._status, self._reason = "preparing", step

    def _ended(self, sequence: ServedText) -> None:
        # The sequences of the warm-up are not counted.
        if self._status == "ok":
            self.metrics.ended(sequence)

    def _passed(self, sequence: ServedText, tokens: int, seconds: float | None) -> None:
        if self._status == "ok":
            self.metrics.passed(sequence, tokens, seconds)

    async def report(self) -> None:
        """Logs the throughput as soon as requests are answered, until it is cancelled."""
        while self.service is None or self._status != "ok":
            await asyncio.sleep(1)
        await log_throughput(self.metrics, self.service.scheduler)

    def stop(self) -> None:
        """Ends all sequences after the running pass of decoding."""
        self._closed = True
        if self.service is not None:
            self.service.scheduler.stop()

    def close(self) -> None:
        self.stop()
        if self.service is not None:
            self.service.readers.close()
            self.service.scheduler.close()
            gc.unfreeze()

    @property
    def state(self) -> tuple[str, str | None]:
        """Returns the state for ``/health``, and why requests are not answered, if they are not.

        The state is ``loading``, ``preparing``, ``ok`` or ``failed``.
        """
        if self.service is not None and not self.service.scheduler.alive:
            return "failed", "decoding has failed"
        return self._status, None if self._status == "ok" else self._reason

    async def answer(self, request: Request, asked: Asked) -> Response:
        """Returns the reply to a request; errors are raised as RefusedError with a status."""
        if (why := self.state[1]) is not None:
            raise RefusedError(f"{why}; ask again", 503, retry=5)
        assert self.service is not None
        return await self.service.answer(await self._body(request), asked, request)

    async def _body(self, request: Request) -> bytes:
        """Reads the body of a request. It is not read if the header Content-Length exceeds the limit."""
        too_long = RefusedError(
            f"the body has more than {self.most_bytes:,} bytes; send less, or raise --max-body", 413
        )
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > self.most_bytes):
            raise too_long
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self.most_bytes:
                raise too_long
        return b"".join(parts)


def create_app(engine: Engine | Future[Engine], served: Served) -> Starlette:
    """Creates the application; its scheduler starts and ends with it.

    Args:
        engine: an engine with a tokenizer, or a future engine. Until it is loaded, requests get status 503.

    Returns:
        the application. Its ``state.stop()`` ends all sequences early, for a shutdown. Its ``state.problem``
        is the error because of which a future engine cannot be served, or None.

    Raises:
        ValueError: the engine has no tokenizer, the key cannot be sent in a header, or no format of tool
            calls has this name.
    """
    running = _Running(served)
    if served.tool_parser not in (None, *FORMATS):
        raise ValueError(f"tool_parser={served.tool_parser!r} must be one of {', '.join(FORMATS)}")
    if isinstance(engine, Engine) and engine.tokenizer is None:
        raise ValueError("a server needs a tokenizer; give one: load(..., tokenizer=...)")

    def begin(loaded: Future[Engine]) -> None:
        if loaded.exception() is None:
            try:
                running.begin(loaded.result())
            except Exception as problem:  # an error in the callback of a future would only be logged
                app.state.problem = problem

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if isinstance(engine, Future):
            engine.add_done_callback(begin)
        else:
            await asyncio.to_thread(running.begin, engine)
        reporter = asyncio.create_task(running.report())
        try:
            yield
        finally:
            reporter.cancel()
            await asyncio.to_thread(running.close)

    created = int(time.time())

    def description() -> dict[str, Any]:
        # None until the model is loaded.
        most = running.service and running.service.engine.target.max_positions
        return {
            "id": served.name, "object": "model", "created": created, "owned_by": "triforce-tree",
            "root": served.name, "parent": None, "max_model_len": most,
        }  # fmt: skip

    content = _PAGE.read_bytes()

    async def models(request: Request) -> Response:
        return reply({"object": "list", "data": [description()]})

    async def model(request: Request) -> Response:
        if (name := request.path_params["name"]) != served.name:
            raise RefusedError(not_served(name, served.name), 404)
        return reply(description())

    async def health(request: Request) -> Response:
        state, why = running.state
        more = {} if why is None else {"reason": why}
        return reply({"status": state} | more, 200 if state == "ok" else 503)

    async def page(request: Request) -> Response:
        return HTMLResponse(content, headers={"Content-Security-Policy": _PAGE_POLICY})

    async def exposed(request: Request) -> Response:
        return Response(running.metrics.exposed(), media_type=CONTENT_TYPE_LATEST)

    guarded = Router([
        *(
            Route(path, partial(running.answer, asked=asked), methods=["POST"])
            for path, asked in _ROUTES.items()
        ),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Mount("/", _nowhere),
    ])  # fmt: skip
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/health", health),
            Route("/metrics", exposed),
            # All other paths, including unknown ones, require the key.
            Mount("/", Guard(guarded, served.key)),
        ],
        lifespan=lifespan,
        middleware=[
            Middleware(CORSMiddleware, allow_origins=served.origins, allow_methods=["*"], allow_headers=["*"])
        ]
        if served.origins
        else [],
    )
    app.state.stop, app.state.problem = running.stop, None
    return app


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    what = f"{shown(scope['method'])} {shown(scope['path'])}"
    raise RefusedError(f"there is no {what} here; see docs/server.md for the routes", 404)
