"""Buffers, models and captured stages for one batch size, room and configuration."""

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.copied import CopiedRows
from triforce_tree.cycle.growth import Growth
from triforce_tree.cycle.host_store import Offload
from triforce_tree.cycle.laws import DeviceLaw
from triforce_tree.cycle.model import StepModel
from triforce_tree.cycle.offloaded import OffloadedCache
from triforce_tree.cycle.prefill import chunk_tokens, prefill
from triforce_tree.cycle.rows import KVStore, RetrievalRows, TreeRows
from triforce_tree.cycle.shapes import DeviceShape, Extent, device_shape, least_prompt
from triforce_tree.cycle.stages import (
    ChainPass,
    FullRows,
    Grow,
    MiddlePass,
    PlainPass,
    Stage,
    TreePass,
    Verifier,
)
from triforce_tree.cycle.streamed_weights import check_level_one
from triforce_tree.cycle.texts import Texts
from triforce_tree.few_row import few_row_copy, low_bit_copy
from triforce_tree.graphs import Captured
from triforce_tree.hf_model import HFModel
from triforce_tree.length_rope import fix_rotation
from triforce_tree.level import Progress
from triforce_tree.sampling import TokenLaw
from triforce_tree.tree_search import parse_shape


@dataclass(frozen=True)
class _Program:
    """The stages of a cycle for one kind of law."""

    law: DeviceLaw
    stages: dict[str, Stage]
    graphs: dict[str, Callable[[], None]]


class Cycle:
    """Everything that decoding needs on the device, made once and used for many texts.

    Args:
        target: level 2, and level 1.
        draft: level 0; may be None for one level.
        config: what each level does.
        batch: sequences.
        room: most tokens of a text, new ones included.
        levels: 1, 2 or 3.
        offload: how to split the full cache between device and host; None keeps it on the device.
        progress: called with bytes of host memory as they are taken.
        store: a full cache on the device to work on, with whatever rows are in it; by default a new one.

    Raises:
        ValueError: several levels without a draft, or with a tree that has no fixed size; a store that is
            too small, or cannot be paged by chunks; streamed weights with the full cache on the device, or
            with a level 1 of 16 bits.
        HostMemoryError: host memory is short.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel | None,
        config: HierarchyConfig,
        batch: int,
        room: int,
        levels: int,
        offload: Offload | None = None,
        progress: Callable[[int], None] | None = None,
        store: KVStore | None = None,
    ) -> None:
        self.target, self.config, self.batch, self.room, self.levels = target, config, batch, room, levels
        self._draft_rope = draft.length_rope if draft is not None else None
        self.device = target.device
        self._prefill_chunk = chunk_tokens(config.prefill_chunk, self.device)
        self._programs: dict[Hashable, _Program] = {}
        compiled = self.device.type == "cuda"
        shape = device_shape(parse_shape(config.tree)) if levels > 1 else None
        if levels > 1 and (draft is None or shape is None):
            raise ValueError(
                "a captured cycle of several levels needs a draft model and a tree of fixed size"
            )
        if target.streamed is not None:
            if offload is None:
                raise ValueError(
                    "streamed weights need an offloaded cache: level 2 cannot be captured with them"
                )
            if levels == 3:
                check_level_one(config.middle_bits)
        extent = Extent.of(config, levels)
        depth, nodes, behind = extent.depth, extent.nodes, extent.behind
        self.reach = extent.reach
        self.leaves = levels == 3 and config.leaves is not False
        page = config.retrieval.chunk if levels == 3 else 64
        self.offloaded: OffloadedCache | None = None
        self._full_rows: FullRows
        if offload is not None:
            chosen = config.retrieval
            recent, slots = (chosen.recent, (chosen.budget - chosen.recent) // page * page)
            if levels < 3:
                recent = slots = page = 0
            self.offloaded = OffloadedCache(
                target, batch, room, recent, behind, slots, page, offload, progress
            )
            self._full_rows = self.offloaded.rows
        else:
            if store is None:
                store = KVStore(
                    target.layers, batch, target.heads, room + behind, self.device, target.dtype, page
                )
            elif store.batch != batch or store.rows < room + behind:
                raise ValueError(
                    f"a store of {store.batch} x {store.rows} rows cannot hold {batch} x {room + behind}: "
                    f"{room} tokens and what passes write behind them"
                )
            self.store = own = store.in_pages(page)
            self._full_rows = lambda queries, mask: TreeRows(own, queries, mask=mask)
        reach, extra, vocabulary = (
            (self.reach, depth + 1, target.vocab_size) if levels == 3 else (0, depth, 0)
        )
        self.texts = Texts(batch, room + behind, reach, max(1, extra), vocabulary, self.device)
        self.full = StepModel(few_row_copy(target.model), compiled, target.length_rope)
        self.growth = self._growth(draft, shape, depth, compiled) if draft and shape else None
        self.rows: RetrievalRows | None = None
        self.copies: CopiedRows | None = None
        if levels == 3:
            if self.offloaded is not None:
                self.copies = CopiedRows(self.offloaded, nodes, config.retrieval)
            else:
                self.rows = RetrievalRows(self.store, nodes, config.retrieval, self.reach + 1)
            bits = config.middle_bits
            bring = target.streamed.bring if target.streamed is not None else None
            self.middle = (
                self.full
                if bits == 16
                else StepModel(low_bit_copy(target.model, bits, bring), compiled, target.length_rope)
            )
        self.capture_seconds = 0.0

    def _growth(self, draft: HFModel, shape: DeviceShape, depth: int, compiled: bool) -> Growth:
        model = StepModel(few_row_copy(draft.model), compiled, draft.length_rope)
        reach = self.reach + depth + 2
        return Growth(model, draft.layers, draft.heads, shape, self.config.streaming, self.batch, reach)

    def prepare(self, law: TokenLaw) -> None:
        """Make stages and graphs for this kind of law, or take those that are there, and set it.

        Texts must be fed or rewound after this: a capture's trial runs use their buffers.
        """
        key = DeviceLaw.key(law)
        if key not in self._programs:
            start = time.perf_counter()
            own = DeviceLaw(law, self.device)
            stages = self._stages(own)
            self._programs[key] = _Program(own, stages, self._captured(stages))
            self.capture_seconds += time.perf_counter() - start
        self._program = self._programs[key]
        self._program.law.set(law)

    def _stages(self, law: DeviceLaw) -> dict[str, Stage]:
        texts, vocabulary = self.texts, self.target.vocab_size
        stages: dict[str, Stage] = {}
        if self.growth is not None:
            grow = Grow(self.growth, law, texts)
            stages["grow"] = grow
            nodes = self.growth.nodes
            seen = self.rows or self.copies
            if seen is not None:
                verifier = Verifier(self.middle, law, texts, nodes, vocabulary)
                for name, choosing in (("choose", True), ("middle", False)):
                    stages[name] = MiddlePass(grow, verifier, seen, self.leaves, choosing)
                stages["full"] = ChainPass(
                    self.full, self._full_rows, self.rows, law, texts, vocabulary, self.leaves
                )
            else:
                stages["full"] = TreePass(
                    grow, Verifier(self.full, law, texts, nodes, vocabulary), self._full_rows
                )
        stages["plain"] = PlainPass(self.full, self._full_rows, self.rows, law, texts, vocabulary)
        return stages

    def _captured(self, stages: dict[str, Stage]) -> dict[str, Callable[[], None]]:
        """Capture every stage on texts of a made-up length."""
        result: dict[str, Callable[[], None]] = {}
        on_gpu = self.device.type == "cuda"
        with self.trial(self.room - 1) as begin:
            for name, stage in stages.items():
                begin()
                if self.offloaded is not None and name in ("full", "plain"):
                    # A pass over the host's rows follows their lengths, and waits for the bus anyway.
                    result[name] = stage
                    if on_gpu:
                        stage()
                    continue
                pool = torch.cuda.graph_pool_handle() if on_gpu else None
                result[name] = Captured(stage, self.device, pool)
        return result

    @property
    def stage_names(self) -> Collection[str]:
        """Of the prepared stages."""
        return self._program.stages.keys()

    @contextmanager
    def trial(self, length: int) -> Iterator[Callable[[], None]]:
        """Inside, stages may be run behind made-up texts of ``length`` tokens, up to three times in a row.

        What is yielded puts the texts back to that length. Rows of the full cache are as before afterwards;
        texts must be fed or rewound.
        """

        def begin() -> None:
            self.texts.length.fill_(length)
            self.texts.chain.zero_()
            if self.growth is not None:
                self.growth.dropped.fill_(max(0, length - self.growth.again))

        if self.offloaded is not None:
            with self.offloaded.trial(length):
                yield begin
            return
        written = self.store.kv[..., length : length + self.texts.capacity - self.room + 1, :]
        before = written.clone()
        try:
            yield begin
        finally:
            written.copy_(before)
            if length < self.room - 1:
                self.renew_means()

    def prefill(self, prompts: Sequence[Sequence[int]], progress: Progress | None = None) -> None:
        """Feed all but each prompt's last token, the first root, to every level.

        Where an offloaded cache is interrupted in this, its memory is given back and the cycle closed.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the room.
        """
        self._check(prompts)
        if self.offloaded is not None:
            self._prefill_offloaded(self.offloaded, prompts, progress)
            return
        with self.target.active():
            for b, prompt in enumerate(prompts):
                prefill(self.target, self.store, b, list(prompt[:-1]), self._prefill_chunk, progress)
        self.renew_means()
        self.rewind(prompts)

    def _prefill_offloaded(
        self, cache: OffloadedCache, prompts: Sequence[Sequence[int]], progress: Progress | None
    ) -> None:
        try:
            with self.target.active():
                cache.prefill(prompts, self._prefill_chunk, progress)
            self.rewind(prompts)
        except BaseException:
            self.close()
            raise

    def renew_means(self) -> None:
        """Compute all chunk means anew: rows were written by others than the passes."""
        if self.rows is not None:
            self.rows.renew_means(torch.zeros_like(self.texts.length), self.rows.means.shape[3])

    def serves(self, config: HierarchyConfig) -> bool:
        """Whether only ``self.config = config`` is needed to run these settings.

        They may differ in what is read afresh in every pass; all else is built into buffers and graphs.
        """

        def built_in(settings: HierarchyConfig) -> HierarchyConfig:
            return replace(settings, rounds=None, retrieval=replace(settings.retrieval, refresh=0))

        return built_in(self.config) == built_in(config)

    def close(self) -> None:
        """Give an offloaded cache's host memory back; the cycle is of no use afterwards."""
        if self.offloaded is not None:
            self.offloaded.close()

    @property
    def closed(self) -> bool:
        return self.offloaded is not None and self.offloaded.closed

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Stand at the end of these prompts, or beginnings of texts, whose rows are in the cache."""
        self._check(prompts)
        texts = self.texts
        for b, prompt in enumerate(prompts):
            texts.tokens[b, : len(prompt)] = torch.tensor(prompt, device=self.device)
        texts.length.copy_(torch.tensor([len(p) - 1 for p in prompts], device=self.device))
        texts.active.fill_(1)
        texts.broken.zero_()
        texts.chain.zero_()
        texts.gathered.zero_()
        if self.growth is not None:
            self.growth.renew([list(p) for p in prompts])
        if self.offloaded is not None:
            self.offloaded.stand([len(p) - 1 for p in prompts])
        if self.copies is not None:
            self.copies.fill()

    def transferred_bytes(self, tokens: int, plain: bool = False) -> int:
        """What a pass of level 2 behind so many tokens copies to the device: keys and values, and weights.

        Args:
            plain: of the autoregressive pass.
        """
        weights = self.target.streamed.bytes if self.target.streamed is not None else 0
        if self.offloaded is None:
            return weights
        heads = self.target.heads
        slot = 2 * self.target.layers * heads.kv * heads.dim * self.target.dtype.itemsize
        share = self.offloaded.share(1 if plain or self.levels == 1 else self.reach + 1)
        far = max(0, self.batch * tokens * slot - self.offloaded.host.resident_bytes)
        return int((1 - share) * far) + weights

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        least = least_prompt(self.config, self.levels, self.offloaded is not None)
        for prompt in prompts:
            if not least <= len(prompt) <= self.room:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens does not fit a captured cycle of {self.levels} "
                    f"levels made for {least} to {self.room} tokens; use fewer levels, a smaller budget or "
                    "captured=False"
                )
        lengths = [len(p) for p in prompts]
        fix_rotation(self.target.length_rope, self._draft_rope, lengths, self.config.streaming)

    def settled(self, counts: Sequence[int]) -> None:
        """The last pass of level 2 made each text so many tokens longer."""
        if self.offloaded is not None:
            self.offloaded.settled(counts)

    def run(self, name: str, generator: torch.Generator) -> None:
        """One stage, with fresh random numbers."""
        for noise in self._program.stages[name].noise:
            noise.draw(generator)
        self._program.graphs[name]()
