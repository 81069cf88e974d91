"""A cache as a plain list of rows, driven side by side with a real one.

The list model forgets nothing by accident: it is told which rows exist, and attention over them is
computed row by row in float64. Whatever a cache does with buffers, the outputs must be the same.
"""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from triforce_tree.caches import Rows
from triforce_tree.caches.base import KVCache, Variant

LAYERS, DIM = 2, 16
HEADS = [(4, 4), (4, 2), (6, 1)]


class HalfRope:
    """Rotary embedding as Llama writes it, with angles 1, 1/10, ..."""

    def rotate(self, layer, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, positions), rotated(k, positions)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """``x`` ``[..., T, D]`` turned by ``positions`` ``[T]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10.0 ** -torch.arange(half)
    angles = torch.cat([angles, angles], -1)
    other = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + other * angles.sin()


@dataclass
class Row:
    """One token's row in every layer: ``k[layer]``, ``v[layer]`` are ``[H_kv, D]``."""

    k: list[Tensor]
    v: list[Tensor]


@dataclass
class ListCache:
    """Rows in plain lists, written to a real cache at the same time."""

    cache: KVCache
    heads: tuple[int, int]
    how: Variant = field(default_factory=lambda: Variant(DIM**-0.5))
    committed: list[Row] = field(default_factory=list)
    tail: list[Row] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def ancestors(self, row: int) -> list[int]:
        """Tail rows from the first one down to ``row``."""
        return [] if row < 0 else [*self.ancestors(self.parents[row]), row]

    def write(
        self,
        parents: list[int],
        like: list[Row] | None = None,
        query: Tensor | None = None,
        context: int = 0,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """New tail rows; (queries, outputs) of each layer, ``[H_q, T, D]``."""
        heads, kv_heads = self.heads
        count, start = len(parents), len(self.tail)
        self.parents += parents
        fresh = like or [
            Row(*([torch.randn(kv_heads, DIM) for _ in range(LAYERS)] for _ in "kv")) for _ in range(count)
        ]
        self.tail += fresh
        depths = torch.tensor([len(self.ancestors(row)) - 1 for row in range(len(self.tail))])
        mask = torch.zeros(count, len(self.tail), dtype=torch.bool)
        for row in range(count):
            mask[row, self.ancestors(start + row)] = True
        rows = Rows(depths[start:], mask, depths, context)
        queries, outputs = [], []
        for index in range(LAYERS):
            width = fresh[0].k[0].shape[-1]
            q = torch.randn(1, heads, count, width) if query is None else query
            k = torch.stack([row.k[index] for row in fresh], 1)[None]
            v = torch.stack([row.v[index] for row in fresh], 1)[None]
            layer = SimpleNamespace(layer_idx=index)
            outputs.append(self.cache.attend(layer, q.clone(), k, v, rows, self.how)[0])
            queries.append(q[0])
        self.cache.advance(count)
        return queries, outputs

    def keep(self, path: list[int]) -> None:
        self.cache.keep(path)
        self.tail = [self.tail[row] for row in path]
        self.parents = list(range(-1, len(path) - 1))

    def commit(self) -> None:
        """Everything that ``keep`` left."""
        self.cache.commit(len(self.tail))
        self.committed += self.tail
        self.tail, self.parents = [], []

    def expected(self, q: Tensor, index: int, row: int, seen: list[Row], turn=lambda x, places: x) -> Tensor:
        """Attention of a query ``[H_q, D]`` over committed ``seen`` and its tail ancestors."""
        rows = [*seen, *(self.tail[i] for i in self.ancestors(row))]
        places = torch.arange(len(rows))
        group = self.heads[0] // self.heads[1]
        k = turn(torch.stack([r.k[index] for r in rows], 1), places).double().repeat_interleave(group, 0)
        v = torch.stack([r.v[index] for r in rows], 1).double().repeat_interleave(group, 0)
        if self.how.window is not None:
            k, v = k[:, -self.how.window :], v[:, -self.how.window :]
        q = turn(q[:, None], places[-1:]).double()
        return ((q @ k.transpose(1, 2) * self.how.scale).softmax(-1) @ v)[:, 0].float()

    def check(self, written: tuple[list[Tensor], list[Tensor]], seen: list[Row], **kwargs) -> None:
        queries, outputs = written
        for index in range(LAYERS):
            start = len(self.tail) - queries[index].shape[1]
            for t in range(queries[index].shape[1]):
                wanted = self.expected(queries[index][:, t], index, start + t, seen, **kwargs)
                torch.testing.assert_close(outputs[index][:, t], wanted, atol=2e-5, rtol=1e-4)


def random_parents(tail: int, count: int) -> list[int]:
    """Each new row follows any row before it, or the committed end."""
    return [random.randint(-1, tail + row - 1) for row in range(count)]


def random_use(model: ListCache, steps: int, seen, **kwargs) -> None:
    """Writes, rollbacks and commits in random order; every output is checked."""
    for _ in range(steps):
        for _ in range(random.randint(1, 3)):
            parents = random_parents(len(model.tail), random.randint(1, 7))
            model.check(model.write(parents), seen(), **kwargs)
            if random.random() < 0.4:
                model.keep(model.ancestors(random.randint(-1, len(model.tail) - 1)))
        model.keep(model.ancestors(random.randint(-1, len(model.tail) - 1)))
        model.commit()
        assert model.cache.length == len(model.committed)
