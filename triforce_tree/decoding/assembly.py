"""Keeps what outlives one generation: models, drafter, memory plan, and the last generation's buffers."""

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.level_one_copy import LevelOneCopy
from triforce_tree.decoding.memory.new_plan import new_plan
from triforce_tree.decoding.out_of_memory import with_or_without
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.draft_level import DraftLevel
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.kept_prefixes import KeptPrefixes
from triforce_tree.kv.offload.offloaded_cache import one_shape
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.loading.load_guard import compare_at_load
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.settings import check_settings, within_limits
from triforce_tree.planning.device_defaults import ModelFacts
from triforce_tree.planning.memory_layout import Workload, levels_of
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.locks import generation, held
from triforce_tree.runtime.progress_log import logged
from triforce_tree.trees.device_shapes import least_prompt
from triforce_tree.verify.sampling import ProbsFromLogits

# Buffers are made for sequences of a multiple of this many tokens, so that they serve longer ones too.
_MAX_SEQ_LEN_STEP = 1024
# Settings whose trees are remembered: requests of other lengths may have others.
_MOST_CONFIGS = 64
_LOG = logging.getLogger(__name__)


class Hierarchy:
    """Holds the models of the three levels, their configuration, and the buffers of the last generation.

    Args:
        target: level 2, and level 1 on its retrieval cache.
        draft: a model for level 0, a drafter, or None for suffix matching.
        config: what each level does.
        tokens: the draft model's token ids for the target's; None where these are the same.

    Attributes:
        own_drafter: the drafter that the user gave; None for a draft model and for suffix matching.
        guard: says which parts of the target were compared with transformers' own forward.
        memory: where KV slots are kept, as :meth:`adopt_memory_plan` decided; None if nothing is offloaded.
        level_one: the target in fewer bits, if a program needs it.

    Raises:
        ValueError: a drafter's tree is no tree shape, it was made for another target, or it reads features
            of layers that the target does not have.
        UnsupportedModelError: the target's logits are not transformers' own, or the draft is recurrent.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel | Drafter | None,
        config: HierarchyConfig,
        tokens: TokenMap | None = None,
    ) -> None:
        self.target, self.tokens = target, tokens
        self._level_0 = DraftLevel(target, draft, tokens)
        self.draft, self.own_drafter = self._level_0.model, self._level_0.own
        # By settings as they were given, those with the drafter's trees.
        self._known_configs: dict[HierarchyConfig, HierarchyConfig] = {}
        self.config = config
        self.memory: MemoryPlan | None = None
        self.level_one = LevelOneCopy(target)
        self._planned: tuple[object, MemoryPlan] | None = None
        self._program: tuple[object, DecodingProgram] | None = None
        # Shared by all configurations of these models: host memory holds one full cache at a time.
        self._offloaded: list[DecodingProgram] = []
        self.prefixes = KeptPrefixes()  # of texts that buffers held before, shared likewise
        # The program whose state a user's drafter is bound to, shared by all configurations as well.
        self._bound: list[weakref.ref[DecodingProgram]] = []
        check_settings(target, config)
        with logged("comparing the forward of a few tokens with transformers' own"):
            self.guard = compare_at_load(target)
        self._made_of = self._revisions
        self._facts: tuple[object, ModelFacts] | None = None

    @property
    def config(self) -> HierarchyConfig:
        """The settings; ``tree`` is the drafter's, with the chain of suffix matching beside a model's."""
        return self._config

    @config.setter
    def config(self, config: HierarchyConfig) -> None:
        # The user may give a drafter of his own another tree.
        known = self._known_configs.get(config) if self._level_0.own is None else None
        if known is None:
            known = self._level_0.with_trees(config)
            if self.target.states is not None:
                known = within_limits(self.target.name, known, self.draft is not None)
            if len(self._known_configs) >= _MOST_CONFIGS:
                self._known_configs.clear()
            self._known_configs[config] = known
        self._config = known

    @property
    def facts(self) -> ModelFacts:
        """Returns the facts that the defaults depend on.

        They are read again after the models have changed.
        """
        if self._facts is None or self._facts[0] != self._revisions:
            self._facts = self._revisions, ModelFacts.of(self.target, self.draft)
        return self._facts[1]

    def drafter(self) -> Drafter:
        """Level 0 under the current settings; a draft model's has new buffers."""
        return self._level_0.drafter(self.config)

    def with_config(self, config: HierarchyConfig) -> "Hierarchy":
        """Returns a hierarchy with the same checked models and another configuration."""
        check_settings(self.target, config)
        other = copy.copy(self)
        other.config = config
        other.memory = other._planned = other._program = None
        # Nothing is made of the models yet; kept keys and values know by which state of the model they are.
        other._made_of = self._revisions
        other.level_one = LevelOneCopy(self.target)
        return other

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Is a context in which only this thread generates with these models (``locks.generation``)."""
        with generation(self.target.model, self.draft.model if self.draft is not None else None):
            try:
                yield
            finally:
                if self._program is not None:
                    self._program[1].cache.end()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """:meth:`alone`, after what has changed in the models since the last call was noticed.

        Everything that was made of a changed model is freed, and made of the model as it is.

        Raises:
            UnsupportedModelError, ValueError, RuntimeError: a model that has changed cannot be decoded any
                more (``HFModel.refresh``).
        """
        with self.alone():
            self._refresh()
            try:
                yield
            finally:
                self.target.changes.settle()
                self._level_0.settle()

    def _refresh(self) -> None:
        self.target.refresh(self._compare)
        self._level_0.refresh()
        if self._made_of == self._revisions:
            return
        # On a GPU the number of sequences that fit is measured next; on a CPU a new program collects.
        self.release(collect=self.target.device.type == "cuda")
        self._planned = None
        if self._made_of[0] != self._revisions[0]:
            self.prefixes.clear()
        self._made_of = self._revisions

    def _compare(self, target: HFModel) -> None:
        self.guard = compare_at_load(target)

    @property
    def changed(self) -> bool:
        """Returns whether one of the models has changed since the current call began."""
        return self.target.changes.differs() or self._level_0.changed

    @property
    def _revisions(self) -> tuple[int, int]:
        return self.target.revision, self._level_0.revision

    @contextmanager
    def active(self) -> Iterator[None]:
        """Both models can compute inside, for one thread at a time."""
        with ExitStack() as stack:
            # Both locks in one call, which takes them in a fixed order.
            stack.enter_context(held(self.target.model, self.draft.model if self.draft is not None else None))
            for model in (self.target, self.draft):
                if model is not None:
                    stack.enter_context(model.active())
            yield

    def levels(self, prompt_tokens: int, max_seq_len: int | None = None) -> int:
        """Returns the number of levels for a prompt of this length.

        Args:
            max_seq_len: most tokens of a sequence in the buffers; the default is ``prompt_tokens``.
        """
        if self.config.levels == "auto" and not self._retrieves(max_seq_len or prompt_tokens):
            return 2
        return levels_of(self.config, prompt_tokens)

    def _retrieves(self, max_seq_len: int) -> bool:
        """Returns whether level 1 reads fewer KV slots than level 2 for sequences of this length.

        It does if some layer attends to more than a sliding window: level 1 retrieves chunks for such layers,
        and reads the whole window of the others. A target with recurrent layers has no level 1.
        """
        if self.target.states is not None:
            return False
        return any(s.window is None or s.window >= max_seq_len for s in self.target.kv_shapes)

    @property
    def last_program(self) -> DecodingProgram | None:
        """Returns the program of the last generation, or None if it was released."""
        return self._program[1] if self._program is not None else None

    @property
    def offloads(self) -> bool:
        """Returns whether the full cache is kept in host memory."""
        return self.memory is not None and self.memory.offload is not None

    def together(self, to_probs: ProbsFromLogits, prompts: Sequence[Sequence[int]]) -> bool:
        """Returns whether these prompts can be decoded as one batch."""
        rope = self.target.length_rope
        mixed = rope is not None and rope.mixed([len(p) for p in prompts])
        return len(prompts) == 1 or (to_probs.context_free and not mixed)

    def adopt_memory_plan(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        given: Collection[str] = (),
        pool_slots: int = 0,
    ) -> None:
        """Take up the plan of :meth:`plan_memory` with its settings; raises what that does."""
        self.memory = None
        self.memory = self.plan_memory(lengths, new_tokens, given, pool_slots)
        if self.memory is not None:
            self.config = self.memory.config

    def plan_memory(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        given: Collection[str] = (),
        pool_slots: int = 0,
    ) -> MemoryPlan | None:
        """Decide where the KV slots of these prompts are kept; None where nothing may be offloaded.

        Where the last plan does not serve them, the buffers of the last generation are released first: free
        memory is measured.

        Args:
            lengths: tokens of each prompt.
            given: names of options that stay as they are.
            pool_slots: KV slots of the pool that the prompts share on the device; 0 for none.

        Raises:
            DoesNotFitError: memory is short.
            ValueError: what would have to be offloaded cannot be.
        """
        if not self.config.offloads:
            return None
        key = (self.config, len(lengths), frozenset(given), pool_slots)
        plan = self._kept_plan(key, lengths, new_tokens)
        if plan is None:
            self.release()
            plan = self._new_plan(given, Workload(len(lengths), max(lengths), new_tokens, pool_slots))
        self._planned = (key, plan)
        if plan.offload is None:
            return plan
        one_shape(self.target)
        levels = self._levels_under(plan, lengths, new_tokens)
        # The cache of a shorter prompt is small, and stays on the device.
        return plan if min(lengths) >= least_prompt(plan.config, levels, offloaded=True) else None

    def _new_plan(self, given: Collection[str], workload: Workload) -> MemoryPlan:
        config, max_seq_len = self.config, self.rounded(workload.max_seq_len)
        if config.levels == "auto" and not self._retrieves(max_seq_len):
            config = replace(config, levels=2)
        drafter = self.drafter() if config.levels != 1 else None
        return new_plan(self.target, self.draft, drafter, config, given, workload, max_seq_len)

    def _kept_plan(self, key: object, lengths: Sequence[int], new_tokens: int) -> MemoryPlan | None:
        """Returns the last plan if its program serves these prompts too, else None."""
        if self._planned is None or self._program is None or self._program[1].cache.closed:
            return None
        before, plan = self._planned
        held = self._program[1].max_seq_len
        max_seq_len = max(lengths) + new_tokens
        fits = max_seq_len <= held <= 2 * self.rounded(max_seq_len)
        fits = fits and self._levels_under(plan, lengths, new_tokens) == plan.levels
        return plan if before == key and fits else None

    def _levels_under(self, plan: MemoryPlan, lengths: Sequence[int], new_tokens: int) -> int:
        """Returns the number of levels for prompts of these lengths under the plan's settings."""
        max_seq_len = self.rounded(max(lengths) + new_tokens)
        return self.with_config(plan.config).levels(min(lengths), max_seq_len)

    def shrink(self) -> bool:
        """Reduces the plan after device memory ran out; returns False if it cannot be reduced further.

        Raises:
            torch.OutOfMemoryError: one of several ranks ran out of memory; the others cannot notice this.
        """
        if (group := distributed.current()) is not None:
            raise torch.OutOfMemoryError(
                f"memory ran out on rank {group.rank} of {group.size}, and several ranks cannot reduce their "
                "plan while they decode; set a smaller gpu_memory, or shorten the prompt"
            )
        smaller = self.memory.smaller() if self.memory is not None else None
        without_copy = self.config.retrieval_weight_bits == "auto" and self.level_one.give_up()
        self.release()
        if without_copy:
            _LOG.warning("device memory ran out; going on with less: retrieval_weight_bits 8 -> 16")
            return True
        if smaller is None or self._planned is None:
            return False
        self.memory, what = smaller
        self.config = self.memory.config
        self._planned = (self._planned[0], self.memory)
        _LOG.warning("device memory ran out; going on with less: %s", what)
        return True

    def release(self, collect: bool = True) -> None:
        """Frees the buffers of the last generation, and every offloaded cache of these models.

        Args:
            collect: whether to run the garbage collector too, which takes a few tenths of a second.
        """
        for program in self._offloaded:
            program.cache.close()
        self._offloaded.clear()
        self._program = None
        self.level_one.drop()
        if collect:
            free_memory()

    def program(
        self,
        prompts: Sequence[Sequence[int]], new_tokens: int,
        pinned: Callable[[int], None] | None = None, reuse: Reuse = "none",
        pool: PoolSize | None = None,
    ) -> DecodingProgram:  # fmt: skip
        """Returns a program for these prompts: the last one if it serves them, else a new one.

        Args:
            pinned: called with the bytes of host memory as they are pinned.
            reuse: a new program takes over what the last one holds of these prompts, where both caches are on
                the device.
            pool: the pool of KV slots that the prompts share; with None each prompt has its own slots.
        """
        batch, max_seq_len = len(prompts), max(len(p) for p in prompts) + new_tokens
        rounded = self.rounded(max_seq_len)
        levels = self.levels(min(len(p) for p in prompts), rounded)
        split = self.memory.offload if self.memory is not None else None
        if split is not None:
            pool = None
        chooses = self.config.retrieval_weight_bits == "auto" and batch == 1 and levels == 3 and pool is None
        chooses = chooses and not self.config.offloads and self.level_one.choosable and self.facts.few_bits
        # Without the bits that are chosen: the last program serves with those that it has.
        wanted = (self.config, chooses, batch, levels, split)
        kept_cache: list[FullCache] = []
        if self._program is not None:
            kept, program = self._program
            if (
                kept == wanted
                and program.cache.fits(max_seq_len, pool)
                and not program.cache.closed
                and self._binds(program)
            ):
                if pool is not None:
                    program.cache.backend.share(pool)
                return program
            if split is None and program.cache.worth_keeping(self.config, prompts, reuse, pool):
                kept_cache.append(program.cache)
            else:
                program.cache.keep_prefixes()
            program.cache.close()  # The new program needs its memory.
            self._program = None
            del program
            if split is None:
                free_memory()
        if self.memory is not None and split is not None:
            self.release()
            rounded = max(max_seq_len, self.memory.workload.max_seq_len)
        if self.memory is not None and self.target.streamed is not None:
            self.target.streamed.keep_experts(self.memory.resident_experts)
        config = self.config
        if chooses:
            workload = Workload(1, len(prompts[0]), rounded - len(prompts[0]))
            config = self.level_one.with_bits(config, workload, self.draft, self.own_drafter, kept_cache)
        elif config.retrieval_weight_bits == "auto":
            # The retrieval model cannot run on streamed weights.
            config = replace(config, retrieval_weight_bits=16 if self.target.streamed is None else 8)
        if config.retrieval_weight_bits == 16 and (batch > 1 or levels == 3):
            # Prompts that are too short for three levels take turns with longer ones, and need little.
            self.level_one.drop()
        drafter, make = self.drafter() if levels > 1 else None, self.level_one.model
        settings = (self.target, drafter, config, batch, rounded, levels, split, pinned)
        program = with_or_without(
            kept_cache, lambda cache: DecodingProgram(*settings, kept=cache, pool=pool, level_one=make)
        )
        program.capture_seconds += self.level_one.taken_seconds()
        if limit := self.config.prefix_bytes:
            self.prefixes.bound(limit)
            program.cache.exchange_with(self.prefixes)
        self._program = (wanted, program)
        self._bound[:] = [weakref.ref(program)]
        if split is not None:
            self._offloaded.append(program)
        return program

    def _binds(self, program: DecodingProgram) -> bool:
        """Returns whether the drafter writes into this program's state.

        A drafter that the user gave serves one program at a time.
        """
        return self.own_drafter is None or program.drafter is None or self._bound[0]() is program

    def rounded(self, max_seq_len: int) -> int:
        """Returns ``max_seq_len`` rounded up for longer sequences, at most to the model's number of
        positions.
        """
        rounded = -(-max_seq_len // _MAX_SEQ_LEN_STEP) * _MAX_SEQ_LEN_STEP
        return max(max_seq_len, min(rounded, self.target.max_positions or rounded))
