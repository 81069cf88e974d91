"""Connections of the server: silent ones are closed, and none holds the event loop."""

import asyncio
import socket
from collections import deque

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

# Bytes after whose reading other connections have their turn: a body may come in chunks of one byte.
_PIECE = 4096
# Bytes a second that a body has to come with, beside the time that any request may take.
_RATE = 1024


class _Flow(FlowControl):
    """A connection whose reading is paused until the pieces that have come are read."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """HTTP by uvicorn, with a limit on the time for which a client may be silent.

    Attributes:
        patience: seconds in which a request's head has to come, its body has to begin, and a client has to
            take some of what it is sent.
    """

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does this only for sockets that name their protocol; without it, the second part of a reply
        # waits for 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.flow: _Flow = _Flow(transport)
        self._pieces: deque[bytes] = deque()
        self._came, self._unsent = 0, 0
        self._state: object = None
        self._since = self._sent = self.loop.time()
        self._timer = self.loop.call_later(self.patience / 10, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._pieces.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._came += len(data)
        waiting = bool(self._pieces)
        self._pieces.extend(data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        if not waiting:
            self._read_piece()

    def _read_piece(self) -> None:
        if not self._pieces or self.transport.is_closing():
            return
        super().data_received(self._pieces[0])
        self._pieces.popleft()
        if not self._pieces:
            if self.flow.held:
                self.flow.held = False
                # Else the application has not taken what came, and resumes by taking it.
                if self.cycle is None or self.cycle.response_complete or not self.cycle.body:
                    self.flow.resume_reading()
            return
        self.flow.held = True
        self.flow.pause_reading()
        self.loop.call_soon(self._read_piece)

    def _watch(self) -> None:
        """Close the connection of a client that is silent for too long."""
        if self.transport.is_closing():
            return
        now = self.loop.time()
        # Of the client: waited for, in its body, or at its end.
        state = (self.conn.their_state, self.cycle)
        if state != self._state:
            self._state, self._since, self._came = state, now, 0
        owes = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.flow.read_paused
        wanted = self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete
        allowed = self.patience + (self._came / _RATE if wanted else 0)
        left = self.transport.get_write_buffer_size()
        if not self.flow.write_paused or left < self._unsent:
            self._sent = now
        self._unsent = left
        if (owes and now - self._since > allowed) or now - self._sent > self.patience:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.patience / 10, self._watch)
