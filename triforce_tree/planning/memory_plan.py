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
from triforce_tree.planning.memory_advice import refusal
from triforce_tree.planning.memory_choices import first_fitting, first_on_device
from triforce_tree.planning.memory_layout import MemoryPlan, Task, Workload, gib
from triforce_tree.planning.memory_map import Machine, Sizes

__all__ = ["DoesNotFitError", "MemoryPlan", "plan"]


class DoesNotFitError(ValueError):
    """No choice of settings fits. The message says what is needed and available, and what would help."""


def plan(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    given: Collection[str],
    workload: Workload,
) -> MemoryPlan:
    """Returns the memory plan for models and a machine.

    Args:
        config: the settings; ``offloads`` is True or "auto". ``retrieval_weight_bits`` "auto" counts as not
            given.
        given: names of options that stay as they are.

    Raises:
        DoesNotFitError: device or host memory is too small.
        ValueError: the retrieval model would run on streamed weights.
    """
    if config.retrieval_weight_bits == "auto":
        config = config.changed({"retrieval_weight_bits": 16})
        given = frozenset(given) - {"retrieval_weight_bits"}
    task = Task(sizes, machine, config, given, workload)
    if (resident := first_on_device(task)) is not None:
        return resident
    if config.kv_bits != 16:
        raise DoesNotFitError(
            f"kv_bits={config.kv_bits} keeps the cache of {workload.max_seq_len:,} tokens on the device, "
            f"with {gib(task.on_device().peak)} in all, and {machine.limit} has {gib(machine.device)}; "
            f"{NO_OFFLOAD}"
        )
    chosen, tried = first_fitting(task)
    if chosen is None:
        raise DoesNotFitError(refusal(tried, task))
    return chosen
