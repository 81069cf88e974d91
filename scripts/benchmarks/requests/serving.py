"""Many clients of a server: how long they wait for the first token and for each further one.

    python -m scripts.benchmarks serving                                   # our server with an inflated pair
    python -m scripts.benchmarks serving --endpoint vllm=http://127.0.0.1:8001/v1    # another one, running
    python -m scripts.benchmarks serving --tiny

Our server runs as ``triforce-tree serve`` in a process of its own. ``--models FOLDER`` keeps the inflated
checkpoints there, for another server to load. Each cell has some clients, who send a request after a random
pause and the next one when it is answered, and prompts of one length. ``--seconds`` bounds a cell: requests
that have not ended by then are cut, and their tokens count. The same command continues where it was ended.
"""

import argparse
import asyncio
import itertools
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from scripts.benchmarks.common.command import device_of, machine_of, parser, results_folder
from scripts.benchmarks.common.results import Record, ResultsFile, settings_of
from scripts.benchmarks.requests.tables import OURS, SERVING_FILE
from scripts.benchmarks.sources.registry import Texts, named
from triforce_tree.bench import load
from triforce_tree.bench.load import Endpoint, Load
from triforce_tree.cli.parsing import field

_TINY = {"clients": [1, 2], "prompt_tokens": [200, 600], "new": 16, "pause": 0.05, "seconds": 20.0}
# Seconds within which a server has to be ready.
_PATIENCE = 1800


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks serving", __doc__)
    made.add_argument("--shape", default="llama-3.1-8b", help="of the target, unless --tiny")
    made.add_argument("--models", type=Path, help="folder of the inflated pair, made if it is not there")
    made.add_argument("--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    made.add_argument("--prompt-tokens", nargs="+", type=int, default=[2048, 16_384, 65_536])
    made.add_argument("--new", type=int, default=128, help="tokens of an answer")
    made.add_argument("--requests", type=int, default=4, help="of each client")
    made.add_argument(
        "--pause", type=float, default=0.25, help="mean seconds before each request of a client"
    )
    made.add_argument("--seconds", type=float, default=60.0, help="most seconds of a cell")
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--text", default="python-topics", help="what prompts are cut from, by name")
    made.add_argument(
        "--serve", default="", metavar="WORDS", help="further options of our server, in one word"
    )
    made.add_argument(
        "--endpoint", action="append", default=[], metavar="NAME=URL",
        help="measure this running server instead of ours; give it again for several",
    )  # fmt: skip
    made.add_argument(
        "--field", action="append", type=field, default=[], metavar="NAME=JSON",
        help="a further field of each request, as in ignore_eos=true",
    )  # fmt: skip
    args = made.parse_args(words)
    if args.tiny:
        vars(args).update(_TINY)
    device = device_of(made, args.tiny)
    path = results_folder(args.out, args.tiny) / SERVING_FILE.format(machine=machine_of(device))
    others = [tuple(each.partition("=")[::2]) for each in args.endpoint]
    if any(not name or not url for name, url in others):
        made.error("--endpoint takes NAME=URL, as in vllm=http://127.0.0.1:8001/v1")
    for name, url in others:
        _measure(path, args, name, url)
    if not others:
        log = path.with_suffix(".log")
        with _models(args) as options, _server(args, options, log) as url:
            _measure(path, args, OURS, url)
    print(f"written: {path}")
    return 0


def _measure(path: Path, args: argparse.Namespace, name: str, url: str) -> None:
    """Measures the cells that the results file lacks."""
    fields = {"temperature": args.temperature, **dict(args.field)}
    plan = {
        "shape": "the embedded pair" if args.tiny else args.shape, "server": name, "fields": fields,
        "pause": args.pause, "seconds": args.seconds, "text": args.text,
        "serve": args.serve if name == OURS else "",
    }  # fmt: skip
    file = ResultsFile(path, name, settings_of(plan, args.seed, args.tiny), _rows)
    endpoint = Endpoint(url, asyncio.run(load.model_of(url, None)), fields=fields)
    [source] = named(args.text)
    text = Texts().read(source)
    for length, clients in itertools.product(args.prompt_tokens, args.clients):
        key = {"prompt_tokens": length, "new_tokens": args.new, "requests": args.requests * clients}
        key |= {"clients": clients, "rate": None}
        if file.find(**key) is not None:
            continue
        # It is answered when requests that were cut have left the server.
        size = asyncio.run(load.characters_per_token(endpoint, text))
        own = Load(**key, pause=args.pause, seconds=args.seconds, seed=args.seed)
        given = load.prompts(text, own.requests, round(size * length), f"{args.seed} {key}")
        found = load.summary(asyncio.run(load.send(endpoint, given, own)))
        file.add(key | found)
        first, token = found["first_token_seconds"], found["token_seconds"]
        shown = f"{found['tokens_per_second']:,.1f} tokens/s"
        shown += "" if first is None else f", first token {first['p50']:.2f} s (p99 {first['p99']:.2f})"
        shown += (
            "" if token is None else f", token {1e3 * token['p50']:.1f} ms (p99 {1e3 * token['p99']:.1f})"
        )
        print(
            f"{name}, {clients} clients, {length:,} tokens: {shown}; of {own.requests} requests "
            f"{found['complete']} complete, {found['cut']} cut, {found['failed']} failed",
            flush=True,
        )


def _rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    return [{"part": part, **sample} for sample in samples]


@contextmanager
def _models(args: argparse.Namespace) -> Iterator[list[str]]:
    """Returns the options of our server that name the models, inside a context in which they exist."""
    if args.tiny:
        yield ["--device", "cpu"]
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.models or Path(temporary)
        if not (folder / "draft" / "config.json").exists():
            command = [sys.executable, "-m", "scripts.inflate", args.shape, str(folder)]
            subprocess.run([*command, "--seed", str(args.seed)], check=True)
        yield ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


@contextmanager
def _server(args: argparse.Namespace, options: list[str], log: Path) -> Iterator[str]:
    """Returns the address of our server, inside a context in which it answers.

    Raises:
        RuntimeError: it has ended, or is not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "triforce_tree", "serve", "--port", str(port), "--model-name", "model"]
    command += ["--max-waiting", "1000", *options, *shlex.split(args.serve)]
    with log.open("wb") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def _wait(health: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end, said = time.monotonic() + _PATIENCE, ""
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with code {process.returncode}; see {log}")
        try:
            with urlopen(health, timeout=10):
                return
        except HTTPError as error:
            with error:
                reason = json.loads(error.read()).get("reason", "")
            if reason != said:
                print(f"{reason} ...", flush=True)
            said = reason
        except URLError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {_PATIENCE} s; see {log}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
