"""Where everything lives when a full cache is larger than the device: a function of sizes.

    device   weights | draft | level 1's chunks and window | chunk means | ring | resident rows | work | free
    host     the other rows of the full cache, in page-locked memory

Layers with a sliding window keep it on the device; "rows" are those of the other layers.

Where the weights are streamed (``kv/offload/streamed_weights.py``), the device holds embeddings, head and
norms of them, slots for a few layers, and level 1's copy in 8 bits, or 4 where 8 do
not fit; the host holds the rest.

What is not given is chosen: level 1's budget and chunk as large and fine as fits both memories, gamma by
expected tokens a second, and every byte that is left keeps rows on the device, since each of them need
neither cross the bus nor lie in host memory. Where the CPU is to attend, it gets the share of the other rows
that lets it end with the bus.
"""

from collections.abc import Collection

from triforce_tree.config import HierarchyConfig
from triforce_tree.planning.memory_advice import refusal
from triforce_tree.planning.memory_choices import first_fitting
from triforce_tree.planning.memory_layout import MemoryPlan, Workload, on_device
from triforce_tree.planning.memory_map import Machine, Sizes

__all__ = ["DoesNotFitError", "MemoryPlan", "plan"]


class DoesNotFitError(ValueError):
    """No choice of what may be chosen fits; the message says by how much, and what would help."""


def plan(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    given: Collection[str],
    batch: int,
    prompt: int,
    new: int,
) -> MemoryPlan:
    """Decide for ``batch`` texts of ``prompt`` tokens, the longest, and ``new`` ones.

    Args:
        config: ``offloads`` True or "auto".
        given: names of options that stay as they are.

    Raises:
        DoesNotFitError: device or host memory is short.
        ValueError: level 1 was given the weights that are streamed.
    """
    workload = Workload(batch, prompt, new)
    if config.offloads == "auto" and not sizes.streamed:
        whole = on_device(sizes, machine, config, workload)
        if whole.fits_device:
            return whole
    made, tried = first_fitting(sizes, machine, config, given, workload)
    if made is None:
        raise DoesNotFitError(refusal(tried, sizes, machine, config, given, workload))
    return made
