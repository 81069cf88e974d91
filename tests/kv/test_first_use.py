"""Before stages are timed, all slots are in memory: a CPU reads pages that were never written too fast."""

import sys
from pathlib import Path

import pytest
import torch

from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("held", [0, None])
def test_fresh_slots_become_resident(bits: int, held: int | None) -> None:
    shape = KVShape(Heads(4, 4, 64, 64))
    store = KVStore([shape] * 8, 1, 1 << 15, torch.device("cpu"), torch.bfloat16, bits=bits)
    size, before = store.memory.nbytes, resident_bytes()
    assert size > 100 << 20  # The allocator takes fresh memory from the system for such sizes.
    store.initialise([held])
    assert resident_bytes() - before > 0.9 * size
