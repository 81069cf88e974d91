"""Computes how many KV slots the prompts of a batch share, and whether sharing saves memory."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.pool.blocks import own_slots, stops, tail_of
from triforce_tree.kv.prefill import chunk_tokens
from triforce_tree.models.hf_model import HFModel

# If all prompts are known, prefixes are shared only if they have at least this many tokens, and save at least
# this many KV slots. Attention to a shared prefix is computed separately and merged, so on a CPU passes of
# two sequences are slower below 2,048 tokens, of eight below 400.
LEAST, LEAST_SPARED = 64, 2048
MOST_PAGE = 128
"""A whole number of any attention kernel's tiles."""

# Most of the slots that copies take with which sharing pays.
_SHARE = 0.9


@dataclass(frozen=True)
class PoolSize:
    """A pool of KV slots for what prompts share and for what each sequence has after it.

    Attributes:
        slots: the KV slots of each head.
        least: how many of these slots the known prompts need.
        unit: the tokens of a chunk that prompts share. It consists of whole chunks of a prefill and of the
            retrieval, so that each prompt is computed as if it were alone.
        tails: beginnings that several known prompts share, and that end within a chunk.
    """

    slots: int
    least: int
    unit: int
    tails: tuple[list[int], ...] = field(default=(), repr=False)


def unit_of(target: HFModel, config: HierarchyConfig) -> int | None:
    """Returns the tokens of a chunk that prompts share; None if each sequence has slots of its own.

    These are needed for recurrent layers, which have a state and no slots; for indexers, which choose among
    the slots of one sequence; for layers with a window, whose rings belong to one sequence; and where slots
    are split over ranks.
    """
    windows = any(shape.window is not None for shape in target.kv_shapes)
    if target.states is not None or target.indexed or windows or config.text_ranks > 1:
        return None
    return math.lcm(chunk_tokens(config.prefill_chunk, target.device), config.retrieval.chunk)


def page_of(unit: int, config: HierarchyConfig, levels: int) -> int:
    """Returns the KV slots of a page: at most ``MOST_PAGE``, or a chunk of the retrieval if that is longer.

    Chunks of ``unit`` tokens are whole multiples of it, and it is a multiple of the retrieval's chunks.
    """
    chunk = config.retrieval.chunk if levels == 3 else 1
    return chunk * math.gcd(unit // chunk, max(1, MOST_PAGE // chunk))


class SharedChunks:
    """Counts the chunks that known prompts share.

    Args:
        prompts: token ids.
        unit: tokens of a chunk.
        tails: see :class:`PoolSize`.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], unit: int, tails: Sequence[list[int]] = ()) -> None:
        found: dict[tuple[int, ...], int] = {}
        self._sizes: list[int] = []
        self._rest: list[int] = []
        # Numbers of the chunks of each prompt, in the order in which they are found.
        self._paths: list[list[int]] = []
        for prompt in prompts:
            path: list[int] = []
            start = 0
            for stop in stops(prompt, unit, tails):
                key = (path[-1] if path else -1, *prompt[start:stop])
                if key not in found:
                    found[key] = len(found)
                    self._sizes.append(stop - start)
                path.append(found[key])
                start = stop
            self._paths.append(path)
            self._rest.append(len(prompt) - start)

    def order(self) -> list[int]:
        """Returns the numbers of the prompts, such that prompts that share a chunk are adjacent."""
        numbers = range(len(self._paths))
        return sorted(numbers, key=lambda n: [*self._paths[n], len(self._sizes) + n])

    def slots(self, sequences: int, new_tokens: int, scratch: int, page: int) -> tuple[int, int]:
        """Returns the KV slots of ``sequences`` prompts: with shared chunks stored once, and with copies."""
        users = Counter(number for path in self._paths for number in path)
        own = [own_slots(rest + new_tokens, scratch, page) for rest in self._rest]
        alone, copied = (
            sorted(
                (
                    size + sum(self._sizes[n] for n in path if copies or users[n] == 1)
                    for size, path in zip(own, self._paths, strict=True)
                ),
                reverse=True,
            )[:sequences]
            for copies in (False, True)
        )
        shared = sum(size for n, size in enumerate(self._sizes) if users[n] > 1)
        return min(shared + sum(alone), sum(copied)), sum(copied)


def common_tails(prompts: Sequence[Sequence[int]], unit: int, page: int) -> tuple[list[int], ...] | None:
    """Returns the prefixes, in whole pages, that two prompts share and that are not whole chunks.

    It returns None if no two of them share ``LEAST`` tokens.
    """
    ordered = sorted(map(list, prompts))
    # Neighbours in this order have more in common than other pairs.
    common = [min(common_prefix(a, b), len(a) - 1, len(b) - 1) // page * page for a, b in pairwise(ordered)]
    if max(common, default=0) < LEAST:
        return None
    tails: list[list[int]] = []
    for n, prompt in enumerate(ordered):
        most = max(common[max(0, n - 1) : n + 1])
        if most >= LEAST and most % unit and (not tails or tails[-1] != prompt[:most]):
            tails.append(prompt[:most])
    used = Counter(tuple(prompt[: tail_of(tails, prompt)]) for prompt in ordered)
    return tuple(tail for tail in tails if used[tuple(tail)] > 1)


def for_known(
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sequences: int,
    unit: int,
    page: int,
    scratch: int,
    exact: bool,
) -> PoolSize | None:
    """Returns the pool of prompts that are known before the batch begins; None if sharing saves little.

    Args:
        new_tokens: the most new tokens of each sequence.
        sequences: the most sequences that are decoded together.
        scratch: the KV slots after a sequence's end that passes write.
        exact: whether the keys and values of each prompt must have the bits that they have alone. Only whole
            chunks are shared then.
    """
    tails = common_tails(prompts, unit, page)
    if tails is None:
        return None
    tails = () if exact else tails
    chunks = SharedChunks(prompts, unit, tails)
    slots, copies = chunks.slots(sequences, new_tokens, scratch, page)
    if slots > _SHARE * copies or copies - slots < LEAST_SPARED:
        return None
    return PoolSize(slots, slots, unit, tails)
