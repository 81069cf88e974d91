"""The stages of decoding for one batch size, context length and configuration, over buffers made once."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.prepared_stages import PreparedStages, prepare_shape, prepared
from triforce_tree.decoding.stage_set import stage_name
from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.drafters.base import Drafter, features_of, grown_shapes, start_one
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.weights.streamed_weights import check_level_one
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, low_bit_model, step_model
from triforce_tree.policy.estimates import MOST_RANKS
from triforce_tree.policy.pass_policy import LearntChoice
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.seeded import Seeded
from triforce_tree.verify.verifier import Acceptance, Verifier

# Kinds of sampling whose stages are kept. On a GPU it takes seconds to capture those of another one.
_MOST_PREPARED = 16


class DecodingProgram:
    """Everything that decoding needs on the device, made once and used for many requests.

    Args:
        target: the model of levels 1 and 2.
        drafter: level 0; may be None for one level.
        config: what each level does; its ``tree`` is the drafter's.
        batch: sequences.
        max_seq_len: most tokens of a sequence, new ones included.
        levels: 1, 2 or 3.
        offload: how to split the full cache between device and host; None keeps it on the device.
        progress: called with bytes of host memory as they are taken.
        store: KV slots on the device to work on, with whatever they hold; by default new ones.
        kept, pool: an earlier program's cache, and a pool of KV slots, see :class:`FullCache`.
        level_one: level 1's model in fewer bits, of the arguments of ``low_bit_model``; by default a new one.
        noise: makes the random numbers of every stage.

    Attributes:
        cache: the target's keys and values.
        state: tokens, lengths and draft chains of the batch.
        full: the target, as levels 2 and plain decoding run it.
        retrieval_model: the target as level 1 runs it; only with three levels.
        states, full_view, retrieval: see :class:`FullCache`.
        shapes: of the drafter's trees, the configured one first. The stages of the others are made and
            captured by :meth:`prepare_shape`, where a pass first takes them.
        max_draft_tokens: most tokens that are proposed to level 2 in a line.
        runner_ups: whether level 2 also verifies one runner-up beside each token of the chain.
        tail_tree: whether it also verifies a tree of the first shape at the end of the chain.
        capture_seconds: spent on making stages, capturing them, and on a copy of the weights for level 1.
        two_levels: whether three levels may be exchanged for two in any pass: the number was not given.
        prepared: stages of at most ``_MOST_PREPARED`` kinds of sampling, the one selected last at the end.
        selected: those prepared last; seeded: see ``prepared_stages``.
        learnt: what requests leave to later ones, by kind of sampling (``choice/chooser.py``).

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
        kept: FullCache | None = None,
        pool: PoolSize | None = None,
        level_one: Callable[[HFModel, int, bool, Sequence[int]], StepModel] = low_bit_model,
    ) -> None:
        self.target, self.config, self.levels = target, config, levels
        self.batch, self.max_seq_len, self.device, self.noise = batch, max_seq_len, target.device, noise
        if levels > 1 and drafter is None:
            raise ValueError(f"levels={levels} needs a drafter; give one, or levels=1")
        self.drafter = drafter if levels > 1 else None
        self.seeded: Seeded | None = None
        self.prepared: dict[Hashable, PreparedStages] = {}
        self.learnt: dict[Hashable, LearntChoice] = {}
        if target.streamed is not None and levels == 3:
            check_level_one(config.weight_bits)
        compiled = self.device.type == "cuda"
        extent = PassLimits.of(config, levels)
        self.max_draft_tokens = extent.max_draft_tokens
        self.runner_ups = levels == 3 and (compiled if config.runner_ups is None else config.runner_ups)
        self.tail_tree = levels == 3 and config.tail_tree
        size = batch, max_seq_len, levels
        self.cache = FullCache(target, config, *size, offload, progress, store, kept, pool)
        self.full_view, self.states, self.retrieval = self.cache.view, self.cache.states, self.cache.retrieval
        self.two_levels = self._may_choose_levels(config)
        features = self.drafter.features if self.drafter is not None else ()
        self.shapes = grown_shapes(self.drafter) if self.drafter is not None else [DeviceTreeShape(())]
        if self.cache.backend.fixed_passes:
            del self.shapes[1:]
        self.state = new_state(target, self.drafter, extent, batch, max_seq_len, levels, self.shapes)
        if self.states is not None:
            self.state.recurrent = self.states.buffers
        self.full = step_model(target, compiled, features, config.exact)
        if self.drafter is not None:
            self.drafter.bind(self.state)
        if levels == 3:
            bits = config.weight_bits
            self.retrieval_model = self.full if bits == 16 else level_one(target, bits, compiled, features)
        self.capture_seconds = 0.0

    @property
    def store(self) -> KVStore:
        """KV slots on the device, see :class:`KVBackend`."""
        return self.cache.backend.store

    def _may_choose_levels(self, config: HierarchyConfig) -> bool:
        return self.levels == 3 and not self.cache.backend.fixed_passes and config.chooses_levels

    def prepare(self, to_probs: ProbsFromLogits) -> None:
        """Select the stages for this kind of sampling, after making and capturing them where there are none.

        Sequences must be fed or rewound after this: the trial runs of a capture use their buffers.
        """
        key = DeviceProbs.key(to_probs)
        found = self.prepared.pop(key, None)
        if found is None:
            if len(self.prepared) >= _MOST_PREPARED:
                # The one selected longest ago: clients ask for ever new settings, and each kind has buffers.
                del self.prepared[next(iter(self.prepared))]
                if self.device.type == "cuda":
                    free_memory()
            found = prepared(self, DeviceProbs(to_probs, self.device, self.noise))
            self.capture_seconds += found.seconds
        self.selected = self.prepared[key] = found
        self.selected.to_probs.set(to_probs)
        if self.seeded is not None:
            self.seeded.clear()

    def prepare_shape(self, number: int) -> None:
        """Make and capture the stages for trees of one shape, unless they are there.

        Between two passes, or inside :meth:`trial`: the state of the sequences is as before afterwards, and
        KV slots after their ends are overwritten, as by any pass.

        Raises:
            torch.OutOfMemoryError: device memory is short; the stages are not there then.
        """
        self.capture_seconds += prepare_shape(self, self.selected, number)

    @contextmanager
    def trial(self, length: int) -> Iterator[Callable[[bool], None]]:
        """Inside, stages may be run after made-up sequences of ``length`` tokens, up to three times in a row.

        Yields a function that sets the sequences back to that length, with draft chains of full length if its
        argument is True, else empty ones. The full cache's KV slots are as before afterwards; sequences must
        be fed or rewound.
        """

        def begin(chains: bool) -> None:
            self.state.length.fill_(length)
            self.state.chain.fill_(self.state.max_draft_tokens if chains else 0)

        with self.state.trial(length):
            if self.drafter is not None:
                self.drafter.start([[0] * (length + 1)] * self.batch)
            with self.cache.trial(length):
                yield begin

    def prefill(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None, reuse: Reuse = "none"
    ) -> list[int]:
        """Feed all but each prompt's last token, the first root, to every level; see ``FullCache.prefill``.

        Where an offloaded cache is interrupted in this, its memory is given back and the program closed.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers.
        """
        self._check(prompts)
        try:
            reused = self.cache.prefill(prompts, progress, reuse, self.state.features)
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        except BaseException:
            self.close()
            raise
        return reused

    @property
    def replaces(self) -> bool:
        """Whether :meth:`replace` works, see :class:`KVBackend`."""
        return self.cache.backend.replaces

    def replace(
        self,
        row: int,
        sequences: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> int:
        """Put another sequence into a row whose sequence has ended; the others go on. Returns what it reused.

        Args:
            sequences: all committed tokens of each sequence; of ``row`` the new prompt.
        """
        prompt, state = sequences[row], self.state
        self._check([prompt])
        [reused] = self.cache.prefill([prompt], progress, reuse, state.features, row)
        state.tokens[row, : len(prompt)] = id_tensor(prompt, self.device)
        state.length[row], state.active[row] = len(prompt) - 1, 1
        state.chain[row] = state.retrieval_emitted[row] = 0
        if self.drafter is not None:
            start_one(self.drafter, row, sequences)
        self.cache.begin([prompt], row)
        return reused

    def rewind(self, prompts: Sequence[Sequence[int]]) -> None:
        """Continue from these prompts, whose keys and values the cache holds: beginnings of its sequences.

        Where layers with a window have overwritten what is needed there, the prompts are fed again.
        """
        self._check(prompts)
        if self.cache.holds([len(p) - 1 for p in prompts]):
            if self.state.features is not None:
                self.state.features.rewind(torch.tensor([len(p) - 1 for p in prompts], device=self.device))
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        else:
            self.prefill(prompts)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        least = self.cache.backend.least_prompt
        for prompt in prompts:
            if not least <= len(prompt) <= self.max_seq_len:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens does not fit buffers for {self.levels} levels "
                    f"and {least} to {self.max_seq_len} tokens; use fewer levels or a smaller budget"
                )
        if (rope := self.target.length_rope) is not None:
            rope.choose_for_texts([len(p) for p in prompts])

    def _start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Set the target's state to the end of prompts whose keys and values are in the cache."""
        state, lengths = self.state, [len(p) - 1 for p in prompts]
        for b, prompt in enumerate(prompts):
            state.tokens[b, : len(prompt)] = id_tensor(prompt, self.device)
        state.length.copy_(torch.tensor(lengths, device=self.device))
        state.active.fill_(1)
        for counts in (state.has_nan, state.chain, state.retrieval_emitted, state.rank_counts):
            if counts is not None:
                counts.zero_()
        self.cache.begin(prompts)

    def committed(
        self, counts: Sequence[int], tokens: Sequence[Sequence[int]] | None = None, stage: str = "target"
    ) -> None:
        """The last pass of level 2, which ended with this stage, made each sequence so many tokens longer.

        Args:
            tokens: these, if they are known.
        """
        self.cache.committed(counts, tokens, with_means=self.levels == 3 and stage == "target")

    def resume_retrieval(self) -> None:
        """Bring the chunk means up to date before a pass of three levels: the other passes leave them."""
        self.cache.means.catch_up()

    def update_chunk_means(self) -> None:
        """See :class:`FullCache`."""
        self.cache.means.update_all()

    def transferred_bytes(self, tokens: int, plain: bool = False) -> int:
        """Keys, values and weights that a pass of level 2 after so many tokens copies to the device.

        Args:
            plain: of the autoregressive pass.
        """
        queries = 1 if plain or self.levels == 1 else self.max_draft_tokens + 1
        streamed = self.target.streamed
        weights = streamed.pass_bytes(self.batch * queries) if streamed is not None else 0
        return weights + self.cache.backend.transferred_bytes(tokens, queries)

    def serves(self, config: HierarchyConfig) -> bool:
        """Whether setting ``self.config = config`` is all that these settings need.

        They may differ in what every pass reads anew; all else is built into buffers and graphs.
        """

        def built_in(settings: HierarchyConfig) -> HierarchyConfig:
            return replace(settings, rounds=None, retrieval=replace(settings.retrieval, refresh=0))

        return built_in(self.config) == built_in(config) and self.two_levels >= self._may_choose_levels(
            config
        )

    def close(self) -> None:
        """Give an offloaded cache's host memory back; the program cannot be used afterwards."""
        self.cache.close()

    @property
    def closed(self) -> bool:
        """Whether memory that its stages use was given back."""
        return self.cache.closed

    def last_stage(self, levels: int, shape: int = 0) -> str:
        """The target's stage in passes of so many levels, with trees of one shape."""
        if levels == 1:
            return "plain"
        if levels == 3:
            return "target"
        return stage_name("target_tree" if levels < self.levels else "target", shape)

    @property
    def stage_names(self) -> Collection[str]:
        """Of the prepared stages."""
        return self.selected.stages.keys()

    def stage(self, name: str) -> Stage:
        """One of the prepared stages."""
        return self.selected.stages[name]

    def acceptance(self, name: str) -> Acceptance:
        """The last acceptance of a verifying stage."""
        return self.verifier(name).acceptance

    def verifier(self, name: str) -> Verifier:
        """What a verifying stage verifies with."""
        stage = self.stage(name)
        assert isinstance(stage, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage | PlainStage)
        return stage.verifier

    def run(self, name: str, *generators: torch.Generator) -> None:
        """Run one stage with fresh random numbers, from one generator or one for each sequence."""
        for noise in self.selected.stages[name].noise:
            if len(generators) == 1:
                noise.draw(*generators)
            else:
                noise.draw_rows(generators)
        self.selected.runs[name]()


def new_state(
    target: HFModel,
    drafter: Drafter | None,
    extent: PassLimits,
    batch: int,
    max_seq_len: int,
    levels: int,
    shapes: Sequence[DeviceTreeShape],
) -> SequenceState:
    """Buffers for ``batch`` sequences of at most ``max_seq_len`` tokens, with trees of these shapes."""
    vocabulary = target.vocab_size if levels == 3 else 0
    features = features_of(drafter, target, batch, extent.max_draft_tokens + extent.depth + 2)
    # Acceptance by rank is needed to compare shapes.
    depths = [len(shape.widths) for shape in shapes if not shape.matched]
    ranks = (max(depths), MOST_RANKS) if len(depths) > 1 else None
    return SequenceState(
        batch, max_seq_len + extent.scratch_slots, extent.chain, extent.extra, vocabulary,
        target.device, features, ranks, extent.tail,
    )  # fmt: skip
