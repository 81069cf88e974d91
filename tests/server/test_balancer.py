"""The balancer of ``examples/compose``: nginx with its configuration, before two servers of this machine."""

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request as Asking
from urllib.request import urlopen

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from scripts.checks.served import serving
from tests.support.processes.served import PATIENCE, until

FOLDER = Path(__file__).parents[2] / "examples" / "compose"
NGINX = shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs the program nginx")


class Server:
    """A server that says which one it is, and may not be ready."""

    def __init__(self, name: str) -> None:
        self.name, self.ready, self.asked = name, True, 0
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        self.app.state.stop = lambda: None

    async def answer(self, request: Request) -> Response:
        self.asked += 1
        if not self.ready:
            return JSONResponse({"status": "loading"}, 503)
        body = await request.body()
        if b'"stream"' in body:
            return StreamingResponse(self._pieces(), media_type="text/event-stream")
        return JSONResponse({"name": self.name, "bytes": len(body)})

    async def _pieces(self) -> AsyncIterator[str]:
        for _ in range(3):
            yield "data: x\n\n"
            await asyncio.sleep(0.3)


@pytest.fixture
def servers() -> list[Server]:
    return [Server("1"), Server("2")]


@pytest.fixture
def url(servers: list[Server], tmp_path: Path) -> Iterator[str]:
    text = (FOLDER / "nginx.conf").read_text()
    with ExitStack() as stack:
        for number, server in enumerate(servers, 1):
            address, _ = stack.enter_context(serving(server.app))
            assert f"server-{number}:8000" in text
            text = text.replace(f"server-{number}:8000", address.removeprefix("http://"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        text = text.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace(
            "events {}", f"events {{}}\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;"
        )
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
            text = text.replace("http {", f"http {{\n  {kind}_temp_path {tmp_path}/{kind};", 1)
        text = text.replace("http {", f"http {{\n  access_log {tmp_path}/access.log;", 1)
        (tmp_path / "nginx.conf").write_text(text)
        command = [str(NGINX), "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                until(lambda: process.poll() is None and _listens(port))
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def asked(url: str, prompt: str, **headers: str) -> str:
    """Returns the name of the server that has answered."""
    body = json.dumps({"model": "model", "messages": [{"role": "user", "content": prompt}]}).encode()
    named = {"Content-Type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
    with urlopen(Asking(f"{url}/v1/chat/completions", body, named), timeout=PATIENCE) as reply:
        found = json.loads(reply.read())
    assert found["bytes"] == len(body)
    return str(found["name"])


def test_a_conversation_stays_with_its_server(url: str) -> None:
    names = []
    for number in range(12):
        document = f"Document {number}. " * 5000
        turns = [asked(url, document + "And then? " * turn) for turn in range(4)]
        assert len(set(turns)) == 1
        names.append(turns[0])
    assert set(names) == {"1", "2"}


def test_a_header_names_the_conversation(url: str) -> None:
    names = []
    for number in range(12):
        turns = [asked(url, f"Something else {turn}", x_session_id=f"talk-{number}") for turn in range(4)]
        assert len(set(turns)) == 1
        names.append(turns[0])
    assert set(names) == {"1", "2"}


def test_long_prompts_pass(url: str) -> None:
    assert asked(url, "x" * 5_000_000) in ("1", "2")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_server_that_is_not_ready_is_passed_over(url: str, servers: list[Server], gone: int) -> None:
    servers[gone].ready = False
    other = servers[1 - gone].name
    assert {asked(url, "x", x_session_id=f"talk-{number}") for number in range(12)} == {other}
    assert servers[gone].asked > 0
    servers[1 - gone].ready = False
    with pytest.raises(HTTPError) as refused:
        asked(url, "x")
    refused.value.close()


def test_streams_are_passed_on_at_once(url: str) -> None:
    begun = time.monotonic()
    with urlopen(Asking(f"{url}/v1/completions", b'{"stream": true}'), timeout=PATIENCE) as reply:
        assert reply.readline() == b"data: x\n"
        first = time.monotonic() - begun
        rest = reply.read()
    assert rest.count(b"data: x") == 2
    assert time.monotonic() - begun - first > 0.5


def test_the_files_of_compose_name_what_is_there() -> None:
    base, more = (yaml.safe_load((FOLDER / name).read_text()) for name in ("compose.yaml", "gpu.yaml"))
    assert more["services"].keys() < base["services"].keys()
    for service in base["services"].values():
        if "build" in service:
            assert (FOLDER / service["build"] / "Dockerfile").is_file()
    [mounted] = base["services"]["balancer"]["volumes"]
    assert (FOLDER / mounted.partition(":")[0]).is_file()
