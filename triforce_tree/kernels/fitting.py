"""Launches that survive a shortage of shared memory: the next smaller tile takes over.

Tiles are chosen to fit (``configs``, ``linear_configs``), and every choice is compiled ahead of time for the
usual GPUs. A device or a compiler that nobody tried may still ask for more than there is.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from triton import OutOfResources

from triforce_tree.kernels.device import Device, KernelError

C = TypeVar("C")
R = TypeVar("R")
_LOG = logging.getLogger(__name__)

# What took the place of configurations that did not fit.
_replaced: dict[Any, Any] = {}


def fitted(config: C, smaller: Callable[[C], C | None], run: Callable[[C], R]) -> R:
    """``run`` with a configuration, or with the first smaller one that the device has memory for.

    Args:
        config: what to begin with; hashable.
        smaller: the next one to try; None behind the last.
        run: launches, and raises ``triton.OutOfResources`` before anything has run.

    Raises:
        KernelError: not even the smallest fits.
    """
    if _replaced:
        config = _replaced.get(config, config)
    first = config
    while True:
        try:
            return run(config)
        except OutOfResources as error:
            less = smaller(config)
            if less is None:
                raise KernelError(
                    f"{config} needs {error.required:,} bytes of {error.name} where the GPU has "
                    f"{error.limit:,}, and no smaller tile is left; run on the CPU (device='cpu')"
                ) from error
            _LOG.warning(
                "%s needs %s bytes of %s where the GPU has %s; going on with %s",
                config, f"{error.required:,}", error.name, f"{error.limit:,}", less,
            )  # fmt: skip
            config = _replaced[first] = less


def within(made: Any, device: Device) -> None:
    """Hold a compiled kernel to the limit of the GPU that another one was told to be.

    Raises:
        triton.OutOfResources: as a launch on that GPU does.
    """
    if device.told and made is not None and made.metadata.shared > device.shared_bytes:
        raise OutOfResources(made.metadata.shared, device.shared_bytes, "shared memory")
