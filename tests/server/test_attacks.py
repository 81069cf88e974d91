"""Requests that try to stall the server, exhaust its memory or read data of others."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import openai
import pytest

from tests.support.processes.attacked import LOOPS, PANICS, SLOW, Health, Process, asking, hostile_target
from tests.support.processes.served import KEY, NAME, PATIENCE, PROMPT, client_of, until

# Most seconds of a health check during an attack, and without one. On an idle machine it takes below 0.05.
_MOST, _CALM = 0.25, 0.03


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("attacked")
    words = ["--target", str(hostile_target(folder)), "--max-body", "17MiB", "--reading-timeout", "1"]
    made = Process([*words, "--shutdown-timeout", "30"], folder / "log")
    try:
        yield made
    finally:
        made.kill()


def body(**fields: object) -> bytes:
    return json.dumps({"model": NAME, "max_tokens": 4, **fields}).encode()


def message(content: object) -> bytes:
    return body(messages=[{"role": "user", "content": content}])


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def listed(name: str, item: str, count: int) -> bytes:
    """Returns a body whose field ``name`` is a list of ``count`` items and a last one."""
    needed = "" if name in ("prompt", "messages") else '"prompt":"a",'
    return f'{{"model":"{NAME}",{needed}"{name}":[{f"{item}," * count}1]}}'.encode()


_NAMES = ",".join(f'"{number}":1' for number in range(10**6))
# Pairs of a body and a part of the refusal.
ATTACKS: dict[str, tuple[str, bytes, str]] = {
    "messages of ones": (CHAT, listed("messages", "1", 1_200_000), "message 0 of a chat is of type int"),
    "prompts of objects": (TEXT, listed("prompt", "{}", 200_000), "prompt is a list"),
    "stops of lists": (TEXT, listed("stop", "[]", 10**6), "stop is a list"),
    "lists alone": (TEXT, b"[" + b"[]," * 5_400_000 + b"1]", "no JSON object"),
    "an unknown field": (TEXT, listed("unknown", "[]", 5_000_000), "unknown is not supported"),
    "many fields": (TEXT, f'{{"model":"{NAME}","prompt":"a",{_NAMES}}}'.encode(), "0 is not supported"),
    "deep lists": (TEXT, b'{"a":' + b"[" * 16_000_000, "nested too deeply"),
    "many digits": (TEXT, b'{"seed":' + b"9" * 16_000_000 + b"}", "thousands of digits"),
    "a long value": (TEXT, body(prompt="a", stream="a" * 16_000_000), "stream must be true or false"),
    "a long prompt": (TEXT, body(prompt="a b " * 4_000_000), "the prompt of 16,000,000 characters"),
    "escapes": (TEXT, b'{"model":"' + b"\\ud83d" * 2_700_000 + b'"}', "prompt is missing"),
    "half an object": (TEXT, b'{"prompt":"' + b"a" * 16_000_000, "no JSON"),
    "a template's loops": (CHAT, message(LOOPS), "reading this request takes more than 1.0 s"),
    "a regular expression that gives up": (CHAT, message(PANICS), "the tokenizer cannot tokenize this text"),
    "one that goes on": (CHAT, message(SLOW), "reading this request takes more than 1."),
}


@pytest.fixture(scope="module")
def calm(process: Process) -> float:
    """Returns the longest time of some health checks without an attack."""
    with asking(process.port) as took:
        time.sleep(1)
    # If the second part of a reply waited for the first one's acknowledgement, it would take 0.04 s.
    assert sorted(took)[len(took) // 2] < _CALM
    return max(took)


@pytest.fixture
def held(process: Process, calm: float) -> Iterator[None]:
    """Runs health checks while the body of the context attacks the server."""
    with asking(process.port) as took:
        yield
    assert max(took) < _MOST + 2 * calm


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_holds_the_others(process: Process, name: str) -> None:
    path, sent, words = ATTACKS[name]
    memory = process.memory()
    status, answer = process.post(path, sent)
    assert status == 400
    assert words in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300
    # The memory of refused requests is freed.
    assert process.memory() < memory + 2**30
    assert process.post(TEXT, body(prompt=PROMPT, temperature=0))[0] == 200


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("sent", [b"[]," * 5_400_000, b"{"], ids=["long", "no JSON"])
def test_the_key_is_asked_for_before_a_body_is_read(process: Process, sent: bytes) -> None:
    memory = process.memory()
    for key in (None, "other", KEY + "x", ""):
        status, answer = process.post(TEXT, sent, key)
        assert status == 401
        assert answer["error"]["type"] == "authentication_error"
    assert process.memory() < memory + 100 * 2**20


@pytest.mark.usefixtures("held")
def test_chunks_of_one_byte_do_not_hold_the_others(process: Process) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body(prompt="a" * 200_000, stop=1))
    with closing(socket.create_connection(("127.0.0.1", process.port), PATIENCE)) as connection:
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.usefixtures("held")
def test_long_log_probabilities_do_not_hold_the_others(process: Process) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 400, "n": 4, "logprobs": 20, "temperature": 1, "seed": 1}
    status, answer = process.post(TEXT, body(**asked))
    assert status == 200
    assert len(answer["choices"][3]["logprobs"]["tokens"]) == 400


def test_processes_that_read_and_are_ended_are_started_again(process: Process) -> None:
    # A request soon after meets processes that are still ending.
    for _ in range(3):
        process.kill_readers()
        for _ in range(2):
            status, answer = process.post(TEXT, body(prompt=PROMPT, temperature=0))
            assert status == 200, answer


def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_at_once(process: Process) -> None:
    """This is the last test, as it ends the process."""
    stream = client_of(process.url).completions.create(
        model=NAME, prompt=PROMPT, max_tokens=4000, temperature=0, stream=True
    )
    next(stream)
    process.interrupt()
    until(lambda: "waiting up to 30 seconds for 1 running request to end" in process.log.read_text())
    with pytest.raises(ConnectionRefusedError):
        Health(process.port).ask()
    next(stream)
    began = time.monotonic()
    process.interrupt()
    with pytest.raises(openai.APIError, match="the server is shutting down"):
        list(stream)
    assert process.wait() == 130
    assert time.monotonic() - began < 20
    said = process.log.read_text()
    assert "Traceback" not in said.partition("waiting up to")[2]
