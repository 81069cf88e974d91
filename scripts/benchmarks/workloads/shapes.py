"""Trees of texts that published work measures attention and decoding on, by name.

``deft`` (arXiv 2404.00242, section 4 and appendix A.6): few-shot prompting is a prompt of 4,000 tokens and 20
to 50 branches of 400; each is taken at the mean of its iterations, 200 tokens a branch. Multi-step reasoning
replays recorded trees of width 10. Their depths and lengths are not printed: prompts and thoughts here have
the lengths with which the KV reads of Table 17 come out; a state is the mean of all iterations.
Speculative decoding is a tree of 32 to 256 one-token nodes behind 7,780 tokens, the mean by Table 17.

``fasttree`` and ``pat`` have the shapes of the kernel benchmarks that FastTree (MLSys 2025) and PAT (arXiv
2511.22333) published: nodes and tokens of a node, level by level. ``long`` is many branches behind one prompt
of 100,000 tokens, and one branch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, chain


@dataclass(frozen=True)
class Workload:
    """A forest of nodes, parents before their children.

    Attributes:
        name: such as ``deft/few-shot-4000x20``.
        parents: the parent of each node; -1 for a root.
        lengths: number of KV positions of each node.
        asks: whether a query at the node's end sees the node and all nodes before it.
        iterations: number of iterations of the published run whose mean state this is; 0 without such a run.
        decoded: whether decoding is measured too, and not only attention.
    """

    name: str
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    asks: tuple[bool, ...]
    iterations: int = 0
    decoded: bool = False

    @property
    def queries(self) -> int:
        return sum(self.asks)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Returns the nodes from the root to each node that asks, in the order of nodes."""
        found: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            found.append((*(found[parent] if parent >= 0 else ()), node))
        return [path for path, asks in zip(found, self.asks, strict=True) if asks]

    @property
    def stored(self) -> int:
        """Returns the number of KV positions of all nodes, which attention by nodes reads."""
        return sum(self.lengths)

    @property
    def read_by_sequences(self) -> int:
        """Returns the number of KV positions that attention by sequences reads, the sum over all queries."""
        return sum(self.lengths[node] for path in self.paths for node in path)

    def scaled(self, factor: float) -> "Workload":
        """Returns the same forest with nodes of ``factor`` times as many tokens, at least one."""
        return replace(self, lengths=tuple(max(1, round(n * factor)) for n in self.lengths))


def branches(name: str, prefix: Iterable[int], count: int, length: int, iterations: int = 0) -> Workload:
    """Returns a chain of nodes with ``count`` branches after it."""
    shared = [n for n in prefix if n]
    parents = (*range(-1, len(shared) - 1), *[len(shared) - 1] * count)
    asks = (False,) * len(shared) + (True,) * count
    lengths = (*shared, *[length] * count)
    return Workload(name, parents, lengths, asks, iterations, decoded=True)


def reasoning(task: str, prompt: int, thought: int, depth: int, width: int = 10) -> Workload:
    """Returns the mean state of breadth-first search that keeps one thought of each step."""
    kept, part = divmod((depth - 1) * thought // 2, thought)
    shared = (prompt, *[thought] * kept, part)
    return branches(f"deft/{task}", shared, width, thought // 2, depth * thought)


def speculative(size: int, prefix: int = 7_780) -> Workload:
    """Returns a binary tree of one-token nodes after a prompt. Every node of the tree asks."""
    parents = (-1, 0, *((node - 1) // 2 + 1 for node in range(1, size)))
    lengths, asks = (prefix, *[1] * size), (False, *[True] * size)
    return Workload(f"deft/speculative-{size}", parents, lengths, asks, 1000)


def levels(kind: str, nodes: str, lengths: str) -> Workload:
    """Returns a forest with so many nodes in each level, spread evenly. The nodes of the last level ask."""
    counts, sizes = ([int(n) for n in text.split(",")] for text in (nodes, lengths))
    starts = [0, *accumulate(counts)]
    parents = [-1] * counts[0]
    for level in range(1, len(counts)):
        below = counts[level] // counts[level - 1]
        parents += [starts[level - 1] + number // below for number in range(counts[level])]
    flat = tuple(chain.from_iterable([size] * count for size, count in zip(sizes, counts, strict=True)))
    asks = (False,) * starts[-2] + (True,) * counts[-1]
    return Workload(f"{kind}/{nodes}:{lengths}", tuple(parents), flat, asks)


# Nodes and tokens of a node, by level.
_FASTTREE = (
    "1,2,64 8,256,32", "1,4,256 8,256,32", "1,4,8,256 8,256,256,32", "1,256 256,32", "1,1024 2048,32",
    "1,16,64 1024,256,32", "1,4,16,512 1024,256,128,32", "1,4,16,64,256,1024 256,8,256,64,32,256",
    "1,10 4000,400", "1,2,4,8,16,32,64,128,1024 16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024 256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024 256,128,64,16,16,16,16", "1,8,16,32,64,256,1024 256,128,64,16,16,16,16",
    "1,16,32,64,128,1024 256,128,64,16,16,16", "1,16,32,64,256,1024 256,128,64,16,16,16",
)  # fmt: skip
_PAT = (
    "1,10 4096,416", "1,256 256,32", "1,1024 2048,32", "1,2,64 1024,256,256", "1,4,256 32,256,32",
    "1,8,512 32,512,256", "1,8,512 32,2048,256", "1,8,512 512,512,256", "1,4,8,256 32,256,256,32",
    "1,4,16,512 1024,256,128,32", "1,4,16,64,256,1024 256,32,256,64,32,256",
    "1,16,32,64,128,1024 256,128,64,32,32,32", "1,16,32,64,256,1024 256,128,64,32,32,32",
    "1,8,16,32,64,128,1024 256,128,64,32,32,32,32", "1,8,16,32,64,256,1024 256,128,64,32,32,32,32",
    "2,8,16,256 256,256,32,32", "4,16,256,512 512,32,128,32", "8,16,32,256 512,512,256,32",
    "256 1024", "256 4096",
)  # fmt: skip
_FEW_SHOT = ((4_000, 20), (4_000, 30), (4_000, 50), (10_000, 30), (20_000, 20), (20_000, 50))


def _deft() -> list[Workload]:
    few_shot = [branches(f"deft/few-shot-{n}x{b}", (n,), b, 200, 400) for n, b in _FEW_SHOT]
    # Decoding by sequences would store a million positions and prefill them.
    few_shot = [replace(w, decoded=w.lengths[0] <= 4_000) for w in few_shot]
    steps = [
        reasoning("sorting", 1_262, 737, 5),
        reasoning("document", 1_170, 965, 3),
        reasoning("keyword", 1_587, 97, 5),
        reasoning("set", 711, 134, 8),
    ]
    return few_shot + steps + [speculative(size) for size in (32, 64, 128, 256)]


FAMILIES: dict[str, Callable[[], list[Workload]]] = {
    "deft": _deft,
    "fasttree": lambda: [levels("fasttree", *shape.split()) for shape in _FASTTREE],
    "pat": lambda: [levels("pat", *shape.split()) for shape in _PAT],
    "long": lambda: [branches(f"long/{n}x256", (100_000,), n, 256) for n in (1, 32)],
}


def chosen(names: Iterable[str]) -> list[Workload]:
    """Returns the workloads with these names, and those of families with these names.

    Raises:
        ValueError: a name is unknown.
    """
    known = {family: make() for family, make in FAMILIES.items()}
    found: list[Workload] = []
    for name in names:
        own = known.get(name) or [w for w in known.get(name.partition("/")[0], []) if w.name == name]
        if not own:
            raise ValueError(
                f"workload {name!r} is unknown; use a family ({', '.join(known)}) or one of its "
                f"workloads, as in {known['deft'][0].name}"
            )
        found += own
    return list(dict.fromkeys(found))
