"""Requests to a server at random times, and what is measured of them."""

import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from scripts.benchmarks.common.results import content_at
from scripts.benchmarks.requests import serving
from tests.support.processes.command_line import last_object, run
from triforce_tree.bench import load
from triforce_tree.bench.load import Endpoint, Load, Sent
from triforce_tree.kv.cached_tokens import common_prefix

TEXT = " ".join(f"word{n}" for n in range(5000))
# What the made-up server takes for a first piece of text, and for each further one, which has two tokens.
FIRST, GAP, PIECES = 0.15, 0.05, 4


class MadeUp:
    """A server with a token for each five characters; requests with ``how`` are answered in other ways."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.most = self.running = 0
        routes = [
            Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "made-up"}]})),
            Route("/locked/models", lambda request: JSONResponse({"error": {"message": "no key"}}, 401)),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def complete(self, request: Request) -> Response:
        asked = await request.json()
        chat = "messages" in asked
        prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
        self.prompts.append(prompt)
        how = asked.get("how")
        if how == "refused":
            return JSONResponse({"error": {"message": "the queue is full"}}, 429)
        return StreamingResponse(self._stream(len(prompt), chat, how), media_type="text/event-stream")

    async def _stream(self, characters: int, chat: bool, how: str | None) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps(fields)}\n\n"

        def choice(text: str) -> dict[str, Any]:
            return {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}

        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield event(choices=[choice("")])
            for number in range(PIECES):
                await asyncio.sleep(GAP if number else FIRST)
                yield event(choices=[choice("ab cd")])
                if how == "broken":
                    yield event(error={"message": "an error within the server"})
            if how == "endless":
                await asyncio.sleep(600)
            usage = {"prompt_tokens": characters // 5, "completion_tokens": 2 * PIECES}
            details = {"completion_tokens_details": {"accepted_prediction_tokens": PIECES}}
            yield event(choices=[], usage=usage | details)
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


@contextmanager
def running(made: MadeUp) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(made.app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def made() -> MadeUp:
    return MadeUp()


@pytest.fixture
def url(made: MadeUp) -> Iterator[str]:
    with running(made) as address:
        yield address


def sent_to(url: str, own: Load, **more: Any) -> list[Sent]:
    endpoint = Endpoint(url, "made-up", **more)
    return asyncio.run(load.send(endpoint, load.prompts(TEXT, own.requests, 100, "0"), own))


def longest_common(texts: list[str]) -> int:
    """Returns how many characters the beginnings of two texts share at most."""
    pairs = itertools.combinations([[ord(each) for each in text] for text in texts], 2)
    return max(common_prefix(a, b) for a, b in pairs)


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_those_of_the_server(url: str, chat: bool) -> None:
    sent = sent_to(url, Load(20, 8, requests=3, clients=1), chat=chat)
    assert [each.complete for each in sent] == [True] * 3
    for each in sent:
        assert (each.prompt_tokens, each.new_tokens, each.accepted) == (20, 2 * PIECES, PIECES)
        assert [size for _, size in each.pieces] == [5] * PIECES
        # The first chunk, which has no text, is no first token.
        assert each.pieces[0][0] - each.begun >= FIRST
    found = load.summary(sent)
    assert found["tokens"] == 6 * PIECES
    assert found["accepted_share"] == 0.5
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"], rel=1e-3)
    assert found["first_token_seconds"]["p50"] >= FIRST
    assert found["token_seconds"]["p50"] >= (PIECES - 1) * GAP / (2 * PIECES - 1)
    assert found["gap_seconds"]["p99"] >= GAP


def test_percentiles_are_those_of_the_requests() -> None:
    def one(number: int) -> Sent:
        first = 0.01 * number
        return Sent(5.0, [(5.0 + first, 4), (5.0 + 3 * first, 4)], 6.0, 10, 3)

    found = load.summary([one(number) for number in range(1, 102)])
    # 101 values: the percentiles are values, without interpolation.
    assert found["first_token_seconds"] == {"p50": 0.51, "p90": 0.91, "p99": 1.0}
    assert found["token_seconds"] == {"p50": 0.51, "p90": 0.91, "p99": 1.0}
    assert found["gap_seconds"] == {"p50": 1.02, "p90": 1.82, "p99": 2.0}


def test_clients_ask_one_after_another(made: MadeUp, url: str) -> None:
    sent = sent_to(url, Load(20, 8, requests=7, clients=3))
    assert made.most == 3
    assert len(made.prompts) == 7
    assert sum(each.complete for each in sent) == 7
    assert longest_common(made.prompts) < 5


def test_rates_are_poisson_processes_of_the_seed(url: str) -> None:
    def begun(seed: int) -> list[float]:
        return [each.begun for each in sent_to(url, Load(20, 8, requests=60, rate=80.0, seed=seed))]

    first, again, other = begun(1), begun(1), begun(2)
    between = [b - a for a, b in itertools.pairwise([0.0, *first])]
    # Sixty exponential times: the standard error of their mean is an eighth of it.
    assert 0.6 / 80 < statistics.fmean(between) < 1.6 / 80
    assert statistics.stdev(between) > 0.4 / 80
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 0.3
    assert abs(first[-1] - other[-1]) > 1e-4


def test_failures_are_counted_by_reason(url: str) -> None:
    own = Load(20, 8, requests=2, clients=2)
    refused = load.summary(sent_to(url, own, fields={"how": "refused"}))
    assert (refused["failed"], refused["complete"]) == (2, 0)
    [(reason, count)] = refused["errors"].items()
    assert (count, reason.startswith("status 429"), "the queue is full" in reason) == (2, True, True)
    assert refused["first_token_seconds"] is None
    broken = load.summary(sent_to(url, own, fields={"how": "broken"}))
    assert (broken["failed"], broken["complete"]) == (2, 0)
    [reason] = broken["errors"]
    assert "an error within the server" in reason
    gone = load.summary(sent_to("http://127.0.0.1:9/v1", own))
    assert (gone["failed"], gone["begun"]) == (2, 2)


def test_what_has_not_ended_in_time_is_cut_and_its_tokens_count(made: MadeUp, url: str) -> None:
    start = time.monotonic()
    endless = sent_to(url, Load(20, 8, requests=9, clients=2, seconds=0.8), fields={"how": "endless"})
    assert time.monotonic() - start < 5
    assert [(each.cut, each.complete, len(each.pieces)) for each in endless] == [(True, False, PIECES)] * 2
    [whole] = sent_to(url, Load(20, 8, requests=1, clients=1))
    found = load.summary([*endless, whole])
    assert (found["cut"], found["complete"], found["tokens"]) == (2, 1, 6 * PIECES)


def test_prompts_begin_differently_and_have_the_length() -> None:
    own = list(load.prompts(TEXT[:1000], 20, 5000, "a"))
    assert {len(prompt) for prompt in own} == {5000}
    assert own == list(load.prompts(TEXT[:1000], 20, 5000, "a"))
    others = list(load.prompts(TEXT[:1000], 20, 5000, "b"))
    assert longest_common(own + others) < 5


def test_the_command_measures_a_grid(
    made: MadeUp,
    url: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    out_file = tmp_path / "load.jsonl"
    words = ["bench", "serve", "--url", url, "--clients", "1", "2", "--prompt-tokens", "30", "200"]
    words += ["--requests", "3", "--new-tokens", "8", "--out", str(out_file), "--json", "--field", "how=null"]
    code, out, err = run(capsys, *words)
    assert code == 0
    found = last_object(out)
    assert found.keys() >= {"command", "commit", "date", "hardware"}
    assert [(r["clients"], r["prompt_tokens"], r["complete"]) for r in found["rows"]] == [
        (1, 30, 3), (2, 30, 3), (1, 200, 3), (2, 200, 3),
    ]  # fmt: skip
    # The server takes five characters for a token.
    assert [r["median_prompt"] for r in found["rows"]] == [30, 30, 200, 200]
    # The sample, and then as many prompts, all of them different.
    assert len(made.prompts) == 13
    assert len({prompt[:10] for prompt in made.prompts}) == 13
    assert "sk-secret" not in out + err + out_file.read_text()
    assert "first, s: p50" in out_file.with_suffix(".md").read_text()
    kept = [json.loads(line) for line in out_file.read_text().splitlines()[1:]]
    assert [len(record["sent"]) for record in kept] == [3] * 4
    # The same command has nothing left to measure.
    assert run(capsys, *words)[0] == 0
    assert len(made.prompts) == 14


@pytest.mark.release
def test_the_benchmark_of_servers_continues(made: MadeUp, url: str, tmp_path: Path) -> None:
    words = ["--tiny", "--endpoint", f"made-up={url}", "--field", "how=null", "--out", str(tmp_path)]
    assert serving.main(words) == 0
    content = content_at(tmp_path / "serving_cpu.jsonl")
    cells = [(row["part"], row["clients"], row["prompt_tokens"], row["complete"]) for row in content["rows"]]
    assert cells == [("made-up", clients, n, 4 * clients) for n in (200, 600) for clients in (1, 2)]
    assert content["parts"]["made-up"].keys() >= {"command", "commit", "date", "hardware"}
    asked = len(made.prompts)
    assert serving.main(words) == 0
    assert len(made.prompts) == asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "localhost:8000"], "--url 'localhost:8000' is no address"),
        (["--rate", "1", "--pause", "2"], "--pause is for --clients"),
        (["--field", "temperature"], "'temperature' has no value; write NAME=VALUE"),
        (["--rate", "1", "--clients", "2"], "not allowed with argument"),
        (["--url", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1/models does not answer"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    try:
        code, _, err = run(capsys, "bench", "serve", *words)
    except SystemExit as ended:
        code, err = int(str(ended.code)), capsys.readouterr().err
    assert code == 2
    assert said in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "remedy"), [("", "give --url up to /v1"), ("/locked", "set OPENAI_API_KEY")]
)
def test_a_wrong_path_or_key_is_named(
    url: str, capsys: pytest.CaptureFixture[str], path: str, remedy: str
) -> None:
    code, _, err = run(capsys, "bench", "serve", "--url", url.removesuffix("/v1") + path)
    assert code == 2
    assert remedy in err.splitlines()[-1]


def test_a_server_that_refuses_everything_is_a_failure(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bench", "serve", "--url", url, "--field", "how=refused")
    assert code == 2
    assert "status 429" in err.splitlines()[-1]
