"""The processor that a measurement on the CPU ran on: cores that may be used, model, matrix instructions."""

import os
from pathlib import Path
from typing import Any

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def cores() -> int:
    """Cores that this process may keep busy: those it may run on, within the control group's quota."""
    here = len(os.sched_getaffinity(0))
    words = _text("/sys/fs/cgroup/cpu.max").split()
    if not words:  # version 1 of control groups
        words = [_text(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return here
    return max(1, min(here, int(words[0]) // int(words[1])))


def processor() -> dict[str, Any]:
    """Facts about the processor, from Linux's /proc; None where they are missing."""
    lines = (line.partition(":") for line in _text("/proc/cpuinfo").splitlines())
    info = {name.strip(): value.strip() for name, _, value in lines}
    return {
        "model": info.get("model name"),
        "cores": cores(),
        "cores_of_machine": os.cpu_count(),
        "flags": [flag for flag in _FLAGS if flag in info.get("flags", "").split()],
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
