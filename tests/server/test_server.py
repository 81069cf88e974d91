"""The server, asked by OpenAI's own client over HTTP."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import openai
import pytest
import torch
import uvicorn
from transformers import StoppingCriteria, StoppingCriteriaList

import triforce_tree
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import Limits, Scheduler, Sequence, _Batch

KEY, NAME = "sk-test", "pair"
PROMPT = "The import statement is used to bring a module into"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
# Seconds that a thread may take on a busy machine.
PATIENCE = 60
LIMITS = Limits(waiting=4, batch=3, new_tokens=500)


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = triforce_tree.load(device="cpu", levels=2, profile=False)
    assert made.tokenizer is not None
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(create_app(engine, Served(NAME, KEY, LIMITS)), log_level="error")
        )
        thread = threading.Thread(target=lambda: server.run(sockets=[free]))
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{free.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def expected(engine: Engine, prompt: str, tokens: int) -> str:
    return str(engine.generate(prompt, max_new_tokens=tokens, do_sample=False).text)


def metric(url: str, name: str) -> float:
    text = urlopen(f"{url}/metrics").read().decode()
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


def test_completions_are_the_targets_text(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0)
    [choice] = answer.choices
    assert choice.text == expected(engine, PROMPT, 24)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(engine.tokenizer(PROMPT)["input_ids"])
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens < 24


def test_streams_are_the_same_text(client: openai.OpenAI, engine: Engine) -> None:
    stream = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == expected(engine, PROMPT, 24)
    assert sum(map(bool, texts)) > 2
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_chats_take_the_template(client: openai.OpenAI, engine: Engine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    prompt = f"user: {PROMPT}\nassistant:"
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=16, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected(engine, prompt, 16)
    chunks = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=16, temperature=0, stream=True
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_part_of_the_text(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    whole = expected(engine, PROMPT, 60)
    stop = whole[20:26]  # in the middle of words
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": [stop, "\0never"]}
    answer = client.completions.create(**given, stream=stream)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    def texts(**more: object) -> list[str]:
        answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=16, **more)
        return [choice.text for choice in answer.choices]

    once = texts(seed=5, n=3)
    assert once == texts(seed=5, n=3)
    assert len(set(once)) == 3
    assert len(set(texts(n=3))) == 3


def test_logprobs_are_the_targets(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": PROMPT}], max_tokens=6, temperature=0,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the most probable one.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert len(plain.choices[0].logprobs.token_logprobs) == 6


@pytest.mark.parametrize("stop", [None, ["the"]])
def test_streams_have_the_logprobs_of_whole_replies(
    client: openai.OpenAI, engine: Engine, stop: list[str] | None
) -> None:
    """Each token once, in the chunks as they come, for both texts of a request."""
    given = {"model": NAME, "max_tokens": 40, "seed": 3, "n": 2, "temperature": 1.1, "stop": stop}
    chat = {**given, "messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**chat)
    chunks = list(client.chat.completions.create(**chat, stream=True))
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        with_some = [c for c in own if c.logprobs is not None]
        assert len(with_some) > (1 if stop else 2)
        entries = [entry for c in with_some for entry in c.logprobs.content]
        assert choice.logprobs is not None
        assert entries == choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        # Text never comes before its tokens.
        tokens = text = ""
        for c in own:
            tokens += "".join(entry.token for entry in (c.logprobs.content if c.logprobs else []))
            text += c.delta.content or ""
            assert tokens.startswith(text)


def test_logprobs_in_streams_are_those_of_generate(client: openai.OpenAI, engine: Engine) -> None:
    given = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 0}
    chunks = list(client.completions.create(**given, stream=True))
    found = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    expected = engine.generate(PROMPT, max_new_tokens=20, do_sample=False, logprobs=True)
    values = [value for logprobs in found for value in logprobs.token_logprobs]
    assert values == pytest.approx(expected.logprobs[0].tolist(), abs=1e-5)
    texts = [token for logprobs in found for token in logprobs.tokens]
    offsets = [offset for logprobs in found for offset in logprobs.text_offset]
    assert "".join(texts) == expected.text
    assert offsets == [len("".join(texts[:at])) for at in range(len(texts))]


def test_prompts_of_a_list_come_back_in_order(client: openai.OpenAI, engine: Engine) -> None:
    prompts = [PROMPT, "A list comprehension", "Class definitions, like"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=10, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [expected(engine, p, 10) for p in prompts]


@pytest.mark.parametrize(
    "change, status, said",
    [
        ({"model": "other"}, 404, "'other' is not served here; use 'pair'"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 501}, 400, "501 new tokens are more than the 500"),
        ({"prompt": ""}, 400, "empty"),
        ({"extra_body": {"logit_bias": {"5": 1}}}, 400, "logit_bias is not supported"),
        ({"extra_body": {"frequency_penalty": 0.5}}, 400, "frequency_penalty is not supported"),
        ({"prompt": ["a"] * 5}, 429, "at most 4 requests wait"),
    ],
    ids=lambda value: None if isinstance(value, (dict, int)) else str(value)[:20],
)
def test_refusals(client: openai.OpenAI, change: dict[str, object], status: int, said: str) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(**{"model": NAME, "prompt": PROMPT, "max_tokens": 4, **change})
    assert raised.value.status_code == status
    assert said in raised.value.message


def test_a_wrong_key_is_refused(url: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="wrong or missing API key"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()


def test_the_model_is_listed_and_healthy(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert urlopen(f"{url}/health").status == 200


def test_requests_join_a_batch_that_runs(
    client: openai.OpenAI, engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of like settings; one with others waits, and a few may go before it."""
    batches: list[int] = []
    began: list[int] = []
    generate, joining, go = engine.generate, Scheduler.joining, threading.Event()

    def counted(prompts: list[list[int]], **how: object) -> object:
        batches.append(len(prompts))
        began.extend([how["max_new_tokens"]] * len(prompts))
        return generate(prompts, **how)

    def after_all_have_come(self: Scheduler, *args: Any) -> Sequence | None:
        go.wait(PATIENCE)
        taken = joining(self, *args)
        if taken is not None:
            began.append(taken.settings["max_new_tokens"])
        return taken

    def after_all_wait(self: Scheduler, *args: Any) -> int:
        go.wait(PATIENCE)
        return wanted(self, *args)

    wanted = Scheduler.wanted
    monkeypatch.setattr(engine, "generate", counted)
    monkeypatch.setattr(Scheduler, "joining", after_all_have_come)
    monkeypatch.setattr(Scheduler, "wanted", after_all_wait)
    lengths = (40, 12, 9, 11)
    texts = {n: expected(SimpleNamespace(generate=generate), PROMPT, n) for n in lengths}

    def ask(tokens: int, temperature: float = 0) -> str:
        given = {"prompt": PROMPT, "max_tokens": tokens, "temperature": temperature}
        return client.completions.create(model=NAME, **given).choices[0].text

    with ThreadPoolExecutor(5) as pool, released(go):
        first = pool.submit(ask, 40)
        until(lambda: bool(batches))
        other = pool.submit(ask, 5, 1.0)
        until(lambda: metric(url, "waiting ") == 1)
        others = {n: pool.submit(ask, n) for n in (12, 9, 11)}
        until(lambda: metric(url, "waiting ") == 4)
        go.set()
        assert first.result() == texts[40]
        assert {n: answer.result() for n, answer in others.items()} == {n: texts[n] for n in others}
        other.result()
    assert batches == [1, 1]
    assert began[0] == 40
    assert sorted(began[1:4]) == [9, 11, 12]
    assert began[4] == 5


def test_a_request_is_overtaken_a_few_times_only(engine: Engine) -> None:
    """No later than after as many as a batch may hold, and by none that does not fit."""
    scheduler = Scheduler(engine, Limits(waiting=40, batch=3), lambda sequence: None)
    scheduler.close()

    def one(temperature: float) -> Sequence:
        settings = {"max_new_tokens": 4, "seed": None, "temperature": temperature}
        return Sequence([1, 2], settings, (), lambda piece: None)

    queued = [one(0.5), *(one(1.0) for _ in range(8))]
    scheduler._closed = False
    scheduler._queue.extend(queued)
    batch = _Batch(scheduler, [one(1.0)])
    assert scheduler.wanted(batch) == 3
    assert scheduler.joining(batch, lambda prompt, new: False) is None
    taken = []
    while (sequence := scheduler.joining(batch, lambda prompt, new: True)) is not None:
        taken.append(sequence)
        batch.running.pop(min(batch.running))
    assert taken == queued[1:4]
    assert list(scheduler._queue) == [queued[0], *queued[4:]]


def test_a_client_that_leaves_ends_its_text(
    client: openai.OpenAI, engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, left = engine.generate, threading.Event()

    def after_it_has_left(prompts: list[list[int]], **how: Any) -> object:
        [nobody_waits] = how["stopping_criteria"]

        class Waits(StoppingCriteria):
            """The second pass ends when the server knows that the client has left: decoding is faster."""

            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                if left.wait(PATIENCE):
                    until(lambda: nobody_waits.true)
                return nobody_waits(input_ids, scores)

        return generate(prompts, **{**how, "stopping_criteria": StoppingCriteriaList([Waits()])})

    monkeypatch.setattr(engine, "generate", after_it_has_left)
    before, cancelled = metric(url, "new_tokens_total"), metric(url, 'sequences_total{outcome="cancelled"}')
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=500, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    left.set()
    until(lambda: metric(url, 'sequences_total{outcome="cancelled"}') > cancelled)
    until(lambda: not metric(url, "running"))
    assert metric(url, "new_tokens_total") - before < 100
