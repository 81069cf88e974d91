"""Brings pieces of text from the decoding thread to the event loop."""

import asyncio
import contextlib
import threading

from triforce_tree.server.replies import Piece

# Seconds between two pieces of a text, for each text that got one. The event loop takes about 0.1 ms to send
# a piece, in which the decoding thread may have to wait for Python's lock.
_APART = 0.0006

Pieces = asyncio.Queue[tuple[int, Piece, bool]]
"""Elements: the index of a text, a piece of it, and whether it is the last one, which has no text."""


class Outbox:
    """Brings pieces of many texts to the event loop together, so that few texts get each of theirs at once,
    and many texts get longer pieces (about 20 ms apart with 32 texts).

    Args:
        loop: the event loop in which the queues are read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        # By queue and index of the text; a later piece is joined to an earlier one.
        self._pieces: dict[tuple[Pieces, int], tuple[Piece, bool]] = {}
        self._next = 0.0

    def put(self, queue: Pieces, index: int, piece: Piece, last: bool) -> None:
        """Puts a piece into a queue soon. Any thread may call it."""
        with self._lock:
            waiting = bool(self._pieces)
            before, _ = self._pieces.get((queue, index), (None, False))
            self._pieces[queue, index] = piece if before is None else before.joined(piece), last
        # The event loop may have ended with the server.
        with contextlib.suppress(RuntimeError):
            if not waiting:
                self._loop.call_soon_threadsafe(self._loop.call_at, self._next, self._flush)

    def _flush(self) -> None:
        with self._lock:
            pieces, self._pieces = self._pieces, {}
        self._next = self._loop.time() + _APART * len(pieces)
        for (queue, index), (piece, last) in pieces.items():
            if last and piece.text:
                queue.put_nowait((index, piece, False))
                piece = Piece("")
            queue.put_nowait((index, piece, last))
