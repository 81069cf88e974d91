"""What one choice of settings takes of device and host memory, and how long its passes are."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from triforce_tree.config import HierarchyConfig
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.layout import piece_slots, round_up, window_slots
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_map import GIB, MIB, MOST_GAMMA, Machine, Sizes
from triforce_tree.planning.pass_time import LEAST_GAMMA, FarRows, best_gamma, pass_rows
from triforce_tree.trees.device_shapes import PassLimits, unit_rows

LEAST_BUDGET = 1024
"""The smallest budget that is chosen."""

# Rows that a store on the device is rounded up to.
_PAGE = 64
_WEIGHTS = "weights"


@dataclass(frozen=True)
class Workload:
    """What memory is planned for: ``batch`` texts of ``prompt`` tokens, the longest, and ``new`` ones."""

    batch: int
    prompt: int
    new: int

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest text."""
        return self.prompt + self.new


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, and the map of the memory.

    Attributes:
        config: settings, those that were free chosen.
        levels: 1, 2 or 3.
        offload: how rows are split; None where all of them stay on the device.
        device, host: bytes by use; the device's add up to what there is.
        pass_seconds: of level 2, expected; ``weight_seconds`` of it go to weights that cross the bus.
        texts: what it was made for.
        layer_bytes: of one layer's rows of all texts.
    """

    config: HierarchyConfig
    levels: int
    offload: Offload | None
    device: dict[str, int]
    host: dict[str, int]
    machine: Machine
    pass_seconds: float
    workload: Workload
    layer_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON; memory in GiB."""
        own = self.config.as_options()
        names = ("gamma", "tree", "runner_ups", "budget", "chunk", "retrieval_weight_bits", "prefill_chunk")
        chosen = {name: own[name] for name in names}
        return {
            "offloaded": self.offload is not None,
            "levels": self.levels,
            "options": {**chosen, "tree": str(chosen["tree"])},
            "split": asdict(self.offload) if self.offload is not None else None,
            "device_gib": {name: size / GIB for name, size in self.device.items()},
            "host_gib": {name: size / GIB for name, size in self.host.items()},
            "bus_gbps": self.machine.bus / 1e9,
            "cpu_gbps": self.cpu / 1e9 if self.cpu is not None else None,
            "pass_ms": 1e3 * self.pass_seconds,
            "pass_weights_gib": self.host.get(_WEIGHTS, 0) / GIB,
            "pass_weights_ms": 1e3 * self.weight_seconds,
        }

    @property
    def cpu(self) -> float | None:
        """Bytes a second that the CPU attends to in a pass of level 2; None where it does not attend."""
        rate = self.machine.host_attention
        return rate.at(pass_rows(self.config, self.levels)) if rate is not None and self.offload else None

    @property
    def weight_seconds(self) -> float:
        return self.host.get(_WEIGHTS, 0) / self.machine.bus

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def coming_bytes(self) -> int:
        """Host bytes that are still to be taken: weights are there since the model was loaded."""
        return self.host_bytes - self.host.get(_WEIGHTS, 0)

    @property
    def peak(self) -> int:
        """Device bytes that the engine is expected to take."""
        return sum(size for name, size in self.device.items() if name != "free")

    @property
    def fits_device(self) -> bool:
        return self.device["free"] >= memory_map.reserve(self.machine.device)

    @property
    def fits(self) -> bool:
        """Whether device and host have what it takes."""
        return self.fits_device and self.host_bytes <= self.machine.host

    def with_resident(self, size: int) -> "MemoryPlan":
        """The same with ``size`` bytes of rows on the device."""
        assert self.offload is not None, "without offloading all rows are on the device"
        more = size - self.device["resident rows"]
        device = {"resident rows": size, "free": self.device["free"] - more}
        host = self.host | {"full rows": max(0, self.host["full rows"] - more)}
        far = _far_rows(host, self.machine)
        split = far.split(replace(self.offload, resident_bytes=size), pass_rows(self.config, self.levels))
        return replace(self, offload=split, device=self.device | device, host=host)

    def smaller(self) -> tuple["MemoryPlan", str] | None:
        """After device memory ran out: a plan that needs less, and what was given up; None at the end."""
        split = self.offload
        if split is None:
            return None
        least = self.layer_bytes if split.last_resident else 0
        less = max(least, min(3 * split.resident_bytes // 4, split.resident_bytes - GIB // 2))
        fewer = self.with_resident(less)
        if less < split.resident_bytes and fewer.host_bytes <= self.machine.host:
            return fewer, f"resident rows {gib(split.resident_bytes)} -> {gib(less)}"
        if split.buffers > 2:
            return replace(self, offload=replace(split, buffers=2)), f"ring {split.buffers} -> 2 buffers"
        if split.piece_bytes > 8 * MIB:
            less = split.piece_bytes // 2
            what = f"ring pieces {split.piece_bytes // MIB} -> {less // MIB} MiB"
            return replace(self, offload=replace(split, piece_bytes=less)), what
        chosen = self.config.retrieval
        budget = chosen.budget // 2
        least = max(LEAST_BUDGET, chosen.recent + chosen.chunk)
        if self.levels == 3 and self.config.retrieval_weight_bits == 8 and _WEIGHTS in self.host:
            return replace(
                self, config=with_options(self.config, retrieval_weight_bits=4)
            ), "retrieval_weight_bits 8 -> 4"
        if self.levels == 3 and budget >= least and budget % chosen.chunk == 0:
            return replace(
                self, config=with_options(self.config, budget=budget)
            ), f"budget {chosen.budget} -> {budget}"
        return None


def offloaded(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    split: Offload,
    given: Collection[str],
    workload: Workload,
) -> MemoryPlan:
    """The plan for one choice: gamma is chosen, unless it is given, and what is left keeps resident rows.

    Args:
        split: its ``resident_bytes`` and shares of the CPU are chosen here.
    """
    levels = levels_of(config, workload.prompt)
    if "gamma" not in given and levels == 3:
        # Behind rows and laws grow with it, so the largest is laid out for, and a smaller one taken below.
        config = with_options(config, gamma=MOST_GAMMA)
    row, layers, batch = sizes.row, sizes.whole_layers, workload.batch
    chosen = config.retrieval
    unit = unit_rows(chosen.chunk if levels == 3 else 1)
    max_seq_len = round_up(workload.max_seq_len, unit)
    piece = piece_slots(split.piece_bytes, row, max_seq_len, unit) * row
    means, slots, recent = 0, 0, 0
    if levels == 3:
        recent, slots = chosen.recent, (chosen.budget - chosen.recent) // chosen.chunk * chosen.chunk
        chunks = max_seq_len // chosen.chunk * layers * sizes.kv_heads * batch
        means = chunks * (sizes.head_dim * sizes.itemsize + 4)  # and where each of them is
    rows = slots + window_slots(recent, unit, PassLimits.of(config, levels).scratch_slots)
    store = round_up(rows, _PAGE) * layers * row * batch
    hidden = memory_map.hidden_states(sizes, workload.prompt)
    if split.last_resident:
        split = replace(split, states_on_host=hidden > store)
    aside = (recent + unit) * batch
    device = {
        "weights": sizes.weights - sizes.streamed,
        "weight slots": sizes.slots,
        "draft": sizes.draft if levels > 1 else 0,
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "level 1: chunks and window": store,
        **_windows(sizes, config, levels, workload),
        "chunk means": means,
        "ring": split.buffers * piece,
        "prefill": memory_map.prefill(sizes, config, workload.prompt, store, aside, split),
        "graphs and workspace": memory_map.workspace(sizes, config, levels, batch)
        + memory_map.partials(sizes, config, max_seq_len, piece),
        "other tensors": machine.others,
    }
    left = max(0, machine.device - sum(device.values()) - memory_map.reserve(machine.device))
    layer = max_seq_len * row * batch
    whole = layer * layers
    last = layer if split.last_resident and layers else 0
    resident = min(whole, last + max(0, left - last) // (piece * batch) * piece * batch)
    device["resident rows"] = resident
    device["free"] = machine.device - sum(device.values())
    on_device = sizes.weights + resident
    host = {"full rows": whole - resident}
    if sizes.streamed:
        host[_WEIGHTS] = sizes.streamed
    if split.states_on_host:
        host["hidden states of prefill"] = hidden
    far = _far_rows(host, machine)
    if far.share(LEAST_GAMMA + 1) and config.runner_ups is None and levels == 3:
        # Further rows are nearly free on the device, but not on the CPU: leaves bring a token a pass at most.
        config = with_options(config, runner_ups=False)

    def seconds(gamma: int) -> float:
        return max(far.seconds(pass_rows(config, levels, gamma)), on_device / machine.read)

    if "gamma" not in given and levels == 3:
        config = with_options(config, gamma=best_gamma(sizes, machine, config, seconds))
    split = far.split(replace(split, resident_bytes=resident), pass_rows(config, levels))
    return MemoryPlan(config, levels, split, device, host, machine, seconds(config.gamma), workload, layer)


def _windows(sizes: Sizes, config: HierarchyConfig, levels: int, workload: Workload) -> dict[str, int]:
    """Layers with a window, where there are any."""
    size = memory_map.rings(sizes, config, levels, workload.max_seq_len, workload.batch)
    return {"layers with windows": size} if sizes.windowed else {}


def _far_rows(host: Mapping[str, int], machine: Machine) -> FarRows:
    return FarRows(host["full rows"], host.get(_WEIGHTS, 0), machine.bus, machine.host_attention)


def on_device(sizes: Sizes, machine: Machine, config: HierarchyConfig, workload: Workload) -> MemoryPlan:
    """The plan that keeps everything on the device."""
    levels = levels_of(config, workload.prompt)
    max_seq_len = workload.max_seq_len + PassLimits.of(config, levels).scratch_slots
    layer = max_seq_len * sizes.row * workload.batch
    rows = layer * sizes.whole_layers
    means = max_seq_len // config.retrieval.chunk * rows // max_seq_len // 2 if levels == 3 else 0
    chunk = config.prefill_chunk or 4096
    device = {
        "weights": sizes.weights,
        "draft": sizes.draft if levels > 1 else 0,
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "full rows": rows,
        **_windows(sizes, config, levels, workload),
        "chunk means": means,
        "prefill": chunk * memory_map.token(sizes),
        "graphs and workspace": memory_map.workspace(sizes, config, levels, workload.batch),
        "other tensors": machine.others,
    }
    device["free"] = machine.device - sum(device.values())
    seconds = (sizes.weights + rows) / machine.read
    return MemoryPlan(config, levels, None, device, {}, machine, seconds, workload, layer)


def levels_of(config: HierarchyConfig, prompt: int, budget: int | None = None) -> int:
    """How many levels a prompt of so many tokens gets."""
    if isinstance(config.levels, int):
        return config.levels
    return 3 if prompt >= 2 * (budget or config.retrieval.budget) else 2


def with_options(config: HierarchyConfig, **options: Any) -> HierarchyConfig:
    return HierarchyConfig.from_options(**{**config.as_options(), **options})


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
