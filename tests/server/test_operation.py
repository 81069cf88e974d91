"""The warm-up, the log and the metrics of a server."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import pytest

from scripts.checks.served import serving
from tests.support.processes.served import KEY, NAME, PATIENCE, PROMPT, client_of, metric, until
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.metrics import Metrics, Totals, log_throughput, throughput
from triforce_tree.server.scheduler import Limits, Scheduler
from triforce_tree.server.text_stream import ServedText


def health(url: str) -> tuple[int, dict[str, str]]:
    try:
        with urlopen(f"{url}/health", timeout=PATIENCE) as reply:
            return reply.status, json.loads(reply.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_requests_are_answered_after_the_warm_up(engine: Engine) -> None:
    loaded: Future[Engine] = Future()
    served = Served(NAME, KEY, Limits(new_tokens=100), warm_up=(64, 200))
    with serving(create_app(loaded, served)) as (url, _):
        assert health(url) == (503, {"status": "loading", "reason": "the model is being loaded"})
        seen: list[tuple[int, dict[str, str]]] = []
        refused: list[str] = []
        begins = threading.Thread(target=loaded.set_result, args=[engine])
        # The engine's lock keeps the warm-up from its first step.
        with engine.generation():
            begins.start()
            until(lambda: health(url)[1]["status"] == "preparing")
            try:
                client_of(url).completions.create(model=NAME, prompt=PROMPT)
            except openai.APIStatusError as problem:
                refused.append(problem.message)
        until(lambda: seen.append(health(url)) or seen[-1][0] == 200)
        begins.join(PATIENCE)
        assert seen[-1] == (200, {"status": "ok"})
        [why] = refused
        assert "preparing greedy decoding after a prompt of 64 tokens; ask again" in why
        # Nothing of the warm-up is counted.
        assert metric(url, "new_tokens_total") == metric(url, "sequences_total") == 0
        client_of(url).completions.create(model=NAME, prompt=PROMPT, max_tokens=3)
        assert metric(url, "new_tokens_total") == 3


def test_a_warm_up_that_fails_says_what_to_do(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise MemoryError("too long a prompt")

    monkeypatch.setattr(engine, "generate", fails)
    loaded: Future[Engine] = Future()
    loaded.set_result(engine)
    app = create_app(loaded, Served(NAME, warm_up=(200, 64)))
    with serving(app) as (url, _):
        until(lambda: app.state.problem is not None)
        assert isinstance(app.state.problem, ValueError)
        assert "a prompt of 64 tokens failed (too long a prompt); give --warm-up-tokens" in str(
            app.state.problem
        )
        assert health(url)[0] == 503


def test_a_line_of_throughput_has_the_rates_of_its_interval() -> None:
    before, now = Totals(100, 1000, 500, 40, 100), Totals(2100, 1300, 600, 940, 1300)
    assert throughput(before, now, 10.0, 2, 3) == (
        "prompts 200.0 tokens/s, new 30.0 tokens/s, running 2, waiting 3, "
        "kept prefixes 75 % of prompt tokens, accepted 2.00 tokens a pass"
    )
    assert throughput(now, now, 10.0, 1, 0) == (
        "prompts 0.0 tokens/s, new 0.0 tokens/s, running 1, waiting 0"
    )


@contextmanager
def _kept(logger: str) -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, keep = logging.getLogger(logger), Keep()
    log.addHandler(keep)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(keep)
        log.setLevel(level)


def test_an_idle_server_logs_no_throughput(engine: Engine) -> None:
    metrics = Metrics("model")
    scheduler = Scheduler(engine, Limits(), metrics.ended, metrics.passed)

    async def idle_then_busy() -> int:
        task = asyncio.create_task(log_throughput(metrics, scheduler, every=0.02))
        await asyncio.sleep(0.2)
        idle = len(lines)
        sequence = ServedText([1, 2, 3], {"max_new_tokens": 30, "do_sample": False}, (), lambda text: None)
        scheduler.submit([sequence])
        while sequence.output is None or scheduler.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        return idle

    with _kept("triforce_tree.server") as lines:
        assert asyncio.run(idle_then_busy()) == 0
    scheduler.close()
    assert lines
    assert any("accepted" in line and "prompts 0.0" not in line for line in lines)
    totals = metrics.totals()
    assert (totals.prompt, totals.new, totals.ended_prompts) == (3, 30, 3)
    assert 0 < totals.passes <= 30


def test_tokens_are_counted_as_they_come(client: openai.OpenAI, url: str) -> None:
    """Passes, first tokens and the times between tokens are known before the text ends."""
    names = ["prompt_tokens_total", "new_tokens_total", "sequence_passes_total", "first_token_seconds_count"]
    names += ["inter_token_seconds_count", "sequence_seconds_count"]
    before = {name: metric(url, name) for name in names}
    tokens = 0
    with client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=400, temperature=0, stream=True
    ) as stream:
        next(iter(stream))
        until(lambda: metric(url, "inter_token_seconds_count") > before["inter_token_seconds_count"])
        assert metric(url, "first_token_seconds_count") == before["first_token_seconds_count"] + 1
        assert metric(url, "sequence_seconds_count") == before["sequence_seconds_count"]
        tokens = sum(1 for _ in stream)
    assert tokens
    until(lambda: metric(url, "sequence_seconds_count") > before["sequence_seconds_count"])
    grown = {name: metric(url, name) - before[name] for name in names}
    assert grown["new_tokens_total"] == 400
    assert grown["inter_token_seconds_count"] < 400
    assert 400 / grown["sequence_passes_total"] > 1
