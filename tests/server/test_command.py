"""``triforce-tree serve`` as a process."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import openai
import pytest

from tests.support.processes.served import NAME, PATIENCE, PROMPT, client_of, until
from triforce_tree.cli.entry import main

COMMAND = ["serve", "--device", "cpu", "--levels", "1", "--model-name", NAME]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def status(url: str) -> int | None:
    """Returns the status of ``/health`` after a pause, or None if the server does not listen yet."""
    time.sleep(0.2)
    try:
        with urlopen(f"{url}/health", timeout=PATIENCE) as reply:
            return int(reply.status)
    except HTTPError as error:
        with error:
            return error.code
    except URLError:
        return None


def test_the_port_answers_while_the_model_is_loaded_and_texts_end_at_sigterm(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # With several threads on a busy machine a pass could take longer than the time for running sequences.
    own = {**os.environ, "TRIFORCE_TREE_API_KEY": "sk-env", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "triforce_tree", *COMMAND, "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as stderr, subprocess.Popen(command, env=own, stderr=stderr) as process:
        try:
            seen = []
            # On a busy machine the import of transformers takes long.
            until(lambda: process.poll() is not None or seen.append(status(url)) or seen[-1] == 200, 240)
            assert 503 in seen
            for _ in range(2):
                assert status(url) == 200
            with pytest.raises(openai.AuthenticationError):
                client_of(url, "other").models.list()
            stream = client_of(url, "sk-env").completions.create(
                model=NAME, prompt=PROMPT, max_tokens=60, temperature=0, stream=True
            )
            text = [next(stream).choices[0].text]
            process.send_signal(signal.SIGTERM)
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
            assert text + [chunk.choices[0].text for chunk in chunks]
            # uvicorn raises the signal again at its end.
            assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
            said = log.read_text()
            # A line for each request, and none for probes.
            assert '"POST /v1/completions HTTP/1.1" 200' in said
            assert "/health" not in said
        finally:
            process.kill()


def test_a_model_that_cannot_be_loaded_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, "--port", str(free_port()), "--target", "no/where/at/all"]
    assert main(command) not in (0, None)
    said = capsys.readouterr().err
    assert "no/where/at/all" in said
    assert "Traceback" not in said


def test_an_address_that_cannot_be_listened_at_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given, said in (
            (["--port", str(port)], f"the server cannot listen at 127.0.0.1:{port} ("),
            (["--host", "no.such.invalid", "--port", str(port)], f"listen at no.such.invalid:{port} ("),
            (["--port", "70000"], "--port 70000 must be at most 65535"),
            (["--api-key", " "], "--api-key is empty; give a key, or leave the option out"),
        ):
            assert main([*COMMAND, *given]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert said in line
