"""Threads of torch's operators on a CPU that others use too: how many, and how long they spin.

Our own C kernels have threads of their own (``kernels/cpu/threads.h``).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

# Settings by which the user has chosen how long OpenMP's threads spin.
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@contextmanager
def shared_cpus() -> Iterator[None]:
    """Inside, torch has no more threads than the process may use CPUs, and they do not spin for long.

    The number of threads that the caller has set is an upper limit, and is there again afterwards.
    """
    for set_block_time in _limit_spinning():
        set_block_time(0)
    before = torch.get_num_threads()
    most = usable_cpus()
    if before <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def usable_cpus() -> int:
    """CPUs that this process may use by its affinity and by the quotas of its control groups, rounded up.

    Several processes that ``torchrun`` started on this host share them.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = min([count, *quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, int(-(-quota // processes)))


def quotas(groups: Path, mounted: Path) -> Iterator[float]:
    """CPUs that each control group around this process may use; none where there is no limit.

    Args:
        groups: Linux's list of the process's groups, ``number:controllers:path`` a line.
        mounted: where the file system of control groups is.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        own = root / path.lstrip("/")
        # In a container the path may be the host's, and the group itself mounted at the root.
        for folder in (own, *own.parents):
            if folder == root.parent:
                break
            try:
                if controllers:
                    files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
                    quota, period = (file.read_text(encoding="utf-8") for file in files)
                else:
                    quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError):  # No such file, or "max".
                continue


@cache
def _limit_spinning() -> list[Callable[[int], None]]:
    """Make waiting threads of libgomp, the OpenMP of torch for Linux, sleep after a few microseconds.

    Intel's and LLVM's OpenMP have functions for it, which are returned: they set it for the team of the
    calling thread.

    By default they spin for milliseconds, and on a machine that others use too they take the processor from
    the thread that they wait for. Libgomp reads its settings when it is loaded, mostly before this package;
    but its threads spin for a moment only as long as it has more of them than there are CPUs. So a thread of
    ours keeps a team of sleeping ones. What the user has set by the environment stays.
    """
    if any(name in os.environ for name in _CHOSEN):
        return []
    for path in _loaded("libgomp"):
        held = threading.Event()
        thread = threading.Thread(
            target=_keep_team, args=(path, held), name="triforce-tree team", daemon=True
        )
        thread.start()
        held.wait()
    libraries = (ctypes.CDLL(path) for name in ("libiomp", "libomp") for path in _loaded(name))
    return [library.kmp_set_blocktime for library in libraries if hasattr(library, "kmp_set_blocktime")]


def _keep_team(path: str, held: threading.Event) -> None:
    """Make a team of more threads than CPUs, which lives as long as this thread does."""
    try:
        begin = ctypes.CDLL(path).GOMP_parallel
        # Every thread runs a function that does nothing: free(NULL).
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        begin(nothing, None, (os.cpu_count() or 1) + 1, 0)
    finally:
        held.set()
    threading.Event().wait()


def _loaded(name: str) -> list[str]:
    """Paths of the libraries of this name that the process has loaded; none on other systems than Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return sorted({path for path in paths if Path(path).name.startswith(name)})
