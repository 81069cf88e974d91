"""Processes of one process group, as torchrun starts them."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
FORKED = Path(__file__).with_name("forked_ranks.py")
# Seconds that processes may take on a busy machine; a deadlock is ended after these.
PATIENCE = 240


class Ended(NamedTuple):
    """Exit code and output of one rank."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that finds the package and ``tests``, and uses one core."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


class _Launcher:
    """A process that has done the slow imports, and forks for each job; see ``forked_ranks``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(FORKED)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def run(self, job: dict[str, Any]) -> str:
        """Returns the answer, empty if the launcher has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self.end()
            raise TimeoutError(f"{job['command']} did not end in {PATIENCE} seconds")
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Kills it and all processes that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _launcher.cache_clear()


@cache
def _launcher() -> _Launcher:
    return _Launcher()


def ranks_of(command: Sequence[str], size: int = 2) -> list[Ended]:
    """Runs ``size`` processes of ``python command...`` to their end."""
    with tempfile.TemporaryDirectory() as folder:
        answer = _launcher().run({"size": size, "folder": folder, "command": list(command)})
        assert answer == "done", answer
        output = Path(folder)
        return [
            Ended(code, (output / f"{rank}.out").read_text(), (output / f"{rank}.err").read_text())
            for rank, code in enumerate(json.loads((output / "codes.json").read_text()))
        ]


def results_of(script: str, job: str, folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """Returns what each rank of a script beside this one writes about a job."""
    ranks = ranks_of([str(FORKED.with_name(script)), job, str(folder)], size)
    assert [rank.code for rank in ranks] == [0] * size, ranks
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
