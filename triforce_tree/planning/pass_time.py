"""How long a pass of level 2 takes, what of it the CPU should do, and how many tokens to gather for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_map import MOST_GAMMA, HostRate, Machine, Sizes
from triforce_tree.trees.device_shapes import PassLimits

LEAST_GAMMA = 12
"""The smallest gamma that is chosen."""

# Acceptance a token that gamma, which is only the most that a pass may gather, is chosen for.
_ACCEPTANCE = 0.97
# Seconds of a round that are not bytes: the draft's forwards, and small kernels.
_ROUND_SECONDS = 2e-3
# Of the bandwidth that a round of level 1 reaches on its bytes.
_ROUND_SHARE = 0.7
# Of what the CPU reaches: it waits for the queries of each layer.
_BUSY = 0.95
# Shares are so many 32nds. Speeds are measured anew in each process, but shares decide about bits.
_STEPS = 32


@dataclass(frozen=True)
class FarRows:
    """What of a pass is in host memory.

    Attributes:
        rows: bytes of keys and values.
        others: bytes that cross the bus in any case.
        bus: bytes a second.
        cpu: None where the CPU attends to nothing.
    """

    rows: int
    others: int
    bus: float
    cpu: HostRate | None = None

    def share(self, queries: int) -> float:
        """Of the rows, the CPU's, so that it ends with the bus or before, in a pass of so many query rows."""
        if self.cpu is None or not self.rows:
            return 0.0
        cpu = self._cpu(queries)
        share = min(1.0, (1 + self.others / self.rows) * cpu / (cpu + self.bus))
        return math.floor(_STEPS * share) / _STEPS

    def split(self, rows: Offload, queries: int) -> Offload:
        """This split with the CPU's shares, where a pass of level 2 has so many query rows."""
        return replace(rows, host_share=self.share(queries), plain_host_share=self.share(1))

    def seconds(self, queries: int) -> float:
        """Of such a pass, as far as these bytes decide it."""
        share = self.share(queries)
        on_bus = ((1 - share) * self.rows + self.others) / self.bus
        return max(on_bus, share * self.rows / self._cpu(queries)) if share else on_bus

    def _cpu(self, queries: int) -> float:
        assert self.cpu is not None
        return _BUSY * self.cpu.at(queries)


def pass_rows(config: HierarchyConfig, levels: int, gamma: int | None = None) -> int:
    """Rows of a text in a pass of level 2."""
    if levels < 3:
        return PassLimits.of(config, levels).nodes
    gamma = config.gamma if gamma is None else gamma
    return gamma + 1 + (gamma if config.runner_ups is not False else 0)


def best_gamma(
    sizes: Sizes, machine: Machine, config: HierarchyConfig, pass_seconds: Callable[[int], float]
) -> int:
    """Tokens to gather for most tokens a second, with rounds that cost level 1's bytes."""
    depth = PassLimits.of(config, 3).depth
    budget = config.retrieval.budget
    seen = budget * sizes.whole_layers * sizes.row + sizes.window_bytes(budget)
    weights = memory_map.low_bit(sizes, config, 3) or sizes.weights
    a_round = _ROUND_SECONDS + (weights + seen) / (_ROUND_SHARE * machine.read)

    def rate(gamma: int) -> float:
        expected = (1 - _ACCEPTANCE ** (gamma + 1)) / (1 - _ACCEPTANCE)
        return expected / (math.ceil(gamma / (1 + depth / 2)) * a_round + pass_seconds(gamma))

    return max(range(LEAST_GAMMA, MOST_GAMMA + 1, 4), key=rate)
