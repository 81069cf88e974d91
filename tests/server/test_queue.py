"""The queue and the batches of the server: joining, waiting, seeds and shutdown."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import triforce_tree
from scripts.checks.served import serving
from tests.support.models.api_cases import CHUNKED, characters
from tests.support.models.ended_early import Fault, wired
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.processes.served import (
    KEY,
    LIMITS,
    NAME,
    PATIENCE,
    PROMPT,
    client_of,
    expected,
    metric,
    released,
    until,
)
from triforce_tree.config import load_arguments
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.scheduler import ClosedError, Limits, QueueFullError, Scheduler, _Batch
from triforce_tree.server.text_stream import ServedText, TextStream


def test_requests_join_a_batch_that_runs(
    client: openai.OpenAI, engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join with any options, except one that allows other drafts, which later ones may overtake."""
    batches: list[int] = []
    began: list[int] = []
    generate, joining, go = engine.generate, Scheduler.joining, threading.Event()

    def counted(prompts: list[list[int]], **how: object) -> object:
        batches.append(len(prompts))
        began.extend(how["max_new_tokens"])
        return generate(prompts, **how)

    def after_all_have_come(self: Scheduler, *args: Any) -> ServedText | None:
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
        if temperature:
            given["extra_body"] = {"speculation": "off"}
        return client.completions.create(model=NAME, **given).choices[0].text

    with ThreadPoolExecutor(5) as pool, released(go):
        first = pool.submit(ask, 40)
        until(lambda: bool(batches))
        other = pool.submit(ask, 5, 1.0)
        until(lambda: metric(url, "waiting_sequences ") == 1)
        others = {n: pool.submit(ask, n) for n in (12, 9, 11)}
        until(lambda: metric(url, "waiting_sequences ") == 4)
        go.set()
        assert first.result(PATIENCE) == texts[40]
        assert {n: answer.result(PATIENCE) for n, answer in others.items()} == {n: texts[n] for n in others}
        other.result(PATIENCE)
    assert batches == [1, 1]
    assert began[0] == 40
    assert sorted(began[1:4]) == [9, 11, 12]
    assert began[4] == 5


def test_a_request_is_overtaken_a_few_times_only(engine: Engine) -> None:
    """At most as many requests as a batch may hold overtake it."""
    scheduler = Scheduler(engine, Limits(waiting=40, batch=3), lambda sequence: None)
    scheduler.close()

    def one(levels: int) -> ServedText:
        settings, speculation = {"max_new_tokens": 4, "temperature": 1.0}, {"levels": levels}
        return ServedText([1, 2], settings, (), lambda piece: None, speculation=speculation)

    queued = [one(1), *(one(2) for _ in range(8))]
    scheduler._closed = False
    scheduler._queue.extend(queued)
    batch = _Batch(scheduler, [one(2)])
    assert scheduler.wanted(batch, lambda *_: True) == 3
    assert scheduler.joining(batch, lambda *_: False) is None
    taken = []
    while (sequence := scheduler.joining(batch, lambda *_: True)) is not None:
        taken.append(sequence)
        batch.running.pop(min(batch.running))
    assert taken == queued[1:4]
    assert list(scheduler._queue) == [queued[0], *queued[4:]]


def test_the_failure_of_a_text_is_not_that_of_others(engine: Engine) -> None:
    """Sequences with a repetition penalty are decoded one by one."""
    settings = {"max_new_tokens": 3, "do_sample": False, "repetition_penalty": 1.1}
    ended: list[ServedText] = []

    def told(piece: str | None) -> None:
        pass

    def fails(piece: str | None) -> None:
        if piece is not None:
            raise RuntimeError("the third fails")

    sequences = [ServedText([1, 2, 3], settings, (), emit) for emit in (told, told, fails, told)]
    scheduler = Scheduler(engine, Limits(batch=4), ended.append)
    scheduler.submit(sequences)
    until(lambda: len(ended) == 4)
    scheduler.close()
    assert [sequence.complete for sequence in sequences] == [True, True, False, True]
    assert [str(sequence.error) for sequence in sequences] == ["None", "None", "the third fails", "None"]
    assert [sequences[n].result("new_tokens") for n in (0, 1, 3)] == [3, 3, 3]


def plain(target: PreTrainedModel) -> Engine:
    return triforce_tree.load(target, tokenizer=characters(), levels=1, **load_arguments(CHUNKED))


def scheduled(engine: Engine, prompts: list[list[int]], limits: Limits) -> list[ServedText]:
    """Has a scheduler decode these prompts, and returns the sequences."""
    ended: list[ServedText] = []
    settings = {"max_new_tokens": 5, "do_sample": False}
    sequences = [ServedText(prompt, settings, (), lambda piece: None) for prompt in prompts]
    scheduler = Scheduler(engine, limits, ended.append)
    scheduler.submit(sequences)
    until(lambda: len(ended) == len(sequences))
    scheduler.close()
    assert (scheduler.running, scheduler.waiting) == (0, 0)
    return sequences


def test_what_a_batch_has_no_memory_for_is_decoded_one_by_one() -> None:
    class Short(nn.Module):
        def __init__(self, activation: nn.Module) -> None:
            super().__init__()
            self.activation = activation

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise torch.OutOfMemoryError(f"no memory for {len(x)} rows")
            result: Tensor = self.activation(x)
            return result

    target, prompts = tiny("llama-gqa"), [prompt_of(60), prompt_of(45), prompt_of(33)]
    mlp = target.model.layers[1].mlp
    mlp.act_fn = Short(mlp.act_fn)
    sequences = scheduled(plain(target), prompts, Limits(batch=3))
    assert [sequence.error for sequence in sequences] == [None] * 3
    texts = [sequence.result("sequences")[0, -5:].tolist() for sequence in sequences]
    assert texts == [greedy(tiny("llama-gqa"), prompt, 5) for prompt in prompts]


def test_an_error_of_every_batch_ends_every_sequence_once() -> None:
    target, wire = wired("llama-gqa")
    engine = plain(target)
    wire.set(Fault(1, SystemExit("a panic of native code")))
    first, second = scheduled(engine, [prompt_of(40), prompt_of(30)], Limits(batch=2))
    assert (first.error, second.error) == (None, None), "each is decoded again"
    wire.set(always)
    first, second = scheduled(engine, [prompt_of(40), prompt_of(30)], Limits(batch=2))
    assert [str(each.error) for each in (first, second)] == ["SystemExit: a panic of native code"] * 2


def always() -> None:
    raise SystemExit("a panic of native code")


def test_a_client_that_leaves_while_its_prompt_is_read_is_not_in_the_way() -> None:
    target, wire = wired("llama-gqa")
    engine, text, ended = plain(target), prompt_of(120), list[ServedText]()
    settings = {"max_new_tokens": 5, "do_sample": False}
    leaving, *others = (
        ServedText(prompt, settings, (), lambda piece: None) for prompt in (text, text[:90], text[:100])
    )
    wire.set(lambda: setattr(leaving, "cancelled", True))
    scheduler = Scheduler(engine, Limits(batch=3), ended.append)
    scheduler.submit([leaving])
    until(lambda: len(ended) == 1)
    wire.set()
    scheduler.submit(others)
    until(lambda: len(ended) == 3)
    scheduler.close()
    assert leaving.cut
    assert [each.error for each in ended] == [None] * 3
    for each in others:
        new = each.result("sequences")[0, -5:].tolist()
        assert new == greedy(tiny("llama-gqa"), each.prompt, 5)


def test_sequences_one_by_one_have_outputs_of_their_own(engine: Engine) -> None:
    settings = {"max_new_tokens": 3, "do_sample": False, "repetition_penalty": 1.1}
    ended: list[ServedText] = []
    sequences = [ServedText([1, 2, n], settings, (), lambda piece: None) for n in (3, 4)]
    scheduler = Scheduler(engine, Limits(batch=2), ended.append)
    scheduler.submit(sequences)
    until(lambda: len(ended) == 2)
    scheduler.close()
    for sequence in sequences:
        alone = engine.generate(sequence.prompt, **settings)
        assert sequence.output is not None
        assert sequence.output.sequences.equal(alone.sequences)
        assert (sequence.result("new_tokens"), sequence.result("reused_tokens")) == (3, 0)


def test_a_queue_holds_those_who_wait_alone(engine: Engine) -> None:
    """Requests of disconnected clients leave the queue, and their end is reported once."""
    ended: list[ServedText] = []
    scheduler = Scheduler(engine, Limits(waiting=2), ended.append)
    told: list[ServedText] = []
    begun, go, generate = threading.Event(), threading.Event(), engine.generate

    def one() -> ServedText:
        sequence = ServedText([1, 2], {"max_new_tokens": 2, "do_sample": False}, (), lambda piece: None)
        sequence.emit = lambda piece: told.append(sequence) if piece is None else None
        return sequence

    def held(*args: Any, **how: Any) -> Any:
        begun.set()
        go.wait(PATIENCE)
        return generate(*args, **how)

    with released(go), pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "generate", held)
        first, gone, other = one(), [one(), one()], [one(), one()]
        scheduler.submit([first])
        assert begun.wait(PATIENCE)
        scheduler.submit(gone)
        with pytest.raises(QueueFullError):
            scheduler.submit(other)
        for sequence in gone:
            sequence.cancelled = True
        scheduler.submit(other)
        assert told == ended == gone
        go.set()
        until(lambda: len(told) == 5)
        scheduler.close()
    assert [sequence.complete for sequence in (first, *gone, *other)] == [True, False, False, True, True]
    with pytest.raises(ClosedError):
        scheduler.submit([one()])


def test_seeded_texts_are_those_of_a_lone_request(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for sequences of one batch, and for those that join a batch without seeds early or late."""

    def ask(seed: int | None, tokens: int = 30) -> str:
        given = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 1.1}
        return client.completions.create(model=NAME, **given, seed=seed).choices[0].text

    alone = {seed: ask(seed) for seed in (1, 2, 3)}
    assert len(set(alone.values())) == 3
    put, passes, go = TextStream.put_tokens, [0], threading.Event()
    batches: list[int] = []

    def slowly(stream: TextStream, value: Any) -> bool:
        passes[0] += 1
        if passes[0] > 3:
            go.wait(PATIENCE)
        return put(stream, value)

    joining, taken = Scheduler.joining, []

    def counted(self: Scheduler, batch: _Batch, *args: Any) -> ServedText | None:
        sequence = joining(self, batch, *args)
        if sequence is not None:
            batches.append(len(batch.running))
            taken.append(sequence.seed)
        return sequence

    monkeypatch.setattr(TextStream, "put_tokens", slowly)
    monkeypatch.setattr(Scheduler, "joining", counted)
    with ThreadPoolExecutor(4) as pool, released(go):
        first = pool.submit(ask, None, 60)
        until(lambda: passes[0] > 3)
        answers = {seed: pool.submit(ask, seed) for seed in (1, 2, 3)}
        until(lambda: metric(url, "waiting_sequences ") == 3)
        go.set()
        assert {seed: answer.result(PATIENCE) for seed, answer in answers.items()} == alone
        first.result(PATIENCE)
    assert sorted(taken) == [1, 2, 3]
    assert max(batches) >= 2
    together = client.completions.create(
        model=NAME, prompt=[PROMPT, "A list comprehension"], max_tokens=30, temperature=1.1, seed=2
    )
    assert together.choices[0].text == alone[2]


def test_a_full_queue_says_when_to_ask_again(client: openai.OpenAI, engine: Engine, url: str) -> None:
    go, generate = threading.Event(), engine.generate
    refused = metric(url, 'sequences_total{outcome="refused"}')
    with ThreadPoolExecutor(2) as pool, released(go), pytest.MonkeyPatch.context() as patched:

        def held(*args: Any, **how: Any) -> Any:
            go.wait(PATIENCE)
            return generate(*args, **how)

        patched.setattr(engine, "generate", held)
        given = {"model": NAME, "max_tokens": 2, "temperature": 0}
        first = pool.submit(client.completions.create, prompt=PROMPT, **given)
        until(lambda: metric(url, "running_sequences ") == 1)
        others = pool.submit(client.completions.create, prompt=["a"] * 4, **given)
        until(lambda: metric(url, "waiting_sequences ") == 4)
        with pytest.raises(openai.RateLimitError, match="at most 4 requests wait; try again later") as raised:
            client.completions.create(prompt=PROMPT, **given)
        assert raised.value.response.headers["retry-after"] == "1"
        go.set()
        assert len(others.result(PATIENCE).choices) == 4
        first.result(PATIENCE)
    assert metric(url, 'sequences_total{outcome="refused"}') == refused + 1


@pytest.mark.parametrize("seconds", [1, PATIENCE])
def test_a_shutdown_lets_texts_end_or_tells_their_clients(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    put, leaving, ends = TextStream.put_tokens, threading.Event(), seconds == PATIENCE
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 200, "temperature": 0}

    def waits(stream: TextStream, value: Any) -> bool:
        # The text begins before the shutdown, and would end after it, or after its time limit.
        if stream.text:
            leaving.wait(PATIENCE)
            if not ends:
                until(stream.wants_end)
        return put(stream, value)

    monkeypatch.setattr(TextStream, "put_tokens", waits)
    with released(leaving), ThreadPoolExecutor(1) as pool:
        with serving(create_app(engine, Served(NAME, KEY, LIMITS)), seconds) as (url, server):
            client = client_of(url)
            stream = iter(client.completions.create(**asked, stream=True))
            text = [next(stream).choices[0].text for _ in range(2)]
            whole = pool.submit(client.completions.create, **{**asked, "max_tokens": 5})
            until(lambda: metric(url, "sequences_total") + metric(url, "waiting_sequences ") > 0)
            server.should_exit = True
            leaving.set()
            if ends:
                text += [choice.text for chunk in stream for choice in chunk.choices]
                assert "".join(text) == expected(engine, PROMPT, 200)
                assert len(whole.result(PATIENCE).choices) == 1
            else:
                with pytest.raises(openai.APIError, match="the server is shutting down"):
                    list(stream)
                with pytest.raises(openai.InternalServerError, match="shutting down") as raised:
                    whole.result(PATIENCE)
                assert raised.value.status_code == 503
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_requests_before_the_model_is_loaded(engine: Engine) -> None:
    loaded: Future[Engine] = Future()
    with serving(create_app(loaded, Served(NAME, KEY, LIMITS))) as (url, _):
        client = client_of(url)
        assert [model.id for model in client.models.list()] == [NAME]
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
        with pytest.raises(openai.InternalServerError, match="is being loaded; ask again") as raised:
            client.completions.create(**asked)
        assert raised.value.status_code == 503
        assert raised.value.response.headers["retry-after"]
        health = client.with_options(base_url=url)
        with pytest.raises(openai.InternalServerError) as raised:
            health.get("/health", cast_to=object)
        assert raised.value.body == {"status": "loading", "reason": "the model is being loaded"}
        loaded.set_result(engine)
        assert health.get("/health", cast_to=object) == {"status": "ok"}
        assert client.completions.create(**asked).choices[0].text == expected(engine, PROMPT, 3)


def test_metrics_of_a_request(client: openai.OpenAI, url: str) -> None:
    names = [
        "prompt_tokens_total", "new_tokens_total", 'sequences_total{outcome="ended"}', "queue_seconds_count",
        "first_token_seconds_count", "sequence_seconds_count", "token_seconds_count",
    ]  # fmt: skip
    before = {name: metric(url, name) for name in names}
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    until(lambda: metric(url, names[-1]) > before[names[-1]])
    grown = {name: metric(url, name) - before[name] for name in names}
    assert answer.usage is not None
    assert grown == dict(zip(names, [answer.usage.prompt_tokens, 12, 1, 1, 1, 1, 1], strict=True))
    assert metric(url, "sequence_seconds_sum") > metric(url, "first_token_seconds_sum") > 0
