"""What outlives a request: the models, their settings, the memory plan, and the last program."""

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.level_one_copy import LevelOneCopy
from triforce_tree.decoding.out_of_memory import with_or_without
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.draft_level import DraftLevel
from triforce_tree.drafters.token_map import TokenMap
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.kept_prefixes import KeptPrefixes
from triforce_tree.kv.offload.host_attention import host_attends
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import one_shape
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.loading.load_guard import compare_at_load
from triforce_tree.models.fingerprint import Changes
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.settings import check_settings, within_limits
from triforce_tree.planning import memory_map, memory_plan
from triforce_tree.planning.batch_size import check_every_rank, free_bytes, has_room
from triforce_tree.planning.device_defaults import ModelFacts, resolve
from triforce_tree.planning.machine import host_rate, measured
from triforce_tree.planning.memory_layout import Workload, gib
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.locks import generation
from triforce_tree.runtime.progress_log import logged
from triforce_tree.trees.device_shapes import least_prompt
from triforce_tree.verify.sampling import ProbsFromLogits

Pool = Callable[[], PoolSize | None]
"""Returns the size of the pool of KV slots that sequences share under the settings at the time of the call;
None if each sequence has its own slots."""

# Buffers are made for sequences of a multiple of this many tokens, so that they serve longer ones too.
_MAX_SEQ_LEN_STEP = 1024
# The most configurations whose trees are remembered: requests of different lengths may have different ones.
_MOST_CONFIGS = 64
# The most programs for other numbers of sequences; a batch of up to 512 that prompts join has as many.
_MOST_BESIDE = 8
_LOG = logging.getLogger(__name__)


class Hierarchy:
    """Holds the models of the three levels, their settings, and the program of the last request.

    Args:
        target: level 2, and level 1 on its retrieval cache.
        draft: a model for level 0, a drafter, or None for suffix matching.
        config: the settings of each level.
        tokens: maps the target's token ids to the draft model's; None if these are the same.

    Attributes:
        own_drafter: the drafter that the user gave; None for a draft model and for suffix matching.
        config: the settings of the last request. ``tree`` and ``other_trees`` are those of the drafter.
        facts: the properties of the models that the defaults of a device depend on.
        guard: says which parts of the target were compared with transformers' own forward.
        settled: tokens of the prompt for which the settings were chosen.
        memory: the memory plan of the last request; None if nothing may be offloaded.
        level_one: the copy of the target's weights in fewer bits for level 1.
        prefixes: keys and values of earlier texts in host memory.
        last_program: the program of the last request; None if it was released.

    Raises:
        ValueError: a drafter's tree is no tree shape, it was made for another target, or it reads features
            of layers that the target does not have.
        UnsupportedModelError: the target's logits are not transformers' own.
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
        self._models = [target] if self.draft is None else [target, self.draft]
        # Settings with the drafter's trees, by the settings that were given.
        self._with_trees: dict[HierarchyConfig, HierarchyConfig] = {}
        self.use(config)
        self.memory: MemoryPlan | None = None
        self.level_one = LevelOneCopy(target)
        # What the last plan was made for, and what the last program serves.
        self._planned: tuple[object, MemoryPlan] | None = None
        self.last_program: DecodingProgram | None = None
        self._serves: _Served | None = None
        self.settled = 0
        # Programs for other numbers of sequences in the pages of the last one, by these numbers.
        self._beside: dict[int, DecodingProgram] = {}
        # All configurations of these models share the following: host memory holds one full cache at a time,
        # and a user's drafter is bound to the state of one program.
        self._offloaded: list[DecodingProgram] = []
        self.prefixes = KeptPrefixes()
        self._bound: list[weakref.ref[DecodingProgram]] = []
        check_settings(target, config)
        with logged("comparing the forward of a few tokens with transformers' own"):
            self.guard = compare_at_load(target)
        # The states of the models that the buffers and the facts belong to.
        self._made_of = target.revision, self._level_0.revision
        self.facts = ModelFacts.of(target, self.draft, self.own_drafter)

    # Models

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Is a context in which this thread alone generates with these models, and both can compute.

        If a model has changed since the last call, everything that was made of it is freed.

        Raises:
            UnsupportedModelError, ValueError, RuntimeError: a model has changed and cannot be decoded any
                more (``HFModel.refresh``); the engine was closed; or see ``locks.generation``.
        """
        with ExitStack() as stack:
            stack.enter_context(generation(*(each.model for each in self._models)))
            stack.enter_context(distributed.together())
            self._refresh()
            for each in self._models:
                stack.enter_context(each.active())
            try:
                yield
            finally:
                self.target.changes.settle()
                self._level_0.settle()
                if self.last_program is not None:
                    self.last_program.cache.end()

    def close(self) -> None:
        """Frees what was made of the models, and the weights in host memory."""
        with generation(*(each.model for each in self._models)):
            self.release()
            self.prefixes.clear()
            if self.target.streamed is not None:
                self.target.streamed.close()

    def _refresh(self) -> None:
        """Frees what was made of a model that has changed."""
        self.target.refresh(self._compare)
        self._level_0.refresh()
        made_of, self._made_of = self._made_of, (self.target.revision, self._level_0.revision)
        if made_of == self._made_of:
            return
        self.release()
        self._planned, self.facts = None, ModelFacts.of(self.target, self.draft, self.own_drafter)
        if made_of[0] != self.target.revision:
            self.prefixes.clear()

    def _compare(self, target: HFModel) -> None:
        self.guard = compare_at_load(target)

    @property
    def changed(self) -> bool:
        """Returns whether one of the models has changed since the current call began, without waiting for the
        work of GPUs.
        """
        return any(changes.differs() for changes in self._changes)

    def begin_reading(self) -> Callable[[], bool]:
        """Begins to read weights behind the present work of devices. Returns a function that waits for this,
        and returns whether the weights are those with which the current call began.
        """
        begun = [changes.begin_reading() for changes in self._changes]
        return lambda: all(same() for same in begun)

    @property
    def _changes(self) -> list[Changes]:
        return [self.target.changes, *self._level_0.changes]

    # Settings

    def with_config(self, config: HierarchyConfig) -> "Hierarchy":
        """Returns a hierarchy with the same checked models and another configuration."""
        check_settings(self.target, config)
        other = copy.copy(self)
        other.use(config)
        other.memory = other._planned = other.last_program = other._serves = None
        other._beside = {}
        # Nothing is made of the models yet; kept keys and values know by which state of the model they are.
        other._made_of = self.target.revision, self._level_0.revision
        other.level_one = LevelOneCopy(self.target)
        return other

    def use(self, config: HierarchyConfig) -> None:
        """Sets ``config``, with the trees of the drafter."""
        # The user may give a drafter of his own another tree.
        known = self._with_trees.get(config) if self.own_drafter is None else None
        if known is None:
            known = within_limits(self.target, self.draft, self._level_0.with_trees(config))
            if len(self._with_trees) >= _MOST_CONFIGS:
                self._with_trees.clear()
            self._with_trees[config] = known
        self.config = known

    def choose_settings(
        self,
        config: HierarchyConfig,
        given: frozenset[str],
        lengths: Sequence[int],
        new_tokens: int,
        pool: Pool | None = None,
        batch: int | None = None,
    ) -> None:
        """Chooses the settings and the memory plan of a request.

        If memory is not limited, options that were left at their defaults get those of the device. For
        prompts that others may join, the settings stay as they are while the pages of the last program serve:
        other settings would need other buffers and graphs.

        Args:
            config: the settings that the user gave.
            given: the names of options that stay as they are.
            lengths: tokens of each prompt.
            new_tokens: the most new tokens of each sequence.
            pool: the pool that the prompts share on the device.
            batch: the most sequences, if others may join these; None if no others may.

        Raises:
            DoesNotFitError, ValueError: see :meth:`plan_memory`.
        """
        longest = max(lengths)
        if batch is not None and self.held_by_pages(longest + new_tokens):
            longest = max(longest, self.settled)
        self.settled = longest
        self.use(config)
        self.memory = None
        if config.offloads:
            shared = pool() if pool is not None else None
            self.memory = self.plan_memory(lengths, new_tokens, given, shared.slots if shared else 0)
        if self.memory is not None:
            self.use(self.memory.config)
        # The defaults were measured with the full cache and all weights on the device.
        if not self.offloads and self.target.streamed is None:
            self.use(resolve(config, given, self.facts, longest, batch or len(lengths)))

    def held_by_pages(self, tokens: int) -> int:
        """Returns the most tokens of a sequence in the pages of the last program, if batches of other numbers
        of sequences can go on in these and ``tokens`` fit; else 0.
        """
        last = self.last_program
        serves = last is not None and last.cache.backend.resizes and not last.cache.closed
        return last.max_seq_len if last is not None and serves and tokens <= last.max_seq_len else 0

    @property
    def places(self) -> set[int]:
        """Returns the numbers of sequences for which there are programs in the pages of the last one."""
        return {*self._beside, self.last_program.batch} if self.last_program is not None else set()

    @property
    def offloads(self) -> bool:
        """Returns whether the full cache is kept in host memory."""
        return self.memory is not None and self.memory.offload is not None

    def levels(
        self, prompt_tokens: int, max_seq_len: int | None = None, config: HierarchyConfig | None = None
    ) -> int:
        """Returns the number of levels for a prompt of this length.

        With ``levels="auto"`` there are three only if level 1 reads fewer KV slots than level 2. It does if
        some layer attends to more than a sliding window: level 1 retrieves chunks for such layers, and reads
        the whole window of the others. Some targets have no level 1 (``HFModel.has_level_one``).

        Args:
            max_seq_len: the most tokens of a sequence in the buffers; by default ``prompt_tokens``.
            config: the settings; by default those of the last request.
        """
        config, longest = config or self.config, max_seq_len or prompt_tokens
        if config.levels == "auto" and (
            not self.target.has_level_one
            or all(s.window is not None and s.window < longest for s in self.target.kv_shapes)
        ):
            return 2
        return config.levels_for(prompt_tokens)

    def rounded(self, max_seq_len: int, more: int = 0) -> int:
        """Returns ``max_seq_len + more`` rounded up, so that the buffers serve longer sequences too, but at
        most to the model's number of positions.
        """
        rounded = -(-(max_seq_len + more) // _MAX_SEQ_LEN_STEP) * _MAX_SEQ_LEN_STEP
        return max(max_seq_len, min(rounded, self.target.max_positions or rounded))

    def together(self, settings: Sequence[ProbsFromLogits], prompts: Sequence[Sequence[int]]) -> bool:
        """Returns whether prompts with these sampling options, of which there are several, can be decoded as
        one batch.
        """
        rope = self.target.length_rope
        mixed = rope is not None and rope.mixed([len(p) for p in prompts])
        alike = len({each.others_key for each in settings}) == 1 and settings[0].in_stages
        return alike and not mixed

    def drafter(self) -> Drafter:
        """Returns level 0 under the current settings; for a draft model it has new buffers."""
        return self._level_0.drafter(self.config)

    # The memory plan

    def plan_memory(
        self,
        lengths: Sequence[int],
        new_tokens: int,
        given: Collection[str] = (),
        pool_slots: int = 0,
    ) -> MemoryPlan | None:
        """Decides where the KV slots of these prompts are kept.

        If the last plan does not serve them, the buffers of the last request are released first, because free
        memory is measured.

        Args:
            lengths: tokens of each prompt.
            given: the names of options that stay as they are.
            pool_slots: KV slots of the pool that the prompts share on the device; 0 without a pool.

        Returns:
            the plan; None if nothing may be offloaded, or if the prompts are too short for that.

        Raises:
            DoesNotFitError: memory is short.
            ValueError: the model's data cannot be offloaded as needed.
        """
        if not self.config.offloads:
            return None
        key = (self.config, len(lengths), frozenset(given), pool_slots)
        least, max_seq_len = min(lengths), self.rounded(max(lengths) + new_tokens)
        plan, outgrown = None, False
        if self._planned is not None and self._planned[0] == key and self.last_program is not None:
            last, held = self._planned[1], self.last_program.max_seq_len
            outgrown = held < max(lengths) + new_tokens
            serves = not outgrown and held <= 2 * max_seq_len
            if serves and self.levels(least, max_seq_len, last.config) == last.levels:
                plan = last if not self.last_program.cache.closed else None
        if plan is None:
            self.release()
            workload = Workload(len(lengths), max(lengths), new_tokens, pool_slots)
            plan = self._new_plan(given, workload, outgrown)
        self._planned = (key, plan)
        if plan.offload is None:
            return plan
        one_shape(self.target)
        levels = self.levels(least, max_seq_len, plan.config)
        # The cache of a shorter prompt is small, and stays on the device.
        return plan if least >= least_prompt(plan.config, levels) else None

    def _new_plan(self, given: Collection[str], workload: Workload, outgrown: bool) -> MemoryPlan:
        """Measures the machine's free memory and returns a plan for it.

        Args:
            outgrown: whether the last plan was for shorter texts, see :meth:`_outgrown`.
        """
        target, config, max_seq_len = self.target, self.config, self.rounded(workload.max_seq_len)
        if config.levels == "auto" and self.levels(max_seq_len) == 2:
            config = replace(config, levels=2)
        sizes = memory_map.Sizes.of(
            target, self.draft, config, self.drafter() if config.levels != 1 else None
        )
        weights = sum(memory_map.device_bytes(m) for m in (target, self.draft) if m) + sizes.heads_bytes
        streamed = target.streamed.bytes if target.streamed is not None else 0
        machine = measured(target.device, weights, config.gpu_bytes, streamed, config.host_bytes)

        def up_to(tokens: int) -> MemoryPlan:
            longer = replace(workload, new=tokens - workload.prompt)
            return memory_plan.plan(sizes, machine, config, given, longer)

        def planned() -> MemoryPlan:
            # The plan is for sequences of the rounded length if they fit, else for those of the exact length.
            try:
                found = up_to(max_seq_len)
            except memory_plan.DoesNotFitError:
                return up_to(workload.max_seq_len)
            if outgrown:
                with suppress(memory_plan.DoesNotFitError):
                    longer = up_to(self.rounded(max_seq_len, max_seq_len // 2))
                    if longer.config == found.config and (longer.offload is None) == (found.offload is None):
                        return longer
            return found

        plan = planned()
        if host_attends(target, config.host_attention) and plan.offload is not None:
            # This is measured only if something is offloaded, as it takes a second.
            machine = replace(machine, host_attention=host_rate(target.heads, target.dtype, target.device))
            plan = planned()
        return plan

    def shrink(self) -> bool:
        """Reduces the plan after device memory ran out; returns False if it cannot be reduced further.

        Raises:
            torch.OutOfMemoryError: one of several ranks ran out of memory; the others cannot notice this.
        """
        if (group := distributed.current()) is not None:
            free = free_bytes(group.device)
            raise torch.OutOfMemoryError(
                f"memory ran out on rank {group.rank} of {group.size} ({gib(free)} are free), and several "
                "ranks cannot reduce their plan while they decode; free memory there, shorten the prompt, or "
                "start more ranks"
            )
        smaller = self.memory.smaller() if self.memory is not None else None
        without_copy = self.config.retrieval_weight_bits == "auto" and self.level_one.give_up()
        several = bool(self._beside)
        self.release()
        if several:
            _LOG.warning("device memory ran out; going on without stages for other numbers of texts")
            return True
        if without_copy:
            _LOG.warning("device memory ran out; going on with less: retrieval_weight_bits 8 -> 16")
            return True
        if smaller is None or self._planned is None:
            return False
        self.memory, what = smaller
        self.use(self.memory.config)
        self._planned = (self._planned[0], self.memory)
        _LOG.warning("device memory ran out; going on with less: %s", what)
        return True

    def release(self) -> None:
        """Frees the buffers of the last request, and every offloaded cache of these models."""
        for program in self._offloaded:
            program.cache.close()
        self._offloaded.clear()
        self._beside.clear()
        self.last_program = self._serves = None
        self.level_one.drop()
        self._free()

    def _free(self) -> None:
        """Frees the memory of dropped programs. Without graphs, which have reference cycles, it is free by
        now, and a garbage collection takes a quarter of a second.
        """
        if self.target.device.type != "cpu":
            free_memory()

    # Programs

    def program(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        pinned: Callable[[int], None] | None = None,
        reuse: Reuse = "none",
        pool: PoolSize | None = None,
        shortest: int | None = None,
    ) -> DecodingProgram:
        """Returns a program for these prompts: the last one if it serves them, else a new one.

        Programs that differ in the number of prompts alone are kept if they have the same pages.

        Args:
            pinned: called with the bytes of host memory as they are pinned.
            reuse: which tokens of the prompts a new program takes over from the last one, if the caches of
                both are on the device.
            pool: the pool of KV slots that the prompts share; with None each prompt has its own slots.
            shortest: tokens by which the number of levels is chosen; by default, and with an offloaded cache,
                which has no level 1 for shorter prompts, those of the shortest prompt. A lone text on the
                device has the levels that its new tokens may need.
        """
        split = self.memory.offload if self.memory is not None else None
        if split is not None:
            pool = shortest = None
        shortest, max_seq_len = shortest or min(map(len, prompts)), max(map(len, prompts)) + new_tokens
        if len(prompts) == 1 and pool is None and self.memory is None:
            shortest = max_seq_len
        levels = self.levels(shortest, self.rounded(max_seq_len))
        few_bits = (
            self.config.retrieval_weight_bits == "auto"
            and len(prompts) == 1 and levels == 3 and pool is None and not self.config.offloads
            and self.facts.few_bits and self.level_one.choosable
        )  # fmt: skip
        # ``self.config`` does not have the chosen bits, since the last program can serve with the bits that
        # it has.
        serves = _Served(self.config, few_bits, len(prompts), levels, split)
        kept: list[FullCache] = []
        earlier: Drafter | None = None
        if (last := self.last_program) is not None:
            # A drafter that the user gave is bound to one program at a time.
            bound = self.own_drafter is None or last.drafter is None or self._bound[0]() is last
            usable = bound and not last.cache.closed and last.cache.fits(max_seq_len, pool)
            # A program with level 1 may choose two levels before each pass, as short prompts need.
            deeper = serves._replace(levels=3, few_bits=self._serves.few_bits) if self._serves else None
            if usable and (self._serves == serves or (self._serves == deeper and last.two_levels)):
                if pool is not None:
                    last.cache.backend.share(pool)
                return last
            if usable and self._serves == serves._replace(batch=last.batch) and last.cache.backend.resizes:
                return self._resized(last, serves, prompts, pool)
            self._beside.clear()
            if split is None and last.cache.worth_keeping(self.config, prompts, reuse, pool):
                kept.append(last.cache)
                if pool is None and self.memory is None:
                    max_seq_len = self._outgrown(max_seq_len, len(prompts))
            last.cache.close()  # The new program needs its memory.
            earlier = last.drafter if kept else None
            self.last_program = last = None
            if split is None:
                self._free()
        if split is not None:
            self.release()
        program = self._new_program(prompts, max_seq_len, levels, few_bits, pinned, pool, kept)
        self._follow(program, serves, earlier)
        if split is not None:
            self._offloaded.append(program)
        return program

    def _outgrown(self, max_seq_len: int, batch: int) -> int:
        """Returns the length of new buffers for texts that the last ones no longer hold.

        Such texts are likely to grow on, and on a GPU the stages of a program take seconds.
        """
        longer = self.rounded(max_seq_len, max_seq_len // 2)
        fits = has_room(self.target, self.draft, self.config, batch, longer)
        return longer if fits else max_seq_len

    def _resized(
        self,
        last: DecodingProgram,
        serves: "_Served",
        prompts: Sequence[Sequence[int]],
        pool: PoolSize | None,
    ) -> DecodingProgram:
        """Returns a program for another number of prompts, which continues in the pages of the last one."""
        program = self._beside.pop(len(prompts), None)
        if program is None:
            longest = last.max_seq_len
            program = self._new_program(
                prompts, longest, last.levels, False, None, pool, [last.cache], last.graph_memory
            )
        else:
            program.cache.take_over(last.cache)
            if pool is not None:
                program.cache.backend.share(pool)
        if program.cache.backend.store.memory is last.cache.backend.store.memory:
            # A drafter that the user gave is bound to one program at a time.
            if self.own_drafter is None:
                self._beside[last.batch] = last
            if len(self._beside) > _MOST_BESIDE:
                # The program that was used longest ago goes.
                del self._beside[next(iter(self._beside))]
        else:
            self._beside.clear()
            last.cache.close()
        program.learnt = last.learnt
        self._follow(program, serves, last.drafter)
        return program

    def _follow(self, program: DecodingProgram, serves: "_Served", earlier: Drafter | None) -> None:
        """Makes a program the last one; its drafter takes over what an earlier one has computed."""
        if program.drafter is not None and earlier is not None:
            program.drafter.take_over(earlier)
        self.last_program, self._serves = program, serves
        self._bound[:] = [weakref.ref(program)]

    def _new_program(
        self,
        prompts: Sequence[Sequence[int]],
        max_seq_len: int,
        levels: int,
        few_bits: bool,
        pinned: Callable[[int], None] | None,
        pool: PoolSize | None,
        kept: list[FullCache],
        graph_memory: torch.cuda.MemPool | None = None,
    ) -> DecodingProgram:
        """Makes a program for these prompts.

        Args:
            few_bits: whether level 1 may run on weights in fewer bits, if they fit into memory.
            kept: the cache of the last program, if it is taken over; it is removed from the list if memory is
                short.
            graph_memory: see :class:`DecodingProgram`.
        """
        split, streamed, longest = None, self.target.streamed, self.rounded(max_seq_len)
        if self.memory is not None:
            split = self.memory.offload
            if split is not None:
                longest = max(max_seq_len, self.memory.workload.max_seq_len)
            if streamed is not None:
                streamed.keep_experts(self.memory.resident_experts)
        config, batch = self.config, len(prompts)
        if split is None and pool is None:
            check_every_rank(self.target, self.draft, config, batch, longest)
        if few_bits:
            workload = Workload(1, len(prompts[0]), longest - len(prompts[0]))
            config = self.level_one.with_bits(config, workload, self.draft, self.own_drafter, kept)
        elif config.retrieval_weight_bits == "auto":
            # The retrieval model cannot run on streamed weights.
            config = replace(config, retrieval_weight_bits=16 if streamed is None else 8)
        if config.retrieval_weight_bits == 16 and (batch > 1 or levels == 3):
            # Prompts that are too short for three levels take turns with longer ones, and need little.
            self.level_one.drop()
        drafter, level_one = self.drafter() if levels > 1 else None, self.level_one.model
        settings = (self.target, drafter, config, batch, longest, levels, split, pinned)
        program = with_or_without(
            kept,
            lambda cache: DecodingProgram(
                *settings, kept=cache, pool=pool, level_one=level_one, graph_memory=graph_memory
            ),
        )
        program.capture_seconds += self.level_one.taken_seconds()
        if limit := self.config.prefix_bytes:
            self.prefixes.bound(limit)
            program.cache.exchange_with(self.prefixes)
        return program


class _Served(NamedTuple):
    """What a program serves: settings, whether level 1 may have fewer bits, the number of sequences, levels,
    and how the cache is split between device and host.
    """

    config: HierarchyConfig
    few_bits: bool
    batch: int
    levels: int
    split: Offload | None


class PlannedPrograms:
    """Makes the programs of a request, each within the memory plan at that time (``loop.Programs``).

    Args:
        hierarchy: the models, the plan, and the program of the last request.
        first: the texts that the first program is made for.
        max_seq_len: the most tokens of a sequence, new ones included.
        reuse: which tokens that the cache holds from earlier requests are kept.
        pinned: called with bytes of host memory as they are taken.
        pool: the pool of KV slots that the texts share; None for a single text.
        least: tokens by which the levels of all programs are chosen, however short the texts are that join;
            by default those of the shortest of ``first``.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        first: Sequence[Sequence[int]],
        max_seq_len: int,
        reuse: Reuse = "none",
        pinned: Callable[[int], None] | None = None,
        pool: Pool | None = None,
        least: int | None = None,
    ) -> None:
        self._hierarchy, self._count, self._max_seq_len = hierarchy, len(first), max_seq_len
        self._reuse, self._pinned, self._pool = reuse, pinned, pool
        self._least = least or min(map(len, first))

    def make(self, texts: Sequence[Sequence[int]]) -> DecodingProgram:
        """Returns a program with a batch index for each of these texts."""
        reuse: Reuse = "all" if len(texts) > self._count else self._reuse
        left, pool = self._max_seq_len - max(map(len, texts)), self._pool and self._pool()
        program = self._hierarchy.program(texts, left, self._pinned, reuse, pool, self._least)
        self._max_seq_len = program.max_seq_len
        return program

    def shrink(self) -> bool:
        """Reduces the memory plan; returns False if it cannot be reduced further."""
        return self._hierarchy.shrink()
