"""Computes how many sequences the device's memory holds at a time."""

from bisect import bisect_right

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter
from triforce_tree.kv.offload.pinned import available, total
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_layout import Workload, gib, on_device
from triforce_tree.planning.memory_map import Machine, Sizes
from triforce_tree.planning.memory_plan import DoesNotFitError
from triforce_tree.runtime import distributed

# Allocated when the models were loaded.
_LOADED = ("weights", "weight slots", "draft", "heads")


def fitting_batch(
    target: HFModel,
    draft: HFModel | None,
    config: HierarchyConfig,
    wanted: int,
    prompt: int,
    new_tokens: int,
    freed: int = 0,
    pool: int = 0,
    drafter: Drafter | None = None,
    workspaces: int = 1,
) -> int:
    """Returns how many sequences of ``prompt + new_tokens`` tokens fit beside the models, from 1 to
    ``wanted``.

    Args:
        config: the settings; nothing is offloaded.
        freed: bytes in use that are freed before new buffers are made.
        pool: KV slots that all sequences share; 0 if each has its own.
        drafter: the drafter that was given, if any. It may keep further data for each sequence.
        workspaces: how often memory for the stages of so many sequences is needed: there may be stages for
            several kinds of sampling, and for fewer sequences.
    """
    if wanted == 1:
        return 1
    sizes, free = Sizes.of(target, draft, config, drafter), free_bytes(target.device) + freed

    def needed(batch: int) -> int:
        workload = Workload(batch, prompt, new_tokens, pool)
        workspace = memory_map.workspace(sizes, config, config.levels_for(prompt), batch)
        own = bytes_beside_models(sizes, config, workload) + (workspaces - 1) * workspace
        return own + memory_map.reserve(free)

    fits = max(1, bisect_right(range(1, wanted + 1), free, key=needed))
    return int(distributed.all_reduce_min([fits])[0])


def check_every_rank(
    target: HFModel, draft: HFModel | None, config: HierarchyConfig, batch: int, tokens: int
) -> None:
    """Checks that all ranks have room for the keys and values of ``batch`` sequences on their devices, before
    any of them allocates memory.

    Raises:
        DoesNotFitError: a rank has too little. It is raised on every rank.
    """
    if distributed.current() is None:
        return
    needed = _kv_bytes(target, draft, config, batch, tokens)
    free = distributed.all_gather_object(free_bytes(target.device))
    if needed > min(free):
        raise DoesNotFitError(
            f"keys and values of {batch * tokens:,} tokens need {gib(needed)} on every rank, and rank "
            f"{free.index(min(free))} has {gib(min(free))} free; free memory there, shorten the prompt, or "
            "start more ranks"
        )


def has_room(
    target: HFModel, draft: HFModel | None, config: HierarchyConfig, batch: int, tokens: int
) -> bool:
    """Returns whether keys and values of ``batch`` sequences take at most half of the device's free bytes."""
    return 2 * _kv_bytes(target, draft, config, batch, tokens) <= free_bytes(target.device)


def _kv_bytes(
    target: HFModel, draft: HFModel | None, config: HierarchyConfig, batch: int, tokens: int
) -> int:
    """Returns the bytes of the keys and values of ``batch`` sequences on each rank."""
    sizes = Sizes.of(target, draft, config, None)
    return batch * -(-tokens // config.text_ranks) * sizes.row * sizes.full_layers


def bytes_beside_models(sizes: Sizes, config: HierarchyConfig, workload: Workload) -> int:
    """Returns the device bytes that decoding uses in addition to the loaded models, if nothing is
    offloaded.
    """
    plan = on_device(sizes, Machine(0, 0, 1.0, 1.0), config, workload)
    return plan.peak - sum(plan.device.get(name, 0) for name in _LOADED)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that new tensors can use, including memory that torch's allocator holds unused."""
    if device.type != "cuda":
        return available()[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def total_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return total()
    return int(torch.cuda.get_device_properties(device).total_memory)
