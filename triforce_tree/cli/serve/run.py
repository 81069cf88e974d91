"""``triforce-tree serve``: an OpenAI-compatible server."""

import argparse
import importlib.util
import os

from triforce_tree.cli import options
from triforce_tree.cli.console import screen

KEY = "TRIFORCE_TREE_API_KEY"
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
    from triforce_tree.server.scheduler import Limits

    engine = options.engine_of(args)
    name = args.model_name or str(args.target or "embedded")
    limits = Limits(args.max_waiting, args.max_batch, args.max_batch_tokens, args.max_new_tokens)
    key = args.api_key or os.environ.get(KEY) or None
    app = create_app(engine, Served(name, key, limits))
    where = f"http://{args.host}:{args.port}/v1"
    screen().print(
        f"serving {name!r} at {where}" + ("" if key else f", to anyone; --api-key or {KEY} sets a key")
    )
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=5)
    return 0
