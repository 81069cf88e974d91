"""``triforce-tree serve``: an OpenAI-compatible server."""

import argparse
import logging
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

from triforce_tree.cli import options
from triforce_tree.cli.console import screen
from triforce_tree.cli.early import no_listening
from triforce_tree.engine import Engine
from triforce_tree.memory_size import bytes_of

KEY = "TRIFORCE_TREE_API_KEY"


def run(args: argparse.Namespace) -> int:
    # This is imported here, because the extra "server" may not be installed.
    import uvicorn

    from triforce_tree.server.app import Served, create_app
    from triforce_tree.server.graceful import GracefulServer
    from triforce_tree.server.scheduler import Limits

    name = args.model_name or str(args.target or "embedded")
    limits = Limits(
        args.max_waiting, args.max_batch, args.max_batch_tokens, args.max_new_tokens, args.timeout
    )
    key = args.api_key or os.environ.get(KEY) or None
    most = None if args.max_body is None else bytes_of(args.max_body, "--max-body")
    lengths = None if args.warm_up_tokens is None else tuple(filter(None, args.warm_up_tokens))
    served = Served(
        name, key, limits, most, tuple(args.allowed_origins), args.reading_timeout, lengths,
        args.tool_parser, not args.keep_reasoning,
    )  # fmt: skip
    loaded: Future[Engine] = Future()
    app = create_app(loaded, served)
    # The socket was bound before anything was loaded (``cli.early``).
    listening = args.listening
    port = listening.getsockname()[1]
    try:
        listening.listen()
    except OSError as error:  # another process was faster
        raise no_listening(args.host, args.port, error) from error
    config = uvicorn.Config(app, log_config=_log_config(args.log_level))
    server = GracefulServer(config, app.state.stop, args.shutdown_timeout)

    def load() -> None:
        try:
            engine = options.engine_of(args)
        except BaseException as problem:
            # The problem is set before the server ends, because the command then asks for it.
            loaded.set_exception(problem)
            server.should_exit = True
            return
        # Begins to answer, after the warm-up.
        loaded.set_result(engine)
        if app.state.problem is not None:
            server.should_exit = True
            return
        who = "" if key else f", to anyone; --api-key or {KEY} sets a key"
        screen().print(f"serving {name!r} at http://{args.host}:{port}/v1{who}")

    # By default the thread that decodes waits up to 5 ms until the one that answers lets it run Python code
    # again, which is as long as a pass.
    sys.setswitchinterval(0.0005)
    # The port answers meanwhile; /health says when requests do.
    threading.Thread(target=load, name="triforce-tree load", daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        if server.force_exit:
            # A thread that decodes would end by a crash when the interpreter ends.
            sys.stderr.write("triforce-tree: ended at once; texts that were running are cut\n")
            sys.stderr.flush()
            os._exit(130)
    if loaded.done():
        # A failure ends the command, as anywhere else.
        loaded.result()
    if app.state.problem is not None:
        raise app.state.problem
    return 130 if server.interrupted_again else 0


class _Requests(logging.Filter):
    """Leaves out lines of probes, which come every few seconds, unless the level is debug."""

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn logs the client, method, path, HTTP version and status.
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) == 5 else None
        probes = logging.getLogger("uvicorn.access").isEnabledFor(logging.DEBUG)
        return probes or path not in ("/health", "/metrics")


def _log_config(level: str) -> dict[str, Any]:
    """Returns a configuration of Python's logging that writes lines with times to stderr."""
    line = {"format": "%(asctime)s %(levelname)s %(message)s"}
    # uvicorn logs its start and end at level info, which is of use only for finding faults of uvicorn.
    own = "WARNING" if level == "info" else level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "filters": {"requests": {"()": _Requests}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "line"},
            "access": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["requests"]},
        },
        "loggers": {
            "uvicorn": {"handlers": ["stderr"], "level": own, "propagate": False},
            "uvicorn.access": {"handlers": ["access"], "level": level.upper(), "propagate": False},
            "triforce_tree.server": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
        },
    }
