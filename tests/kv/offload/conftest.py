"""Settings under which caches of a few tokens behave like large ones."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.models.offloaded_cases import PIECE
from triforce_tree.kv.offload import host_store
from triforce_tree.planning import memory_plan
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.planning.pass_time import HostKV


@pytest.fixture(autouse=True)
def _small_eviction_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens leave the device window 16 at a time."""
    monkeypatch.setattr(host_store, "EVICTED_TOGETHER", 16)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans cut short sequences into small pieces, some of which are resident."""
    decide = memory_plan.plan
    split: dict[str, Any] = {"resident_bytes": 3 * PIECE, "piece_bytes": PIECE, "buffers": 3}

    def plan(*args: Any) -> MemoryPlan:
        made = decide(*args)
        if made.offload is None:
            return made
        # The whole of so short a sequence would be resident, which leaves no share to the CPU.
        on_host = HostKV(1, 0, made.machine.bus, made.machine.host_attention)
        split["host_share"], split["plain_host_share"] = on_host.share(5), on_host.share(1)
        return replace(made, offload=replace(made.offload, **split), host={"KV": 1})

    monkeypatch.setattr(memory_plan, "plan", plan)
