"""The processes that try models. They import this module, so it imports little."""

import os
import time
from typing import Any

import pytest


def test_a_worker_that_dies_or_hangs_ends_neither_the_run_nor_other_rows(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = script("checks.models.workers")
    monkeypatch.setattr(workers, "_serve", _faulty)
    rows: list[Any] = []
    job = workers.Job("LlamaForCausalLM", "llama", "default", ("good", "dies", "hangs", "last"))
    workers.run([job], "cpu", 1, 1.0, lambda job, found: rows.extend(found))
    assert [(row.path, row.outcome) for row in rows] == [
        ("good", "equal"),
        ("dies", "crashes"),
        ("hangs", "crashes"),
        ("last", "equal"),
    ]
    assert "status 7" in rows[1].reason
    assert "more than 1 s" in rows[2].reason


def _faulty(pipe: Any, device: str) -> None:
    pipe.send("ready")
    while True:
        _, _, paths = pipe.recv()
        for path in paths:
            if path == "dies":
                os._exit(7)
            if path == "hangs":
                time.sleep(60)
            pipe.send(("equal", "", ""))
