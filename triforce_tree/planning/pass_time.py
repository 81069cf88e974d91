"""The time of a full-target pass over an offloaded cache, the CPU's share of it, and the gamma to use."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_map import MOST_GAMMA, HostRate, Machine, Sizes
from triforce_tree.policy.estimates import tokens_of
from triforce_tree.trees.device_shapes import pass_limits

LEAST_GAMMA = 12
"""The smallest gamma that is chosen."""

# The acceptance per token that gamma is chosen for; gamma is only the most tokens drafted for a pass.
_ACCEPTANCE = 0.97
# Seconds of a round that do not depend on bytes: the draft model's forwards, and small kernels.
_ROUND_SECONDS = 2e-3
# Share of the device's bandwidth that a round of the retrieval model reaches.
_ROUND_BANDWIDTH = 0.7
# Share of its measured rate that the CPU reaches in a pass, as it waits for the queries of each layer.
_CPU_UTILISATION = 0.95
# Shares are multiples of 1/32: measured rates vary by process, and the split changes the output's bits.
_SHARE_STEPS = 32


@dataclass(frozen=True)
class HostKV:
    """The host memory that a full-target pass reads.

    Attributes:
        kv_bytes: bytes of keys and values.
        other_bytes: bytes of other data, which always cross the bus.
        bus: bytes per second.
        cpu: rate of the CPU's attention; None if the CPU does not attend.
    """

    kv_bytes: int
    other_bytes: int
    bus: float
    cpu: HostRate | None = None

    def share(self, queries: int) -> float:
        """Returns the CPU's share of the keys and values for so many queries, with which the CPU ends no
        later than the bus.
        """
        if self.cpu is None or not self.kv_bytes:
            return 0.0
        cpu = self._cpu_rate(queries)
        share = min(1.0, (1 + self.other_bytes / self.kv_bytes) * cpu / (cpu + self.bus))
        return math.floor(_SHARE_STEPS * share) / _SHARE_STEPS

    def split(self, offload: Offload, queries: int) -> Offload:
        """Returns ``offload`` with the CPU's shares for full-target passes of so many queries per
        sequence.
        """
        return replace(offload, host_share=self.share(queries), plain_host_share=self.share(1))

    def seconds(self, queries: int) -> float:
        """Returns the seconds of a pass of so many queries, as far as bus and CPU limit it."""
        share = self.share(queries)
        on_bus = ((1 - share) * self.kv_bytes + self.other_bytes) / self.bus
        return max(on_bus, share * self.kv_bytes / self._cpu_rate(queries)) if share else on_bus

    def _cpu_rate(self, queries: int) -> float:
        assert self.cpu is not None
        return _CPU_UTILISATION * self.cpu.at(queries)


def pass_tokens(config: HierarchyConfig, levels: int, gamma: int | None = None) -> int:
    """Returns the tokens per sequence in a full-target pass: the root, the draft, its runner-ups and the tree
    that follows the draft.
    """
    limits = pass_limits(config, levels)
    if levels < 3:
        return limits.nodes
    limits = limits if gamma is None else replace(limits, max_draft_tokens=gamma)
    return limits.chain_nodes(config.runner_ups is not False)


def best_gamma(
    sizes: Sizes, machine: Machine, config: HierarchyConfig, pass_seconds: Callable[[int], float]
) -> int:
    """Returns the gamma with the most expected tokens per second. A round reads the retrieval model's weights
    and cache.

    Args:
        pass_seconds: returns the seconds of a full-target pass for a gamma.
    """
    depth = pass_limits(config, 3).depth
    budget = config.retrieval.budget
    kv_bytes = budget * sizes.full_layers * sizes.row + sizes.window_bytes(budget)
    nodes = pass_limits(config, 3).nodes
    weights = memory_map.low_bit(sizes, config, 3) or sizes.weights
    # A pass reads only the experts that the tree's tokens are routed to.
    weights = int(weights * sizes.read_weights(nodes) / sizes.weights)
    round_seconds = _ROUND_SECONDS + (weights + kv_bytes) / (_ROUND_BANDWIDTH * machine.read)

    def tokens_per_second(gamma: int) -> float:
        rounds = math.ceil(gamma / (1 + depth / 2))
        return tokens_of(_ACCEPTANCE, gamma) / (rounds * round_seconds + pass_seconds(gamma))

    return max(range(LEAST_GAMMA, MOST_GAMMA + 1, 4), key=tokens_per_second)
