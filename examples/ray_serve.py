"""Replicas of the server by Ray Serve, on one machine or on as many as the Ray cluster has.

    pip install '.[server]' 'ray[serve]'
    python examples/ray_serve.py                # two replicas of the embedded pair, one core each
    python examples/ray_serve.py --target FOLDER --draft FOLDER --replicas 4 --gpus 1

Each replica has an engine and a queue of its own, and keeps the texts of its own requests alone: a second
turn is short where it comes to the same replica.
"""

import argparse

try:
    from ray import serve
    from starlette.applications import Starlette
except ImportError as missing:
    raise SystemExit(f"{missing}: pip install '.[server]' 'ray[serve]'") from None

import triforce_tree
from triforce_tree.server.app import Served, create_app


def replicas(args: argparse.Namespace) -> serve.Application:
    """The application of ``triforce-tree serve`` as a deployment; paths must exist on every machine."""

    def app() -> Starlette:
        # Called in each replica's process, where the models are loaded.
        engine = triforce_tree.load(args.target, args.draft)
        return create_app(engine, Served(args.model_name, args.api_key))

    @serve.deployment(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        # The queue is the server's own, which answers 429 beyond it.
        max_ongoing_requests=1000,
    )
    @serve.ingress(app)
    class Replica:
        pass

    return Replica.bind()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or an id; by default the embedded pair")
    parser.add_argument("--draft")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="cores of each replica")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--model-name", default="model", help="what clients call it")
    parser.add_argument("--api-key")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(replicas(options), blocking=True)
