"""A memory plan for given models on this machine, as it is now."""

from collections.abc import Collection
from dataclasses import replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter
from triforce_tree.kv.offload.host_attention import host_attends
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import memory_map, memory_plan
from triforce_tree.planning.machine import host_rate, measured
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.planning.memory_plan import MemoryPlan


def new_plan(
    target: HFModel,
    draft: HFModel | None,
    drafter: Drafter | None,
    config: HierarchyConfig,
    given: Collection[str],
    workload: Workload,
    max_seq_len: int,
) -> MemoryPlan:
    """Measures the machine's free memory and returns a memory plan.

    Args:
        target, draft, drafter: the models, and what proposes trees.
        config, given: see ``memory_plan.plan``.
        workload: what must fit.
        max_seq_len: tokens of the sequences that are planned for where they fit, too.

    Raises:
        DoesNotFitError: memory is short.
    """
    sizes = Sizes.of(target, draft, config, drafter)
    weights = sum(memory_map.device_bytes(m) for m in (target, draft) if m) + sizes.heads_bytes
    streamed = target.streamed.bytes if target.streamed is not None else 0
    machine = measured(target.device, weights, config.gpu_bytes, streamed, config.host_bytes)

    def planned() -> MemoryPlan:
        # Of the rounded length, so that the buffers serve longer sequences too; else of the exact one.
        longer = replace(workload, new=max_seq_len - workload.prompt)
        try:
            return memory_plan.plan(sizes, machine, config, given, longer)
        except memory_plan.DoesNotFitError:
            return memory_plan.plan(sizes, machine, config, given, workload)

    plan = planned()
    if host_attends(target, config.host_attention) and plan.offload is not None:
        # Measured only where something is offloaded: it takes a second.
        machine = replace(machine, host_attention=host_rate(target.heads, target.dtype, target.device))
        plan = planned()
    return plan
