"""Replicas of the server by Ray Serve, on one machine or on as many as the Ray cluster has.

    pip install '.[server]' 'ray[serve]'
    python examples/ray_serve.py                # two replicas of the embedded pair, one core each
    python examples/ray_serve.py --target FOLDER --draft FOLDER --replicas 4 --gpus 1
    python examples/ray_serve.py --route prefix

Each replica has an engine and a queue of its own, and keeps the texts of its own requests alone, so a
conversation should stay with its replica. Ray's routers see to it:

* ``--route session``: clients send the same header x-session-id with each request of a conversation, and a
  consistent hash of it chooses the replica.
* ``--route prefix``: the replica that has read the longest beginning of the prompt is chosen, or the least
  busy one where they differ much. Clients send nothing. A front reads the requests for the router.
"""

import argparse
import json
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

try:
    import aiohttp
    import uvicorn
    from fastapi import FastAPI
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
except ImportError as missing:
    raise SystemExit(f"{missing}: pip install '.[server]' 'ray[serve]'") from None

import triforce_tree
from triforce_tree.server.app import Served, create_app

SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
# Its public name, ray.serve.llm.request_router, can be imported beside vLLM alone.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
)


def made(args: argparse.Namespace) -> Starlette:
    """Returns the application of ``triforce-tree serve``; paths must exist on every machine."""
    engine = triforce_tree.load(args.target, args.draft, advanced={"prefix_cache": args.prefix_cache})
    return create_app(engine, Served(args.model_name, args.api_key, warm_up=None))


def settings(args: argparse.Namespace, router: str) -> dict[str, Any]:
    """Returns the settings of the replicas."""
    return {
        "num_replicas": args.replicas,
        "ray_actor_options": {"num_cpus": args.cpus, "num_gpus": args.gpus},
        # The queue is the server's own, which answers 429 beyond it.
        "max_ongoing_requests": 1000,
        "request_router_config": RequestRouterConfig(request_router_class=router),
    }


def by_session(args: argparse.Namespace) -> serve.Application:
    """Returns replicas behind Ray's proxy, which reads the header."""

    @serve.deployment(**settings(args, SESSION_ROUTER))
    # The function is called in each replica's process, where the models are loaded.
    @serve.ingress(lambda: made(args))
    class Replica:
        pass

    return Replica.bind()


@dataclass
class Asked:
    """A request for a replica. The router reads ``prompt``."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    prompt: Any


def by_prefix(args: argparse.Namespace) -> serve.Application:
    """Returns replicas behind a front, which reads each request and hands it to the router."""

    @serve.deployment(**settings(args, PREFIX_ROUTER))
    class Replica:
        def __init__(self) -> None:
            listening = socket.create_server(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            app = made(args)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            threading.Thread(target=server.run, args=([listening],), daemon=True).start()

        async def answer(self, asked: Asked) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
            timeout = aiohttp.ClientTimeout(total=None)
            async with (
                aiohttp.ClientSession(self._url, timeout=timeout) as session,
                session.request(asked.method, asked.path, headers=asked.headers, data=asked.body) as reply,
            ):
                kept = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
                yield reply.status, {name: reply.headers[name] for name in kept if name in reply.headers}
                async for part in reply.content.iter_any():
                    yield part

    app = FastAPI(openapi_url=None)

    # It forwards bytes, and gets no core of its own: the replicas may have all of them.
    @serve.deployment(ray_actor_options={"num_cpus": 0})
    @serve.ingress(app)
    class Front:
        def __init__(self, replicas: DeploymentHandle) -> None:
            self._replicas = replicas.options(method_name="answer", stream=True)

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def pass_on(self, request: Request) -> Response:
            body = await request.body()
            try:
                given = json.loads(body)
                prompt = given.get("messages") or given.get("prompt")
            except (ValueError, AttributeError):
                # The replica says what is wrong.
                prompt = None
            kept = ("authorization", "content-type")
            headers = {name: value for name, value in request.headers.items() if name in kept}
            path = request.url.path
            parts = self._replicas.remote(Asked(request.method, path, headers, body, prompt or path))
            status, headers = await anext(parts)
            return StreamingResponse(parts, status, headers)

    return Front.bind(Replica.bind())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or an id; by default the embedded pair")
    parser.add_argument("--draft")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--route", choices=("session", "prefix"), default="session")
    parser.add_argument("--prefix-cache", default="4GiB", help="host memory for kept texts of each replica")
    parser.add_argument("--cpus", type=float, default=1, help="cores of each replica")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--model-name", default="model", help="what clients call it")
    parser.add_argument("--api-key")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run({"session": by_session, "prefix": by_prefix}[options.route](options), blocking=True)
