"""Several processes that know each other, as torchrun starts them."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Seconds that processes may take on a busy machine; those that wait for each other for ever are ended.
PATIENCE = 240


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds the package and keeps to one core."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ranks_of(words: Sequence[str], size: int = 2) -> list["subprocess.Popen[str]"]:
    """As many processes of ``python words...``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env=environment(WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def ended(ranks: Sequence["subprocess.Popen[str]"]) -> list[tuple[str, str]]:
    """What each rank wrote to stdout and stderr; none is left behind."""
    try:
        return [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
