"""Sends many requests to a server, some of whose clients leave early, and looks for replies that differ from
those of the same requests alone, and for what is not given back.

Usage: python -m scripts.checks.many_requests [requests] [clients]

It prints one line of JSON: outcomes, resident bytes, open files, and seconds.

The server decodes with the embedded pair on the CPU. The requests differ in their prompts, sampling
options, grammars and numbers of choices. After each half of them nothing runs or waits, and after the second
one memory and open files are as after the first. Memory is what remains after the allocator has given back
what it keeps for later.
"""

import asyncio
import ctypes
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

import triforce_tree
from scripts.checks.served import serving
from triforce_tree.bench.texts import pydoc_text, surrounding
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

_NAME, _PATIENCE, _ALL = "pair", 300.0, 10**6
# Tokens of the prompts (several chunks of a prefill among them), and new tokens.
_LENGTHS, _NEW = (5, 40, 90, 200, 700), (1, 6, 24)
# Most different requests, and how often each is sent at least, on average. Each is first sent alone.
_DIFFERENT, _EACH = 50, 4
# Fields of requests, each with the share of requests that have it, and its value.
_FIELDS: list[tuple[float, dict[str, Any]]] = [
    (0.2, {"top_p": 0.8}), (0.2, {"top_k": 7}), (0.1, {"min_p": 0.02}), (0.2, {"frequency_penalty": 0.9}),
    (0.2, {"repetition_penalty": 1.3}), (0.2, {"logit_bias": {"40": 3}}), (0.2, {"logprobs": 2}),
    (0.1, {"echo": True}), (0.2, {"stop": ["e"]}), (0.1, {"guided_regex": "(yes|no) [0-9]{1,4}"}),
    (0.1, {"speculation": {"levels": 1}}), (0.7, {"stream": True}),
]  # fmt: skip
# The text, the reason of the end and the tokens with log-probabilities of each choice.
_Reply = list[tuple[str, str, list[str]]]
# The most bytes and files that the process may have more than after the first half. Without a leak, memory
# differs by up to 100 MB from one look to the next, and files by both ends of the connections that are kept
# open, one for each client.
_MORE_BYTES, _MORE_FILES = 256 * 2**20, 2


@dataclass
class Report:
    """What a run has found.

    Attributes:
        outcomes: number of requests by outcome: whole, wrong, left, refused or failed.
        bytes: resident bytes of the process after each half of the requests.
        files: open files at these times.
        clients: number of clients.
        idle: whether nothing ran or waited then.
        seconds: of all requests.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    clients: int = 0
    idle: bool = True
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Returns what is wrong, in words."""
        found = [
            f"{self.outcomes[kind]} {kind} texts"
            for kind in ("wrong", "refused", "failed")
            if self.outcomes[kind]
        ]
        if self.bytes[-1] - self.bytes[0] > _MORE_BYTES:
            found.append(f"memory grew from {self.bytes[0]:,} to {self.bytes[-1]:,} bytes")
        if self.files[-1] - self.files[0] > _MORE_FILES * self.clients:
            found.append(f"open files grew from {self.files[0]} to {self.files[-1]}")
        return found if self.idle else [*found, "sequences run or wait although all clients have left"]

    def look(self) -> None:
        """Records memory and open files."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir("/proc/self/fd")))


def run(
    engine: Engine, requests: int, clients: int, seed: int = 0, lengths: Sequence[int] = _LENGTHS
) -> Report:
    """Sends requests from several clients at a time; about half of the clients leave before the end.

    Args:
        lengths: tokens of the prompts.
    """
    assert engine.tokenizer is not None
    text = surrounding(engine.tokenizer, pydoc_text(), 4 * sum(lengths), "the check")
    prompts = [text[n * length : (n + 1) * length] for length in lengths for n in range(3)]
    draw, report = random.Random(seed), Report(clients=clients)
    bodies = [_body(draw, prompts) for _ in range(min(_DIFFERENT, requests // _EACH))]

    async def one(client: aiohttp.ClientSession, draw: random.Random, alone: list[_Reply]) -> str:
        number = draw.randrange(len(bodies))
        patience = draw.choice([_PATIENCE, _PATIENCE, draw.uniform(0, 0.3)])
        pieces = draw.choice([_ALL, _ALL, draw.randrange(4)])
        try:
            async with asyncio.timeout(patience):
                reply = await _reply(client, bodies[number] | {"user": f"user {draw.randrange(5)}"}, pieces)
        except TimeoutError:
            return "left"
        return reply if isinstance(reply, str) else "whole" if reply == alone[number] else "wrong"

    async def some(
        client: aiohttp.ClientSession, draw: random.Random, alone: list[_Reply], numbers: Iterator[int]
    ) -> None:
        for _ in numbers:
            report.outcomes[await one(client, draw, alone)] += 1

    async def busy(client: aiohttp.ClientSession) -> bool:
        async with client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        names = ("triforce_tree_running_sequences ", "triforce_tree_waiting_sequences ")
        return any(float(line.split()[1]) for line in lines if line.startswith(names))

    async def everyone(url: str) -> None:
        draws, alone = [random.Random(f"{seed} {n}") for n in range(clients)], list[_Reply]()
        async with aiohttp.ClientSession(base_url=url, timeout=aiohttp.ClientTimeout(_PATIENCE)) as client:
            for body in bodies:
                reply = await _reply(client, body, _ALL)
                if isinstance(reply, str):
                    raise RuntimeError(f"the request {body} alone has {reply}")
                alone.append(reply)
            for numbers in (iter(range(requests // 2)), iter(range(requests // 2, requests))):
                await asyncio.gather(*(some(client, draw, alone, numbers) for draw in draws))
                last = time.monotonic() + _PATIENCE
                while (waits := await busy(client)) and time.monotonic() < last:
                    await asyncio.sleep(0.05)
                report.idle &= not waits
                report.look()

    app = create_app(engine, Served(_NAME, limits=Limits(waiting=8 * clients, new_tokens=max(_NEW))))
    with serving(app, patience=_PATIENCE) as (url, _):
        start = time.monotonic()
        asyncio.run(everyone(url))
        report.seconds = time.monotonic() - start
    return report


def _body(draw: random.Random, prompts: list[list[int]]) -> dict[str, Any]:
    """Returns a random request."""
    body: dict[str, Any] = {
        "model": _NAME, "prompt": draw.choice(prompts), "max_tokens": draw.choice(_NEW),
        "temperature": draw.choice([0, 0, 0.7, 1.2]), "seed": draw.randrange(1000),
    }  # fmt: skip
    if body["temperature"] and draw.random() < 0.3:
        body["n"] = 2
    for share, fields in _FIELDS:
        if draw.random() < share:
            body |= fields
    return body


async def _reply(client: aiohttp.ClientSession, body: dict[str, Any], pieces: int) -> _Reply | str:
    """Returns the reply to a request; or "refused", "failed", or "left" if it has more pieces than these."""
    async with client.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            return "refused" if answer.status in (429, 503) else "failed"
        if "stream" not in body:
            return _read((await answer.json())["choices"])
        choices: list[dict[str, Any]] = []
        async for read in answer.content:
            line = read.decode().rstrip()
            if line == "data: [DONE]":
                return _read(choices)
            if line.startswith("data: "):
                if not pieces:
                    return "left"
                pieces -= 1
                event = json.loads(line[6:])
                if "error" in event:
                    return "failed"
                choices += event["choices"]
    return "failed"


def _read(pieces: list[dict[str, Any]]) -> _Reply:
    """Joins the pieces of each choice."""
    found = []
    for index in sorted({piece["index"] for piece in pieces}):
        own = [piece for piece in pieces if piece["index"] == index]
        tokens = [token for piece in own if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
        found.append(("".join(piece["text"] for piece in own), own[-1]["finish_reason"], tokens))
    return found


def main() -> None:
    given = dict(enumerate(map(int, sys.argv[1:])))
    requests, clients = given.get(0, 10_000), given.get(1, 24)
    report = run(triforce_tree.load(device="cpu"), requests, clients)
    shown = {"outcomes": report.outcomes, "bytes": report.bytes, "files": report.files}
    print(json.dumps({**shown, "seconds": round(report.seconds)}))
    if report.problems:
        sys.exit("; ".join(report.problems))


if __name__ == "__main__":
    main()
