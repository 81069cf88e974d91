"""Plans device and host memory when the full KV cache is larger than the device, from sizes alone.

    device   weights | draft | retrieval cache | chunk means | ring | resident KV | workspace | free
    host     the other KV slots of the full cache, in page-locked memory

KV slots on the host are those of full-attention layers; layers with a window keep theirs on the device.

If the weights are streamed (``kv/offload/weights``), the device holds embeddings, head and norms, slots for a
few layers, and the retrieval model's copy in 8 bits, or in 4 if 8 do not fit; the host holds the
rest. Where only experts are streamed, the KV cache may still fit on the device; memory that is left keeps the
experts of whole layers there.

Options that are not given are chosen: budget and chunk as large and as fine as fit both memories, gamma by
expected tokens per second. All device memory that is left keeps KV slots resident, which then neither cross
the bus nor take host memory. If the CPU attends, it gets the share of the KV slots on the host with which it
ends no later than the bus.
"""

from collections.abc import Collection

from triforce_tree.config import NO_OFFLOAD, HierarchyConfig
from triforce_tree.kv.shared.tree import NO_PREFIX, PrefixSize
from triforce_tree.planning.memory_advice import refusal
from triforce_tree.planning.memory_choices import first_fitting, with_level_one
from triforce_tree.planning.memory_layout import MemoryPlan, Workload, gib, on_device
from triforce_tree.planning.memory_map import Machine, Sizes

__all__ = ["DoesNotFitError", "MemoryPlan", "plan"]


class DoesNotFitError(ValueError):
    """No choice of settings fits; the message has what is needed and available, and what would help."""


def plan(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    given: Collection[str],
    batch: int,
    prompt: int,
    new: int,
    prefix: PrefixSize = NO_PREFIX,
) -> MemoryPlan:
    """The plan for ``batch`` sequences of at most ``prompt`` tokens and ``new`` further ones.

    Args:
        config: ``offloads`` True or "auto".
        given: names of options that must not be changed.
        prefix: of the common prefixes that are stored once, unless they are offloaded.

    Raises:
        DoesNotFitError: device or host memory is short.
        ValueError: the retrieval model would run on streamed weights.
    """
    workload = Workload(batch, prompt, new, prefix)
    if config.offloads == "auto" and (not sizes.streamed or sizes.streams_experts_only):
        for choice in with_level_one(sizes, config, given, prompt):
            resident = on_device(sizes, machine, choice, workload)
            if resident.fits:
                return resident
    if config.kv_bits != 16:
        needed = on_device(sizes, machine, config, workload)
        raise DoesNotFitError(
            f"kv_bits={config.kv_bits} keeps the cache of {prompt + new:,} tokens on the device, with "
            f"{gib(needed.peak)} in all, and {machine.limit} has {gib(machine.device)}; {NO_OFFLOAD}"
        )
    chosen, tried = first_fitting(sizes, machine, config, given, workload)
    if chosen is None:
        raise DoesNotFitError(refusal(tried, sizes, machine, config, given, workload))
    return chosen
