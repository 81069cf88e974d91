"""Checks the API key before requests reach the routes, and converts errors to JSON replies."""

import asyncio
import hmac
import json
import re
import traceback
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce_tree.server.errors import logged
from triforce_tree.server.refusals import RefusedError, error

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_WRONG_KEY = "wrong or missing API key; send Authorization: Bearer KEY"


class Guard:
    """Checks the key before a request is read, and converts errors of the application to replies.

    Args:
        app: the application.
        key: the API key that clients must send as ``Authorization: Bearer KEY``; None for no key.

    Raises:
        ValueError: the key cannot be sent in a header.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise ValueError(
                "the API key has characters that not every client can send in a header; give one of "
                "ASCII letters, digits and signs, without spaces"
            )
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._key is not None and not self._allowed(scope):
            await refusal(RefusedError(_WRONG_KEY, 401))(scope, receive, send)
            return
        began = False

        async def sent(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except (ClientDisconnect, asyncio.CancelledError):
            # The client has disconnected, or the server is shutting down.
            return
        except RefusedError as problem:
            response = refusal(problem)
        except Exception:
            response = refusal(RefusedError(logged(traceback.format_exc()), 500))
        else:
            return
        # A reply that has begun cannot be replaced by an error; the connection is closed instead.
        if not began:
            await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        assert self._key is not None
        # The key is compared even if the scheme is wrong, and in constant time.
        same = hmac.compare_digest(key.strip(b" \t"), self._key)
        return same and scheme.lower() == b"bearer"


def refusal(problem: RefusedError) -> Response:
    """Returns the reply to a refused request, in the form of OpenAI's API."""
    other = "invalid_request_error" if problem.status < 500 else "server_error"
    headers = {} if problem.retry is None else {"Retry-After": str(problem.retry)}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    sentence = " ".join(str(problem).split())
    body = error(sentence, _KINDS.get(problem.status, other), problem.param)
    return reply(body, problem.status, headers)


def reply(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a JSON reply in ASCII, since lone surrogates, which clients may send, have no UTF-8 bytes."""
    return Response(json.dumps(body), status, headers, "application/json")
