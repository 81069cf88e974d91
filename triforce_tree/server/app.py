"""The HTTP application: OpenAI's chat completions and completions over one engine."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException

from triforce_tree.engine import Engine
from triforce_tree.server.metrics import Metrics
from triforce_tree.server.middleware import BodyLimit
from triforce_tree.server.protocol import ChatRequest, CompletionRequest, error
from triforce_tree.server.replies import Asked
from triforce_tree.server.scheduler import Limits, Scheduler
from triforce_tree.server.service import Service

# Longer values are left out of errors.
_SHOWN_CHARACTERS = 60
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Served:
    """What is served, and to whom.

    Attributes:
        name: of the model, which requests have to give.
        key: that clients must send as ``Authorization: Bearer KEY``; None for anyone.
        limits: see :class:`Limits`.
        body: most bytes of a request.
        origins: of web pages whose scripts may ask (CORS); ``*`` for all.
    """

    name: str
    key: str | None = None
    limits: Limits = field(default_factory=Limits)
    body: int = 16 * 2**20
    origins: tuple[str, ...] = ()


class _Running:
    """What answers requests, from when the engine is loaded until the server ends."""

    def __init__(self, served: Served) -> None:
        self.served, self.metrics = served, Metrics()
        self.service: Service | None = None
        self._closed = False

    def begin(self, engine: Engine) -> None:
        """Answer requests from now on."""
        scheduler = Scheduler(engine, self.served.limits, self.metrics.ended)
        self.metrics.watch(scheduler)
        self.service = Service(engine, self.served.name, scheduler, self.metrics)
        if self._closed:
            scheduler.stop()

    def stop(self) -> None:
        """End all texts after the pass that runs."""
        self._closed = True
        if self.service is not None:
            self.service.scheduler.stop()

    def close(self) -> None:
        self.stop()
        if self.service is not None:
            self.service.scheduler.close()

    @property
    def status(self) -> str:
        """``loading``, ``ok`` or ``failed``."""
        if self.service is None:
            return "loading"
        return "ok" if self.service.scheduler.alive else "failed"

    async def answer(self, asked: Asked, request: Request) -> Response:
        """A reply, or an error by its status."""
        if asked.model != self.served.name:
            raise HTTPException(404, f"model {asked.model!r} is not served here; use {self.served.name!r}")
        if (problem := asked.problem()) is not None:
            raise HTTPException(400, problem)
        if self.service is None or not self.service.scheduler.alive:
            why = "the model is being loaded; ask again" if self.service is None else "decoding has failed"
            raise HTTPException(503, why, {"Retry-After": "5"})
        return await self.service.answer(asked, request)


def create_app(engine: Engine | Future[Engine], served: Served) -> FastAPI:
    """The application; its scheduler starts and ends with it.

    Args:
        engine: with a tokenizer; or a future one, until which requests are answered with status 503.

    Returns:
        the application; calling its ``state.stop`` ends all texts early, for a shutdown.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    running = _Running(served)
    if isinstance(engine, Engine) and engine.tokenizer is None:
        raise ValueError("a server needs a tokenizer; give one: load(..., tokenizer=...)")

    def begin(loaded: Future[Engine]) -> None:
        if loaded.exception() is None:
            running.begin(loaded.result())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if isinstance(engine, Future):
            engine.add_done_callback(begin)
        else:
            running.begin(engine)
        try:
            yield
        finally:
            await asyncio.to_thread(running.close)

    async def allowed(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if served.key is not None and not hmac.compare_digest(sent, f"Bearer {served.key}".encode()):
            raise HTTPException(401, "wrong or missing API key; send Authorization: Bearer KEY")

    app = FastAPI(title="triforce-tree", lifespan=lifespan)
    app.state.stop = running.stop
    app.add_middleware(BodyLimit, most=served.body)
    if served.origins:
        origins, everything = list(served.origins), ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=everything, allow_headers=everything
        )
    guarded = [Depends(allowed)]
    own = {
        "id": served.name, "object": "model", "created": int(time.time()), "owned_by": "triforce-tree",
    }  # fmt: skip

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, problem: StarletteHTTPException) -> JSONResponse:
        other = "invalid_request_error" if problem.status_code < 500 else "server_error"
        said = str(problem.detail)
        if said in ("Not Found", "Method Not Allowed"):  # Starlette's own
            said = f"there is no {request.method} {request.url.path} here; see docs/server.md for the routes"
        body = error(said, _KINDS.get(problem.status_code, other))
        return JSONResponse(body, problem.status_code, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, problem: RequestValidationError) -> JSONResponse:
        first, *others = problem.errors()
        # Of a value of several forms each form has an error: that of the form which the value has tells most.
        same = [each for each in (first, *others) if each["loc"][:2] == first["loc"][:2]]
        told = next((each for each in same if not each["type"].endswith("_type")), first)
        name = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            why, at = first["ctx"]["error"], name
            return JSONResponse(error(f"the body is no JSON ({why} at byte {at}); send an object"), 400)
        if not name:
            return JSONResponse(
                error("the body is no JSON object; send one, with Content-Type application/json"), 400
            )
        if len(same) > 1:
            name = str(first["loc"][1])
        value = "" if told["type"] == "missing" else f"={told['input']!r}"
        shown = value if len(value) < _SHOWN_CHARACTERS else ""
        return JSONResponse(error(f"{name}{shown}: {told['msg']}", param=name), 400)

    @app.post("/v1/chat/completions", dependencies=guarded, response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await running.answer(asked, request)

    @app.post("/v1/completions", dependencies=guarded, response_model=None)
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        return await running.answer(asked, request)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [own]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise HTTPException(404, f"model {name!r} is not served here; use {served.name!r}")
        return own

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": running.status}, 200 if running.status == "ok" else 503)

    @app.get("/metrics")
    async def exposed() -> Response:
        return Response(running.metrics.exposed(), media_type=CONTENT_TYPE_LATEST)

    return app
