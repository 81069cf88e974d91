"""All benchmarks by name."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module below ``scripts`` with ``main(words)``, and what it measures."""

    module: str
    about: str


_LISTED = {
    "tables": ("tables", "no benchmark: writes the tables of README.md and docs/"),
    "on_chip": ("on_chip.run", "decoding on one GPU, 122,880 tokens: docs/benchmarks.md"),
    "offload": ("offload.run", "decoding with the cache in host memory: docs/offloading.md"),
    "parallel": ("offload.parallel", "the same on several cards, under torchrun"),
    "resident": ("offload.resident", "level 2's passes when much of the cache is on the GPU"),
    "view_or_copy": ("offload.view_or_copy", "level 1 on a view of the cache, or on copies"),
    "tree_attention": ("attention.run", "tree attention beside its peers; --check: the gate alone"),
    "linear": ("linear.run", "few-row linear layers: check, time, compare; --quick: less"),
    "host_attention": ("cpu.host_attention", "attention on the CPU, alone and beside the bus"),
    "cpu": ("cpu.speed", "the embedded pair on a CPU beside transformers: README.md"),
}
BENCHMARKS = {name: Benchmark(f"benchmarks.{module}", about) for name, (module, about) in _LISTED.items()} | {
    "pair": Benchmark("train_pair.evaluate", "what the embedded pair can do: needles, loss, overlaps"),
    "kernels_by_arch": Benchmark("checks.kernels_by_arch", "compiles every kernel for GPUs not at hand"),
}
