"""The choices of settings for an offloaded cache, from highest acceptance to least memory."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.weights.streamed_weights import check_level_one
from triforce_tree.planning.memory_layout import (
    LEAST_BUDGET,
    MemoryPlan,
    Task,
    offloaded,
)
from triforce_tree.planning.memory_map import MIB

_MOST_BUDGET = 4096
# A full-target pass over the bus takes far longer than a round of drafting, so larger trees pay off.
_TREE = "best-first:8,6,4"
# Chunk sizes, and one for the last resort.
_CHUNKS, _COARSEST = (8, 16, 32, 64), 128
# If one of these is given, the retrieval model is not dropped.
_RETRIEVAL_OPTIONS = frozenset(
    ("levels", "budget", "chunk", "recent", "refresh", "retrieval_weight_bits", "gamma")
)
_PREFILL_CHUNK, _SMALL_PREFILL_CHUNK, _LEAST_PREFILL_CHUNK = 4096, 1024, 512
# Sizes of prefill chunks if the experts of each chunk are streamed.
_STREAMED_CHUNKS = (16_384, 8192, _PREFILL_CHUNK, _SMALL_PREFILL_CHUNK)


def first_fitting(task: Task) -> tuple[MemoryPlan | None, list[MemoryPlan]]:
    """Returns the plan of the first choice that fits device and host (None if none fits), and all plans that
    were tried.

    Raises:
        ValueError: the retrieval model would run on streamed weights.
    """
    tried: list[MemoryPlan] = []
    if "tree" not in task.given and not task.sizes.chains:
        task = task.with_options(tree=_TREE)
    for choice, split in _choices(task):
        plan = offloaded(choice, split)
        tried.append(plan)
        if plan.fits:
            return plan, tried
    return None, tried


def _choices(task: Task) -> Iterator[tuple[Task, Offload]]:
    config, given, prompt = task.config, task.given, task.workload.prompt
    retrieval = config.retrieval
    budgets, chunks, coarsest = [retrieval.budget], [retrieval.chunk], retrieval.chunk
    if "budget" not in given:
        most = min(_MOST_BUDGET, max(LEAST_BUDGET, prompt // 16 // 512 * 512))
        most = max(most, retrieval.recent + retrieval.chunk)
        least = max(LEAST_BUDGET, retrieval.recent + 64)
        # With 3/8 of the largest, the retrieval cache may still hold the hidden states of a prompt.
        budgets = [most, *(b for b in (most // 2, most * 3 // 8, most // 4) if b >= least)]
    if "chunk" not in given:
        # Coarse chunks need fewer key means, but are a worse selection.
        chunks, coarsest = list(_CHUNKS), _COARSEST
    if not any(budget % chunk == 0 for budget, chunk in product(budgets, chunks)):
        budgets, chunks, coarsest = [retrieval.budget], [retrieval.chunk], retrieval.chunk
    for budget in budgets:
        yield from _of_budget(task, budget, chunks)
    if coarsest not in chunks:
        yield from _of_budget(task, budgets[-1], [coarsest])
    fixed = not _RETRIEVAL_OPTIONS.isdisjoint(given) or config.levels_for(prompt, budgets[-1]) < 3
    if config.levels == "auto" and not fixed:
        # Two levels need neither a retrieval cache nor key means, but each tree needs a full-target pass.
        yield from _of_budget(task.with_options(levels=2), budgets[-1], chunks[:1])


def first_on_device(task: Task) -> MemoryPlan | None:
    """Returns the first plan that fits with the KV cache on the device; None if none fits, or if the cache
    must not stay there.

    With streamed experts, the choices are the prefill chunk and the bits of level 1.

    Raises:
        ValueError: the retrieval model would run on streamed weights.
    """
    config, sizes, prompt = task.config, task.sizes, task.workload.prompt
    if config.offloads != "auto" or (sizes.streamed and not sizes.streams_experts_only):
        return None
    chunks: list[int | None] = [config.prefill_chunk]
    if sizes.streamed and "prefill_chunk" not in task.given:
        # Every chunk goes through all layers, and is routed to nearly all experts, which cross the bus. So
        # chunks are as large as fit, and one that holds the prompt is enough.
        smaller = (*_STREAMED_CHUNKS[1:], 0)
        chunks = [chunk for chunk, less in zip(_STREAMED_CHUNKS, smaller, strict=True) if less < prompt]
    for bits, chunk in product(_level_one_bits(task), chunks):
        plan = task.with_options(retrieval_weight_bits=bits, prefill_chunk=chunk).on_device()
        if plan.fits:
            return plan
    return None


def _level_one_bits(task: Task, budget: int | None = None) -> tuple[int, ...]:
    """Returns the bits of level 1's weights to try, in the order of preference. There is a choice only for a
    copy of streamed weights.

    Args:
        budget: None for that of the settings.
    """
    if not task.sizes.streamed or task.config.levels_for(task.workload.prompt, budget) < 3:
        return (task.config.weight_bits,)
    bits = (task.config.weight_bits,) if "retrieval_weight_bits" in task.given else (8, 4)
    check_level_one(bits[0])
    return bits


def _of_budget(task: Task, budget: int, chunks: list[int]) -> Iterator[tuple[Task, Offload]]:
    for own, (split, prefill_chunk, count) in product(_level_one_bits(task, budget), _splits()):
        if "prefill_chunk" not in task.given:
            task = task.with_options(prefill_chunk=prefill_chunk)
        for chunk in chunks[:count]:
            if budget % chunk == 0 and chunk <= task.config.retrieval.recent:
                yield task.with_options(budget=budget, chunk=chunk, retrieval_weight_bits=own), split


def _splits() -> Iterator[tuple[Offload, int, int]]:
    """Yields (split of the cache and hidden states, prefill chunk, number of chunk sizes to try)."""
    states_on_host = Offload(states_on_host=True)
    small = replace(states_on_host, piece_bytes=32 * MIB, buffers=2)
    yield Offload(), _PREFILL_CHUNK, 2
    yield states_on_host, _PREFILL_CHUNK, 2
    yield small, _SMALL_PREFILL_CHUNK, len(_CHUNKS)
    yield replace(small, last_resident=True), _LEAST_PREFILL_CHUNK, len(_CHUNKS)
