"""A server process that shuts down gracefully: running sequences may end first."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from triforce_tree.server.connections import Connection

_LOG = logging.getLogger("triforce_tree.server")
# Seconds in which streams that were ended early may send their last events; the second value is for the time
# after a second Ctrl-C.
_LAST_EVENTS, _LAST_WORDS = 10, 1.5


class GracefulServer(uvicorn.Server):
    """uvicorn's server. On SIGTERM or Ctrl-C it accepts no more connections, and running sequences may end.

    A second Ctrl-C ends them at once; if some have not ended then, ``force_exit`` becomes true.

    Args:
        config: uvicorn's configuration. ``timeout_graceful_shutdown``, ``http`` and ``ws`` are overwritten.
        stop: ends all sequences early, with an error as the last event of their streams.
        seconds: the time that running sequences have to end.

    Attributes:
        interrupted_again: whether there was a second Ctrl-C.
    """

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None], seconds: int) -> None:
        config.timeout_graceful_shutdown = seconds + _LAST_EVENTS
        config.http, config.ws = Connection, "none"
        super().__init__(config)
        self._stop, self._seconds, self.interrupted_again = stop, seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.interrupted_again = True
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
        """Waits for a second Ctrl-C, then ends all sequences and, after the last events, all connections."""
        while not self.interrupted_again:
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
