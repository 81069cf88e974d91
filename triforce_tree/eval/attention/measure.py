"""Tree attention over shapes: our kernel, plain torch and other implementations, beside the roofline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from triforce_tree.eval.attention.peers import PEERS, Calls, compared, sdpa
from triforce_tree.eval.attention.problems import (
    KV,
    Ceilings,
    Cell,
    measure_ceilings,
    random_kv,
    tree_mask,
)
from triforce_tree.eval.results import Record, Series
from triforce_tree.kernels.attention import planned, reference
from triforce_tree.kernels.attention.plan import plan_trees

KIND = "kernel"
OURS, DEFINITION, SDPA = "triforce", "plain torch", "SDPA dense mask"
# On a CPU there are no others.
ON_CPU = (OURS, DEFINITION, SDPA)
# Autotunes for minutes a shape: named only.
SLOW = "FlexAttention"


@dataclass(frozen=True)
class Shapes:
    """All combinations are measured.

    Attributes:
        heads: (query heads, KV heads, elements of a head).
        prefixes: committed positions.
        trees: nodes.
        pages: KV slots of a page; 0 is a cache without pages. Other implementations have pages of their own.
    """

    heads: Sequence[tuple[int, int, int]]
    prefixes: Sequence[int]
    trees: Sequence[int]
    pages: Sequence[int]

    def keys(self, methods: Sequence[str]) -> list[Record]:
        """Of all records: other implementations are measured once, not for each page size."""
        return [
            {
                "kind": KIND, "query_heads": query, "kv_heads": kv, "dim": dim, "prefix": prefix,
                "tree": tree, "page": page, "method": method,
            }
            for (query, kv, dim), prefix, tree in product(self.heads, self.prefixes, self.trees)
            for page, method in [
                *((page, OURS) for page in self.pages if OURS in methods),
                *((0, method) for method in methods if method != OURS),
            ]
        ]  # fmt: skip


def methods(device: torch.device) -> list[str]:
    """Those that a run measures by default."""
    others = [] if device.type != "cuda" else [name for name in PEERS if name not in (SLOW, SDPA)]
    return [*ON_CPU, *others]


def paged(cell: Cell, kv: KV, page: int) -> tuple[KV, Tensor]:
    """The copies in pages ``[pages, H_kv, page, D]`` of a shuffled table ``[B, pages]``."""
    count = -(-cell.rows // page)
    device = kv[0][0].device
    table = torch.randperm(cell.batch * count, device=device).view(cell.batch, count)

    def one(source: Tensor) -> Tensor:
        pages = source.new_zeros(cell.batch * count, page, cell.kv_heads, cell.dim).transpose(1, 2)
        for own, order in zip(source, table, strict=True):
            padded = torch.nn.functional.pad(own, (0, 0, 0, count * page - cell.rows))
            pages[order] = padded.unflatten(1, (count, page)).transpose(0, 1)
        return pages

    return [(one(k), one(v)) for k, v in kv], table.int()


def ours(cell: Cell, q: Tensor, kv: KV, page: int) -> Calls:
    """The engine's attention call: the Triton kernel on a GPU, the C kernel or torch on a CPU."""
    trees = [tree_mask(cell.size, q.device)] * cell.batch
    plan = plan_trees(cell.heads, trees, [cell.length] * cell.batch, device=q.device, dtype=q.dtype)
    table = None
    if page:
        kv, table = paged(cell, kv, page)
    call = partial(planned.run, q, plan=plan, scale=cell.dim**-0.5, table=table)
    return [partial(call, k, v) for k, v in kv]


def definition(cell: Cell, q: Tensor, kv: KV) -> Calls:
    """``reference.tree_attention``."""
    mask = tree_mask(cell.size, q.device)
    own = q.view(cell.batch, cell.size, cell.query_heads, cell.dim).transpose(1, 2)

    def call(k: Tensor, v: Tensor) -> Tensor:
        out, _ = reference.tree_attention(own, k, v, mask, scale=cell.dim**-0.5)
        return out.transpose(1, 2).reshape(q.shape)

    return [partial(call, k, v) for k, v in kv]


def timed_cell(
    key: Record, device: torch.device, dtype: torch.dtype, ceilings: Ceilings, seed: int
) -> Record:
    """Median microseconds of a call, or the reason why there is none, with what the shape needs on paper.

    The result is compared with plain torch's before it is timed.
    """
    sizes = (key["query_heads"], key["kv_heads"], key["prefix"], key["tree"])
    cell = Cell(*sizes, dim=key["dim"], itemsize=dtype.itemsize)
    torch.manual_seed(seed)
    q = torch.randn(cell.size, cell.query_heads, cell.dim, device=device, dtype=dtype)
    kv = random_kv(cell, device=device, dtype=dtype)
    expected = definition(cell, q, kv[:1])[0]()
    makers: dict[str, Callable[[], Calls]] = {
        OURS: partial(ours, cell, q, kv, key["page"]),
        DEFINITION: partial(definition, cell, q, kv),
        SDPA: partial(sdpa, cell, q, kv),
    }
    make = makers.get(key["method"]) or partial(PEERS[key["method"]], cell, q, kv)
    found = compared(make, expected, 1e-3 if dtype == torch.float32 else 2e-2)
    roof = round(cell.roof_us(ceilings), 3)
    record: Record = {"bytes": cell.bytes, "flops": cell.flops, "roof_us": roof}
    return record | ({"reason": found} if isinstance(found, str) else {"us": found})


def measure(
    shapes: Shapes,
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    series: Series,
) -> None:
    """Measure what the series lacks, on ``device`` alone."""
    held: list[Ceilings] = []

    def one(key: Record) -> Record:
        if not held:
            held.append(measure_ceilings(device, dtype))
        with torch.inference_mode():
            return timed_cell(key, device, dtype, held[0], series.seed)

    series.fill(shapes.keys(names), one)
