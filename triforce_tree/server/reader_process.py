"""Processes that parse and tokenize requests.

They are processes because a chat template or tokenizer that takes too long cannot be interrupted in a thread.
One process with a single thread has the tokenizer and forks the others. Each of these reads one request at a
time, and the operating system kills it if a request takes too much CPU time or memory.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import traceback
from dataclasses import dataclass

from triforce_tree.requests.tokenized_texts import PromptError
from triforce_tree.server.reading import Answered, Read, Reader, Route
from triforce_tree.server.refusals import RefusedError

LENGTH = struct.Struct("!Q")
# The head of a request: its route, and the most seconds of CPU time to read it.
HEAD = struct.Struct("!Bd")
# On a busy machine a request may take this many seconds of wall-clock time per second of CPU time.
_BUSY = 8
# Most bytes of memory to read a request: a fixed number, and so many more per byte of its body.
_MEMORY, _MEMORY_RATIO = 2**30, 48


@dataclass(frozen=True)
class Unread:
    """The reason why a request was not read.

    Attributes:
        refusal: a message for the client, the HTTP status, and the wrong field; None for an internal error.
        trace: the traceback of an error for the log.
    """

    refusal: tuple[str, int, str | None] | None
    trace: str = ""


def main(descriptor: int) -> None:
    """Receives the arguments of :class:`Reader`, then forks a process for each socket that it receives.

    Args:
        descriptor: file descriptor of a socket. The process ends when its other end is closed.
    """
    control = socket.socket(fileno=descriptor)
    # Child processes that end are removed by the system without a wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sent = received(control)
    if sent is None:
        return
    try:
        reader = Reader(*pickle.loads(sent))
    except Exception:
        send(control, pickle.dumps(traceback.format_exc(limit=-1)))
        return
    send(control, pickle.dumps(None))
    # An error here is raised again for the first request with a grammar.
    with contextlib.suppress(Exception):
        reader.grammars.prepare()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _serve(connection, reader)
                os._exit(0)


def _serve(connection: socket.socket, reader: Reader) -> None:
    """Answers each request with a pickled ``Read`` or ``Unread``, until the socket's other end is closed."""
    while (request := received(connection)) is not None:
        route, seconds = HEAD.unpack_from(request)
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        most = used + _MEMORY + _MEMORY_RATIO * len(request)
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(
            resource.RLIMIT_AS, (most if limit == resource.RLIM_INFINITY else min(most, limit), limit)
        )
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _BUSY * seconds)
        answer = pickle.dumps(_answer(reader, request[HEAD.size :], Route(route)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            send(connection, answer)
        except OSError:  # the server has closed the socket
            return


def _answer(reader: Reader, body: bytes, route: Route) -> Read | Answered | Unread:
    # Garbage collection is off: it would scan a list of a million lists many times during parsing.
    gc.disable()
    try:
        return reader.read(body, route)
    except RefusedError as error:
        return Unread((str(error), error.status, error.param))
    except PromptError as error:
        trace = "".join(traceback.format_exception(error)) if str(error) != error.sentence else ""
        return Unread((error.sentence, 400, None), trace)
    except BaseException as error:  # after any error the process must be able to read the next request
        return Unread(None, "".join(traceback.format_exception(error)))
    finally:
        gc.enable()


def send(connection: socket.socket, message: bytes) -> None:
    """Sends the length of a message, then the message."""
    connection.sendall(LENGTH.pack(len(message)))
    connection.sendall(message)


def received(connection: socket.socket) -> bytes | None:
    """Receives the next message; None if the other end is closed."""
    head = _received(connection, LENGTH.size)
    return None if head is None else _received(connection, LENGTH.unpack(head)[0])


def _received(connection: socket.socket, count: int) -> bytes | None:
    message = bytearray(count)
    view = memoryview(message)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(message)
