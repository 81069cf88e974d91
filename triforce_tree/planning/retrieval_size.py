"""Budget and chunk of level 1 by the expected time of a token: what passes read, and what level 1 misses.

A larger budget makes level 1 slower, and the target accept more of what it proposes. What the target refuses
was measured along texts at several lengths, budgets and chunks (``docs/results/budgets_cpu.json``), and
follows a law in these alone; a pass over a few tokens takes as long as reading its weights, keys and values.
Smaller chunks select better, and more means of them are read.
"""

import itertools
from dataclasses import dataclass

BUDGETS, CHUNKS = (1024, 1536, 2048, 4096, 8192, 16_384, 32_768), (8, 16, 32)
"""Those that are compared: buffers are made anew for each of them, so that they are few."""
# Tokens that a round of drafting adds to the chain.
_GATHERED = 3.0
# A size that is expected to be this much faster than a smaller one is worth its memory.
_WORTH = 1.02


@dataclass(frozen=True)
class Read:
    """Bytes that passes read, for a sequence.

    Attributes:
        weights: of the target, in one of its forwards.
        level_one: of level 1's weights, where they have fewer bits.
        slot: keys and values of one token, in layers without a window.
        draft: a round of drafting.
    """

    weights: float
    level_one: float
    slot: float
    draft: float


def missed(budget: int, chunk: int, context: int) -> float:
    """The expected share of level 1's tokens that the target refuses, each after accepted ones.

    Fitted to the embedded pair, the mean of four kinds of text at temperatures of 0.6 and 1 (rms error 7 %).
    Texts differ by a factor of up to four.

    Args:
        budget: smaller than ``context``.
    """
    unseen = 1 - budget / context
    grows = (context / 16_384) ** 0.25 * (chunk / 8) ** 0.21
    return float(min(0.9, 0.079 * (budget / 1024) ** -0.47 * unseen**1.74 * grows))


def bytes_of_token(read: Read, context: int, budget: int, chunk: int, gamma: int) -> float:
    """Bytes that are read for a token, with the best number of rounds (arXiv 2211.17192, equation 1)."""
    a = 1 - missed(budget, chunk, context)
    # The mean key of each chunk is half of a slot.
    round_ = read.draft + read.level_one + budget * read.slot + context / chunk * read.slot / 2
    target, found = read.weights + context * read.slot, []
    for rounds in range(1, max(2, round(gamma / _GATHERED) + 1)):
        chain = min(gamma, rounds * _GATHERED)
        tokens = (1 - a ** (chain + 1)) / (1 - a) if a < 1 else chain + 1
        found.append((rounds * round_ + target) / tokens)
    return min(found)


def retrieval_size(read: Read, context: int, gamma: int) -> dict[str, int]:
    """``budget`` and ``chunk`` for prompts of ``context`` tokens; empty where they are too short for any.

    Args:
        gamma: most tokens of a chain.
    """
    sizes = [size for size in itertools.product(BUDGETS, CHUNKS) if 2 * size[0] <= context]
    times = {size: bytes_of_token(read, context, *size, gamma) for size in sizes}
    if not times:
        return {}
    least = min(times.values())
    # The first of those that are as good: the smallest budget, and of it the best chunk.
    budget = next(size[0] for size in sizes if times[size] <= _WORTH * least)
    _, chunk = min((size for size in sizes if size[0] == budget), key=times.__getitem__)
    return {"budget": budget, "chunk": chunk}
