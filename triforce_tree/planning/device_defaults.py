"""The settings of a request: what the user gave, and for the rest values that were fastest when measured.

On a GPU a pass over a few more tokens costs little more, and the mean keys of all chunks are read in every
round. So the budget and the chunks follow the length of the prompt in steps.

On a CPU the budget and the chunks are those with the least expected time of a token. A larger budget makes
level 1 slower, and lets the target accept more of what it proposes. The share that the target refuses follows
a law that was fitted to measurements (docs/log/2026-11-26-budget-and-chunk.md); a pass over a few tokens
takes as long as reading its weights, keys and values. Smaller chunks select better, and more of their means
are read.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from triforce_tree.config import HierarchyConfig
from triforce_tree.drafters.base import Drafter
from triforce_tree.kernels.linear.configs import MOST_ROWS
from triforce_tree.models.experts.modules import expert_modules
from triforce_tree.models.few_row import has_int8_kernel, why_not_replaceable
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.model_copy import listed_layers, weight_bytes
from triforce_tree.planning.batch_size import bytes_beside_models
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, MIB, Sizes
from triforce_tree.trees.device_shapes import device_tree_shape, tree_shapes
from triforce_tree.trees.shapes import Shape, matched_alone, tree_shape

# (least tokens of the prompt, budget, chunk): about 4,096 means of each head are read. There are few steps,
# because other settings need new buffers and graphs.
_RETRIEVAL = ((98_304, 8192, 32), (49_152, 8192, 16), (32_768, 4096, 8), (8192, 2048, 8), (0, 1024, 8))
# The same for grouped-query attention. A budget of 16,384 gains as much with sampling as it loses without.
_GROUPED_RETRIEVAL = (_RETRIEVAL[0], (49_152, 4096, 16), *_RETRIEVAL[2:])
_TREE = "best-first:4,4,3,2,1,1"
# Proposals that passes may choose instead: trees, and matched tokens where a text repeats itself. On a CPU
# each verified token has its price: trees of two to five tokens were the best there
# (``docs/log/2026-11-22-trees-or-chains.md``), and of matched tokens a pass verifies as many as should pay
# (``docs/log/2026-12-01-lengths-of-matches.md``). On a GPU a pass over 64 rows costs little more than one
# over 16, and a chain is drafted fastest; where four query heads and more share a KV head, 32 rows cost
# little more.
_CPU_TREES = ("best-first:2,2,1", "chain:2", "lookup:31")
_GPU_TREES = ("best-first:16,14,11,8,6,4,2,2", "chain:6")
_GROUPED_TREES = ("best-first:8,7,5,4,3,2,1,1", "chain:6")
# More than ``_MANY`` sequences have matched tokens of several lengths, because long proposals of so many
# sequences compute longer than a pass reads weights.
_MATCHED, _MANY, _MATCHED_OF_MANY = ("lookup:31",), 8, ("lookup:3", "lookup:7", "lookup:15", "lookup:31")
_GAMMA, _GROUPED_GAMMA = 20, 15
# Most tokens of a sequence in a pass over a chain that ends in a tree: more take another tile of attention.
# The trees of a batch have no more tokens than the kernels of few rows take.
_TAIL_TOKENS = 64
# If there are at least this many query heads for each KV head, a chain of 16 tokens fills a tile of the
# attention kernel.
_GROUPED = 4
_DEFAULTS = HierarchyConfig().as_options()
_RETRIEVAL_NAMES = frozenset({"budget", "chunk", "recent"})
# A product with 8-bit weights takes a microsecond longer to launch than one with 16 bits, and a layer has
# four of them (``docs/kernel.md``), so smaller layers gain nothing. On a CPU a few MiB stay in caches.
_LEAST_LAYER, _LEAST_LAYER_CPU = 64 * MIB, 8 * MIB
# Device memory that a copy of the weights leaves unused where its bits are chosen.
_LEAST_UNUSED, _UNUSED = 4 * GIB, 0.15

# A CPU's budget and chunk are chosen from these. They are few, because each needs new buffers.
BUDGETS, CHUNKS = (1024, 1536, 2048, 4096, 8192, 16_384, 32_768), (8, 16, 32)
# Tokens that a round of drafting adds to the chain.
_GATHERED = 3.0
# A size that is expected to be this much faster than a smaller one is worth its memory.
_WORTH = 1.02


@dataclass(frozen=True)
class Read:
    """The bytes that passes read for one sequence.

    Attributes:
        weights: the target's weights, in one forward of the target.
        level_one: the weights of level 1, which may have fewer bits.
        slot: the keys and values of one token, in layers without a window.
        draft: all that a round of drafting reads.
    """

    weights: float
    level_one: float
    slot: float
    draft: float


def missed(budget: int, chunk: int, context: int) -> float:
    """Returns the probability that the target refuses a token of level 1 that follows accepted ones.

    The law was fitted to the embedded pair: to the mean of four kinds of text at temperatures of 0.6 and 1
    (rms error 7 %). For single texts it is wrong by a factor of 2 to 41.

    Args:
        budget: smaller than ``context``.
    """
    unseen = 1 - budget / context
    grows = (context / 16_384) ** 0.25 * (chunk / 8) ** 0.21
    return float(min(0.9, 0.079 * (budget / 1024) ** -0.47 * unseen**1.74 * grows))


def bytes_of_token(read: Read, context: int, budget: int, chunk: int, gamma: int) -> float:
    """Returns the bytes read per token with the best number of rounds (arXiv 2211.17192, equation 1)."""
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
    """Returns ``budget`` and ``chunk`` for prompts of ``context`` tokens; the dict is empty for prompts that
    are too short.

    Args:
        gamma: the most tokens of a chain.
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


@dataclass(frozen=True)
class ModelFacts:
    """The properties of the models and of their device that the defaults depend on.

    Attributes:
        gpu: whether the target is on a GPU.
        group: query heads of the target per KV head.
        grows_trees: whether a draft model grows trees of any shape.
        takes_matches: whether matched tokens may take the place of its trees, or of another drafter's.
        few_bits: whether level 1 should be faster in 8 bits (:func:`gains_from_few_bits`).
        weights, drafted: bytes of the target's and of the draft's weights; 0 without a draft.
        slot: bytes of the keys and values of one token, in layers without a window.
    """

    gpu: bool
    group: int
    grows_trees: bool
    takes_matches: bool = False
    few_bits: bool = False
    weights: float = 0.0
    drafted: float = 0.0
    slot: float = 0.0

    @classmethod
    def of(cls, target: HFModel, draft: HFModel | None, drafter: Drafter | None = None) -> "ModelFacts":
        """Reads the properties of the models, which visits all their modules.

        Args:
            drafter: what proposes trees in the place of a draft model.
        """
        elements = sum(shape.elements for shape in target.kv_shapes if shape.window is None)
        grows = draft is not None and target.states is None and draft.states is None
        return cls(
            gpu=target.device.type == "cuda",
            group=target.heads.group,
            grows_trees=grows,
            # Matched tokens take the place of trees that a network grows, or there are no others.
            takes_matches=grows or (draft is None and not (drafter is not None and drafter.deterministic)),
            few_bits=gains_from_few_bits(target),
            weights=weight_bytes(target.model),
            drafted=weight_bytes(draft.model) if draft is not None else 0.0,
            slot=elements * target.dtype.itemsize,
        )

    def read(self, config: HierarchyConfig, batch: int) -> Read:
        """Returns the bytes that passes read for one of ``batch`` sequences, on a CPU."""
        few = config.retrieval_weight_bits == 8 or (config.retrieval_weight_bits == "auto" and self.few_bits)
        weights, depth = self.weights / batch, tree_shapes(config)[0].depth
        return Read(weights, weights / 4 if few else weights, self.slot, depth * self.drafted / batch)


@lru_cache(maxsize=64)
def resolve(
    config: HierarchyConfig, given: frozenset[str], facts: ModelFacts, prompt: int, batch: int = 1
) -> HierarchyConfig:
    """Returns a request's settings: ``config`` with the device's values for options left at their defaults.

    It is called once for a request whose keys, values and weights are all on the device.

    Args:
        given: names of options that stay as they are, even at their defaults.
        facts: of the models. On a CPU the defaults are those of ``HierarchyConfig``, but for ``other_trees``,
            ``budget`` and ``chunk``.
        prompt: tokens of the longest prompt.
        batch: sequences.
    """
    options = config.as_options()
    free = {name for name in options if name not in given and options[name] == _DEFAULTS[name]}
    chosen: dict[str, Any] = {}
    grouped = facts.group >= _GROUPED
    shapes: Sequence[str | Shape] = _CPU_TREES
    if facts.gpu:
        trees = _GROUPED_TREES if grouped else _GPU_TREES
        shapes = (*trees, *(_MATCHED_OF_MANY if batch > _MANY else _MATCHED))
    if not facts.grows_trees:
        shapes = matched_alone(shapes) if facts.takes_matches else ()
    # The memory plan of an offloaded cache has no buffers for further shapes.
    if "tree" in free and shapes and config.offloads is False:
        chosen["other_trees"] = tuple(shapes)
    if facts.gpu:
        chosen["gamma"] = _GROUPED_GAMMA if grouped else _GAMMA
        if facts.grows_trees:
            chosen["tree"] = _TREE
        if grouped:
            chosen["runner_ups"] = False
        if free >= _RETRIEVAL_NAMES:
            steps = _GROUPED_RETRIEVAL if grouped else _RETRIEVAL
            _, chosen["budget"], chosen["chunk"] = next(step for step in steps if prompt >= step[0])
    elif free >= _RETRIEVAL_NAMES:
        chosen |= retrieval_size(facts.read(config, batch), prompt, config.gamma)
    if facts.gpu and facts.grows_trees and not config.offloads:
        values = {**options, **{name: value for name, value in chosen.items() if name in free}}
        tail = device_tree_shape(tree_shape(values["tree"])).nodes - 1
        tokens = 1 + values["gamma"] * (1 if values["runner_ups"] is False else 2) + tail
        chosen["tail_tree"] = tokens <= _TAIL_TOKENS and tokens * batch <= MOST_ROWS
    return config.changed({name: value for name, value in chosen.items() if name in free})


def gains_from_few_bits(target: HFModel) -> bool:
    """Returns whether level 1 should be faster in 8 bits.

    This is so for large linear layers, in half precision on a GPU or in fp32 on a CPU that has our kernel.
    Models with experts were not measured, so the result is False for them.
    """
    layers, gpu = listed_layers(target.model), target.device.type == "cuda"
    served = target.dtype.itemsize == 2 if gpu else has_int8_kernel(target.device, target.dtype)
    if not served or not layers or target.streamed:
        return False
    if expert_modules(target.model) or why_not_replaceable(target.model):
        return False
    least = _LEAST_LAYER if gpu else _LEAST_LAYER_CPU
    elements = sum(weight.numel() for weight in layers.parameters())
    return elements * target.dtype.itemsize >= least * len(layers)


def level_one_bits(
    sizes: Sizes, config: HierarchyConfig, workload: Workload, free: int, total: int, held: int
) -> int:
    """Returns the bits for ``retrieval_weight_bits="auto"``: 8 if the copy leaves enough memory, else 16.

    Args:
        sizes: sizes of the models, which are loaded.
        config: the other settings: three levels, all on the device.
        workload: the workload that needs memory beside the copy.
        free: device bytes that new tensors can use.
        total: device bytes.
        held: bytes of an existing copy. They count as free, and half of the usual unused memory is then
            enough, so that alternating requests do not make and drop the copy in turn.
    """
    needed = bytes_beside_models(sizes, replace(config, retrieval_weight_bits=8), workload)
    unused = max(_LEAST_UNUSED, int(_UNUSED * total))
    return 8 if free + held - needed >= (unused // 2 if held else unused) else 16
