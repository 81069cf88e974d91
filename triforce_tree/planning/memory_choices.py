"""The choices of settings for an offloaded cache, from highest acceptance to least memory."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.weights.streamed_weights import check_level_one
from triforce_tree.planning.memory_layout import (
    LEAST_BUDGET,
    MemoryPlan,
    Workload,
    levels_of,
    offloaded,
    with_options,
)
from triforce_tree.planning.memory_map import MIB, Machine, Sizes

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
# The same where the experts of each chunk are streamed.
_STREAMED_CHUNKS = (16_384, 8192, _PREFILL_CHUNK, _SMALL_PREFILL_CHUNK)


def first_fitting(
    sizes: Sizes, machine: Machine, config: HierarchyConfig, given: Collection[str], workload: Workload
) -> tuple[MemoryPlan | None, list[MemoryPlan]]:
    """The plan of the first choice that fits device and host, or None; and all plans that were tried.

    Args:
        config: ``offloads`` True or "auto".
        given: names of options that must not be changed.

    Raises:
        ValueError: the retrieval model would run on streamed weights.
    """
    tried: list[MemoryPlan] = []
    if "tree" not in given and not sizes.states:
        config = with_options(config, tree=_TREE)
    for choice, split in _choices(config, given, workload.prompt, bool(sizes.streamed)):
        plan = offloaded(sizes, machine, choice, split, given, workload)
        tried.append(plan)
        if plan.fits:
            return plan, tried
    return None, tried


def _choices(
    config: HierarchyConfig, given: Collection[str], prompt: int, streamed: bool
) -> Iterator[tuple[HierarchyConfig, Offload]]:
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
        yield from _of_budget(config, given, prompt, streamed, budget, chunks)
    if coarsest not in chunks:
        yield from _of_budget(config, given, prompt, streamed, budgets[-1], [coarsest])
    fixed = not _RETRIEVAL_OPTIONS.isdisjoint(given) or levels_of(config, prompt, budgets[-1]) < 3
    if config.levels == "auto" and not fixed:
        # Two levels need neither a retrieval cache nor key means, but each tree needs a full-target pass.
        fewer = with_options(config, levels=2)
        yield from _of_budget(fewer, given, prompt, streamed, budgets[-1], chunks[:1])


def with_level_one(
    sizes: Sizes, config: HierarchyConfig, given: Collection[str], prompt: int
) -> Iterator[HierarchyConfig]:
    """The settings for a KV cache on the device: all choices of a prefill's chunks and of level 1's bits.

    Every chunk of a prefill goes through all layers, and is routed to nearly all experts, which cross the
    bus: with streamed experts chunks are as large as fits.
    """
    if not sizes.streamed:
        yield config
        return
    bits: tuple[int, ...] = (config.retrieval_weight_bits,)
    if levels_of(config, prompt) == 3:
        bits = _level_one_bits(config, given)
    chunks: list[int | None] = [config.prefill_chunk]
    if "prefill_chunk" not in given:
        # One that holds the prompt is enough.
        smaller = (*_STREAMED_CHUNKS[1:], 0)
        chunks = [chunk for chunk, less in zip(_STREAMED_CHUNKS, smaller, strict=True) if less < prompt]
    for own, chunk in product(bits, chunks):
        yield with_options(config, retrieval_weight_bits=own, prefill_chunk=chunk)


def _level_one_bits(config: HierarchyConfig, given: Collection[str]) -> tuple[int, ...]:
    """Bits of the retrieval model's copy of streamed weights, in the order of preference."""
    bits = (config.retrieval_weight_bits,) if "retrieval_weight_bits" in given else (8, 4)
    check_level_one(bits[0])
    return bits


def _of_budget(
    config: HierarchyConfig,
    given: Collection[str],
    prompt: int,
    streamed: bool,
    budget: int,
    chunks: list[int],
) -> Iterator[tuple[HierarchyConfig, Offload]]:
    bits: tuple[int, ...] = (config.retrieval_weight_bits,)
    if streamed and levels_of(config, prompt, budget) == 3:
        bits = _level_one_bits(config, given)
    for retrieval_weight_bits, (split, prefill_chunk, count) in product(bits, _splits()):
        if "prefill_chunk" not in given:
            config = with_options(config, prefill_chunk=prefill_chunk)
        for chunk in chunks[:count]:
            if budget % chunk == 0 and chunk <= config.retrieval.recent:
                yield (
                    with_options(
                        config, budget=budget, chunk=chunk, retrieval_weight_bits=retrieval_weight_bits
                    ),
                    split,
                )


def _splits() -> Iterator[tuple[Offload, int, int]]:
    """(split of the cache and hidden states, prefill chunk, how many of the chunk sizes to try)."""
    states_on_host = Offload(states_on_host=True)
    small = replace(states_on_host, piece_bytes=32 * MIB, buffers=2)
    yield Offload(), _PREFILL_CHUNK, 2
    yield states_on_host, _PREFILL_CHUNK, 2
    yield small, _SMALL_PREFILL_CHUNK, len(_CHUNKS)
    yield replace(small, last_resident=True), _LEAST_PREFILL_CHUNK, len(_CHUNKS)
