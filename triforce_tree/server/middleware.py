"""The size of requests, checked before they are read."""

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triforce_tree.server.protocol import error


class BodyLimit:
    """Refuses bodies of more than so many bytes with status 413.

    Args:
        app: the application.
        most: bytes of a body.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most
        self._sentence = f"the body has more than {most:,} bytes; send less, or raise --max-body"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most:
            await JSONResponse(error(self._sentence), 413)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            # A chunked body does not say how long it is.
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, self._sentence)
            return message

        await self._app(scope, counted, send)
