"""Problems for the kernels of a decoding step, to be compared with the operators' definitions.

Used by the tests, in Triton's interpreter on small shapes, and by ``tests/gpu/test_step_kernels.py`` on a
GPU. A problem holds the arguments of an operator; ``agree`` runs kernel and definition on copies of them.
Storage that an operator must not read is NaN.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels.kernels_cases import poisoned_memory
from triforce_tree.kernels import step
from triforce_tree.kernels.step.kv_slots import quantized
from triforce_tree.kernels.step.select import chunk_scores


@dataclass
class Problem:
    """An operator of a ``package`` and arguments; its results: what it returns, and those at ``changed``."""

    op: str
    args: tuple[Any, ...]
    changed: tuple[int, ...] = ()
    compare: Callable[["Problem", list[Tensor], list[Tensor]], None] | None = None
    package: Any = step

    def run(self, op: Callable[..., Any], args: tuple[Any, ...] | None = None) -> list[Tensor]:
        args = self.args if args is None else args
        made = op(*args)
        returned = [] if made is None else list(made) if isinstance(made, tuple) else [made]
        return [*returned, *(args[at] for at in self.changed)]

    def copied(self) -> tuple[Any, ...]:
        return tuple(copy(x) if at in self.changed else x for at, x in enumerate(self.args))

    def expected(self) -> list[Tensor]:
        return self.run(getattr(self.package, self.op).definition, self.copied())

    def judge(self, made: list[Tensor], exact: list[Tensor]) -> None:
        if self.compare is not None:
            self.compare(self, made, exact)
            return
        for a, b in zip(made, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def agree(problem: Problem, ops: Any) -> None:
    """Raises where the operator of that name in ``ops`` differs from its definition."""
    with poisoned_memory():
        made = problem.run(getattr(ops, problem.op), problem.copied())
    problem.judge(made, problem.expected())


def copy(x: Tensor) -> Tensor:
    """Returns a clone with x's strides, which ``clone`` keeps only without gaps between elements."""
    if x.is_contiguous():
        return x.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    made = torch.full((span,), torch.nan if x.is_floating_point() else -99, dtype=x.dtype, device=x.device)
    return made.as_strided(x.shape, x.stride()).copy_(x)


def _randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def append(
    batch: int,
    heads: int,
    size: int,
    count: int,
    dims: int | tuple[int, int],
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Problem:
    """Returns new keys and values in the layout of a linear layer; the last sequence exceeds the cache.

    ``dims``: of keys and values where they differ.
    """
    rng, dims = random.Random(seed), _pair(dims)
    caches = [_randn(batch, heads, size, dim, dtype=dtype, device=device) for dim in dims]
    new = [_randn(batch, count, heads, dim, dtype=dtype, device=device).transpose(1, 2) for dim in dims]
    start = [rng.randrange(max(1, size - count)) for _ in range(batch - 1)] + [size - (count + 1) // 2]
    return Problem("append_kv", (*caches, *new, torch.tensor(start, device=device)), (0, 1))


def _pair(dims: int | tuple[int, int]) -> tuple[int, int]:
    return (dims, dims) if isinstance(dims, int) else dims


def append_to_ring(*args: Any, ring: int, seed: int = 0) -> Problem:
    """Appends to a ring that has wrapped several times; the last sequence wraps to slot 0."""
    problem = append(*args, seed=seed)
    *tensors, start = problem.args
    rng, count = random.Random(seed), tensors[2].shape[2]
    places = [rng.randrange(5 * ring) for _ in start[1:]] + [3 * ring - (count + 1) // 2]
    return Problem("append_kv", (*tensors, start.new_tensor(places), ring), (0, 1))


def append_int8(problem: Problem) -> Problem:
    """Appends to caches in int8 new vectors of different magnitudes, one of zeros, one with
    NaN.
    """
    k_cache, v_cache, k, v, *rest = problem.args
    k, v = (t * 10 ** (6 * torch.rand_like(t[..., :1]) - 3) for t in (k, v))
    k[0, 0, 0], v[-1, -1, -1, 0] = 0, torch.nan
    caches = [torch.full_like(t, 99, dtype=torch.int8) for t in (k_cache, v_cache)]
    scales = [torch.full((*t.shape[:-1], 1), -1.0, device=t.device) for t in caches]
    ring = rest[1] if len(rest) > 1 else 0
    return Problem("append_kv", (*caches, k, v, rest[0], ring, *scales), (0, 1, 6, 7))


def move(
    layers: int,
    batch: int,
    heads: int,
    size: int,
    places: int,
    dims: int | tuple[int, int],
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> Problem:
    """Ascending paths with entries of -1, one in descending order, one that moves nothing."""
    rng = random.Random(seed)
    kv = [
        _randn(layers, batch, size, heads, dim, dtype=dtype, device=device).transpose(2, 3)
        for dim in _pair(dims)
    ]
    start = [rng.randrange(size - 2 * places) for _ in range(batch)]
    index = torch.full((batch, places), -1)
    for b in range(batch):
        path = sorted(rng.sample(range(2 * places), places))
        index[b] = torch.tensor(path if b % 3 else path[::-1])
        index[b, torch.rand(places) < 0.2] = -1
    if batch > 1:
        index[-1] = -1
    tensors = index.to(device), torch.tensor(start, device=device)
    return Problem("move_kv", (*kv, *tensors), (0, 1))


def move_in_ring(*args: Any, ring: int, seed: int = 0) -> Problem:
    """Moves slots in a ring that has wrapped several times; the first path crosses its end."""
    problem = move(*args, seed=seed)
    *kv, index, start = problem.args
    rng = random.Random(seed)
    places = [4 * ring - index.shape[1]] + [rng.randrange(5 * ring) for _ in start[1:]]
    return Problem("move_kv", (*kv, index, start.new_tensor(places), ring), (0, 1))


def in_pages(problem: Problem, page: int) -> Problem:
    """Lets each sequence have its slots in pages of any order. A quarter of the pages are missing."""
    cache = problem.args[0]
    batch, pages = cache.shape[-4], cache.shape[-2] // page
    table = torch.stack([torch.randperm(pages) for _ in range(batch)])
    table[torch.rand(batch, pages) < 0.25] = -1
    ring_and_scales = {"append_kv": (0, None, None), "move_kv": (0,)}[problem.op]
    args = problem.args if len(problem.args) > 5 else (*problem.args, *ring_and_scales)
    return replace(problem, args=(*args, table.int().to(cache.device), page))


def means(
    layers: int,
    batch: int,
    heads: int,
    size: int,
    count: int,
    dim: int,
    chunk: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    variances: bool = False,
) -> Problem:
    """Returns keys interleaved with values in one tensor; two sequences are at its two ends."""
    rng = random.Random(seed)
    places = size // chunk
    k = _randn(layers, 2, batch, heads, size, dim, dtype=dtype, device=device)[:, 0]
    columns = 2 * dim if variances else dim
    made = torch.full((layers, batch, heads, places - 1, columns), torch.nan, dtype=dtype, device=device)
    first = [0] + [rng.randrange(places) for _ in range(batch - 2)] + [places - 1]
    args = (made, k, torch.tensor(first[:batch], device=device), count, chunk)
    return Problem("chunk_means", args, (0,), _close_means)


def means_int8(*args: Any, seed: int = 0) -> Problem:
    """Takes the means of keys in int8."""
    problem = means(*args, seed=seed)
    made, k, *rest = problem.args
    stored, scale = quantized(k)
    return Problem("chunk_means", (made, stored, *rest, scale), (0,), _close_means)


def _close_means(problem: Problem, made: list[Tensor], exact: list[Tensor]) -> None:
    # Another order of summation may differ by rounding.
    eps = torch.finfo(made[0].dtype).eps
    dim = problem.args[1].shape[-1]
    for own, other in zip(made[0].split(dim, -1), exact[0].split(dim, -1), strict=True):
        torch.testing.assert_close(own, other, rtol=4 * eps, atol=2 * eps, equal_nan=True)


def selection(
    batch: int,
    heads: int,
    group: int,
    chunks: int,
    dim: int,
    slots: int,
    dtype: torch.dtype,
    device: str,
    integers: bool = False,
    seed: int = 0,
    variances: bool = False,
) -> Problem:
    """Means beyond each sequence's limit are NaN; integers give exact scores with many ties."""
    rng = random.Random(seed)
    q = _randn(batch, heads * group, dim, dtype=torch.float32, device=device)
    m = _randn(batch, heads, chunks, dim, dtype=torch.float32, device=device)
    if integers:
        q, m = q.mul_(0.6).round_(), m.round_()
    if variances:
        m = torch.cat([m, 20 * torch.rand_like(m)], -1)
    q, m = q.to(dtype), m.to(dtype)
    limit = [chunks] + [rng.randint(slots, chunks) for _ in range(batch - 2)] + [slots]
    for b, count in enumerate(limit[:batch]):
        m[b, :, count:] = torch.nan
    table = torch.full((batch, heads, slots + 3), -7, dtype=torch.int32, device=device)
    args = (q, m, torch.tensor(limit[:batch], device=device), table, slots, 0.5 if integers else dim**-0.5)
    return Problem("select_chunks", args, (3,), None if integers and group == 1 else _valid_selection)


def _valid_selection(problem: Problem, made: list[Tensor], exact: list[Tensor]) -> None:
    """Another order of summation may exchange chunks of almost equal scores, and no others."""
    q, m, limit, _, slots, scale = problem.args
    table, scores = made[0], chunk_scores(q, m, limit, scale)
    assert torch.equal(table[..., slots:], exact[0][..., slots:]), "columns beyond the slots changed"
    chosen = table[..., :slots].long()
    assert (chosen[..., 0] == 0).all(), "chunk 0 is missing"
    assert (chosen.diff(dim=-1) > 0).all(), "not ascending"
    assert (chosen[..., -1] < limit[:, None]).all(), "beyond the limit"
    lowest = scores.gather(2, chosen)[..., 1:].amin(-1) if slots > 1 else scores[..., 0] + torch.inf
    highest_left = scores.scatter(2, chosen, -torch.inf).amax(-1)
    # Scores are sums of `dim` products of unit variance, times the scale.
    assert (lowest >= highest_left - 1e-4).all(), f"missed a chunk {(highest_left - lowest).max()} higher"


def beyond_the_cache(device: str) -> Problem:
    """Moves whose sources and targets lie beyond the last slot."""
    kv = torch.randn(2, 1, 1, 2, 10, 8, device=device)
    index, start = torch.tensor([[0, 3, -1, 1, 2]], device=device), torch.tensor([7], device=device)
    return Problem("move_kv", (*kv, index, start), (0, 1))


def even_scores(value: float, device: str) -> Problem:
    """A selection from scores that are equal, infinite or NaN: ties go to the lowest chunks."""
    means = torch.zeros(1, 1, 90, 16, device=device)
    means[0, 0, 40:, 0], means[0, 0, 70, 0] = value, -1.0
    table = torch.full((1, 1, 60), -7, dtype=torch.int32, device=device)
    q, limit = torch.ones(1, 1, 16, device=device), torch.tensor([80], device=device)
    return Problem("select_chunks", (q, means, limit, table, 60, 1.0), (3,))
