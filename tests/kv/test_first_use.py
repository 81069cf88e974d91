"""Before stages are timed, all slots are in memory: a CPU reads pages that were never written too fast."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes.processes import environment
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check() -> None:
    shape = KVShape(Heads(4, 4, 64, 64))
    for bits in (16, 8):
        for held in (0, None):
            store = KVStore([shape] * 4, 1, 1 << 15, torch.device("cpu"), torch.bfloat16, bits=bits)
            size, before = store.memory.nbytes, resident_bytes()
            assert size > 50 << 20  # The allocator takes fresh memory from the system for such sizes.
            store.initialise([held])
            assert resident_bytes() - before > 0.9 * size, (bits, held)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fresh_slots_become_resident() -> None:
    """In a process of its own: in others, memory that was freed before may be used again."""
    subprocess.run([sys.executable, __file__], env=environment(), check=True)


if __name__ == "__main__":
    check()
