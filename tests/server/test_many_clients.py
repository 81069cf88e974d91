"""Many clients: a fair queue, a time limit, prompts that are prefilled between passes, clients that leave."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest
from transformers import PreTrainedModel

import triforce_tree
from scripts.checks.many_requests import run
from scripts.checks.served import serving
from tests.support.models.api_cases import CHUNKED, CHUNKED_DRAFTED, characters
from tests.support.models.ended_early import wired
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.recurrent_families import recurrent
from tests.support.processes.processes import environment
from tests.support.processes.served import KEY, NAME, PATIENCE, PROMPT, client_of, released, until
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.errors import LateError
from triforce_tree.server.fair_queue import NEW_TOKEN, FairQueue
from triforce_tree.server.scheduler import Limits, Scheduler
from triforce_tree.server.text_stream import ServedText

GREEDY = {"do_sample": False}


def text_of(client: str, tokens: int = 4, prompt: int = 20) -> ServedText:
    return ServedText(
        prompt_of(prompt), {"max_new_tokens": tokens, **GREEDY}, (), lambda piece: None, client=client
    )


def plain(target: Any) -> Engine:
    return triforce_tree.load(target, tokenizer=characters(), levels=1, **load_arguments(CHUNKED))


def order(limits: Limits, texts: list[ServedText], target: Any = None) -> list[str]:
    """Returns the clients of texts that come at once, in the order in which the texts end."""
    ended: list[ServedText] = []
    scheduler = Scheduler(plain(target or tiny("llama-gqa")), limits, ended.append)
    scheduler.submit(texts)
    until(lambda: len(ended) == len(texts))
    scheduler.close()
    assert all(text.complete for text in ended)
    return [text.client for text in ended]


def test_a_client_with_many_texts_does_not_keep_others_waiting() -> None:
    texts = [*(text_of("many") for _ in range(5)), text_of("one"), text_of("other"), text_of("one")]
    found = order(Limits(batch=1), texts)
    assert sorted(found[:3]) == ["many", "one", "other"]
    assert found[-3:] == ["many"] * 3


def test_clients_share_tokens_and_not_texts() -> None:
    """Three short texts take as many tokens as one long text, with the tokens of prompts."""
    long, short = 31, 3
    assert 10 + NEW_TOKEN * long == 3 * (18 + NEW_TOKEN * short)
    texts = [*(text_of("long", long, 10) for _ in range(2)), *(text_of("short", short, 18) for _ in range(6))]
    assert order(Limits(batch=1), texts) == ["long", *["short"] * 3, "long", *["short"] * 3]


def test_an_idle_client_saves_nothing_up() -> None:
    queue, clients = FairQueue(), [*"aaaaabbb"]
    a1, a2, a3, a4, a5, b1, b2, b3 = texts = [text_of(client, prompt=10) for client in clients]
    queue.extend(texts[:5])
    for text in (a1, a2, a3):
        queue.begin(text)
        queue.ended(text)
    queue.extend([b1, b2, b3])
    assert list(queue) == [a4, b1, a5, b2, b3]
    queue.begin(b1)
    queue.put_back(b1)
    assert list(queue) == [a4, a5, b1, b2, b3]
    for text in list(queue):
        queue.remove(text)
    assert len(queue) == 0
    assert queue._charged == {}, "clients that are gone are forgotten"


def test_the_end_user_or_the_address_is_the_client(client: openai.OpenAI, monkeypatch: Any) -> None:
    found: list[str] = []
    submit = Scheduler.submit

    def seen(self: Scheduler, sequences: list[ServedText]) -> None:
        found.extend(sequence.client for sequence in sequences)
        submit(self, sequences)

    monkeypatch.setattr(Scheduler, "submit", seen)
    given: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    client.completions.create(**given)
    client.completions.create(**given, user="ada")
    client.completions.create(**given, user="ada", extra_body={"safety_identifier": "hash"})
    assert found == ["127.0.0.1", "ada", "hash"]


def test_a_late_text_ends_and_the_others_go_on() -> None:
    """One is late while it runs, and one while it waits; their places are free for the next."""
    ended: list[ServedText] = []
    scheduler = Scheduler(plain(tiny("llama-gqa")), Limits(batch=1, seconds=3), ended.append)
    # Its pieces take longer than the limit, and the first ones come before it.
    first, second = replace(text_of("a", 400), emit=lambda piece: time.sleep(0.05)), text_of("a", 4)
    scheduler.submit([first, second])
    until(lambda: len(ended) == 2)
    third = text_of("a")
    scheduler.submit([third])
    until(lambda: len(ended) == 3)
    scheduler.close()
    assert isinstance(first.error, LateError)
    assert isinstance(second.error, LateError)
    assert first.stream is not None
    assert 0 < first.stream.count < 400
    assert third.complete
    assert third.result("sequences")[0, -4:].tolist() == greedy(tiny("llama-gqa"), third.prompt, 4)


def test_a_late_reply_says_so(engine: Engine) -> None:
    served = Served(NAME, KEY, Limits(new_tokens=3000, seconds=0.3))
    with serving(create_app(engine, served)) as (url, _):
        client = client_of(url)
        given: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 1.5, "max_tokens": 3000}
        with pytest.raises(openai.InternalServerError, match=r"not ended within the 0.3 seconds") as raised:
            client.completions.create(**given)
        assert raised.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"not ended within the 0.3 seconds"):
            list(client.completions.create(**given, stream=True))


def test_a_long_prompt_does_not_stop_a_running_text(monkeypatch: Any) -> None:
    """Between two chunks of the long prompt the running text gets tokens, and a client may leave."""
    target, wire = wired("llama-gqa")
    events: list[str] = []
    engine, ended, go = plain(target), list[ServedText](), threading.Event()
    monkeypatch.setattr("triforce_tree.decoding.chunked_prefill._PAUSE", 0.0)

    def emit(name: str) -> Callable[[str | None], None]:
        return lambda piece: events.append(name)

    running, long, gone = text_of("a", 60), text_of("b", 4, 330), text_of("c", 4, 300)
    running.emit, long.emit = emit("running"), emit("long")
    gone.prompt = gone.prompt[::-1]
    wire.set(lambda: events.append("forward"))
    with released(go):
        scheduler = Scheduler(engine, Limits(batch=3), ended.append)
        running.emit = lambda piece: (events.append("running"), go.wait(PATIENCE))
        scheduler.submit([running])
        until(lambda: "running" in events)
        scheduler.submit([long, gone])
        gone.emit = lambda piece: events.append("gone")
        events.clear()
        go.set()
        until(lambda: events.count("forward") > 12)
        gone.cancelled = True
        until(lambda: len(ended) == 3)
        scheduler.close()
    assert gone.cut
    assert events.count("gone") == 1, "its end alone"
    for text, new in ((running, 60), (long, 4)):
        assert text.result("sequences")[0, -new:].tolist() == greedy(tiny("llama-gqa"), text.prompt, new)
    before = events[: events.index("long")]
    longest = max(map(len, "".join("r" if e == "running" else "f" for e in before).split("r")))
    # A chunk and a pass, each of which is one forward, and another chunk where a text was held back.
    assert longest <= 6, events


ENGINES: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "three levels": (partial(tiny, "llama-gqa"), {"levels": 3, "rounds": 2}),
    "host memory": (partial(tiny, "llama-gqa"), {"offload": True}),
    "one level": (partial(tiny, "llama-gqa"), {"levels": 1}),
    "8 bits": (partial(tiny, "llama-gqa"), {"kv_bits": 8}),
    "windows": (partial(tiny, "gemma3"), {}),
    "recurrent": (partial(recurrent, "qwen3-next"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.1])
@pytest.mark.parametrize("kind", ENGINES)
def test_random_requests_get_the_replies_that_they_get_alone(
    kind: str, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling options, grammars and numbers of choices differ within a batch, and clients leave."""
    seed, (make, options) = random.randrange(2**32), ENGINES[kind]
    monkeypatch.setattr("triforce_tree.decoding.chunked_prefill._PAUSE", pause)
    monkeypatch.setattr("triforce_tree.requests.batch._PATIENCE", 3)
    target, tokenizer = make(), characters()
    target.generation_config.eos_token_id = 63
    arguments = load_arguments({**CHUNKED_DRAFTED, **options})
    engine = triforce_tree.load(target, perturbed(target, 0.05), tokenizer=tokenizer, **arguments)
    # Up to 13 chunks of a prefill.
    report = run(engine, 40, 12, seed, (5, 40, 90, 200))
    assert not {"wrong", "refused", "failed"} & set(report.outcomes), f"{seed=} {report.outcomes}"
    assert report.idle


def test_clients_that_leave_leave_nothing_behind() -> None:
    """In a process of its own, whose memory other tests do not use."""
    requests = 24
    words = [sys.executable, "-m", "scripts.checks.many_requests", str(requests), "12"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert sum(outcomes.values()) == requests
    assert min(outcomes["whole"], outcomes["left"]) > requests // 10
