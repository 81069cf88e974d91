"""Chooses the device that models run on, and explains why a GPU cannot be used; copies to the device."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


def memory_is_short(error: BaseException) -> bool:
    """Returns whether an error says that memory is short; the CPU's allocator has no error of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def device_of(name: str | torch.device | None = None) -> torch.device:
    """Returns the device with a name; without a name CUDA if it is available, else the CPU.

    Raises:
        ValueError: the device is no CPU or CUDA device, is not present, or lacks what our kernels need.
    """
    if name is None:
        if not torch.cuda.is_available():
            _warn_of_unused_gpu()
            return torch.device("cpu")
        name = "cuda"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={str(name)!r} is unknown; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(name)!r} is not supported; use cpu or cuda")
    if device.type == "cuda":
        if reason := _why_no_cuda():
            raise ValueError(f"device={str(name)!r}, but {reason}; or use device cpu")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise ValueError(
                f"device={str(name)!r}, but torch sees {count} CUDA devices; use cuda:0 to cuda:{count - 1}"
            )
    return device


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a host tensor in pinned memory if ``device`` is a GPU, so that a copy need not wait for it."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to ``device`` without waiting for the device's work."""
    return pinned(tensor, device).to(device, non_blocking=True)


def overwrite(target: Tensor, source: Tensor) -> None:
    """Copies a host tensor into ``target`` without waiting for the device's work."""
    target.copy_(pinned(source.to(target.dtype), target.device), non_blocking=True)


@contextmanager
def before_queued_work(device: torch.device) -> Iterator[None]:
    """Is a context whose work a GPU does at once, and not after all that it was given before.

    Inside, tensors may be read that no queued work writes. Afterwards the work is done.
    """
    if device.type != "cuda":
        yield
        return
    stream = _urgent_stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


@cache
def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _why_no_cuda() -> str | None:
    """Returns the reason why CUDA cannot be used, with a remedy; None if it can."""
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it (pytorch.org)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        # torch warns whether the driver is missing or too old.
        message = " ".join(str(warning.message) for warning in caught).split(". ")[0]
        detail = f" ({' '.join(message.split())})" if message else ""
        kind = "CUDA" if torch.version.cuda else "ROCm"
        return (
            f"torch {torch.__version__}, built for {kind} {built}, finds no GPU with a suitable "
            f"driver{detail}: update the driver, or install a torch for an older one"
        )
    if find_spec("triton") is None:
        return "our kernels need triton, which is not installed: pip install triton (on Windows use WSL2)"
    return None


@cache
def _warn_of_unused_gpu() -> None:
    """Warns once if the CPU is used although the machine has an NVIDIA GPU."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        _LOG.warning("running on the CPU, though there is an NVIDIA GPU: %s", _why_no_cuda())


@contextmanager
def plain_torch_modes(device: torch.device) -> Iterator[None]:
    """Turns off autocast, gradients and inference mode inside the context.

    Tensors created in inference mode could not be written by later calls outside of it.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {device.type, "cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
