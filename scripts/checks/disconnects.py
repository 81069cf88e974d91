"""Sends many requests to a server, some of whose clients leave early, and looks for what is not given back.

Usage: python -m scripts.checks.disconnects [requests] [clients]

It prints one line of JSON: outcomes, resident bytes, open files, and seconds.

The server decodes with the embedded pair on the CPU. Whole texts must equal those of lone requests. After
each half of the requests nothing runs or waits, and after the second one memory and open files are as after
the first. Memory is what remains after the allocator has given back what it keeps for later.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

import triforce_tree
from scripts.checks.served import serving
from triforce_tree.bench.texts import pydoc_text, surrounding
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits

_NAME, _PATIENCE = "pair", 300.0
# Tokens of the prompts, several chunks of a prefill among them, and numbers of new tokens.
_LENGTHS, _NEW = (5, 40, 90, 200, 700), (1, 6, 24)
# The most bytes and files that the process may have more than after the first half. Without a leak, memory
# differs by up to 100 MB from one look to the next, and files by the connections that are kept open.
_MORE_BYTES, _MORE_FILES = 256 * 2**20, 50


@dataclass
class Report:
    """What a run has found.

    Attributes:
        outcomes: number of requests by outcome: whole, wrong, left, refused or failed.
        bytes: resident bytes of the process after each half of the requests.
        files: open files at these times.
        idle: whether nothing ran or waited then.
        seconds: of all requests.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
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
        if self.files[-1] - self.files[0] > _MORE_FILES:
            found.append(f"open files grew from {self.files[0]} to {self.files[-1]}")
        return found if self.idle else [*found, "sequences run or wait although all clients have left"]

    def look(self) -> None:
        """Records memory and open files."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.files.append(len(os.listdir("/proc/self/fd")))


def run(engine: Engine, requests: int, clients: int, seed: int = 0) -> Report:
    """Sends requests from several clients at a time; about half of the clients leave before the end."""
    assert engine.tokenizer is not None
    text = surrounding(engine.tokenizer, pydoc_text(), 4 * sum(_LENGTHS), "the check")
    prompts = [text[n * length : (n + 1) * length] for length in _LENGTHS for n in range(3)]
    alone = {
        (number, new): engine.generate([prompt], max_new_tokens=new, do_sample=False).text
        for number, prompt in enumerate(prompts) for new in _NEW
    }  # fmt: skip
    report = Report()

    async def one(client: aiohttp.ClientSession, draw: random.Random) -> str:
        number, new = draw.randrange(len(prompts)), draw.choice(_NEW)
        body = {
            "model": _NAME, "prompt": prompts[number], "max_tokens": new, "temperature": 0,
            "user": f"user {draw.randrange(5)}", "stream": draw.random() < 0.7,
        }  # fmt: skip
        patience = draw.choice([_PATIENCE, _PATIENCE, draw.uniform(0, 0.3)])
        pieces = draw.choice([10**6, 10**6, draw.randrange(4)])
        try:
            async with asyncio.timeout(patience):
                async with client.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        return "refused" if answer.status in (429, 503) else "failed"
                    if body["stream"]:
                        return await _read(answer, pieces, alone[number, new])
                    return _judged((await answer.json())["choices"][0]["text"], alone[number, new])
        except TimeoutError:
            return "left"

    async def some(client: aiohttp.ClientSession, draw: random.Random, numbers: Iterator[int]) -> None:
        for _ in numbers:
            report.outcomes[await one(client, draw)] += 1

    async def busy(client: aiohttp.ClientSession) -> bool:
        async with client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        names = ("triforce_tree_running_sequences ", "triforce_tree_waiting_sequences ")
        return any(float(line.split()[1]) for line in lines if line.startswith(names))

    async def everyone(url: str) -> None:
        draws = [random.Random(f"{seed} {n}") for n in range(clients)]
        async with aiohttp.ClientSession(base_url=url, timeout=aiohttp.ClientTimeout(_PATIENCE)) as client:
            for numbers in (iter(range(requests // 2)), iter(range(requests // 2, requests))):
                await asyncio.gather(*(some(client, draw, numbers) for draw in draws))
                last = time.monotonic() + _PATIENCE
                while (waits := await busy(client)) and time.monotonic() < last:
                    await asyncio.sleep(0.05)
                report.idle &= not waits
                report.look()

    app = create_app(engine, Served(_NAME, limits=Limits(waiting=4 * clients, new_tokens=max(_NEW))))
    with serving(app, patience=_PATIENCE) as (url, _):
        start = time.monotonic()
        asyncio.run(everyone(url))
        report.seconds = time.monotonic() - start
    return report


async def _read(answer: aiohttp.ClientResponse, pieces: int, expected: str) -> str:
    """Reads a stream up to so many events, and judges its text if it was read to its end."""
    text = ""
    async for read in answer.content:
        line = read.decode().rstrip()
        if line == "data: [DONE]":
            return _judged(text, expected)
        if line.startswith("data: "):
            if not pieces:
                return "left"
            pieces -= 1
            event = json.loads(line[6:])
            if "error" in event:
                return "failed"
            text += "".join(choice["text"] for choice in event["choices"])
    return "wrong"


def _judged(text: str, expected: str) -> str:
    return "whole" if text == expected else "wrong"


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
