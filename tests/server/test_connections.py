"""API keys, connections of idle clients, and the replies to internal errors."""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlparse

import openai
import pytest

from scripts.checks.served import serving
from tests.support.processes.served import KEY, LIMITS, NAME, PATIENCE, PROMPT, client_of, until
from triforce_tree.engine import Engine
from triforce_tree.server.app import Served, create_app
from triforce_tree.server.connections import Connection
from triforce_tree.server.graceful import GracefulServer
from triforce_tree.server.replies import ChatReply
from triforce_tree.server.scheduler import Limits

ALL_SIGNS, PAGE = "".join(map(chr, range(33, 127))), "https://example.org"
BODY = json.dumps({"model": NAME, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}).encode()


def asked(url: str, method: str = "GET", path: str = "/v1/models", **headers: str) -> tuple[int, Any, Any]:
    """Returns status, headers and text of a reply."""
    connection = HTTPConnection(urlparse(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "sent", ["Bearer {}", "bearer {}", "BEARER {}", "bEaReR {}", "Bearer   {}", "Bearer {}  ", "Bearer \t{}"]
)
def test_the_scheme_of_a_key_is_read_in_any_case(url: str, sent: str) -> None:
    assert asked(url, Authorization=sent.format(KEY))[0] == 200


@pytest.mark.parametrize(
    "sent",
    ["{}", "Basic {}", "Bearer{}", "Bearer", "Bearer {}x", "Bearer x{}", "Bearer {} {}", "", "Bearer é"],
)
def test_other_keys_are_refused(url: str, sent: str) -> None:
    status, headers, said = asked(url, Authorization=sent.format(KEY, KEY))
    assert status == 401
    assert headers["WWW-Authenticate"] == "Bearer"
    assert json.loads(said)["error"]["message"] == "wrong or missing API key; send Authorization: Bearer KEY"


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "a b", " a", "a\n", "a\tb", "", "a\x7f", "\udcff"])
def test_keys_that_headers_do_not_hold_are_refused_at_start(engine: Engine, key: str) -> None:
    with pytest.raises(
        ValueError, match=r"give one of ASCII letters, digits and signs, without spaces$"
    ) as raised:
        create_app(engine, Served(NAME, key))
    assert not key.strip() or repr(key) not in str(raised.value)


@pytest.fixture(scope="module")
def other_url(engine: Engine) -> Iterator[str]:
    """A server with another key, an allowed origin, and as many new tokens as the context holds."""
    served = Served(NAME, ALL_SIGNS, Limits(new_tokens=10**9), origins=(PAGE,))
    with serving(create_app(engine, served)) as (url, _):
        yield url


def test_keys_of_all_signs_work_from_openais_client(other_url: str) -> None:
    assert client_of(other_url, ALL_SIGNS).models.list().data[0].id == NAME


@pytest.mark.parametrize(
    "path",
    [
        "/docs",
        "/redoc",
        "/openapi.json",
        "/docs/oauth2-redirect",
        "/index.html",
        "/v1",
        "/health/",
        "//health",
        "/x/../health",
    ],
)
def test_all_else_needs_the_key_and_is_not_there(url: str, path: str) -> None:
    assert asked(url, path=path)[0] == 401
    status, _, said = asked(url, path=path, Authorization=f"Bearer {KEY}")
    assert status == 404
    assert json.loads(said)["error"]["message"].startswith("there is no GET ")


def test_pages_of_allowed_origins_read_refusals_and_need_no_key_to_ask_whether_they_may(
    url: str, other_url: str
) -> None:
    how = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    status, headers, _ = asked(other_url, "OPTIONS", "/v1/completions", Origin=PAGE, **how)
    assert status == 200
    assert headers["access-control-allow-origin"] == PAGE
    assert "authorization" in headers["access-control-allow-headers"].lower()
    status, headers, _ = asked(other_url, Origin=PAGE)
    assert status == 401
    assert headers["access-control-allow-origin"] == PAGE
    for address, origin in ((other_url, "https://other.org"), (url, PAGE)):
        _, headers, _ = asked(address, "OPTIONS", "/v1/completions", Origin=origin, **how)
        assert "access-control-allow-origin" not in headers


def test_the_longest_prompt_fits_into_a_body_and_leaves_no_new_token(engine: Engine, other_url: str) -> None:
    most = engine.target.max_positions
    assert most is not None
    client = client_of(other_url, ALL_SIGNS)
    for prompt, tokens in ((PROMPT, most), ([4095] * most, 1)):
        with pytest.raises(openai.BadRequestError, match=f"{most} positions"):
            client.completions.create(model=NAME, prompt=prompt, max_tokens=tokens)
    with pytest.raises(openai.APIStatusError, match=f"more than {64 * most:,} bytes") as raised:
        client.completions.create(model=NAME, prompt="a" * 64 * most, max_tokens=1)
    assert raised.value.status_code == 413


class Peer:
    """A client that uses a plain socket."""

    def __init__(self, url: str) -> None:
        place = urlparse(url)
        self.socket = socket.create_connection((place.hostname, place.port), PATIENCE)

    def closed(self) -> bool:
        """Returns whether the server closes the connection without a reply."""
        try:
            return not self.socket.recv(1000)
        except ConnectionError:
            return True

    def is_cut_after(self, sent: bytes) -> bool:
        """Returns whether the server closes the connection before ``data`` is sent."""
        time.sleep(0.05)
        try:
            self.socket.sendall(sent)
        except ConnectionError:
            return True
        return False


def head(length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


@pytest.fixture(scope="module")
def hasty_server(engine: Engine) -> Iterator[tuple[str, GracefulServer]]:
    """A server with a short limit for idle clients."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Connection, "patience", 0.5)
        with serving(create_app(engine, Served(NAME, KEY, LIMITS))) as made:
            yield made


@pytest.fixture
def hasty(hasty_server: tuple[str, GracefulServer]) -> str:
    return hasty_server[0]


@pytest.mark.parametrize(
    "sent", [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", head(100), head(100) + b'{"model":'],
    ids=["nothing", "a byte", "half a head", "a head", "half a body"],
)  # fmt: skip
def test_silent_connections_are_closed(hasty: str, sent: bytes) -> None:
    peer = Peer(hasty)
    with closing(peer.socket):
        peer.socket.sendall(sent)
        began = time.monotonic()
        assert peer.closed()
        assert time.monotonic() - began > 0.4


def test_connections_that_send_a_byte_now_and_then_are_closed(hasty: str) -> None:
    for start, byte in ((b"GET /health HTTP/1.1\r\nA: ", b"a"), (head(10_000), b" ")):
        peer = Peer(hasty)
        with closing(peer.socket):
            peer.socket.sendall(start)
            until(lambda peer=peer, byte=byte: peer.is_cut_after(byte))


def test_a_client_that_takes_nothing_of_what_it_is_sent_is_cut(
    hasty_server: tuple[str, GracefulServer],
) -> None:
    url, server = hasty_server
    until(lambda: not server.server_state.connections)
    peer = Peer(url)
    with closing(peer.socket):
        # The reply is much larger than the system's socket buffers.
        peer.socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 3000)
        until(lambda: any(each.flow.write_paused for each in server.server_state.connections))
        until(lambda: not server.server_state.connections)


def test_clients_that_take_long_for_good_reasons_are_not_cut(hasty: str) -> None:
    """One client waits for its reply, and one sends a long body slowly but steadily."""
    stream = client_of(hasty).completions.create(
        model=NAME, prompt=PROMPT, max_tokens=500, temperature=1, seed=1, stream=True
    )
    began, count = time.monotonic(), 0
    for _ in stream:
        count += 1
        if time.monotonic() - began < 2:
            time.sleep(0.1)
    assert count > 20
    peer = Peer(hasty)
    with closing(peer.socket):
        peer.socket.sendall(head(len(BODY) + 8000) + BODY)
        for _ in range(8):
            time.sleep(0.15)
            peer.socket.sendall(b" " * 1000)
        assert peer.socket.recv(1000).startswith(b"HTTP/1.1 200 ")


FAULTS: dict[str, Callable[[], BaseException]] = {
    "a value": lambda: ValueError("Block(tokens=(1, 2, 3)) of somebody else"),
    "a key": lambda: KeyError("somebody else"),
    "no Exception": lambda: BaseException("somebody else"),
    "memory": lambda: MemoryError("somebody else"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_errors_are_told_by_an_identifier(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, stream: bool,
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> None:
        raise FAULTS[name]()

    def ask() -> list[str]:
        given = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        if stream:
            return [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True)]
        return [client.completions.create(**given).choices[0].text]

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "triforce_tree.server"):
        patched.setattr(engine, "generate", fails)
        with pytest.raises(openai.APIError) as raised:
            ask()
    check_told(raised.value, caplog)
    assert "".join(ask())


def check_told(problem: openai.APIError, caplog: pytest.LogCaptureFixture) -> None:
    said = str(problem.body)
    assert "else" not in said
    assert "Traceback" not in said
    identifier = said[said.index("error-") :].partition("'")[0]
    [record] = [each for each in caplog.records if identifier in each.getMessage()]
    assert "somebody else" in record.getMessage()
    assert "Traceback" in record.getMessage()
    if isinstance(problem, openai.APIStatusError):
        assert problem.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_a_reply_are_told_by_an_identifier(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("somebody else")

    monkeypatch.setattr(ChatReply, "last" if stream else "whole", fails)
    with caplog.at_level(logging.ERROR, "triforce_tree.server"), pytest.raises(openai.APIError) as raised:
        list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2, stream=stream))
    check_told(raised.value, caplog)
