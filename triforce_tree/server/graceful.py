"""A server process that lets running texts end before it does."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from triforce_tree.server.connections import Connection

_LOG = logging.getLogger("triforce_tree.server")
# Seconds in which streams that were ended early send their last events, and that after a second Ctrl-C.
_LAST_EVENTS, _LAST_WORDS = 10, 1.5


class GracefulServer(uvicorn.Server):
    """uvicorn's server; on SIGTERM or Ctrl-C it takes no more connections, and running texts may end.

    A second Ctrl-C ends them at once. ``force_exit`` is then true where some have not ended.

    Args:
        config: of the server; its ``timeout_graceful_shutdown`` and its ``http`` are set.
        stop: ends all texts early, with an error as their last event.
        seconds: that running texts have.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None], seconds: int) -> None:
        config.timeout_graceful_shutdown = seconds + _LAST_EVENTS
        config.http, config.ws = Connection, "none"
        super().__init__(config)
        self._stop, self._seconds, self._again = stop, seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self._again = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if running := len(self.server_state.tasks):
            _LOG.warning(
                "waiting up to %d seconds for %d running %s to end; Ctrl-C again ends at once",
                self._seconds, running, "request" if running == 1 else "requests",
            )  # fmt: skip
        timer = loop.call_later(self._seconds, self._stop)
        hurry = loop.create_task(self._hurry())
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            hurry.cancel()

    async def _hurry(self) -> None:
        """After a second Ctrl-C: last events, then the end of all connections."""
        while not self._again:
            await asyncio.sleep(0.05)
        self._stop()
        end = asyncio.get_running_loop().time() + _LAST_WORDS
        while self.server_state.tasks:
            if asyncio.get_running_loop().time() > end:
                for connection in list(self.server_state.connections):
                    connection.transport.abort()
                self.force_exit = True
                return
            await asyncio.sleep(0.05)
