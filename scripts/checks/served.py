"""Runs a server in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from triforce_tree.server.graceful import GracefulServer


@contextmanager
def serving(app: Starlette, seconds: int = 5, patience: float = 60.0) -> Iterator[tuple[str, GracefulServer]]:
    """Inside, the application answers at the address.

    Args:
        seconds: that running texts have at the end.
        patience: seconds in which the server must start, and end.

    Raises:
        RuntimeError: it does not start or end in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = GracefulServer(uvicorn.Config(app, log_level="error"), app.state.stop, seconds)
        thread = threading.Thread(target=lambda: server.run(sockets=[free]), daemon=True)
        thread.start()
        end = time.monotonic() + patience
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the server has not started within {patience:g} seconds")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join(patience)
            if thread.is_alive():
                raise RuntimeError(f"the server has not ended within {patience:g} seconds")
