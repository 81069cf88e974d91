"""Over how many ranks a text is split by position, where that is left open: by estimated times of a pass.

A pass reads a rank's share of the weights and of the keys and values, and each layer waits for collectives.
Ranks that split heads read less of attention's weights; ranks that split a text need no KV heads to share.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.ranks import merged_bytes
from triforce_tree.kv.offload.bandwidth import read_bandwidth
from triforce_tree.models.indexers import indexers
from triforce_tree.models.model_copy import text_decoder, weight_bytes
from triforce_tree.models.recurrent.mixers import mixers, unknown_mixers
from triforce_tree.models.supported import max_positions
from triforce_tree.models.tensor_parallel import layers_to_shard, neurons_divide, of_attention, shards_of
from triforce_tree.runtime import distributed
from triforce_tree.runtime.distributed import Group

_LOG = logging.getLogger(__name__)
# The length that is assumed for models that name none.
_POSITIONS = 1 << 15


@dataclass(frozen=True)
class Link:
    """Holds the seconds of a small collective of two ranks, and the bytes per second of larger ones."""

    latency: float
    bandwidth: float

    def seconds(self, ranks: int, sent: float) -> float:
        """Returns the estimated seconds of a collective of ``sent`` bytes per rank (log2(ranks) steps)."""
        return math.ceil(math.log2(ranks)) * self.latency + sent / self.bandwidth if ranks > 1 else 0.0


# As measured within a machine (docs/results/sequence_parallel_h200x2.jsonl: 32 merging collectives of 8 and
# of 256 KB in 0.12 and 0.23 ms); assumed between machines, and of gloo.
WITHIN, BETWEEN, HOSTS = Link(4e-6, 75e9), Link(30e-6, 25e9), Link(150e-6, 1e9)


@dataclass(frozen=True)
class Ranks:
    """Describes the processes that decode together.

    Attributes:
        size: their number; ``local`` of them, next to each other, are on each machine.
        read: bytes a second of reading a device's memory.
        within, between: links of the ranks of one machine, and of several.
    """

    size: int
    local: int
    read: float
    within: Link = WITHIN
    between: Link = BETWEEN

    @classmethod
    def joined(cls, group: Group) -> "Ranks":
        """Returns the ranks that have joined; all of them must call it, since the slowest one counts."""
        read = distributed.all_reduce_min([read_bandwidth(group.device)])[0]
        links = (WITHIN, BETWEEN) if group.device.type == "cuda" else (HOSTS, HOSTS)
        return cls(group.size, distributed.local_size(), read, *links)

    def link(self, adjacent: int) -> Link:
        """Returns the link that connects groups of so many adjacent ranks."""
        return self.within if self.local % adjacent == 0 else self.between


def pass_seconds(
    model: PreTrainedModel, context: int, ranks: Ranks, tokens: int, method: str | None = None
) -> float:
    """Returns the estimated seconds of a forward of ``tokens`` tokens after all positions of the model.

    Experts and the head count as if all were read: what a rank reads of them does not depend on ``context``.

    Args:
        model: not sharded; its weights are not read, and may be on the meta device.
        context: ranks that split the text.
        method: how the weights are quantised; None if they are not.

    Raises:
        ValueError: the other ranks cannot share the heads.
    """
    heads = ranks.size // context
    planned = layers_to_shard(model, heads, method)
    inner = ranks.size if neurons_divide(model, planned, ranks.size) else heads
    config: Any = model.config.get_text_config(decoder=True)
    itemsize = model.dtype.itemsize
    shared = dict.fromkeys((True, False), 0)
    for path, _ in planned:
        shared[of_attention(model, path)] += sum(w.nbytes for w in model.get_submodule(path).parameters())
    weights = weight_bytes(model) - sum(shared.values()) + shared[True] // heads + shared[False] // inner
    query = config.num_attention_heads
    kv, width = getattr(config, "num_key_value_heads", None) or query, getattr(config, "head_dim", None)
    width = width or config.hidden_size // query
    length, layers = max_positions(config) or _POSITIONS, config.num_hidden_layers
    slot = 2 * kv * width * itemsize
    window = min(getattr(config, "sliding_window", None) or length, length)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windowed = kinds.count("sliding_attention") if window < length else 0
    slots = ((layers - windowed) * length // context + windowed * window) * slot // heads
    hidden = tokens * config.hidden_size * itemsize
    waiting = ranks.link(heads).seconds(heads, all_reduced(heads, hidden))
    if context > 1:
        sent = (context - 1) * merged_bytes(tokens, query // heads, width, itemsize)
        waiting += ranks.link(ranks.size).seconds(context, sent)
    if planned:
        waiting += ranks.link(inner).seconds(inner, all_reduced(inner, hidden))
    return float((weights + slots) / ranks.read + layers * waiting)


def chosen(
    model: PreTrainedModel,
    config: HierarchyConfig,
    size: int,
    ranks: Callable[[], Ranks],
    method: str | None = None,
) -> int:
    """Returns over how many of ``size`` ranks to split texts: the fastest possible number by estimate.

    Args:
        model: on any device, or meta; one that is sharded stays as it is.
        ranks: called only where there is a choice.
        method: how the weights are quantised; None if they are not.

    Raises:
        ValueError: neither heads nor texts can be split.
    """
    if (heads := shards_of(model)) > 1:
        return size // heads
    possible, reasons = [], {}
    for context in (n for n in range(1, size + 1) if size % n == 0):
        try:
            layers_to_shard(model, size // context, method)
            replace(config, context_parallel=context)
            if context > 1:
                _refuse_recurrent(model, context)
            possible.append(context)
        except ValueError as error:
            reasons[context] = str(error)
    if not possible:
        raise ValueError(f"{reasons[1]}; nor can a text be split: {reasons[size]}")
    if len(possible) == 1:
        return possible[0]
    tokens = 1 if config.levels == 1 else 2 * config.gamma + 1
    machine = ranks()
    seconds = {context: pass_seconds(model, context, machine, tokens, method) for context in possible}
    best = min(seconds, key=lambda context: (seconds[context], context))
    _LOG.info(
        "context_parallel=%d: estimated for a pass of %d tokens %s", best, tokens,
        ", ".join(f"{1e3 * value:.2f} ms with {context}" for context, value in seconds.items()),
    )  # fmt: skip
    return best


def _refuse_recurrent(model: nn.Module, context: int) -> None:
    decoder = text_decoder(model)
    if mixers(decoder) or unknown_mixers(decoder):
        raise ValueError(
            f"context_parallel={context} is not possible with {type(model).__name__}, which has recurrent "
            "layers"
        )
    if indexers(decoder):
        raise ValueError(
            f"context_parallel={context} is not possible with {type(model).__name__}, whose indexers choose "
            "among all slots of a text"
        )


def all_reduced(ranks: int, size: int) -> float:
    """Returns the bytes that a rank sends to reduce ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size
