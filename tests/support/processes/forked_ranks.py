"""Runs scripts as the ranks of one process group, as torchrun would, in forks of this process.

    python tests/support/processes/forked_ranks.py < JOBS

A job is a line of JSON: {"size": 2, "folder": "/tmp/x", "command": ["SCRIPT", "argument"]}, or
["-m", "MODULE", "argument"] for a module. Slow imports are done once, before the forks; they start no thread
and initialise no GPU, neither of which would survive a fork. The folder receives the output of each rank, as
RANK.out and RANK.err, and the exit codes, as codes.json; then a line "done" is printed.
"""

import gc
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from transformers import LlamaForCausalLM  # noqa: F401 - and all that transformers brings with a model

from scripts.inflate import pair  # noqa: F401 - and nearly all else of the package
from triforce_tree import api  # noqa: F401


def run(rank: int, size: int, port: int, folder: Path, command: list[str]) -> int:
    """Runs the script in this process as ``rank``, and returns its exit code."""
    for name, number in (("out", 1), ("err", 2)):
        with (folder / f"{rank}.{name}").open("w") as file:
            os.dup2(file.fileno(), number)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size}
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in {**master, **ranks}.items()})
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    sys.path[0] = str(Path(__file__).parents[3] if module else Path(command[0]).parent)
    code = 0
    try:
        if module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(size: int, folder: Path, command: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gc.freeze()
    started = []
    for rank in range(size):
        if (process := os.fork()) == 0:
            code = 1
            try:
                code = run(rank, size, port, folder, command)
            finally:
                os._exit(code)
        started.append(process)
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    while line := sys.stdin.readline():
        job = json.loads(line)
        main(job["size"], Path(job["folder"]), job["command"])
        sys.stdout.write("done\n")
        sys.stdout.flush()
