"""Where everything lives when a full cache is larger than the device: a function of sizes.

    device   weights | draft | level 1's chunks and window | chunk means | ring | resident rows | work | free
    host     the other rows of the full cache, in page-locked memory

Where the weights are streamed (``cycle/streamed_weights.py``), the device holds embeddings, head and norms of
them, slots for a few layers, and level 1's copy in 8 bits, or 4 where 8 do not fit; the host holds the rest.

What is not given is chosen: level 1's budget and chunk as large and fine as fits, gamma by expected tokens a
second, and every byte that is left keeps rows on the device, since each of them need not cross the bus. Where
the CPU is to attend, it gets the share of the other rows that lets it end with the bus.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from triforce_tree import memory_map
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.host_store import Offload
from triforce_tree.cycle.offloaded import LEAVING
from triforce_tree.cycle.shapes import Extent, unit_rows
from triforce_tree.cycle.streamed_weights import check_level_one
from triforce_tree.memory_map import GIB, MIB, MOST_GAMMA, Machine, Sizes
from triforce_tree.pass_time import LEAST_GAMMA, FarRows, best_gamma, pass_rows

_LEAST_BUDGET, _MOST_BUDGET = 1024, 4096
# A pass over the bus dwarfs a round of levels 0 and 1, so that larger trees pay.
_TREE = "best-first:8,6,4"
# Rows that a store on the device is rounded up to.
_PAGE = 64
_WEIGHTS = "weights"
_MODELS = (_WEIGHTS, "weight slots", "draft", "low-bit weights")


class DoesNotFitError(ValueError):
    """No choice of what may be chosen fits; the message says by how much, and what would help."""


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, and the map of the memory.

    Attributes:
        config: settings, those that were free chosen.
        levels: 1, 2 or 3.
        offload: how rows are split; None where all of them stay on the device.
        device, host: bytes by use; the device's add up to what there is.
        pass_seconds: of level 2, expected; ``weight_seconds`` of it go to weights that cross the bus.
    """

    config: HierarchyConfig
    levels: int
    offload: Offload | None
    device: dict[str, int]
    host: dict[str, int]
    machine: Machine
    pass_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON; memory in GiB."""
        own = self.config.as_options()
        names = ("gamma", "tree", "leaves", "budget", "chunk", "middle_bits", "prefill_chunk")
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
        """After memory ran out: a plan that needs less, and what was given up; None at the end."""
        split = self.offload
        if split is None:
            return None
        if split.resident_bytes:
            less = max(0, min(3 * split.resident_bytes // 4, split.resident_bytes - GIB // 2))
            what = f"resident rows {_gib(split.resident_bytes)} -> {_gib(less)}"
            return self.with_resident(less), what
        if split.buffers > 2:
            return replace(self, offload=replace(split, buffers=2)), f"ring {split.buffers} -> 2 buffers"
        if split.piece_bytes > 8 * MIB:
            less = split.piece_bytes // 2
            what = f"ring pieces {split.piece_bytes // MIB} -> {less // MIB} MiB"
            return replace(self, offload=replace(split, piece_bytes=less)), what
        chosen = self.config.retrieval
        budget = chosen.budget // 2
        least = max(_LEAST_BUDGET, chosen.recent + chosen.chunk)
        if self.levels == 3 and self.config.middle_bits == 8 and _WEIGHTS in self.host:
            return replace(self, config=_with(self.config, middle_bits=4)), "middle_bits 8 -> 4"
        if self.levels == 3 and budget >= least and budget % chosen.chunk == 0:
            return replace(
                self, config=_with(self.config, budget=budget)
            ), f"budget {chosen.budget} -> {budget}"
        return None


def plan(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    given: Collection[str],
    batch: int,
    prompt: int,
    new: int,
) -> MemoryPlan:
    """Decide for ``batch`` texts of ``prompt`` tokens, the longest, and ``new`` ones.

    Args:
        config: ``offloads`` True or "auto".
        given: names of options that stay as they are.

    Raises:
        DoesNotFitError: device or host memory is short.
        ValueError: level 1 was given the weights that are streamed.
    """
    if config.offloads == "auto" and not sizes.streamed:
        on_chip = _on_chip(sizes, machine, config, batch, prompt, new)
        if on_chip.device["free"] >= _reserve(machine):
            return on_chip
    tried: list[MemoryPlan] = []
    if "tree" not in given:
        config = _with(config, tree=_TREE)
    for choice, split in _choices(config, given, prompt, bool(sizes.streamed)):
        made = _offloaded(sizes, machine, choice, split, given, batch, prompt, new)
        tried.append(made)
        if made.device["free"] >= _reserve(machine):
            if made.host_bytes > machine.host:
                raise DoesNotFitError(
                    f"the offloaded cache of {prompt + new} tokens needs {_gib(made.host_bytes)} of host "
                    f"memory, but {_gib(machine.host)} can be had; shorten the prompt, or keep more of it on "
                    "the device (a larger gpu_memory)"
                )
            return made
    raise DoesNotFitError(_refusal(tried[-1], sizes, machine, prompt))


def _refusal(least: MemoryPlan, sizes: Sizes, machine: Machine, prompt: int) -> str:
    used = {name: size for name, size in least.device.items() if name != "free" and size}
    total = sum(used.values()) + _reserve(machine)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in used.items())
    remedy = "allow more (gpu_memory), or shorten the prompt"
    if not sizes.streamed and sizes.weights + sizes.draft > machine.device:
        remedy = (
            "let the weights stay on the host too (offload_weights=True), or use a smaller model or a larger "
            "device: the weights alone do not fit"
        )
    elif not sizes.streamed:
        remedy += ", or let the weights stay on the host too (offload_weights=True)"
    elif least.device["low-bit weights"] and least.config.middle_bits == 8:
        remedy += ", or give middle_bits=4"
    elif sum(least.device[name] for name in _MODELS) > machine.device:
        remedy = (
            "use a smaller model or a larger device, or levels=1, which needs no copy: what the device must "
            "hold of the weights does not fit"
        )
    return (
        f"a prompt of {prompt} tokens needs at least {_gib(total)} of device memory ({parts}, spare "
        f"{_gib(_reserve(machine))}), but {machine.limit} has {_gib(machine.device)}; {remedy}"
    )


def _choices(
    config: HierarchyConfig, given: Collection[str], prompt: int, streamed: bool
) -> Iterator[tuple[HierarchyConfig, Offload]]:
    """From what accepts most and feeds fastest to what needs least memory."""
    own = config.retrieval
    budgets, chunks, feeds = [own.budget], [own.chunk], [config.prefill_chunk]
    if "budget" not in given:
        most = min(_MOST_BUDGET, max(_LEAST_BUDGET, prompt // 16 // 512 * 512))
        most = max(most, own.recent + own.chunk)
        least = max(_LEAST_BUDGET, own.recent + 64)
        budgets = [most, *(b for b in (most // 2, most // 4) if b >= least)]
    if "chunk" not in given:
        # A chunk's mean is one row's keys, so that coarse chunks take less of them, and choose worse.
        chunks = [8, 16, 32, 64]
    if "prefill_chunk" not in given:
        feeds = [4096, 1024]
    near, far = Offload(), Offload(states_on_host=True)
    small = replace(far, piece_bytes=32 * MIB, buffers=2)
    if not any(budget % chunk == 0 for budget, chunk in product(budgets, chunks)):
        budgets, chunks = [own.budget], [own.chunk]
    ways = ((near, feeds[:1], chunks[:2]), (far, feeds[:1], chunks[:2]), (small, feeds[-1:], chunks))
    for budget in budgets:
        bits: tuple[int, ...] = (config.middle_bits,)
        if streamed and _levels(config, prompt, budget) == 3:
            bits = bits if "middle_bits" in given else (8, 4)
            check_level_one(bits[0])
        for middle_bits, (split, some_feeds, some_chunks) in product(bits, ways):
            for feed, chunk in product(some_feeds, some_chunks):
                if budget % chunk == 0 and chunk <= own.recent:
                    chosen = {"budget": budget, "chunk": chunk, "middle_bits": middle_bits}
                    yield _with(config, prefill_chunk=feed, **chosen), split


def _levels(config: HierarchyConfig, prompt: int, budget: int | None = None) -> int:
    if isinstance(config.levels, int):
        return config.levels
    return 3 if prompt >= 2 * (budget or config.retrieval.budget) else 2


def _offloaded(
    sizes: Sizes,
    machine: Machine,
    config: HierarchyConfig,
    split: Offload,
    given: Collection[str],
    batch: int,
    prompt: int,
    new: int,
) -> MemoryPlan:
    levels = _levels(config, prompt)
    if "gamma" not in given and levels == 3:
        # Behind rows and laws grow with it, so the largest is laid out for, and a smaller one taken below.
        config = _with(config, gamma=MOST_GAMMA)
    row, layers = sizes.row, sizes.layers
    chosen = config.retrieval
    unit = unit_rows(chosen.chunk if levels == 3 else 1)
    room = -(-(prompt + new) // unit) * unit
    piece = max(unit, min(split.piece_bytes // row, room) // unit * unit) * row
    means, slots, recent = 0, 0, 0
    if levels == 3:
        recent, slots = chosen.recent, (chosen.budget - chosen.recent) // chosen.chunk * chosen.chunk
        chunks = room // chosen.chunk * layers * sizes.kv_heads * batch
        means = chunks * (sizes.head_dim * sizes.itemsize + 4)  # and where each of them is
    leaving = -(-LEAVING // unit) * unit
    rows = slots + recent + leaving + Extent.of(config, levels).behind
    store = -(-rows // _PAGE) * _PAGE * layers * row * batch
    aside = (recent + unit) * batch
    prefill = memory_map.prefill(sizes, config, prompt, store, aside, split.states_on_host)
    device = {
        "weights": sizes.weights - sizes.streamed,
        "weight slots": sizes.slots,
        "draft": sizes.draft if levels > 1 else 0,
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "level 1: chunks and window": store,
        "chunk means": means,
        "ring": split.buffers * piece,
        "prefill": prefill,
        "graphs and workspace": memory_map.workspace(sizes, config, levels, batch)
        + memory_map.partials(sizes, config, room, piece),
        "other tensors": machine.others,
    }
    left = machine.device - sum(device.values()) - _reserve(machine)
    whole = room * layers * row * batch
    resident = min(whole, max(0, left) // (piece * batch) * piece * batch)
    device["resident rows"] = resident
    device["free"] = machine.device - sum(device.values())
    streamed = max(0, whole - resident)
    on_device = sizes.weights + resident
    host = {"full rows": streamed}
    if sizes.streamed:
        host[_WEIGHTS] = sizes.streamed
    if split.states_on_host:
        host["hidden states of prefill"] = prompt * sizes.hidden * sizes.itemsize
    far = _far_rows(host, machine)
    if far.share(LEAST_GAMMA + 1) and config.leaves is None and levels == 3:
        # Further rows are nearly free on the device, but not on the CPU: leaves bring a token a pass at most.
        config = _with(config, leaves=False)

    def seconds(gamma: int) -> float:
        return max(far.seconds(pass_rows(config, levels, gamma)), on_device / machine.read)

    if "gamma" not in given and levels == 3:
        config = _with(config, gamma=best_gamma(sizes, machine, config, seconds))
    split = far.split(replace(split, resident_bytes=resident), pass_rows(config, levels))
    return MemoryPlan(config, levels, split, device, host, machine, seconds(config.gamma))


def _far_rows(host: Mapping[str, int], machine: Machine) -> FarRows:
    return FarRows(host["full rows"], host.get(_WEIGHTS, 0), machine.bus, machine.host_attention)


def _on_chip(
    sizes: Sizes, machine: Machine, config: HierarchyConfig, batch: int, prompt: int, new: int
) -> MemoryPlan:
    levels = _levels(config, prompt)
    room = prompt + new + Extent.of(config, levels).behind
    rows = room * sizes.layers * sizes.row * batch
    means = room // config.retrieval.chunk * sizes.layers * sizes.row // 2 * batch if levels == 3 else 0
    chunk = config.prefill_chunk or 4096
    device = {
        "weights": sizes.weights,
        "draft": sizes.draft if levels > 1 else 0,
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "full rows": rows,
        "chunk means": means,
        "prefill": chunk * memory_map.token(sizes),
        "graphs and workspace": memory_map.workspace(sizes, config, levels, batch),
        "other tensors": machine.others,
    }
    device["free"] = machine.device - sum(device.values())
    seconds = (sizes.weights + rows) / machine.read
    return MemoryPlan(config, levels, None, device, {}, machine, seconds)


def _with(config: HierarchyConfig, **options: Any) -> HierarchyConfig:
    return HierarchyConfig.from_options(**{**config.as_options(), **options})


def _reserve(machine: Machine) -> int:
    return memory_map.reserve(machine.device)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
