"""The memory plan of one choice of settings: bytes on device and host, and the time of full-target passes."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention.prefill import capacity
from triforce_tree.kv.offload.host_store import Offload, piece_slots, round_up, window_slots
from triforce_tree.models.chunk_graphs import SHORT
from triforce_tree.planning import memory_map
from triforce_tree.planning.memory_map import GIB, MIB, MOST_GAMMA, Machine, Sizes
from triforce_tree.planning.pass_time import LEAST_GAMMA, HostKV, best_gamma, pass_tokens
from triforce_tree.trees.device_shapes import pass_limits, tree_shapes, unit_slots

LEAST_BUDGET = 1024
"""The smallest budget that is chosen."""

# KV slots that a store on the device is rounded up to.
_PAGE = 64
_WEIGHTS = "weights"


@dataclass(frozen=True)
class Workload:
    """The sequences that memory is planned for: ``batch`` of them, with at most ``prompt`` and ``new`` tokens
    each.

    If all sequences are on the device they share a pool of ``pool`` KV slots; 0 gives each its own slots.
    """

    batch: int
    prompt: int
    new: int
    pool: int = 0

    @property
    def max_seq_len(self) -> int:
        """Returns the number of tokens of the longest sequence."""
        return self.prompt + self.new


@dataclass(frozen=True)
class Task:
    """The inputs of a memory plan; ``given`` has the names of options that must not be changed."""

    sizes: Sizes
    machine: Machine
    config: HierarchyConfig
    given: Collection[str]
    workload: Workload

    def with_options(self, **options: Any) -> "Task":
        """Returns the task with other settings."""
        return replace(self, config=self.config.changed(options))

    def on_device(self) -> "MemoryPlan":
        """Returns the plan without offloading."""
        return on_device(self.sizes, self.machine, self.config, self.workload)


@dataclass(frozen=True)
class MemoryPlan:
    """The settings chosen, and the bytes of each use of memory.

    Attributes:
        config: settings, with a value for each that was not given.
        levels: 1, 2 or 3.
        offload: how the KV slots are split; None if all of them stay on the device.
        device, host: bytes by use; those of the device, with "free", add up to ``machine.device``.
        pass_seconds: expected time of a full-target pass; ``weight_seconds`` of it are copies of weights.
        workload: what it was made for.
        layer_bytes: bytes of one layer's KV slots of all sequences.
        weight_bytes: expected bytes of weights that a full-target pass copies to the device.
        resident_experts: layers whose streamed experts stay on the device, once they were copied.
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
    weight_bytes: int = 0
    resident_experts: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON, with memory in GiB."""
        options = self.config.as_options()
        names = (
            "gamma", "tree", "runner_ups", "budget", "chunk", "retrieval_weight_bits", "prefill_chunk",
            "kv_bits",
        )  # fmt: skip
        chosen = {name: options[name] for name in names}
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
            "pass_weights_gib": self.weight_bytes / GIB,
            "pass_weights_ms": 1e3 * self.weight_seconds,
        }

    @property
    def cpu(self) -> float | None:
        """Returns the bytes per second of the CPU's attention in a full-target pass, or None if the CPU does
        not attend.
        """
        rate = self.machine.host_attention
        return rate.at(pass_tokens(self.config, self.levels)) if rate is not None and self.offload else None

    @property
    def weight_seconds(self) -> float:
        return self.weight_bytes / self.machine.bus

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def coming_bytes(self) -> int:
        """Returns the host bytes that are not allocated yet. Streamed weights were allocated when the model
        was loaded.
        """
        return self.host_bytes - self.host.get(_WEIGHTS, 0)

    @property
    def peak(self) -> int:
        """Returns the device bytes that the engine is expected to use."""
        return sum(size for name, size in self.device.items() if name != "free")

    @property
    def fits_device(self) -> bool:
        return self.device["free"] >= memory_map.reserve(self.machine.device)

    @property
    def fits(self) -> bool:
        """Returns whether device and host memory suffice."""
        return self.fits_device and self.host_bytes <= self.machine.host

    def with_resident(self, size: int) -> "MemoryPlan":
        """Returns the plan with ``size`` bytes of KV slots on the device."""
        assert self.offload is not None, "without offloading all KV slots are on the device"
        more = size - self.device["resident KV"]
        device = {"resident KV": size, "free": self.device["free"] - more}
        host = self.host | {"KV": max(0, self.host["KV"] - more)}
        resident = replace(self.offload, resident_bytes=size)
        split = _on_host(host, self.weight_bytes, self.machine).split(
            resident, pass_tokens(self.config, self.levels)
        )
        return replace(self, offload=split, device=self.device | device, host=host)

    def smaller(self) -> tuple["MemoryPlan", str] | None:
        """Returns a plan that needs less memory and a description of the change, or None. Used after device
        memory ran out.
        """
        split = self.offload
        if kept := self.resident_experts:
            size = self.device["resident experts"] * (kept // 2) // kept
            freed = self.device["resident experts"] - size
            device = {"resident experts": size, "free": self.device["free"] + freed}
            change = f"layers with resident experts {kept} -> {kept // 2}"
            return replace(self, resident_experts=kept // 2, device=self.device | device), change
        if split is None:
            return None
        least = self.layer_bytes if split.last_resident else 0
        less = max(least, min(3 * split.resident_bytes // 4, split.resident_bytes - GIB // 2))
        with_less = self.with_resident(less)
        if less < split.resident_bytes and with_less.host_bytes <= self.machine.host:
            return with_less, f"resident KV {gib(split.resident_bytes)} -> {gib(less)}"
        if split.buffers > 2:
            return replace(self, offload=replace(split, buffers=2)), f"ring {split.buffers} -> 2 buffers"
        if split.piece_bytes > 8 * MIB:
            less = split.piece_bytes // 2
            change = f"ring pieces {split.piece_bytes // MIB} -> {less // MIB} MiB"
            return replace(self, offload=replace(split, piece_bytes=less)), change
        if self.levels == 3 and self.config.retrieval_weight_bits == 8 and _WEIGHTS in self.host:
            config = self.config.changed({"retrieval_weight_bits": 4})
            return replace(self, config=config), "retrieval_weight_bits 8 -> 4"
        retrieval = self.config.retrieval
        budget = retrieval.budget // 2
        least = max(LEAST_BUDGET, retrieval.recent + retrieval.chunk)
        if self.levels == 3 and budget >= least and budget % retrieval.chunk == 0:
            config = self.config.changed({"budget": budget})
            return replace(self, config=config), f"budget {retrieval.budget} -> {budget}"
        return None


def offloaded(task: Task, split: Offload) -> MemoryPlan:
    """Returns the plan for one choice. Gamma is chosen unless it was given, and remaining memory keeps KV
    slots resident.

    Args:
        split: its ``resident_bytes`` and shares of the CPU are chosen here.
    """
    sizes, machine, config, workload = task.sizes, task.machine, task.config, task.workload
    levels = config.levels_for(workload.prompt)
    if "gamma" not in task.given and levels == 3:
        # Scratch slots and probs grow with gamma: memory is planned for the largest, and gamma chosen below.
        config = config.changed({"gamma": MOST_GAMMA})
    slot_bytes, layers, batch = sizes.row, sizes.full_layers, workload.batch
    retrieval = config.retrieval
    unit = unit_slots(retrieval.chunk if levels == 3 else 1)
    max_seq_len = round_up(workload.max_seq_len, unit)
    piece = piece_slots(split.piece_bytes, slot_bytes, max_seq_len, unit) * slot_bytes
    means, slots, recent = 0, 0, 0
    if levels == 3:
        recent = retrieval.recent
        slots = (retrieval.budget - recent) // retrieval.chunk * retrieval.chunk
        chunks = max_seq_len // retrieval.chunk * layers * sizes.kv_heads * batch
        # The last 4 bytes are the slot of each chunk, int32.
        means = chunks * (retrieval.columns(sizes.head_dim) * sizes.itemsize + 4)
    store_slots = slots + window_slots(recent, unit, pass_limits(config, levels).scratch_slots)
    store = round_up(store_slots, _PAGE) * layers * slot_bytes * batch
    hidden = memory_map.hidden_states(sizes, workload.prompt)
    if split.last_resident:
        split = replace(split, states_on_host=hidden > store)
    recent_slots = (recent + unit) * batch
    device = {
        "weights": sizes.weights - sizes.streamed,
        "weight slots": sizes.slots,
        "draft": sizes.draft if levels > 1 else 0,
        **memory_map.drafter(sizes, config, levels, max_seq_len, batch),
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "level 1: chunks and window": store,
        **_states_and_windows(sizes, config, levels, workload),
        "chunk means": means,
        "ring": split.buffers * piece,
        "prefill": memory_map.prefill(sizes, config, workload.prompt, store, recent_slots, split),
        # Passes over an offloaded cache have trees of one shape.
        "graphs and workspace": memory_map.workspace(sizes, replace(config, other_trees=()), levels, batch)
        + memory_map.partials(sizes, config, max_seq_len, piece),
        "other tensors": machine.others,
    }
    left = max(0, machine.device - sum(device.values()) - memory_map.reserve(machine.device))
    layer_bytes = max_seq_len * slot_bytes * batch
    full = layer_bytes * layers
    last = layer_bytes if split.last_resident and layers else 0
    resident = min(full, last + max(0, left - last) // (piece * batch) * piece * batch)
    device["resident KV"] = resident
    kept = _keep_experts(device, sizes, machine)
    device["free"] = machine.device - sum(device.values())
    host = {"KV": full - resident}
    if sizes.streamed:
        host[_WEIGHTS] = sizes.streamed
    if split.states_on_host:
        host["hidden states of prefill"] = hidden

    def weight_bytes(gamma: int | None = None) -> int:
        return sizes.copied_weights(batch * pass_tokens(config, levels, gamma), kept)

    on_host = _on_host(host, weight_bytes(), machine)
    if on_host.share(LEAST_GAMMA + 1) and config.runner_ups is None and levels == 3:
        # Runner-ups gain at most a token per pass; their queries are nearly free on the GPU, not on the CPU.
        config = config.changed({"runner_ups": False})

    def seconds(gamma: int) -> float:
        tokens = pass_tokens(config, levels, gamma)
        crossing = _on_host(host, weight_bytes(gamma), machine).seconds(tokens)
        return max(crossing, (sizes.read_weights(batch * tokens) + resident) / machine.read)

    if "gamma" not in task.given and levels == 3:
        config = config.changed({"gamma": best_gamma(sizes, machine, config, seconds)})
    on_host = _on_host(host, weight_bytes(), machine)
    split = on_host.split(replace(split, resident_bytes=resident), pass_tokens(config, levels))
    return MemoryPlan(
        config, levels, split, device, host, machine, seconds(config.gamma), workload, layer_bytes,
        weight_bytes(), kept,
    )  # fmt: skip


def _keep_experts(device: dict[str, int], sizes: Sizes, machine: Machine) -> int:
    """Lets the streamed experts of some layers stay in the remaining memory. Returns the number of layers."""
    if not sizes.streamed or sizes.experts is None:
        return 0
    left = machine.device - sum(device.values()) - memory_map.reserve(machine.device)
    kept = max(0, min(sizes.experts.layers - 1, left // sizes.experts.layer_bytes))
    device["resident experts"] = kept * sizes.experts.layer_bytes
    # The last layer alone in the shared slots stays there too.
    return kept + 1 if kept == sizes.experts.layers - 1 else kept


def _states_and_windows(
    sizes: Sizes, config: HierarchyConfig, levels: int, workload: Workload
) -> dict[str, int]:
    """Returns the memory uses of recurrent layers and of layers with a window, in bytes by name."""
    states: dict[str, int] = {}
    if sizes.states:
        nodes = sum(shape.nodes for shape in tree_shapes(config)) if levels > 1 else 1
        inputs = sizes.state_inputs * nodes * workload.batch
        states = {"recurrent states": sizes.states * workload.batch, "inputs of recurrent layers": inputs}
    size = memory_map.rings(sizes, config, levels, workload.max_seq_len, workload.batch)
    return states | ({"layers with windows": size} if sizes.windowed else {})


def _on_host(host: Mapping[str, int], weight_bytes: int, machine: Machine) -> HostKV:
    return HostKV(host["KV"], weight_bytes, machine.bus, machine.host_attention)


def on_device(sizes: Sizes, machine: Machine, config: HierarchyConfig, workload: Workload) -> MemoryPlan:
    """Returns the plan without offloading: everything but streamed weights stays on the device."""
    # ``Hierarchy.program`` gives a lone text the levels that its new tokens may need.
    lone = workload.batch == 1 and not workload.pool and not config.offloads
    levels = config.levels_for(workload.max_seq_len if lone else workload.prompt)
    max_seq_len = workload.max_seq_len + pass_limits(config, levels).scratch_slots
    slots = workload.pool or max_seq_len * workload.batch
    layer_bytes = slots * sizes.row
    full = layer_bytes * sizes.full_layers
    means = 0
    if levels == 3:
        chunks = max_seq_len // config.retrieval.chunk * sizes.full_layers * workload.batch
        means = chunks * sizes.kv_heads * config.retrieval.columns(sizes.head_dim) * sizes.itemsize
    chunk = config.prefill_chunk or 4096
    copied = capacity(workload.prompt)
    device = {
        "weights": sizes.weights - sizes.streamed,
        "weight slots": sizes.slots,
        "draft": sizes.draft if levels > 1 else 0,
        **memory_map.drafter(sizes, config, levels, workload.max_seq_len, workload.batch),
        "low-bit weights": memory_map.low_bit(sizes, config, levels),
        "KV": full,
        **_states_and_windows(sizes, config, levels, workload),
        "chunk means": means,
        # Graphs of short chunks keep their memory.
        "prefill": (chunk + min(chunk, SHORT)) * memory_map.activations(sizes)
        + copied * sizes.prefill_row
        # A prompt's end is fed over a copy of one layer's slots.
        + (copied * sizes.row if workload.pool else 0)
        + sizes.prefill_blocks,
        "graphs and workspace": memory_map.workspace(sizes, config, levels, workload.batch),
        "other tensors": machine.others,
    }
    kept = _keep_experts(device, sizes, machine)
    device["free"] = machine.device - sum(device.values())
    host = {_WEIGHTS: sizes.streamed} if sizes.streamed else {}
    tokens = workload.batch * pass_tokens(config, levels)
    copied = sizes.copied_weights(tokens, kept)
    seconds = max((sizes.read_weights(tokens) + full) / machine.read, copied / machine.bus)
    return MemoryPlan(
        config, levels, None, device, host, machine, seconds, workload, layer_bytes, copied, kept
    )


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
