"""What may be chosen where a cache is offloaded, from what accepts most to what needs least memory."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.streamed_weights import check_level_one
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
# A pass over the bus dwarfs a round of levels 0 and 1, so that larger trees pay.
_TREE = "best-first:8,6,4"
# The coarsest serve as the last resort.
_CHUNKS, _COARSEST = (8, 16, 32, 64), 128
# Whoever gives one of these wants a level 1.
_OF_LEVEL_ONE = frozenset(
    ("levels", "budget", "chunk", "recent", "refresh", "retrieval_weight_bits", "gamma")
)
_FEED, _SMALL_FEED, _LEAST_FEED = 4096, 1024, 512


def first_fitting(
    sizes: Sizes, machine: Machine, config: HierarchyConfig, given: Collection[str], workload: Workload
) -> tuple[MemoryPlan | None, list[MemoryPlan]]:
    """The first choice that fits device and host, and all that were tried.

    Args:
        config: ``offloads`` True or "auto".
        given: names of options that stay as they are.

    Raises:
        ValueError: level 1 was given the weights that are streamed.
    """
    tried: list[MemoryPlan] = []
    if "tree" not in given:
        config = with_options(config, tree=_TREE)
    for choice, split in _choices(config, given, workload.prompt, bool(sizes.streamed)):
        made = offloaded(sizes, machine, choice, split, given, workload)
        tried.append(made)
        if made.fits:
            return made, tried
    return None, tried


def _choices(
    config: HierarchyConfig, given: Collection[str], prompt: int, streamed: bool
) -> Iterator[tuple[HierarchyConfig, Offload]]:
    own = config.retrieval
    budgets, chunks, coarsest = [own.budget], [own.chunk], own.chunk
    if "budget" not in given:
        most = min(_MOST_BUDGET, max(LEAST_BUDGET, prompt // 16 // 512 * 512))
        most = max(most, own.recent + own.chunk)
        least = max(LEAST_BUDGET, own.recent + 64)
        # Three quarters of a half: level 1's memory may then still hold the hidden states of a prompt.
        budgets = [most, *(b for b in (most // 2, most * 3 // 8, most // 4) if b >= least)]
    if "chunk" not in given:
        # A chunk's mean is one row's keys, so that coarse chunks take less of them, and choose worse.
        chunks, coarsest = list(_CHUNKS), _COARSEST
    if not any(budget % chunk == 0 for budget, chunk in product(budgets, chunks)):
        budgets, chunks, coarsest = [own.budget], [own.chunk], own.chunk
    for budget in budgets:
        yield from _of_budget(config, given, prompt, streamed, budget, chunks)
    if coarsest not in chunks:
        yield from _of_budget(config, given, prompt, streamed, budgets[-1], [coarsest])
    wants_level_one = not _OF_LEVEL_ONE.isdisjoint(given) or levels_of(config, prompt, budgets[-1]) < 3
    if config.levels == "auto" and not wants_level_one:
        # Without level 1 there are neither copies nor means, but every tree waits for a pass over the bus.
        fewer = with_options(config, levels=2)
        yield from _of_budget(fewer, given, prompt, streamed, budgets[-1], chunks[:1])


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
        bits = bits if "retrieval_weight_bits" in given else (8, 4)
        check_level_one(bits[0])
    for retrieval_weight_bits, (split, feed, count) in product(bits, _ways()):
        if "prefill_chunk" not in given:
            config = with_options(config, prefill_chunk=feed)
        for chunk in chunks[:count]:
            if budget % chunk == 0 and chunk <= config.retrieval.recent:
                yield (
                    with_options(
                        config, budget=budget, chunk=chunk, retrieval_weight_bits=retrieval_weight_bits
                    ),
                    split,
                )


def _ways() -> Iterator[tuple[Offload, int, int]]:
    """How rows and hidden states are kept, tokens that are fed at once, and how many of the chunks to try."""
    near, far = Offload(), Offload(states_on_host=True)
    small = replace(far, piece_bytes=32 * MIB, buffers=2)
    yield near, _FEED, 2
    yield far, _FEED, 2
    yield small, _SMALL_FEED, len(_CHUNKS)
    yield replace(small, last_resident=True), _LEAST_FEED, len(_CHUNKS)
