"""How much other programs used the CPUs during a measurement (Linux)."""

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_CPUS = os.cpu_count() or 1


class OtherPrograms:
    """Watches the CPUs from its making on.

    Args:
        pids: processes that belong to the measurement.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._start, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def share(self) -> float:
        """Returns the CPU time of other programs as a share of the time of all CPUs, 0 to 1."""
        seconds = _CPUS * (time.perf_counter() - self._start)
        others = _busy_seconds() - self._busy - (self._own_seconds() - self._own)
        return min(1.0, max(0.0, others / seconds))

    def _own_seconds(self) -> float:
        return sum(_process_seconds(pid) for pid in self._pids)


def _busy_seconds() -> float:
    """Returns the seconds in which any CPU was busy since the machine started."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, _, _, interrupts, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + interrupts + soft + steal) / _TICKS


def _process_seconds(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
