"""A server process of its own, and how long it takes to answer beside what others ask."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.support.processes.served import KEY, NAME, PATIENCE, TEMPLATE, until

PAIR = Path(__file__).parents[3] / "triforce_tree" / "pair"
# Seconds that importing libraries takes on a busy machine.
_START = 240
# A message that the template never ends to render; texts on which the tokenizer panics, and never ends.
LOOPS, PANICS, SLOW = "render this for ever", "x" * 200, ("x" * 22 + " ") * 3000
_LOOPING = (
    f"{{% if messages[0].content == '{LOOPS}' %}}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)


def hostile_target(folder: Path) -> Path:
    """Returns the embedded target, with a template and a tokenizer that some messages do not end in."""
    made = folder / "target"
    shutil.copytree(PAIR / "target", made)
    (made / "chat_template.jinja").write_text(_LOOPING + TEMPLATE)
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, split)
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made


class Process:
    """``triforce-tree serve`` that answers requests.

    Args:
        words: of its command line.
        log: file for its stderr.
    """

    def __init__(self, words: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.log = log
        command = [sys.executable, "-m", "triforce_tree", "serve", "--device", "cpu", "--levels", "1"]
        command += ["--model-name", NAME, "--api-key", KEY, "--port", str(self.port), *words]
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr, start_new_session=True
            )
        until(lambda: self._process.poll() is not None or self._status() == 200, _START)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def interrupt(self) -> None:
        """Ctrl-C of a terminal: to all processes of its group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self._process.wait(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def memory(self) -> int:
        """Returns bytes of its own and of the processes that it has started."""
        return sum(self._family().values()) * os.sysconf("SC_PAGE_SIZE")

    def kill_readers(self) -> None:
        """Ends what it has started, as the system does where memory is short."""
        for pid in self._family():
            if pid != self._process.pid:
                os.kill(pid, signal.SIGKILL)

    def _family(self) -> dict[int, int]:
        """Pages in memory, by process."""
        found, pids = {}, [self._process.pid]
        known = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    pages = int((entry / "statm").read_text().split()[1])
                except OSError:  # it has ended
                    continue
                known[int(entry.name)] = int(fields[1]), pages
        while pids:
            pid = pids.pop()
            if pid in known:
                found[pid] = known[pid][1]
            pids += [child for child, (parent, _) in known.items() if parent == pid]
        return found

    def post(self, path: str, body: bytes, key: str | None = KEY) -> tuple[int, dict[str, Any]]:
        """Status and body of a reply."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _status(self) -> int | None:
        time.sleep(0.2)
        try:
            with Health(self.port) as health:
                return health.status
        except OSError:
            return None


class Health:
    """Asks for ``/health`` over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.status = 0

    def __enter__(self) -> "Health":
        self.ask()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self) -> float:
        """Returns seconds until the answer."""
        began = time.monotonic()
        self._connection.request("GET", "/health")
        answer = self._connection.getresponse()
        answer.read()
        self.status = answer.status
        return time.monotonic() - began


@contextmanager
def asking(port: int) -> Iterator[list[float]]:
    """Inside, asks ``/health`` continually; yields the list of the seconds that it takes."""
    took: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        with Health(port) as health:
            took.append(health.ask())
            while not ended.wait(0.005):
                took.append(health.ask())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join(PATIENCE)
