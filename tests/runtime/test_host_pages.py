"""Memory that was never written is committed, and keeps what it holds."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models.program_cases import GREEDY, draft_of, model, program_of
from triforce_tree.decoding import full_cache
from triforce_tree.decoding.choice.stage_costs import measure
from triforce_tree.runtime.devices import commit

BYTES = 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fresh_memory_becomes_resident() -> None:
    # What the allocator gives may have been used before.
    memory = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.uint8)
    before = resident_bytes()
    commit(memory)
    assert resident_bytes() - before > 0.9 * BYTES


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_contents_stay(dtype: torch.dtype, generator: torch.Generator) -> None:
    bits = torch.randint(0, 256, (5 * 4096 + 4,), dtype=torch.uint8, generator=generator)
    memory = bits.clone().view(dtype)
    commit(memory)
    assert torch.equal(memory.view(torch.uint8), bits)


def test_stages_are_measured_on_committed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of a first request would else be those of a cache that is not there."""
    committed: list[int] = []
    monkeypatch.setattr(full_cache, "commit", lambda memory: committed.append(memory.data_ptr()))
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3)
    program.prepare(GREEDY)
    measure(program, program.max_seq_len - 1)
    assert set(committed) == {program.store.memory.data_ptr()}
