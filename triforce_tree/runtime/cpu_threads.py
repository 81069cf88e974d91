"""Limits the number of torch's CPU threads and the time that they spin, for CPUs with other users.

Our C kernels have their own threads (``kernels/cpu/threads.h``).
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

# If the user has set one of these environment variables, OpenMP's spinning is not changed.
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@contextmanager
def shared_cpus() -> Iterator[None]:
    """Limits torch's threads to the CPUs of the process inside the context, and shortens their spinning.

    A smaller number of threads that the caller has set is kept. Afterwards the caller's number is restored.
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
    """Returns the number of CPUs that this process may use, by its affinity and its control groups' quotas.

    It is rounded up, and divided by the number of processes that ``torchrun`` started on this host.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = min([count, *quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, int(-(-quota // processes)))


def quotas(groups: Path, mounted: Path) -> Iterator[float]:
    """Yields the number of CPUs that each control group of this process may use; nothing without a limit.

    Args:
        groups: Linux's list of the process's control groups, one ``number:controllers:path`` per line.
        mounted: the folder where the file system of control groups is mounted.
    """
    try:
        lines = [line.split(":", 2) for line in groups.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        group = root / path.lstrip("/")
        # In a container the path may be that of the host, while the group is mounted at the root.
        for folder in (group, *group.parents):
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
            except (OSError, ValueError):  # there is no such file, or it contains "max"
                continue


@cache
def _limit_spinning() -> list[Callable[[int], None]]:
    """Makes waiting OpenMP threads sleep after a few microseconds.

    By default they spin for milliseconds, and on a busy machine they take the CPU from the thread that they
    wait for. For libgomp, the OpenMP of torch for Linux, this function takes effect at once: its threads spin
    only briefly while it has more threads than there are CPUs, so a thread of ours keeps a team of sleeping
    threads. (libgomp reads its environment variables when it is loaded, usually before this package.)

    Returns:
        the functions of Intel's and LLVM's OpenMP that set the milliseconds of spinning for the team of the
        calling thread. Nothing is changed or returned if the user has set one of the variables ``_CHOSEN``.
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
    """Creates a team of more OpenMP threads than CPUs, which exists as long as the calling thread."""
    try:
        begin = ctypes.CDLL(path).GOMP_parallel
        # Every thread runs free(NULL), which does nothing.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        begin(nothing, None, (os.cpu_count() or 1) + 1, 0)
    finally:
        held.set()
    threading.Event().wait()


def _loaded(name: str) -> list[str]:
    """Returns the paths of loaded libraries whose file names begin with ``name``; none outside of Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return sorted({path for path in paths if Path(path).name.startswith(name)})
