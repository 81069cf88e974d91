"""What tests ask of a server on a port of this machine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import openai

from triforce_tree.server.scheduler import Limits

KEY, NAME = "sk-test", "pair"
PROMPT = "The import statement is used to bring a module into"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Seconds that a thread may take on a busy machine.
PATIENCE = 60
LIMITS = Limits(waiting=4, batch=3, new_tokens=500)


_clients: list[openai.OpenAI] = []


def client_of(url: str, key: str = KEY) -> openai.OpenAI:
    """A client that is closed after the test."""
    _clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE))
    return _clients[-1]


def close_clients() -> None:
    """Closes all connections: where garbage collection does, their warnings fail any test that runs then."""
    while _clients:
        _clients.pop().close()


def until(reached: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def expected(engine: Any, prompt: str, tokens: int) -> str:
    return str(engine.generate(prompt, max_new_tokens=tokens, do_sample=False).text)


def metric(url: str, name: str) -> float:
    with urlopen(f"{url}/metrics", timeout=PATIENCE) as reply:
        text = reply.read().decode()
    values = [
        line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"triforce_tree_{name}")
    ]
    return sum(map(float, values))


@contextmanager
def released(event: threading.Event) -> Iterator[None]:
    """Nobody waits for the event longer than this lasts."""
    try:
        yield
    finally:
        event.set()
