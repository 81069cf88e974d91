"""Cards that a larger GPU emulates: their limits, and the least time that bytes take on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from scripts.benchmarks.common.results import Record
from scripts.inflate.shapes import Shape
from triforce_tree.config import HierarchyConfig
from triforce_tree.kernels.attention.configs import choose
from triforce_tree.kernels.device import KNOWN, emulated
from triforce_tree.kernels.exchange import link
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.memory_size import bytes_of
from triforce_tree.planning.expert_sizes import ExpertSizes
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import MOST_GAMMA, Machine, Sizes
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan, plan
from triforce_tree.planning.pass_time import pass_tokens


@dataclass(frozen=True)
class Rates:
    """The rates of a GPU by its data sheet.

    Attributes:
        read: bytes a second of device memory.
        flops: of dense products in bf16 with sums in fp32.
    """

    read: float
    flops: float


@dataclass(frozen=True)
class Card:
    """A card in a machine.

    Attributes:
        arch: its description in ``kernels/device.py``, which tiles and code paths depend on.
        device, host: GiB of the card and of the machine.
        link: bytes a second between them.
        rates: of the card.
    """

    name: str
    arch: str
    device: int
    host: int
    link: float
    rates: Rates

    @property
    def options(self) -> Record:
        """Returns the engine options that keep to its memory.

        A tenth of the host's memory is left to the system, as without a limit. The CPU does not attend, as
        that of this machine is another.
        """
        return {
            "gpu_memory": f"{self.device}GiB", "host_memory": f"{0.9 * self.host:.1f}GiB",
            "host_attention": False,
        }  # fmt: skip

    @contextmanager
    def emulate(self, device: torch.device) -> Iterator[Link]:
        """Is a context with its link, its rates in plans, and on a GPU its tiles and code paths."""
        own = replace(KNOWN[self.arch], emulated=True)
        with link.limited(Link(device, self.link, self.rates.read)) as made:
            if device.type != "cuda":
                yield made
                return
            with emulated(own):
                yield made


# PCIe 4 x16 carries 25 GB/s of its 31.5.
CARDS = {
    card.name: card
    for card in (
        Card("rtx-3090", "sm_86", 24, 64, 25e9, Rates(936e9, 71e12)),
        Card("rtx-4090", "sm_89", 24, 64, 25e9, Rates(1008e9, 165.2e12)),
    )
}
HOSTS = {"NVIDIA H200": Rates(4.8e12, 989e12)}
"""GPUs whose times may be projected on a card, by name."""


def sizes_of(shape: Shape, draft: Shape, bits: int, config: HierarchyConfig) -> Sizes:
    """Returns the sizes of a target and its draft in bf16, without making them.

    Args:
        bits: of the target's linear layers and experts.
    """
    entries, width = shape.vocabulary or 0, shape.heads * shape.head_dim
    outs = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = matrix_bytes(outs, shape.hidden, bits) + matrix_bytes(shape.hidden, width, bits)
    mlp = matrix_bytes(2 * shape.mlp, shape.hidden, bits) + matrix_bytes(shape.hidden, shape.mlp, bits)
    count = max(1, shape.experts)
    low = shape.layers * (shape.hidden * (outs + width) + count * 3 * shape.hidden * shape.mlp)
    weights = shape.layers * (attention + count * mlp) + 2 * (shape.parameters(entries) - low)
    slots = config.streaming.sinks + 2 * config.streaming.window + 3 * MOST_GAMMA
    cache = slots * draft.layers * 2 * draft.kv_heads * draft.head_dim
    experts, inner = None, shape.mlp
    if shape.experts:
        experts = ExpertSizes(shape.layers, count, shape.active, mlp, shape.hidden + shape.mlp)
        inner = shape.active * experts.width
    return Sizes(
        weights, 2 * (draft.parameters(entries) + cache), shape.layers, shape.heads, shape.kv_heads,
        shape.head_dim, shape.hidden, inner, entries, experts=experts, kv_bits=config.kv_bits,
    )  # fmt: skip


def matrix_bytes(rows: int, columns: int, bits: int) -> int:
    """Returns the bytes of a matrix in bf16 or in our 4 bits: blocks of 512 columns with four scales."""
    return 2 * rows * columns if bits == 16 else rows * -(-columns // 512) * (256 + 8)


def planned(card: Card, sizes: Sizes, options: Record, context: int, new_tokens: int) -> MemoryPlan | str:
    """Returns the memory plan of a prompt on the card, or why there is none."""
    memory = [bytes_of(options[name], name) for name in ("gpu_memory", "host_memory")]
    machine = Machine(memory[0], memory[1], card.link, card.rates.read, limit="gpu_memory")
    config = HierarchyConfig.from_options(**options)
    try:
        return plan(sizes, machine, config, frozenset(options), Workload(1, context, new_tokens))
    except DoesNotFitError as error:
        return str(error)


def bounds(card: Card, sizes: Sizes, made: MemoryPlan, context: int) -> Record:
    """Returns gigabytes and the least milliseconds of a plain token and of a pass of the target that verifies
    a draft, by what they read once: over the link, and of the card's memory.

    All keys and values of the prompt are read of the card's memory, wherever they came from.
    """
    cache = context * sizes.row * sizes.full_layers + sizes.window_bytes(context)
    on_host = max(0, cache - made.device.get("resident KV", 0)) if made.offload is not None else 0
    table = sizes.vocabulary * sizes.hidden * sizes.itemsize
    found = {}
    for name, tokens in (("plain", 1), ("pass", pass_tokens(made.config, made.levels))):
        weights = sizes.copied_weights(tokens, made.resident_experts)
        read = sizes.read_weights(tokens) - table + cache
        link_ms, device_ms = 1e3 * (on_host + weights) / card.link, 1e3 * read / card.rates.read
        found[name] = {
            "tokens": tokens, "link_gb": (on_host + weights) / 1e9, "link_ms": link_ms,
            "device_gb": read / 1e9, "device_ms": device_ms, "ms": max(link_ms, device_ms),
        }  # fmt: skip
    return found


def tiles(card: Card, shape: Shape, made: MemoryPlan) -> Record:
    """Returns the tiles of attention on the card in bf16: query rows, KV positions, stages."""
    group, found = shape.heads // shape.kv_heads, {}
    for name, tokens in (("plain", 1), ("pass", pass_tokens(made.config, made.levels))):
        tile = choose(tokens * group, shape.head_dim, 2, KNOWN[card.arch])
        found[name] = [tile.block_m, tile.block_n, tile.stages]
    return found
