"""What the attention layers of a forward do with new keys and values, and what they attend to.

Rows are never moved between forwards but by :meth:`TreeAttentionView.move`: a forward writes its rows
behind those that count, and whatever nobody keeps is overwritten by the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triforce_tree.config import RetrievalConfig
from triforce_tree.kernels import step
from triforce_tree.kernels.attention import planned
from triforce_tree.kernels.attention.plan import Heads, Plan, pack_mask, plan_trees
from triforce_tree.kv.store import KVGroup, KVStore
from triforce_tree.kv.window import Window
from triforce_tree.models.attention import AttentionParams


class TreeAttentionView:
    """T new rows a sequence, of which each sees the rows before the tail and its ancestors in it.

    Layers with a window see as many positions less.

    Args:
        store: where rows live.
        queries: T.
        tail: N >= T, rows that the mask covers; the T new ones are the last of them.
        mask: bool ``[T, N]`` where it never changes.
        depths: position of each of the N tail rows, counted from the tail's first. By default those of the
            mask's paths, or of a single row.

    Attributes:
        at: int64 ``[B]``, the first of the new rows.
        lengths: int32 ``[B]``, rows before the tail.
        mask: int64 ``[B * T, words]``; bit j of word w says that the query sees tail row ``64 w + j``.
        capturable: whether a CUDA graph can hold a forward over them.
        resizable: whether a forward may bring fewer new rows than T, the first ones of the plan.

    Raises:
        ValueError: layers have windows, and nothing says how deep the tail's rows are.
    """

    capturable = True

    def __init__(
        self,
        store: KVStore,
        queries: int,
        tail: int | None = None,
        mask: Tensor | None = None,
        depths: Sequence[int] | None = None,
    ) -> None:
        self.store = store
        tail = queries if tail is None else tail
        if depths is None:
            depths = _path_depths(queries, tail, mask)
        if mask is None:
            mask = torch.ones(queries, tail, dtype=torch.bool)
        batch, device = store.batch, store.device
        self.at = torch.zeros(batch, dtype=torch.int64, device=device)
        self.resizable = device.type != "cuda"
        self.ahead = tail - queries
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.mask = pack_mask(mask).repeat(batch, 1).to(device)
        self._windows: dict[int, Window] = {}
        plans: dict[Heads, Plan] = {}
        self._plans: list[Plan] = []
        for group in store.groups:
            heads, window = group.shape.heads, group.shape.window
            if heads not in plans:
                made = plan_trees(heads, [mask] * batch, [0] * batch, device=device, dtype=store.dtype)
                plans[heads] = replace(made, lengths=self.lengths, mask=self.mask)
            if window is not None and window not in self._windows:
                if depths is None:
                    raise ValueError(
                        f"window={window} needs the depths of all {tail} tail rows, which no mask tells"
                    )
                self._windows[window] = Window(window, depths, queries, batch, device)
            plan = plans[heads]
            if window is not None:
                plan = replace(plan, mask=self._windows[window].narrowed(self.mask))
            self._plans.append(plan)
        self._first_layer = min((group.layers[0] for group in store.groups), default=0)

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        """Say where this forward stands.

        Args:
            before: int64 ``[B]`` rows before the tail.
            words: int64 ``[B, T, L]``, bit j of word l: row t sees tail row 64 l + j. Fewer rows where the
                forward brings fewer.
        """
        torch.add(before, self.ahead, out=self.at)
        self.lengths.copy_(before)
        if words is not None:
            mask = self.mask.view(self.store.batch, -1, self.mask.shape[1])
            mask[:, : words.shape[1], : words.shape[2]] = words

    def follow(self, at: Tensor, lengths: Tensor) -> None:
        """Stand where these buffers say, instead of ``begin``; whoever writes them writes ``mask``, too.

        Args:
            at: int64 ``[B]``, the first of the new rows.
            lengths: int32 ``[B]``, rows before the tail.
        """
        self.at, self.lengths = at, lengths
        self._plans = [replace(plan, lengths=lengths) for plan in self._plans]

    def move(self, index: Tensor) -> None:
        """New row ``index[b, i]`` becomes the i-th of them; -1 moves nothing.

        Args:
            index: int64 ``[B, R]``.
        """
        self.store.move(index, self.at)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        number, own = self.store.place(layer)
        self._write(layer, k, v, how)
        group = self.store.groups[number]
        if group.ring:
            return self._attend(
                q, *group.paged(own), self._plans[number], how, group.shape.window, group.table
            )
        return self._attend(q, *self.store.layer(layer), self._plans[number], how, group.shape.window)

    def _write(self, layer: int, k: Tensor, v: Tensor, how: AttentionParams) -> None:
        """Put the new rows of one layer behind the others."""
        if layer == self._first_layer:
            # Here and not in ``begin``: whoever follows buffers fills them as late as before the first layer.
            for window in self._windows.values():
                window.update(self.lengths, self.mask)
        group = self.store.check(layer, how.window)
        keys, values = self.store.layer(layer)
        step.append_kv(keys, values, k, v, self.at, group.ring)

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: Plan,
        how: AttentionParams,
        window: int | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        packed = q.transpose(1, 2).reshape(batch * queries, heads, dim)
        first = None if window is None else self._windows[window].seen
        out = planned.run(
            packed, keys, values, plan, scale=how.scale, table=table, first=first, softcap=how.softcap,
            sinks=how.sinks,
        )  # fmt: skip
        return out.view(batch, queries, heads, dim)


def _path_depths(queries: int, tail: int, mask: Tensor | None) -> list[int] | None:
    """Of the tail's rows, each of which sees itself and its ancestors; None where the mask does not tell."""
    if mask is None:
        return [0] if tail == 1 else None
    return [count - 1 for count in mask.sum(1).tolist()] if queries == tail else None


@dataclass(frozen=True)
class _Retrieved:
    """What one group of layers shows of the rows before the recent ones.

    Attributes:
        table: int32 ``[layers, B, H_kv, pages]``: the chosen chunks, ascending, then the recent ones.
        means: ``[layers, B, H_kv, C, D]``, of the keys of every chunk.
        first_page: int64 ``[B, 1]``, where the pages of each sequence begin.
        plan: of the rows that the table shows.
    """

    table: Tensor
    means: Tensor
    first_page: Tensor
    plan: Plan


class PagedRetrievalView(TreeAttentionView):
    """New rows that see a selection of the rows before them: chosen chunks and the recent ones.

    A view: a table of chunks for each layer and KV head names rows of the full cache, and nothing is
    copied. The new rows stand where the full cache's next rows will, which overwrites them. Layers with a
    window have nothing to choose from: they see all of it, as those of the full cache do.

    Args:
        store: the full cache; its page is the chunk.
        queries: T.
        config: budget, recent window (tokens).
        growth: rows by which the context may grow from one choice to the next.
        depths: as for ``TreeAttentionView``.

    Attributes:
        retrieved: for each group of the store; None for layers with a window.
    """

    def __init__(
        self,
        store: KVStore,
        queries: int,
        config: RetrievalConfig,
        growth: int,
        depths: Sequence[int] | None = None,
    ) -> None:
        super().__init__(store, queries, depths=depths)
        chunk, device = config.chunk, store.device
        self.config = config
        self.slots = (config.budget - config.recent) // chunk
        self.choosing = False
        recent = -(-(config.recent + growth + queries) // chunk) + 2
        self._recent = torch.arange(recent, device=device)
        self._shown = torch.zeros_like(self.lengths)
        self.retrieved = [
            None if group.shape.window is not None else self._retrieved(group, plan, self.slots + recent)
            for group, plan in zip(store.groups, self._plans, strict=True)
        ]
        self.boundary = torch.zeros(store.batch, dtype=torch.int64, device=device)

    def _retrieved(self, group: KVGroup, plan: Plan, pages: int) -> _Retrieved:
        layers, _, batch, heads, _, dim = group.kv.shape
        device = group.kv.device
        return _Retrieved(
            table=torch.zeros(layers, batch, heads, pages, dtype=torch.int32, device=device),
            means=torch.zeros(layers, batch, heads, self.chunks, dim, device=device, dtype=group.kv.dtype),
            first_page=torch.arange(batch, device=device)[:, None] * group.pages_apart,
            plan=replace(plan, lengths=self._shown),
        )

    @property
    def chunks(self) -> int:
        """Of a whole sequence."""
        return self.store.rows // self.config.chunk

    def choose(self, end: Tensor, committed: Tensor) -> None:
        """Let the next forward choose by its root.

        Candidates are the chunks before the recent window of ``end``, as far as their rows are ``committed``.
        """
        boundary = (end - self.config.recent).minimum(committed) // self.config.chunk
        # Where there are no more chunks than slots, all of them are chosen and the table is the identity.
        self.boundary.copy_(boundary.clamp_min(self.slots))
        recent = (self.boundary[:, None] + self._recent).clamp_max(self.chunks - 1)
        for own in self.retrieved:
            if own is not None:
                own.table[..., self.slots :] = (recent + own.first_page)[:, None].int()

    def begin(self, before: Tensor, words: Tensor | None = None) -> None:
        super().begin(before, words)
        held = self.slots - self.boundary
        self._shown.copy_(before + held * self.config.chunk)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: AttentionParams) -> Tensor:
        number, place = self.store.place(layer)
        own = self.retrieved[number]
        if own is None:
            return super().__call__(layer, q, k, v, how)
        table = own.table[place]
        if self.choosing:
            select = self.config.select_chunks or step.select_chunks
            select(q[:, :, 0], own.means[place], self.boundary, table, self.slots, how.scale)
            if self.store.batch > 1:
                table[:, :, : self.slots] += own.first_page[:, :, None].int()
        self._write(layer, k, v, how)
        return self._attend(q, *self.store.groups[number].paged(place), own.plan, how, table=table)

    def renew_means(self, first: Tensor, count: int) -> None:
        """Means of the ``count`` chunks from chunk ``first[b]`` on, after rows in them were settled."""
        for group, own in zip(self.store.groups, self.retrieved, strict=True):
            if own is not None:
                step.chunk_means(own.means, group.kv[:, 0], first, count, self.config.chunk)
