"""HTTP connections: idle ones are closed, and none can block the event loop."""

import asyncio
import socket
from collections import deque

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

# Received bytes are parsed in pieces of this many, and other connections run in between. Without this, a body
# in HTTP chunks of one byte each would block the event loop.
_PIECE = 4096
# A body must arrive with at least this many bytes per second, after an initial delay of ``patience``.
_RATE = 1024


class _Flow(FlowControl):
    """Flow control that does not resume reading from the socket while received pieces are not parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """uvicorn's HTTP connection with a limit on the time for which a client may be idle.

    Attributes:
        patience: seconds within which the head of a request must arrive, its body must begin, and the client
            must receive some of the data sent to it.
    """

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without this option the second part of a reply waits for 40 ms. asyncio sets it only for sockets
        # created with an explicit protocol number.
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
                # Otherwise the application has not taken the received body yet, and resumes reading itself.
                if self.cycle is None or self.cycle.response_complete or not self.cycle.body:
                    self.flow.resume_reading()
            return
        self.flow.held = True
        self.flow.pause_reading()
        self.loop.call_soon(self._read_piece)

    def _watch(self) -> None:
        """Closes the connection if the client is idle for too long; otherwise checks again later."""
        if self.transport.is_closing():
            return
        now = self.loop.time()
        # Whether the client's request is awaited, its body is arriving, or it is complete.
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
