"""Requests about one document: it is stored once for requests that join, and ``/metrics`` reports this."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scripts.checks.served import serving
from tests.support.processes.served import (
    KEY,
    NAME,
    PATIENCE,
    PROMPT,
    client_of,
    expected,
    metric,
    released,
    until,
)
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits
from triforce_tree.server.text_stream import TextStream

CHUNK, CLIENTS = 32, 4


def test_a_document_is_stored_once_for_clients_that_join(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is full although copies of the document would exceed the limit of tokens."""
    small = engine.with_options(advanced={"prefill_chunk": CHUNK})
    tokenizer = small.tokenizer
    assert tokenizer is not None
    document = " ".join([PROMPT] * 12)
    prompts = [f"{document}\nQuestion {number}:" for number in range(CLIENTS)]
    texts = [expected(small, prompt, 12) for prompt in prompts]
    count = len(tokenizer(prompts[0])["input_ids"])
    shared = len(tokenizer(document)["input_ids"]) // CHUNK * CHUNK
    put, go, passes = TextStream.put_tokens, threading.Event(), 0

    def slowly(stream: TextStream, value: Any) -> bool:
        nonlocal passes
        passes += 1
        if passes == 3:
            go.wait(PATIENCE)
        return put(stream, value)

    monkeypatch.setattr(TextStream, "put_tokens", slowly)
    limits = Limits(batch=CLIENTS, batch_tokens=2 * count, new_tokens=64)
    found: list[tuple[float, float, float]] = []
    with serving(create_app(small, Served(NAME, KEY, limits))) as (url, _):
        client = client_of(url)

        def ask(prompt: str) -> str:
            given = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            return client.completions.create(**given).choices[0].text

        def look(stream: TextStream, value: Any) -> bool:
            names = ("running_sequences ", "kv_stored_tokens ", "kv_shared_tokens ")
            found.append(tuple(metric(url, name) for name in names))
            return put(stream, value)

        with ThreadPoolExecutor(CLIENTS) as pool, released(go):
            first = pool.submit(ask, prompts[0])
            until(lambda: passes >= 3)
            others = [pool.submit(ask, prompt) for prompt in prompts[1:]]
            until(lambda: metric(url, "waiting_sequences ") == CLIENTS - 1)
            monkeypatch.setattr(TextStream, "put_tokens", look)
            go.set()
            answers = [first.result(PATIENCE), *(other.result(PATIENCE) for other in others)]
        assert answers == texts
        running, stored, spared = max(found, key=lambda figures: figures[2])
        assert running == CLIENTS
        assert spared == (CLIENTS - 1) * shared
        assert count <= stored < count + CLIENTS * (CHUNK + 30)
        # The first request reuses the KV cache of a generation before the server started.
        assert metric(url, "reused_tokens_total") == CLIENTS * shared
        assert metric(url, "kv_stored_tokens ") == 0
