"""Where models run, and why a card that is there cannot be used."""

import logging
import shutil
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)


def device_of(name: str | torch.device | None = None) -> torch.device:
    """A device that can be used; without a name CUDA where there is one, and else the CPU.

    Raises:
        ValueError: it is no CPU or CUDA device, is not there, or lacks what our kernels need.
    """
    if name is None:
        if not torch.cuda.is_available():
            _say_why_no_cuda()
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
            raise ValueError(f"device={str(name)!r}, but there are {count} of them, counted from cuda:0")
    return device


def _why_no_cuda() -> str | None:
    """What keeps CUDA from being used here, and what would help; None where nothing does."""
    built = torch.version.cuda or torch.version.hip
    if built is None:
        return f"torch {torch.__version__} is built without CUDA: install a build with it (pytorch.org)"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        # Torch knows whether the driver is missing or too old.
        words = " ".join(str(warning.message) for warning in said).split(". ")[0]
        detail = f" ({' '.join(words.split())})" if words else ""
        kind = "CUDA" if torch.version.cuda else "ROCm"
        return (
            f"torch {torch.__version__}, made for {kind} {built}, finds no card with a driver that "
            f"fits{detail}: update the driver, or install a torch for an older one"
        )
    if find_spec("triton") is None:
        return "our kernels need triton, which is not installed: pip install triton (on Windows use WSL2)"
    return None


@cache
def _say_why_no_cuda() -> None:
    """Nobody with a card should have to find out why it is idle."""
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        _LOG.warning("running on the CPU, though there is an NVIDIA card: %s", _why_no_cuda())
