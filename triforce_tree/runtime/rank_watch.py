"""Notices that a rank has failed, so that the other ranks end with a message and do not wait for it.

Each rank has a connection to rank 0, which passes messages on. The system closes the connections of a process
however it ends, so the others learn of it whatever their main thread does. A collective of gloo then fails by
itself. A collective of NCCL may never return, nor does a kernel that waits for another GPU, and no collective
returns if the process of the failed rank lives on. In these cases a thread ends this process.
"""

import atexit
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Seconds that a rank may take to end a call after another has failed in it, before its process is ended.
GRACE = 5.0
# Seconds between an error of a collective and the message that says which rank it waited for.
_MESSAGE = 1.0
# Seconds for connecting; without traffic a connection is probed, and lost after a minute.
_CONNECT, _PROBES = 60.0, {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_LONGEST = 500


class LostRankError(RuntimeError):
    """Another rank has failed, so this process cannot go on.

    Attributes:
        said: whether another process tells the user.
    """

    def __init__(self, message: str, said: bool) -> None:
        super().__init__(message)
        self.said = said


def _of_collective(error: BaseException | None) -> bool:
    """Returns whether a lost connection may have caused an error: collectives raise RuntimeError."""
    while error is not None and not isinstance(error, RuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


class RankWatch:
    """Knows which other ranks have failed. All ranks make it together, and then the same calls.

    Args:
        rank, size: index of this process, and number of all.
        broadcast: returns rank 0's value on all ranks.
        local: whether all ranks run on this machine.
    """

    def __init__(self, rank: int, size: int, broadcast: Callable[[Any], Any], local: bool) -> None:
        self._rank, self._size = rank, size
        self._calls, self._inside, self._failed, self._left = 0, False, False, False
        # By rank: the call in which it raised an error, and the error; and the calls that it had begun when
        # it left, -1 if its process ended without leaving.
        self._errors: dict[int, tuple[int, str]] = {}
        self._gone: dict[int, int] = {}
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._buffers: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._connect(broadcast, local)
        for link in self._ranks:
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._selector.register(link, selectors.EVENT_READ)
        # A child would keep the connections open when this process has ended.
        os.register_at_fork(after_in_child=self._drop)
        atexit.register(self.leave)
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Is a context for a call that all ranks make. Calls inside a call are a part of it.

        Raises:
            LostRankError: another rank has ended, or left, or raised an error in this call.
        """
        if self._inside:
            yield
            return
        if self._failed:
            # A rank that waits in the last call for this one must not take messages of the next call.
            self._wait(lambda: all(self._calls == self._errors.get(n, (0,))[0] for n in self._others()))
        self._calls += 1
        if (lost := self._lost()) is not None:
            raise lost
        self._inside, self._failed = True, False
        try:
            yield
        except BaseException as error:
            if _of_collective(error):
                self._wait(lambda: bool(self._gone), _MESSAGE)
                if self._gone and (lost := self._lost()) is not None:
                    raise lost from error
            self._failed = True
            why = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
            self._send({"rank": self._rank, "call": self._calls, "why": why})
            raise
        finally:
            self._inside = False

    def leave(self) -> None:
        """Tells the others that this rank makes no more calls."""
        atexit.unregister(self.leave)
        self._left = True
        self._send({"rank": self._rank, "gone": self._calls})
        for link in list(self._buffers):
            # What the others have sent is still read, else the system would drop what this rank has sent.
            with suppress(OSError):
                link.shutdown(socket.SHUT_WR)

    def _others(self) -> list[int]:
        return [n for n in range(self._size) if n != self._rank and n not in self._gone]

    def _wait(self, condition: Callable[[], bool], seconds: float = 2 * GRACE) -> None:
        with self._changed:
            self._changed.wait_for(condition, seconds)

    def _lost(self) -> LostRankError | None:
        """Returns the error of this call if a rank does not take part in it any more."""
        with self._changed:
            failed = {n: why for n, (call, why) in self._errors.items() if call == self._calls}
            gone = {n: calls for n, calls in self._gone.items() if calls < self._calls}
        if not failed and not gone:
            return None
        rank = next(iter(failed or gone))
        # The first of the others tells the user, unless the rank has done so.
        said = self._rank != (0 if rank else 1)
        if failed:
            return LostRankError(f"rank {rank} failed: {failed[rank]}", said or rank in self._gone)
        why = "has ended without a message; its process was killed, or its machine failed"
        if gone[rank] >= 0:
            calls = f"after {gone[rank]} calls, and this is call {self._calls}"
            why = f"left {calls}; all ranks must make the same"
        return LostRankError(f"rank {rank} {why}", said)

    def _watch(self) -> None:
        since: float | None = None
        while self._buffers or not self._left:
            for key, _ in self._selector.select(0.2):
                self._receive(key.fileobj)  # type: ignore[arg-type]
            lost = self._lost() if self._inside else None
            since = None if lost is None else since or time.monotonic()
            if lost is not None and since is not None and time.monotonic() - since > GRACE:
                if not lost.said:
                    sys.stderr.write(f"triforce-tree, rank {self._rank}: {lost}\n")
                os._exit(1)

    def _receive(self, link: socket.socket) -> None:
        try:
            data = link.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link)
            del self._buffers[link]
            link.close()
            self._take({"rank": self._ranks[link], "gone": -1}, link)
            return
        *lines, self._buffers[link] = (self._buffers[link] + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line), link)

    def _take(self, message: dict[str, Any], link: socket.socket) -> None:
        if self._rank == 0:
            # First, since this process may end when it knows.
            self._send(message, link)
        with self._changed:
            if "why" in message:
                self._errors[message["rank"]] = message["call"], message["why"]
            else:
                self._gone.setdefault(message["rank"], message["gone"])
            self._changed.notify_all()

    def _send(self, message: dict[str, Any], but: socket.socket | None = None) -> None:
        with self._sending:
            for link in list(self._buffers):
                if link is not but:
                    # A connection that is lost is noticed by the thread.
                    with suppress(OSError):
                        link.sendall(json.dumps(message).encode() + b"\n")

    def _connect(self, broadcast: Callable[[Any], Any], local: bool) -> None:
        """Connects rank 0 with the others, which show a secret that they got through the process group."""
        if self._rank:
            address, port, secret = broadcast(None)
            link = socket.create_connection((address, port), _CONNECT)
            link.sendall(bytes.fromhex(secret) + self._rank.to_bytes(4, "big"))
            self._add(link, 0)
            return
        secret = secrets.token_bytes(16)
        address = "127.0.0.1" if local else os.environ.get("MASTER_ADDR", socket.gethostname())
        both = not local and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        where = (address if local else "", 0)
        with socket.create_server(where, family=family, dualstack_ipv6=both, backlog=self._size) as server:
            server.settimeout(_CONNECT)
            broadcast((address, server.getsockname()[1], secret.hex()))
            while len(self._ranks) < self._size - 1:
                link, _ = server.accept()
                link.settimeout(_CONNECT)
                shown = link.recv(20, socket.MSG_WAITALL)
                if secrets.compare_digest(shown[:16], secret):
                    self._add(link, int.from_bytes(shown[16:], "big"))
                else:
                    link.close()

    def _add(self, link: socket.socket, rank: int) -> None:
        self._buffers[link], self._ranks[link] = b"", rank

    def _drop(self) -> None:
        for link in self._ranks:
            link.close()
        self._buffers.clear()
