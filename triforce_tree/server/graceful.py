"""A server process that lets running texts end before it does."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn

# Seconds in which streams that were ended early send their last events.
_LAST_EVENTS = 10


class GracefulServer(uvicorn.Server):
    """uvicorn's server; on SIGTERM or Ctrl-C it takes no more connections, and running texts may end.

    Args:
        config: of the server; its ``timeout_graceful_shutdown`` is set.
        stop: ends all texts early, with an error as their last event.
        seconds: that running texts have.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None], seconds: int) -> None:
        config.timeout_graceful_shutdown = seconds + _LAST_EVENTS
        super().__init__(config)
        self._stop, self._seconds = stop, seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._seconds, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
