"""Several processes that know each other, as torchrun starts them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FORKED = Path(__file__).with_name("forked_ranks.py")
# Seconds that processes may take on a busy machine; those that wait for each other for ever are ended.
PATIENCE = 240


class Ended(NamedTuple):
    """What one rank left behind."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds the package and keeps to one core."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ranks_of(words: Sequence[str], size: int = 2) -> list[Ended]:
    """Run as many processes of ``python words...`` to their end; none is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(FORKED), str(size), folder, *words],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = launcher.communicate(timeout=PATIENCE)
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        assert launcher.returncode == 0, errors
        wrote = Path(folder)
        return [
            Ended(code, (wrote / f"{rank}.out").read_text(), (wrote / f"{rank}.err").read_text())
            for rank, code in enumerate(json.loads((wrote / "codes.json").read_text()))
        ]
