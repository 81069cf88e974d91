"""The processor that a measurement on the CPU ran on: cores that may be used, model, matrix instructions."""

import os
import re
from pathlib import Path
from typing import Any

_SYSTEM = "/sys/devices/system"
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def cores() -> int:
    """Cores that this process may keep busy: those it may run on, within the control group's quota."""
    here = len(os.sched_getaffinity(0))
    quota = _quota()
    return here if quota is None else max(1, min(here, int(quota)))


def processor() -> dict[str, Any]:
    """Facts about the processor, from /proc and /sys; None where they are missing."""
    info = _text("/proc/cpuinfo")
    flags = set(_first(r"^flags\s*:\s*(.*)$", info, "").split())
    size = _first(r"^MemTotal:\s*(\d+) kB$", _text("/proc/meminfo"), None)
    return {
        "model": _first(r"^model name\s*:\s*(.*)$", info, None),
        "cores": cores(),
        "cores_of_machine": os.cpu_count(),
        "quota": _quota(),
        "siblings_of_cpu_0": _text(f"{_SYSTEM}/cpu/cpu0/topology/thread_siblings_list").strip() or None,
        "numa_nodes": len(list(Path(f"{_SYSTEM}/node").glob("node[0-9]*"))) or None,
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(int(size) / 2**20, 1) if size else None,
    }


def _quota() -> float | None:
    """Of the control group, in cores; version 2, then 1."""
    words = _text("/sys/fs/cgroup/cpu.max").split()
    if not words:
        words = [_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]) / int(words[1])


def _first(pattern: str, text: str, default: Any) -> Any:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else default


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
