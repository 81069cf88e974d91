"""Retries launches that exceed shared memory with the next smaller tile.

Tiles are chosen to fit (``attention.configs``, ``linear.configs``), and tests compile every choice for common
GPUs. On an untested device or compiler a kernel may still need more shared memory than the device has.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from triton import OutOfResources

from triforce_tree.kernels.device import Device, KernelError

C = TypeVar("C")
R = TypeVar("R")
_LOG = logging.getLogger(__name__)

# Maps configurations that did not fit to their replacements.
_replaced: dict[Any, Any] = {}


def fitted(config: C, smaller: Callable[[C], C | None], run: Callable[[C], R]) -> R:
    """Calls ``run`` with a configuration, or with the first smaller one that fits shared memory.

    Args:
        config: the configuration to try first; hashable.
        smaller: returns the next configuration to try; None after the last.
        run: launches the kernel; raises ``triton.OutOfResources`` before anything has run.

    Raises:
        KernelError: not even the smallest configuration fits.
    """
    if _replaced:
        config = _replaced.get(config, config)
    requested = config
    while True:
        try:
            return run(config)
        except OutOfResources as error:
            next_config = smaller(config)
            if next_config is None:
                raise KernelError(
                    f"{config} needs {error.required:,} bytes of {error.name} where the GPU has "
                    f"{error.limit:,}, and no smaller tile is left; run on the CPU (device='cpu')"
                ) from error
            _LOG.warning(
                "%s needs %s bytes of %s where the GPU has %s; continuing with %s",
                config, f"{error.required:,}", error.name, f"{error.limit:,}", next_config,
            )  # fmt: skip
            config = _replaced[requested] = next_config


def within(compiled: Any, device: Device) -> None:
    """Checks that a compiled kernel fits the shared memory of an emulated GPU.

    Raises:
        triton.OutOfResources: it does not fit. A launch on that GPU would raise the same error.
    """
    if device.emulated and compiled is not None and compiled.metadata.shared > device.shared_bytes:
        raise OutOfResources(compiled.metadata.shared, device.shared_bytes, "shared memory")
