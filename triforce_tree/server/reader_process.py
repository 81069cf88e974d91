"""Processes that read requests, as neither a template nor a tokenizer can be interrupted in a thread.

One process has the tokenizer and a single thread, and forks the others. Each of these reads one request at a
time, which the system ends with the process after some seconds of processor time, or where memory is short.
"""

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import traceback
from dataclasses import dataclass

from triforce_tree.generation.prompt_error import PromptError
from triforce_tree.server.protocol import RefusedError
from triforce_tree.server.reading import Read, Reader

LENGTH = struct.Struct("!Q")
# Before a body: whether it is a chat, and the seconds of processor time that it may take.
HEAD = struct.Struct("!?d")
# Seconds by the clock for each second of processor time, on a busy machine.
_BUSY = 8
# Bytes that a request may take: some, and more for each byte of its body.
_MEMORY, _MEMORY_RATIO = 2**30, 48


@dataclass(frozen=True)
class Unread:
    """Why a request was not read.

    Attributes:
        refusal: a sentence for its client, the reply's status, and the field at fault; None for an error.
        trace: of the error, for the log.
    """

    refusal: tuple[str, int, str | None] | None
    trace: str = ""


def main(descriptor: int) -> None:
    """Receive what a :class:`Reader` is made of, then fork a process for each socket that comes.

    Args:
        descriptor: of a socket, whose other end is closed when no more processes are wanted.
    """
    control = socket.socket(fileno=descriptor)
    # Ended processes leave nothing behind.
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
    """Answer requests by a pickled ``Read`` or ``Unread`` until the socket's other end is closed."""
    while (request := received(connection)) is not None:
        chat, seconds = HEAD.unpack_from(request)
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        most = used + _MEMORY + _MEMORY_RATIO * len(request)
        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(
            resource.RLIMIT_AS, (most if limit == resource.RLIM_INFINITY else min(most, limit), limit)
        )
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _BUSY * seconds)
        answer = pickle.dumps(_answer(reader, request[HEAD.size :], chat))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            send(connection, answer)
        except OSError:  # nobody waits for it
            return


def _answer(reader: Reader, body: bytes, chat: bool) -> Read | Unread:
    # A list of a million lists would be looked through again and again.
    gc.disable()
    try:
        return reader.read(body, chat)
    except RefusedError as error:
        return Unread((str(error), error.status, error.param))
    except PromptError as error:
        trace = "".join(traceback.format_exception(error)) if str(error) != error.sentence else ""
        return Unread((error.sentence, 400, None), trace)
    except BaseException as error:  # whatever it is, the next request is read
        return Unread(None, "".join(traceback.format_exception(error)))
    finally:
        gc.enable()


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message behind its length."""
    connection.sendall(LENGTH.pack(len(message)))
    connection.sendall(message)


def received(connection: socket.socket) -> bytes | None:
    """The next message; None at the end."""
    head = _received(connection, LENGTH.size)
    return None if head is None else _received(connection, LENGTH.unpack(head)[0])


def _received(connection: socket.socket, count: int) -> bytes | None:
    found = bytearray(count)
    view = memoryview(found)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(found)
