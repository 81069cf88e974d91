"""All benchmarks by name."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module below ``scripts`` with ``main(words)``, and what it measures."""

    module: str
    about: str


BENCHMARKS = {
    "tables": Benchmark("benchmarks.tables", "no benchmark: writes the tables of README.md and docs/"),
    "on_chip": Benchmark("benchmarks.on_chip.run", "decoding on one GPU, 122,880 tokens: docs/benchmarks.md"),
    "offload": Benchmark(
        "benchmarks.offload.run", "decoding with the cache in host memory: docs/offloading.md"
    ),
    "parallel": Benchmark("benchmarks.offload.parallel", "the same on several cards, under torchrun"),
    "resident": Benchmark(
        "benchmarks.offload.resident", "level 2's passes when much of the cache is on the GPU"
    ),
    "view_or_copy": Benchmark(
        "benchmarks.offload.view_or_copy", "level 1 on a view of the cache, or on copies"
    ),
    "tree_attention": Benchmark(
        "benchmarks.attention.run", "tree attention beside its peers; --check: the gate"
    ),
    "tiles": Benchmark("benchmarks.attention.tiles", "what the tiles of other GPUs cost on this one"),
    "linear": Benchmark("benchmarks.linear.run", "few-row linear layers: check, tune, compare; --quick"),
    "host_attention": Benchmark(
        "benchmarks.cpu.host_attention", "attention on the CPU, alone and beside the bus"
    ),
    "cpu": Benchmark("benchmarks.cpu.speed", "the embedded pair on a CPU beside transformers: README.md"),
    "pair": Benchmark("train_pair.evaluate", "what the embedded pair can do: needles, loss, overlaps"),
    "kernels_by_arch": Benchmark("checks.kernels_by_arch", "compiles every kernel for GPUs not at hand"),
}
