"""Problems for the tree-attention kernels, each with its exact result in fp64.

Used by the tests, which run them in Triton's interpreter on small shapes, and by
``tests/gpu/test_tree_attention.py``, which runs all of them on a GPU. The exact result is computed
independently of ``attention.reference``, so that the reference is tested too.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.attention.backend import AttentionBackend
from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, plan_trees
from triforce_tree.kernels.step.kv_slots import quantized

ERROR_LIMIT = 2.0
"""Largest error of a kernel as a multiple of plain torch's in the same dtype (as in flash-attention)."""


@dataclass(frozen=True)
class Case:
    """One problem: a batch of token trees, each ``(prefix, tree size)``.

    ``layout``: "heads" is storage ``[B, H_kv, S, D]``, "rows" is ``[B, S, H_kv, D]``, "packed" has the keys
    and values of a position in one row, as in host memory; an integer is a page size with one table per
    sequence, and ("view", chunk) one table per KV head; ("cache", chunk) likewise, over storage
    ``[H_kv, S, D]``. ``int8``: keys and values are stored in 8 bits, each vector with a scale of its own, and
    the magnitudes of vectors differ by powers of ten.
    """

    heads: Heads
    trees: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.bfloat16
    layout: str | int | tuple[str, int] = "heads"
    order: str = "depth"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    config: KernelConfig | None = None
    int8: bool = False

    def __str__(self) -> str:
        shape = f"{self.heads.query}/{self.heads.kv}x{self.heads.dim}"
        if self.heads.value_dim != self.heads.dim:
            shape += f"+{self.heads.value_dim}"
        extra = [
            f"{name}={value}"
            for name, value in [
                ("window", self.window),
                ("softcap", self.softcap),
                ("sinks", self.sinks or None),
                ("int8", self.int8 or None),
            ]
            if value is not None
        ]
        trees = "+".join(f"{length}:{size}" for length, size in self.trees)
        return " ".join([shape, trees, str(self.dtype)[6:], str(self.layout), self.order, *extra])


@dataclass
class Problem:
    """The tensors of a case; ``kv`` holds for each sequence its contiguous K and V ``[H_kv, S, D]``.

    ``scales``: of keys and values in int8, whose products ``kv`` holds in fp64: a kernel need not round them.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    masks: list[Tensor]
    table: Tensor | None = None
    first: Tensor | None = None
    sinks: Tensor | None = None
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def scale(self) -> float:
        return self.case.heads.dim**-0.5


def random_tree(size: int, order: str, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Returns the ancestor mask bool ``[T, T]`` and depths ``[T]`` of a random tree, nodes depth- or breadth-
    first.
    """
    children: list[list[int]] = [[] for _ in range(size)]
    for node in range(1, size):
        # Half of the nodes extend the newest path, so that trees are deep as well as wide.
        children[node - 1 if rng.random() < 0.5 else rng.randrange(node)].append(node)
    queue, walk = [0], []
    while queue:
        node = queue.pop(0 if order == "breadth" else -1)
        walk.append(node)
        queue.extend(children[node])
    place = {node: at for at, node in enumerate(walk)}
    mask, depths = torch.eye(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64)
    for node in walk:
        for child in children[node]:
            mask[place[child]] |= mask[place[node]]
            depths[place[child]] = depths[place[node]] + 1
    return mask, depths


def build(case: Case, device: str, seed: int = 0) -> Problem:
    """Returns random tensors of a case; storage outside the sequences' KV slots is NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads, scale = case.heads, 1.0
    total = sum(size for _, size in case.trees)
    q = torch.randn(total, heads.query, heads.dim, device=device).mul_(scale).to(case.dtype)
    masks, firsts, kv = [], [], []
    for length, size in case.trees:
        mask, depths = random_tree(size, case.order, rng)
        if case.window is not None:
            mask &= depths[:, None] - depths < case.window
            firsts.append((length + depths - case.window + 1).clamp_(0, length))
        masks.append(mask.to(device))
        shapes = [(heads.kv, length + size, dim) for dim in (heads.dim, heads.value_dim)]
        kv.append(tuple(torch.randn(shape, device=device).to(case.dtype) for shape in shapes))
    scales = None
    if case.int8:
        stored = [[quantized(_uneven(t)) for t in pair] for pair in kv]
        kv = [tuple(x.double() * scale for x, scale in pair) for pair in stored]
        order = rng.getstate()
        own = [tuple(scale for _, scale in pair) for pair in stored]
        *scales, _ = _store(case, own, rng, device, (1, 1), torch.float32)
        # The same pages.
        rng.setstate(order)
        own = [tuple(x for x, _ in pair) for pair in stored]
        k, v, table = _store(case, own, rng, device, dtype=torch.int8)
    else:
        k, v, table = _store(case, kv, rng, device)
    return Problem(
        case=case,
        q=q,
        k=k,
        v=v,
        masks=masks,
        table=table,
        first=torch.cat(firsts).to(device) if firsts else None,
        sinks=torch.randn(heads.query, device=device) if case.sinks else None,
        kv=kv,
        scales=tuple(t.contiguous() for t in scales) if scales else None,
    )


def _uneven(x: Tensor) -> Tensor:
    """Vectors of magnitudes from a tenth to ten times those of ``x``, and some of zeros."""
    magnitudes = 10 ** (2 * torch.rand(x.shape[:-1], device=x.device) - 1)
    return x * (magnitudes * (torch.rand_like(magnitudes) > 0.05))[..., None]


def _store(
    case: Case,
    kv: list[tuple[Tensor, Tensor]],
    rng: random.Random,
    device: str,
    dims: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    heads, batch = case.heads, len(kv)
    longest = max(k.shape[1] for k, _ in kv) + 37
    dims = dims or (heads.dim, heads.value_dim)
    dtype = dtype or case.dtype
    poison = torch.nan if dtype.is_floating_point else 99

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, poison, dtype=dtype, device=device)

    if isinstance(case.layout, str):
        if case.layout == "packed":
            views = [t.transpose(1, 2) for t in heads.split(filled(batch, longest, heads.row))]
        elif case.layout == "rows":
            views = [filled(batch, longest, heads.kv, dim).transpose(1, 2) for dim in dims]
        else:
            views = [filled(batch, heads.kv, longest, dim) for dim in dims]
        for sequence, pair in enumerate(kv):
            for view, values in zip(views, pair, strict=True):
                view[sequence, :, : values.shape[1]] = values
        return views[0], views[1], None
    per_head = isinstance(case.layout, tuple)
    page = case.layout[1] if per_head else case.layout
    pages = -(-longest // page)
    tables = heads.kv if per_head else 1
    order = list(range(batch * tables * pages + 3))
    rng.shuffle(order)
    table = torch.tensor(order[: batch * tables * pages], dtype=torch.int32, device=device)
    table = table.view(batch, tables, pages)
    if per_head and case.layout[0] == "cache":
        stores = [filled(heads.kv, len(order), page, dim).permute(1, 2, 0, 3) for dim in dims]
    else:
        stores = [filled(len(order), page, heads.kv, dim) for dim in dims]
    for sequence, pair in enumerate(kv):
        for head in range(heads.kv):
            at = torch.arange(pair[0].shape[1], device=device)
            where = table[sequence, head if per_head else 0].long()[at // page]
            for store, values in zip(stores, pair, strict=True):
                store[where, at % page, head] = values[head]
    return stores[0].transpose(1, 2), stores[1].transpose(1, 2), table if per_head else table[:, 0]


def exact_attention(problem: Problem, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Computes plain attention, one sequence and one head at a time, every step in ``dtype``.

    Returns:
        out ``[queries, H_q, D_v]`` and lse ``[queries, H_q]``.
    """
    heads, start = problem.case.heads, 0
    outs, lses = [], []
    for (k, v), mask in zip(problem.kv, problem.masks, strict=True):
        size = mask.shape[0]
        seen = torch.ones(size, k.shape[1], dtype=torch.bool, device=k.device)
        seen[:, k.shape[1] - size :] = mask
        if problem.first is not None:
            first = problem.first[start : start + size]
            seen &= torch.arange(k.shape[1], device=k.device) >= first[:, None]
        per_head = []
        for head in range(heads.query):
            q = problem.q[start : start + size, head].to(dtype)
            scores = q @ k[head // heads.group].to(dtype).T * problem.scale
            if problem.case.softcap is not None:
                scores = problem.case.softcap * torch.tanh(scores / problem.case.softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if problem.sinks is not None:
                sink = problem.sinks[head].to(dtype).expand(size, 1)
                scores = torch.cat([scores, sink], 1)
            weights = scores.softmax(1)[:, : k.shape[1]]
            per_head.append((weights @ v[head // heads.group].to(dtype), scores.logsumexp(1)))
        outs.append(torch.stack([out for out, _ in per_head], 1))
        lses.append(torch.stack([lse for _, lse in per_head], 1))
        start += size
    return torch.cat(outs), torch.cat(lses)


def error_ratio(results: Iterable[tuple[Problem, Tensor, Tensor]]) -> float:
    """Returns the largest error of out, or of lse, over torch's in the same dtype, of all problems together.

    At most ``ERROR_LIMIT`` passes; NaN counts as infinite. Errors are in half units in the last place of a
    problem's largest value. Torch's count as no less than 1: rounding an exact result costs that much.
    """
    found = []
    for problem, out, lse in results:
        exact, plain = exact_attention(problem), exact_attention(problem, problem.case.dtype)
        for mine, true, theirs in zip((out, lse), exact, plain, strict=True):
            unit = true.abs().max() * torch.finfo(problem.case.dtype).eps / 2
            found += [(x.double() - true).abs().max().item() / unit.item() for x in (mine, theirs)]
        # A log-sum-exp is fp32 whatever the dtype, so it has an absolute bound too.
        if not (lse.double() - exact[1]).abs().max() < 2e-3:
            return float("inf")
    ours, torchs = torch.tensor(found, dtype=torch.float64).view(-1, 2, 2).amax(0).T
    return (ours / torchs.clamp_min(1.0)).nan_to_num(torch.inf).max().item()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills ``torch.empty`` with NaN inside, so that unwritten outputs are detected."""
    plain = torch.empty

    def empty(*args, **kwargs):
        made = plain(*args, **kwargs)
        if made.dtype.is_floating_point:
            return made.fill_(float("nan"))
        return made.fill_(min(2**30, torch.iinfo(made.dtype).max))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield


def run_case(
    case: Case, device: str, seeds: Sequence[int] = (0,), backend: AttentionBackend | None = None
) -> float:
    """Returns the largest error of one problem a seed over torch's; at most ``ERROR_LIMIT`` passes.

    ``backend``: by default the Triton kernels, with the case's tiles.
    """
    problems = (build(case, device, seed) for seed in seeds)
    return error_ratio((problem, *_run(problem, backend)) for problem in problems)


def enough_seeds(case: Case, seed: int) -> list[int]:
    """Seeds for ``run_case``: for fp32 as many as make 160 query rows.

    fp32 has errors like torch's own, so with few rows the ratio of the largest ones is a matter of chance:
    over 2 in 2.5 % of problems of 5 rows, in 0.005 % of 32 such problems together (Triton's interpreter).
    """
    rows = case.heads.query * sum(size for _, size in case.trees)
    return [seed + 10_000 * at for at in range(-(-160 // rows) if case.dtype == torch.float32 else 1)]


def first_visible(problem: Problem) -> FirstVisible | None:
    """Returns the first positions that queries see, as views compute them."""
    if problem.first is None:
        return None
    parts = problem.first.int().split([size for _, size in problem.case.trees])
    lows, highs = (torch.stack([f(part) for part in parts]) for f in (torch.amin, torch.amax))
    return FirstVisible(torch.cat(parts), lows, highs)


def _run(problem: Problem, backend: AttentionBackend | None) -> tuple[Tensor, Tensor]:
    """Plan and run: out and lse."""
    case, device = problem.case, problem.q.device
    with poisoned_memory():
        lengths = [length for length, _ in case.trees]
        plan = plan_trees(case.heads, problem.masks, lengths, device=device)
        kv = KV(problem.k, problem.v, problem.table, problem.scales)
        params = AttentionParams(problem.scale, softcap=case.softcap, sinks=problem.sinks)
        if backend is None:
            from triforce_tree.kernels.attention.launch import prepare

            attention = prepare(plan, case.dtype, problem.k.dtype, config=case.config)
            return attention.states(problem.q, kv, params, first_visible(problem))
        made = backend.trees(plan, case.dtype, problem.k.dtype)
        made.begin()
        first = first_visible(problem)
        out, lse = made.states(problem.q, kv, params, first)
        assert torch.equal(made.run(problem.q, kv, params, first), out) or backend.name == "cpu"
        return out, lse


def tree_mask(queries: int, tail: int, seed: int) -> Tensor:
    """bool ``[T, N]``: ancestors in a random tree of the last T positions; all earlier ones are visible."""
    rng = random.Random(seed)
    mask = torch.ones(queries, tail, dtype=torch.bool)
    own = mask[:, tail - queries :]
    own[:] = torch.eye(queries, dtype=torch.bool)
    for node in range(1, queries):
        own[node] |= own[rng.randrange(node)]
    return mask
