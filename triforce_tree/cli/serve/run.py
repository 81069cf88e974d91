"""``triforce-tree serve``: an OpenAI-compatible server."""

import argparse
import importlib.util
import os
import socket
import threading
from concurrent.futures import Future

from triforce_tree.cli import options
from triforce_tree.cli.console import screen
from triforce_tree.engine import Engine
from triforce_tree.memory_size import bytes_of

KEY = "TRIFORCE_TREE_API_KEY"
_LAST_PORT = 65535
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(args: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"serve needs {', '.join(missing)}; pip install {' '.join(_NEEDED).replace('_', '-')}"
        )
    # Imported here: the extra may be missing.
    import uvicorn

    from triforce_tree.server.app import Served, create_app
    from triforce_tree.server.graceful import GracefulServer
    from triforce_tree.server.scheduler import Limits

    if args.api_key is not None and not args.api_key.strip():
        # As from an unset variable of the shell, "$KEY": the server would be open to anyone.
        raise ValueError("--api-key is empty; give a key, or leave the option out to let anyone ask")
    name = args.model_name or str(args.target or "embedded")
    limits = Limits(args.max_waiting, args.max_batch, args.max_batch_tokens, args.max_new_tokens)
    key = args.api_key or os.environ.get(KEY) or None
    served = Served(name, key, limits, bytes_of(args.max_body, "--max-body"), tuple(args.allowed_origins))
    loaded: Future[Engine] = Future()
    app = create_app(loaded, served)
    listening = _bound(args.host, args.port)
    port = listening.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning")
    server = GracefulServer(config, app.state.stop, args.shutdown_timeout)

    def load() -> None:
        try:
            engine = options.engine_of(args)
        except BaseException as problem:
            # Known before the server ends, as the command then asks for it.
            loaded.set_exception(problem)
            server.should_exit = True
            return
        loaded.set_result(engine)
        who = "" if key else f", to anyone; --api-key or {KEY} sets a key"
        screen().print(f"serving {name!r} at http://{args.host}:{port}/v1{who}")

    # The port answers meanwhile; /health says when requests do.
    threading.Thread(target=load, name="triforce-tree load", daemon=True).start()
    server.run(sockets=[listening])
    if loaded.done():
        # What has failed ends the command, as anywhere else.
        loaded.result()
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound before anything is loaded, so that a port in use ends in one line."""
    if port > _LAST_PORT:  # the C library would take its last 16 bits
        raise ValueError(f"--port {port} must be at most {_LAST_PORT}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        # Python's own addition names the address once more.
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise ValueError(
            f"the server cannot listen at {host}:{port} ({reason}); give another --port or --host"
        ) from error
