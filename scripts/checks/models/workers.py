"""Processes that try models one after the other: one that hangs or dies ends neither the run nor its rows."""

import gc
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from queue import Empty, Queue
from typing import Any

from scripts.checks.models.outcomes import CRASHES, NOT_BUILT, Row

_START_SECONDS = 600  # to import torch and transformers


@dataclass(frozen=True)
class Job:
    """A feature set of a class, and the paths it is tried on."""

    model_class: str
    model_type: str
    feature_set: str
    paths: tuple[str, ...]

    def row(self, path: str, outcome: str, reason: str = "", features: str = "") -> Row:
        return Row(self.model_type, self.model_class, self.feature_set, path, outcome, reason, features)


def run(
    jobs: Sequence[Job], device: str, workers: int, limit: float, done: Callable[[Job, list[Row]], None]
) -> None:
    """Tries all jobs; ``done`` gets the rows of each, from one thread at a time.

    Args:
        limit: seconds for one path of a model.

    Raises:
        RuntimeError: a process did not start.
    """
    waiting: Queue[Job] = Queue()
    for job in jobs:
        waiting.put(job)
    lock = threading.Lock()
    failed: list[Exception] = []

    def follow() -> None:
        worker = _Worker(device, limit)
        try:
            while not failed:
                rows = worker.rows(job := waiting.get_nowait())
                with lock:
                    done(job, rows)
        except Empty:
            pass
        except Exception as error:
            failed.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(max(1, workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class _Worker:
    """One process, started anew after it died or was ended."""

    def __init__(self, device: str, limit: float) -> None:
        self._device, self._limit = device, limit
        self._process: Any = None
        self._pipe: Connection | None = None

    def rows(self, job: Job) -> list[Row]:
        """Returns the outcome of every path; paths after one that hung or died run in a new process."""
        found: list[Row] = []
        while left := job.paths[len(found) :]:
            pipe = self._started()
            pipe.send((job.model_class, job.feature_set, left))
            for path in left:
                try:
                    answer = pipe.recv() if pipe.poll(self._limit) else None
                except (EOFError, OSError):
                    code = self._ended()
                    found.append(job.row(path, CRASHES, f"the process ended with status {code}"))
                    break
                if answer is None:
                    self.stop()
                    found.append(job.row(path, CRASHES, f"it took more than {self._limit:g} s"))
                    break
                found.append(job.row(path, *answer))
        return found

    def _started(self) -> Connection:
        if self._pipe is None:
            context = mp.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._device), daemon=True)
            self._process.start()
            theirs.close()
            if not self._pipe.poll(_START_SECONDS):
                raise RuntimeError(f"a process did not start within {_START_SECONDS} s")
            self._pipe.recv()
        return self._pipe

    def _ended(self) -> int | None:
        self._process.join(5)
        code: int | None = self._process.exitcode
        self.stop()
        return code

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            assert self._pipe is not None
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, device: str) -> None:
    """The other process: gets a class, a feature set and paths; sends an outcome and a reason for each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Some families print; the last line of the command is JSON.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import torch
    from transformers.utils import logging

    from scripts.checks.models.build import build_varied, features_of, prompt_of
    from scripts.checks.models.classes import families
    from scripts.checks.models.paths import PROMPTS, Trial, said

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    known = families()
    # The engine collects garbage whenever it lets go of a cache, and would look through all modules.
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    while True:
        try:
            name, feature_set, paths = pipe.recv()
        except EOFError:
            return
        outcome, features = None, ""
        try:
            model = build_varied(known[name], feature_set, prompt_of(PROMPTS[0]))
            features = features_of(model)
            trial = Trial(model, device)
        except Exception as error:
            outcome = NOT_BUILT, said(error)
        else:
            if (refusal := trial.refusal()) is not None:
                # The same on every path: the class alone is the reason.
                outcome = (refusal.outcome, refusal.reason)
        for path in paths:
            found = outcome or tuple(asdict(trial.run(path)).values())
            pipe.send((*found, features))
