"""The server's side of the processes that read requests (``reader_process.py``)."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading

from transformers import PreTrainedTokenizerBase

from triforce_tree.server.errors import logged
from triforce_tree.server.reader_process import HEAD, LENGTH, Unread, received, send
from triforce_tree.server.reading import Answered, Read, Route, Sizes
from triforce_tree.server.refusals import RefusedError

_LOG = logging.getLogger("triforce_tree.server")
# Libraries must not start threads, which do not exist in a forked process.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# The limit of CPU time grows by ``seconds`` for each so many bytes of a request.
_BYTES = 2**20
# Most total bytes of requests that are being read or wait for a process.
_WAITING_BYTES = 256 * 2**20
# The number of times that a request is read if the processes that read it end early. The second try can meet
# a forking process that is ending; the third one starts it again.
_TRIES = 3


class Readers:
    """A pool of processes that read requests, until :meth:`close`. There is one for each two CPUs, and at
    least two and at most four.

    Args:
        tokenizer: the target's tokenizer.
        sizes: the limits for prompts.
        seconds: most seconds of CPU time to read a request, and as many more for each MiB.

    Raises:
        ValueError: the tokenizer cannot be sent to another process.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sizes: Sizes, seconds: float) -> None:
        try:
            self._pickled = pickle.dumps((tokenizer, sizes))
        except Exception as error:
            raise ValueError(
                f"the tokenizer cannot be sent to the processes that read requests ({error}); give one of "
                "transformers' own classes, or of a module that can be imported"
            ) from error
        self._seconds, self._bytes = seconds, 0
        self._slots = asyncio.Semaphore(max(2, min(4, (os.cpu_count() or 1) // 2)))
        # The process that was used last is used next, since it remembers the newest texts.
        self._free: list[socket.socket] = []
        self._lock, self._closed = threading.Lock(), False
        self._begin()

    async def read(self, body: bytes, route: Route) -> Read | Answered:
        """Has a process parse and tokenize the body of a request.

        Raises:
            RefusedError: the request is not valid, or reading it takes too much time or memory.
        """
        if self._bytes and self._bytes + len(body) > _WAITING_BYTES:
            raise RefusedError("too many long requests wait to be read; try again later", 429, retry=1)
        self._bytes += len(body)
        try:
            async with self._slots:
                answer = await self._answer(body, route)
        finally:
            self._bytes -= len(body)
        if isinstance(answer, Read | Answered):
            return answer
        if answer.refusal is None:
            raise RefusedError(logged(answer.trace), 500)
        if answer.trace:
            _LOG.warning("a prompt was refused: %s", answer.trace)
        sentence, status, param = answer.refusal
        raise RefusedError(sentence, status, param)

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            self._closed = True
            self._control.close()
            while self._free:
                self._free.pop().close()
        self._process.wait()

    async def _answer(self, body: bytes, route: Route) -> Read | Answered | Unread:
        seconds, loop = self._seconds * (1 + len(body) / _BYTES), asyncio.get_running_loop()
        for _ in range(_TRIES):
            began = loop.time()
            try:
                return await self._asked(body, route, seconds)
            except (OSError, EOFError):
                if loop.time() - began >= seconds:
                    break
                # A process that ends before its time limit may have been killed because memory was short
                # elsewhere. The others may be ending too, so the next try is in a new process.
                while self._free:
                    self._free.pop().close()
        sentence = (
            f"reading this request takes more than {seconds:.1f} s of processor time, or too much memory "
            "(for its chat template and tokenizer); send less, or raise --reading-timeout"
        )
        return Unread((sentence, 400, None))

    async def _asked(self, body: bytes, route: Route, seconds: float) -> Read | Answered | Unread:
        """Sends a request to a process and returns its answer.

        Raises:
            OSError, EOFError: the process has ended.
        """
        loop = asyncio.get_running_loop()
        connection = await self._connected(LENGTH.pack(HEAD.size + len(body)) + HEAD.pack(route, seconds))
        try:
            await loop.sock_sendall(connection, body)
            head = await _received(connection, LENGTH.size)
            answer = await _received(connection, LENGTH.unpack(head)[0])
        except BaseException:
            # The process is not used again: it would answer the next request with the answer to this one.
            connection.close()
            raise
        self._free.append(connection)
        result: Read | Answered | Unread = pickle.loads(answer)
        return result

    async def _connected(self, head: bytes) -> socket.socket:
        """Sends the head of a request to a process, a new one if none is free, and returns its socket."""
        while self._free:
            connection = self._free.pop()
            try:
                await asyncio.get_running_loop().sock_sendall(connection, head)
                return connection
            except OSError:
                connection.close()
        connection = await asyncio.to_thread(self._forked)
        await asyncio.get_running_loop().sock_sendall(connection, head)
        return connection

    def _begin(self) -> None:
        """Starts the process that forks the others."""
        self._control, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from triforce_tree.server.reader_process import main; main({theirs.fileno()})"
            )
            # The process has its own session, so that Ctrl-C reaches only the server.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], env={**os.environ, **_ONE_THREAD}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(OSError):
            send(self._control, self._pickled)
        answer = received(self._control)
        why = "it has ended" if answer is None else pickle.loads(answer)
        if why is not None:
            raise ValueError(
                f"the process that reads requests cannot start ({' '.join(why.split())[:200]}); give a "
                "tokenizer of transformers' own classes, or of a module that can be imported"
            )

    def _forked(self) -> socket.socket:
        """Has a new process forked and returns a socket to it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise RefusedError("the server is shutting down; ask again", 503, retry=5)
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError:
                # The system has killed the forking process because memory was short.
                self._control.close()
                self._process.wait()
                self._begin()
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        return ours


async def _received(connection: socket.socket, count: int) -> bytes:
    message = bytearray(count)
    view = memoryview(message)
    while view:
        got = await asyncio.get_running_loop().sock_recv_into(connection, view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(message)
