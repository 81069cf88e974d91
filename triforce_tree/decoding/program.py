"""Buffers, models and captured stages for one batch size, room and configuration."""

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    DraftStage,
    FullView,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.drafters.base import Drafter
from triforce_tree.kv.offload.gathered_retrieval import GatheredRetrievalView
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import StreamedView
from triforce_tree.kv.offload.streamed_weights import check_level_one
from triforce_tree.kv.prefill import chunk_tokens, prefill
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import PagedRetrievalView, TreeAttentionView
from triforce_tree.models.few_row import low_bit_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, step_model
from triforce_tree.runtime.executor import executor
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.stats import Progress
from triforce_tree.trees.device_shapes import PassLimits, device_tree_shape, least_prompt
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.verifier import Verdict, Verifier


@dataclass(frozen=True)
class _Program:
    """The stages of a cycle for one kind of law."""

    to_probs: DeviceProbs
    stages: dict[str, Stage]
    graphs: dict[str, Callable[[], None]]


class DecodingProgram:
    """Everything that decoding needs on the device, made once and used for many texts.

    Args:
        target: level 2, and level 1.
        drafter: level 0; may be None for one level.
        config: what each level does; its ``tree`` is the drafter's.
        batch: sequences.
        max_seq_len: most tokens of a text, new ones included.
        levels: 1, 2 or 3.
        offload: how to split the full cache between device and host; None keeps it on the device.
        progress: called with bytes of host memory as they are taken.
        store: a full cache on the device to work on, with whatever rows are in it; by default a new one.
        noise: makes the random numbers of every stage.

    Raises:
        ValueError: several levels without a drafter; a store that is too small, or cannot be paged by chunks;
            streamed weights with a level 1 of 16 bits.
        HostMemoryError: host memory is short.
    """

    def __init__(
        self,
        target: HFModel,
        drafter: Drafter | None,
        config: HierarchyConfig,
        batch: int,
        max_seq_len: int,
        levels: int,
        offload: Offload | None = None,
        progress: Callable[[int], None] | None = None,
        store: KVStore | None = None,
        noise: NoiseFactory = Noise,
    ) -> None:
        self.target, self.config, self.batch, self.max_seq_len, self.levels = (
            target,
            config,
            batch,
            max_seq_len,
            levels,
        )
        if levels > 1 and drafter is None:
            raise ValueError(f"levels={levels} needs a drafter; give one, or levels=1")
        self.drafter = drafter if levels > 1 else None
        self.device, self._noise = target.device, noise
        self._prefill_chunk = chunk_tokens(config.prefill_chunk, self.device)
        self._programs: dict[Hashable, _Program] = {}
        compiled = self.device.type == "cuda"
        if target.streamed is not None and levels == 3:
            check_level_one(config.retrieval_weight_bits)
        extent = PassLimits.of(config, levels)
        depth, nodes, scratch_slots = extent.depth, extent.nodes, extent.scratch_slots
        self.max_draft_tokens = extent.max_draft_tokens
        self.runner_ups = levels == 3 and (
            config.runner_ups is not False if compiled else bool(config.runner_ups)
        )
        page = config.retrieval.chunk if levels == 3 else 64
        self.offloaded: OffloadedCache | None = None
        self.full_view: FullView
        if offload is not None:
            chosen = config.retrieval
            recent, slots = (chosen.recent, (chosen.budget - chosen.recent) // page * page)
            if levels < 3:
                recent = slots = page = 0
            self.offloaded = OffloadedCache(
                target, batch, max_seq_len, recent, scratch_slots, slots, page, offload, progress
            )
            self.full_view = partial(StreamedView, self.offloaded)
        else:
            if store is None:
                rows = max(max_seq_len + scratch_slots, config.retrieval.budget if levels == 3 else 0)
                store = KVStore(target.kv_shapes, batch, rows, self.device, target.dtype, page, scratch_slots)
            store.check_room(batch, max_seq_len + scratch_slots, scratch_slots)
            self.store = own = store.in_pages(page)
            self.full_view = lambda queries, mask, depths: TreeAttentionView(
                own, queries, mask=mask, depths=depths
            )
        max_draft_tokens, extra, vocabulary = (
            (self.max_draft_tokens, depth + 1, target.vocab_size) if levels == 3 else (0, depth, 0)
        )
        features = self.drafter.features if self.drafter is not None else ()
        self.state = SequenceState(
            batch, max_seq_len + scratch_slots, max_draft_tokens, max(1, extra), vocabulary, self.device,
            {layer: self._feature_buffer(max(self.max_draft_tokens, depth) + 1) for layer in features},
        )  # fmt: skip
        self.full = step_model(target, compiled, features)
        if self.drafter is not None:
            self.drafter.bind(self.state)
        self.retrieval_view: PagedRetrievalView | None = None
        self.gathered_view: GatheredRetrievalView | None = None
        if levels == 3:
            depths = device_tree_shape(parse_shape(config.tree)).depths
            if self.offloaded is not None:
                self.gathered_view = GatheredRetrievalView(self.offloaded, nodes, config.retrieval, depths)
            else:
                self.retrieval_view = PagedRetrievalView(
                    self.store, nodes, config.retrieval, self.max_draft_tokens + 1, depths
                )
            self.retrieval_model = (
                self.full if config.retrieval_weight_bits == 16 else self._low_bit_model(compiled, features)
            )
        self.capture_seconds = 0.0

    def _low_bit_model(self, compiled: bool, features: Sequence[int]) -> StepModel:
        target = self.target
        bring = target.streamed.bring if target.streamed is not None else None
        clone = low_bit_copy(target.model, self.config.retrieval_weight_bits, bring)
        return StepModel(clone, compiled, target.length_rope, features, target.learned_positions)

    def _feature_buffer(self, nodes: int) -> Tensor:
        hidden = self.target.model.config.get_text_config(decoder=True).hidden_size
        return torch.zeros(self.batch, nodes, hidden, device=self.device, dtype=self.target.dtype)

    def prepare(self, to_probs: ProbsFromLogits) -> None:
        """Make stages and graphs for this kind of law, or take those that are there, and set it.

        Texts must be fed or rewound after this: a capture's trial runs use their buffers.
        """
        key = DeviceProbs.key(to_probs)
        if key not in self._programs:
            start = time.perf_counter()
            own = DeviceProbs(to_probs, self.device, self._noise)
            stages = self._stages(own)
            self._programs[key] = _Program(own, stages, self._captured(stages, own))
            self.capture_seconds += time.perf_counter() - start
        self._program = self._programs[key]
        self._program.to_probs.set(to_probs)

    def _stages(self, to_probs: DeviceProbs) -> dict[str, Stage]:
        state, vocabulary = self.state, self.target.vocab_size
        stages: dict[str, Stage] = {}
        if self.drafter is not None:
            draft = DraftStage(self.drafter, to_probs, state, vocabulary)
            stages["draft"] = draft
            nodes = draft.tree.nodes
            seen = self.retrieval_view or self.gathered_view
            if seen is not None:
                verifier = Verifier(self.retrieval_model, to_probs, state, nodes, vocabulary)
                for name, choosing in (("retrieval_refresh", True), ("retrieval", False)):
                    stages[name] = RetrievalVerifyStage(draft, verifier, seen, self.runner_ups, choosing)
                stages["target"] = ChainVerifyStage(
                    self.full,
                    self.full_view,
                    self.retrieval_view,
                    to_probs,
                    state,
                    vocabulary,
                    self.runner_ups,
                )
            else:
                stages["target"] = TreeVerifyStage(
                    draft, Verifier(self.full, to_probs, state, nodes, vocabulary), self.full_view
                )
        stages["plain"] = PlainStage(
            self.full, self.full_view, self.retrieval_view, to_probs, state, vocabulary
        )
        return stages

    def _captured(self, stages: dict[str, Stage], to_probs: DeviceProbs) -> dict[str, Callable[[], None]]:
        """What runs each stage; on a GPU captured on texts of a made-up length."""
        if self.device.type != "cuda":
            return {name: executor(stage.steps(), self.device) for name, stage in stages.items()}
        result: dict[str, Callable[[], None]] = {}
        with self.trial(self.max_seq_len - 1) as begin:
            for name, stage in stages.items():
                begin()
                result[name] = executor(stage.steps(), self.device)
                if self.offloaded is not None and name in ("target", "plain") and to_probs.capturable:
                    # These are called directly; every kernel is compiled here, not in the middle of a text.
                    result[name]()
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
            self.state.length.fill_(length)
            self.state.chain.zero_()

        if self.drafter is not None:
            self.drafter.start([[0] * (length + 1)] * self.batch)
        try:
            if self.offloaded is not None:
                with self.offloaded.trial(length):
                    yield begin
                return
            written = [
                group.kv[..., length : length + self.state.capacity - self.max_seq_len + 1, :]
                for group in self.store.groups
                if not group.ring
            ]
            before = [slots.clone() for slots in written]
            try:
                yield begin
            finally:
                for slots, old in zip(written, before, strict=True):
                    slots.copy_(old)
                if length < self.max_seq_len - 1:
                    self.update_chunk_means()
        finally:
            self._kept.invalidate()

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
        self.update_chunk_means()
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

    @property
    def _kept(self) -> KVStore:
        """Keys and values on the device, of layers with a window at least."""
        return self.offloaded.rings if self.offloaded is not None else self.store

    def update_chunk_means(self) -> None:
        """Compute all chunk means anew: rows were written by others than the passes."""
        if self.retrieval_view is not None:
            self.retrieval_view.update_chunk_means(
                torch.zeros_like(self.state.length), self.retrieval_view.chunks
            )

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
        """Stand at the end of these prompts, or beginnings of texts, whose rows are in the cache.

        Where layers keep a window alone, and it is that of a later place, the prompts are fed again.
        """
        self._check(prompts)
        if not self._kept.holds([len(p) - 1 for p in prompts]):
            self.prefill(prompts)
            return
        state = self.state
        for b, prompt in enumerate(prompts):
            state.tokens[b, : len(prompt)] = torch.tensor(prompt, device=self.device)
        state.length.copy_(torch.tensor([len(p) - 1 for p in prompts], device=self.device))
        state.active.fill_(1)
        state.has_nan.zero_()
        state.chain.zero_()
        state.retrieval_emitted.zero_()
        state.feature_count.zero_()
        if self.drafter is not None:
            self.drafter.start(prompts)
        if self.offloaded is not None:
            self.offloaded.set_lengths([len(p) - 1 for p in prompts])
        if self.gathered_view is not None:
            self.gathered_view.fill()

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
        share = self.offloaded.share(1 if plain or self.levels == 1 else self.max_draft_tokens + 1)
        far = max(0, self.batch * tokens * slot - self.offloaded.host.resident_bytes)
        return int((1 - share) * far) + weights

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        least = least_prompt(self.config, self.levels, self.offloaded is not None)
        for prompt in prompts:
            if not least <= len(prompt) <= self.max_seq_len:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens does not fit buffers for {self.levels} levels "
                    f"and {least} to {self.max_seq_len} tokens; use fewer levels or a smaller budget"
                )
        if self.target.length_rope is not None:
            self.target.length_rope.choose_for_texts([len(p) for p in prompts])

    def committed(self, counts: Sequence[int]) -> None:
        """The last pass of level 2 made each text so many tokens longer."""
        self._kept.grown(counts)
        if self.offloaded is not None:
            self.offloaded.committed(counts)

    def stage(self, name: str) -> Stage:
        """One of the stages for the law that was prepared."""
        return self._program.stages[name]

    def verdict(self, name: str) -> Verdict:
        """The last one of a verifying stage."""
        stage = self.stage(name)
        assert isinstance(stage, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage | PlainStage)
        return stage.verifier.verdict

    def run(self, name: str, generator: torch.Generator) -> None:
        """One stage, with fresh random numbers."""
        for noise in self._program.stages[name].noise:
            noise.draw(generator)
        self._program.graphs[name]()
