"""Other platforms: no POSIX, torch without CUDA, an old driver, no Triton."""

import importlib.util
import logging
import mmap
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import tiny
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import run
from tests.support.processes.messages import says
from tests.support.processes.processes import environment
from triforce_tree.kv.offload import pinned
from triforce_tree.loading.checkpoints import load_model
from triforce_tree.runtime import devices
from triforce_tree.runtime.devices import device_of

# Removes modules and functions that Windows lacks, after imports of libraries that support Windows.
ELSEWHERE = """
import os, sys
import datasets, mmap, psutil, rich, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
for name in ("fcntl", "grp", "pwd", "resource", "termios", "triton"):
    sys.modules[name] = None
for name in ("MAP_ANONYMOUS", "MAP_PRIVATE", "MADV_HUGEPAGE"):
    delattr(mmap, name)
for name in ("fork", "getuid", "killpg", "sched_getaffinity", "uname"):
    delattr(os, name)
import builtins, pathlib
def missing(path):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
opened, read = builtins.open, pathlib.Path.read_text
builtins.open = lambda path, *a, **k: missing(path) or opened(path, *a, **k)
pathlib.Path.read_text = lambda path, *a, **k: missing(path) or read(path, *a, **k)
from triforce_tree.cli.entry import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
import triforce_tree
from triforce_tree.planning.machine import measured
# psutil for Linux reads /proc.
from types import SimpleNamespace
psutil.virtual_memory = lambda: SimpleNamespace(available=4 << 30, total=8 << 30)
assert measured(torch.device("cpu"), 0).host < 4 << 30
sys.exit(main(["generate", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_cpu_engine_needs_no_posix(
    pair: TinyPair, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [prompt, *pair.options, "--max-new-tokens", "8", "--levels", "3"]
    argv += ["--budget", "64", "--advanced", "recent=32"]
    expected = run(capsys, "generate", *argv)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *argv], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(expected[1])
    assert len(expected[1]) > 1


def test_host_memory_without_mmap_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_ANONYMOUS", {})
    monkeypatch.setattr(pinned, "_RESOURCE", None)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = pinned.HostMemory(locked=False)
    assert memory.take((3, 5), torch.float32).tolist() == [[0.0] * 5] * 3
    assert pinned._lock_limit() == "the system limits locked memory"
    memory.release()


def test_available_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_lines", lambda path: [])
    size, name = pinned.available()
    assert 0 < size < 1 << 50
    assert name == "the system's available memory"


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    devices._warn_of_unused_gpu.cache_clear()
    yield
    devices._warn_of_unused_gpu.cache_clear()


def cuda(monkeypatch: pytest.MonkeyPatch, built: str | None, available: bool, warning: str = "") -> None:
    def answer() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return available

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))


OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Update\nit"


def test_errors_for_unusable_cuda_name_a_remedy(monkeypatch: pytest.MonkeyPatch, pair: TinyPair) -> None:
    cuda(monkeypatch, None, False)
    for load in (load_model, triforce_tree.load):
        with pytest.raises(ValueError, match=says("device='cuda'", "built without CUDA", "install", "cpu")):
            load(pair.target, device="cuda")
    cuda(monkeypatch, "12.8", False, OLD)
    with pytest.raises(
        ValueError, match=says("CUDA 12.8", "too old (found version 11040)", "update")
    ) as error:
        device_of("cuda:0")
    assert "\n" not in str(error.value)
    cuda(monkeypatch, "12.8", True)
    find = importlib.util.find_spec
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name == "triton" else find(name))
    for name in ("cuda", None):
        with pytest.raises(ValueError, match=says("device='cuda'", "triton", "pip install triton")):
            device_of(name)
    monkeypatch.setattr(devices, "find_spec", find)
    assert device_of() == torch.device("cuda")
    with pytest.raises(ValueError, match=says("device='cuda:3'", "sees 1 CUDA devices", "cuda:0")):
        device_of("cuda:3")


@pytest.mark.parametrize("name", ["abacus", "", "cuda:x", "mps", torch.device("meta")])
def test_other_devices_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="use cpu or cuda"):
        device_of(name)


@pytest.mark.usefixtures("no_warning_yet")
def test_an_unused_gpu_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda(monkeypatch, None, False)
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert device_of() == torch.device("cpu")
    [record] = caplog.records
    assert "running on the CPU, though there is an NVIDIA GPU" in record.getMessage()
    assert "built without CUDA" in record.getMessage()


def test_a_loaded_model_stays_on_its_device() -> None:
    assert triforce_tree.load(tiny("llama-gqa")).target.device.type == "cpu"


def test_a_missing_package_is_a_one_line_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triforce_tree.cli.demo", None)
    code, out, err = run(capsys, "demo")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "a package is missing" in err
