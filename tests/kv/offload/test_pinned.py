"""Tests how much host memory is available, under which limit, and errors where it cannot be locked."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from triforce_tree.kv.offload import pinned
from triforce_tree.kv.offload.pinned import SPARE, HostMemory, HostMemoryError, usable
from triforce_tree.planning import machine
from triforce_tree.planning.memory_map import GIB
from triforce_tree.runtime import distributed


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Replaces what the system reports: its memory, and the contents of its files."""

    def describe(memory: tuple[float, float] | None = None, **files: str) -> None:
        paths = {
            "version": "/proc/version",
            "limit": "/sys/fs/cgroup/memory.max",
            "usage": "/sys/fs/cgroup/memory.current",
            "stat": "/sys/fs/cgroup/memory.stat",
        }
        found = {paths[name]: text.splitlines() for name, text in files.items()}
        monkeypatch.setattr(pinned, "_lines", lambda path: found.get(path, []))
        if memory is not None:
            total, free = (int(size * GIB) for size in memory)
            have = SimpleNamespace(total=total, available=free)
            monkeypatch.setattr(pinned.psutil, "virtual_memory", lambda: have)

    return describe


@pytest.mark.parametrize(
    ("total", "free", "left"),
    [(64, 60, 6.4), (512, 500, 51.2), (32, 30, 4.0), (64, 20, 6.4), (16, 6, 3.0), (64, 2, 1.0)],
)
def test_a_tenth_or_4_gib_is_left_to_the_system(described, total: float, free: float, left: float) -> None:
    """It is no more than half of what is available, or small machines would have nothing."""
    described((total, free))
    size, name = usable()
    assert size / GIB == pytest.approx(free - left)
    assert name == f"the system's available memory, less {left:.1f} GiB for the system,"


def test_a_control_groups_limit_comes_first(described) -> None:
    described((512, 500), limit=str(40 * GIB), usage=str(10 * GIB), stat=f"anon 1\ninactive_file {2 * GIB}")
    size, name = usable()
    assert size / GIB == pytest.approx(40 - 10 + 2 - 4)
    assert name.startswith("the control group's memory.max, less 4.0 GiB")
    assert usable(100 * GIB) == (31 * GIB, "the control group's memory.max")


@pytest.mark.parametrize(
    ("line", "group", "limit", "usage"),
    [
        (
            "0::/system.slice/job_7/step_0", "/sys/fs/cgroup/system.slice/job_7",
            "memory.max", "memory.current",
        ),
        (
            "4:cpu,memory:/slurm/job_7", "/sys/fs/cgroup/memory/slurm/job_7",
            "memory.limit_in_bytes", "memory.usage_in_bytes",
        ),
    ],
    ids=["version 2", "version 1"],
)  # fmt: skip
def test_the_limit_of_a_group_within_a_group(
    monkeypatch: pytest.MonkeyPatch, line: str, group: str, limit: str, usage: str
) -> None:
    files = {
        "/proc/self/cgroup": ["2:pids:/elsewhere", line],
        f"{group}/{limit}": [str(GIB)], f"{group}/{usage}": [str(GIB // 4)],
    }  # fmt: skip
    monkeypatch.setattr(pinned, "_lines", lambda path: files.get(path, []))
    assert pinned.available() == (GIB - GIB // 4, f"the control group's {limit}")
    assert pinned.total() == GIB
    # A path that leads out of the group in which a container began.
    files["/proc/self/cgroup"] = [line.replace(":/", ":/../")]
    assert pinned.available()[1] == "the system's available memory"


def test_the_users_limit_counts_where_so_much_is_available(described) -> None:
    described((64, 60))
    assert usable(50 * GIB) == (50 * GIB, "host_memory")
    # More than is left to the system by default, but not all.
    assert usable(58 * GIB) == (58 * GIB, "host_memory")
    assert usable(64 * GIB) == (60 * GIB - SPARE, "the system's available memory")


def test_plans_keep_to_the_users_limits(described, monkeypatch: pytest.MonkeyPatch) -> None:
    described((64, 60))
    monkeypatch.setattr(machine, "bandwidths", lambda device: (25e9, 1e12))
    cpu = torch.device("cpu")
    own = machine.measured(cpu, own=GIB)
    assert own.host / GIB == pytest.approx(60 - 6.4)
    assert own.device == own.most_device == own.host + GIB
    assert own.most_host == 59 * GIB
    # Weights that are page-locked already count towards it.
    bounded = machine.measured(cpu, GIB, 24 * GIB, on_host=12 * GIB, host_bytes=48 * GIB)
    assert (bounded.host, bounded.host_limit) == (48 * GIB, "host_memory")
    assert (bounded.device, bounded.limit) == (24 * GIB, "gpu_memory")
    assert bounded.most_host == (59 + 12) * GIB
    assert machine.measured(cpu, GIB, on_host=12 * GIB, host_bytes=8 * GIB).host == 12 * GIB
    # Of two processes each has half.
    monkeypatch.setattr(distributed, "local_size", lambda: 2)
    two = machine.measured(cpu, GIB, on_host=4 * GIB, host_bytes=48 * GIB)
    assert (two.host, two.ranks) == (24 * GIB, 2)
    assert two.most_host == 59 * GIB // 2 + 4 * GIB


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("Linux version 6.8.0-45-generic (buildd@lcy02)", r"ulimit -l\) is .*: raise it, or shorten"),
        (
            "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1)",
            r"under WSL2 the NVIDIA driver limits page-locked memory to about half .*"
            r"raise memory= in \.wslconfig, or shorten",
        ),
    ],
)
def test_memory_that_cannot_be_locked_names_the_limit(
    described, version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(version=version)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    locked = HostMemory(locked=True)
    with pytest.raises(HostMemoryError, match=rf"CUDA cannot lock 0\.00 GiB .*\(error 2\); .*{reason}"):
        locked.take((1 << 20,), torch.uint8)
    assert locked.bytes == 0
