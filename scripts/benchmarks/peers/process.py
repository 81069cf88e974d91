"""An engine in a process of its own."""

import json
import os
import subprocess
import tempfile
from dataclasses import asdict
from typing import Any

from scripts.benchmarks.common.results import ROOT
from scripts.benchmarks.peers.protocol import Answer, Load, Request

# Characters of a process's last output that an error quotes.
_QUOTED = 300


class EngineError(RuntimeError):
    """An engine could not do what was asked; the message says why."""


class EngineProcess:
    """Starts an engine and speaks with it.

    Args:
        name: of the engine.
        python: the interpreter that has its packages.
        load: what it loads.

    Attributes:
        load_seconds: that the engine took for it, after its process had started.
        versions: of its packages.

    Raises:
        EngineError: the engine is not installed, or cannot load this.
    """

    def __init__(self, name: str, python: str, load: Load) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                [python, "-m", "scripts.benchmarks.peers.child", name],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, text=True,
                encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise EngineError(f"{python} cannot be started: {error.strerror}") from error
        try:
            ready = self._ask(asdict(load))
        except EngineError:
            self.close()
            raise
        self.load_seconds: float = ready["load_seconds"]
        self.versions: dict[str, str] = ready["versions"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, request: Request) -> Answer:
        """Returns the answer to a request.

        Raises:
            EngineError: it failed.
        """
        return Answer(**self._ask(asdict(request)))

    def close(self) -> None:
        """Ends the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, words: dict[str, Any]) -> dict[str, Any]:
        into, out = self._process.stdin, self._process.stdout
        assert into is not None
        assert out is not None
        try:
            into.write(json.dumps(words) + "\n")
            into.flush()
            line = out.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last = " ".join(self._log.read().split())[-_QUOTED:]
            raise EngineError(f"the process of {self._name} ended with code {code}: {last}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise EngineError(told["error"])
        return told
