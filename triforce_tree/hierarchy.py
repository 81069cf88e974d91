"""Putting the levels together: models, caches and drafters for one generation."""

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from triforce_tree import memory_map, memory_plan, parallel
from triforce_tree.caches import FullCache, RetrievalCache, StreamingCache
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.host_attention import host_attends
from triforce_tree.cycle.refusals import why_not_captured
from triforce_tree.cycle.shapes import least_prompt
from triforce_tree.decoder import Decoder
from triforce_tree.drafters import (
    Autoregressive,
    Drafter,
    HierarchicalDrafter,
    ModelDrafter,
    PromptLookupDrafter,
)
from triforce_tree.graphs import free_memory
from triforce_tree.hf_model import HFModel
from triforce_tree.length_rope import fix_rotation
from triforce_tree.level import Level
from triforce_tree.load_guard import compare_at_load
from triforce_tree.locks import generation, held
from triforce_tree.machine import host_rate, measured
from triforce_tree.memory_map import Sizes
from triforce_tree.memory_plan import MemoryPlan
from triforce_tree.rope import FamilyRope
from triforce_tree.sampling import Random, Stream, TokenLaw, derived
from triforce_tree.tree_search import parse_shape
from triforce_tree.verify.verifier import Verifier

# Captured buffers are made for texts of a multiple of this many tokens, so that the next text fits too.
_ROOM_STEP = 1024
_LOG = logging.getLogger(__name__)


class Hierarchy:
    """The parts that outlive one generation.

    Args:
        target: level 2, and level 1 on its retrieval cache.
        draft: level 0; None proposes by prompt lookup.
        config: what each level does.

    Attributes:
        guard: what of the target was compared with transformers' own forward.
        memory: where rows live, as :meth:`settle_memory` decided; None where nothing may be offloaded.

    Raises:
        ValueError: the vocabularies differ, or the draft cannot run on a streaming cache.
        UnsupportedModelError: the target's logits are not transformers' own.
    """

    def __init__(self, target: HFModel, draft: HFModel | None, config: HierarchyConfig) -> None:
        self.target = target
        self.draft = draft
        self.config = config
        self._rope: FamilyRope | None = None
        self.memory: MemoryPlan | None = None
        self._planned: tuple[object, MemoryPlan] | None = None
        self._cycle: tuple[object, Cycle] | None = None
        # Of all configurations of these models: host memory holds one full cache at a time.
        self._offloaded: list[Cycle] = []
        self.guard = compare_at_load(target)
        if draft is None:
            return
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {draft.vocab_size} tokens, the target's "
                f"{target.vocab_size}: they must share one tokenizer; choose another draft, or none "
                "(prompt lookup)"
            )
        self._rope = draft.rope()

    def with_config(self, config: HierarchyConfig) -> "Hierarchy":
        """The same checked models under another configuration."""
        other = copy.copy(self)
        other.config = config
        other.memory = other._planned = other._cycle = None
        return other

    def generation(self) -> AbstractContextManager[None]:
        """Inside, the models write one text, for this thread alone (``locks.generation``)."""
        return generation(self.target.model, self.draft.model if self.draft is not None else None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Both models can compute inside, for one thread at a time."""
        with ExitStack() as stack:
            # Both locks at once, and so in their order.
            stack.enter_context(held(self.target.model, self.draft.model if self.draft is not None else None))
            for model in (self.target, self.draft):
                if model is not None:
                    stack.enter_context(model.active())
            yield

    def levels(self, prompt_tokens: int) -> int:
        """How many levels a prompt of this length gets."""
        if isinstance(self.config.levels, int):
            return self.config.levels
        return 3 if prompt_tokens >= 2 * self.config.retrieval.budget else 2

    def why_not_captured(self, law: TokenLaw, prompts: Sequence[Sequence[int]]) -> str | None:
        """What keeps these prompts from the captured cycle; None where nothing does.

        Raises:
            ValueError: the settings ask for it, and something does.
        """
        reason = self._obstacle(law, [len(p) for p in prompts])
        wanted = self.config.captured
        if wanted is False:
            reason = "captured=False"
        elif wanted is None and reason is None and self.target.device.type != "cuda" and not self.offloads:
            reason = "captured cycles are for GPUs"
        elif reason is None and self.target.streamed is not None and not self.offloads:
            reason = "the weights are streamed, and a cache on the device does not go with that"
        if reason and (wanted or self.config.middle_bits != 16):
            asked = "captured=True" if wanted else f"middle_bits={self.config.middle_bits}"
            raise ValueError(f"{asked} needs the captured cycle, but {reason}; leave it out")
        return reason

    @property
    def offloads(self) -> bool:
        """Whether the full cache is to live in host memory."""
        return self.memory is not None and self.memory.offload is not None

    def _obstacle(self, law: TokenLaw, lengths: list[int]) -> str | None:
        reason = self._unfit(law, self.levels(min(lengths))) or self._too_short(min(lengths))
        rope = self.target.length_rope
        if reason is None and rope is not None and rope.mixed(lengths):
            reason = f"the prompts lie on both sides of {rope.original} tokens ({rope.kind})"
        return reason

    def _unfit(self, law: TokenLaw, levels: int) -> str | None:
        """What of models and settings keeps the captured cycle from serving."""
        return why_not_captured(self.target, self.draft, self.config.tree, law, levels)

    def _too_short(self, shortest: int) -> str | None:
        """Why a prompt of so few tokens has no captured cycle."""
        levels = self.levels(shortest)
        need = least_prompt(self.config, levels, self.offloads)
        if shortest < need:
            return f"a prompt of {shortest} tokens is shorter than the {need} that {levels} levels need"
        return None

    def settle_memory(
        self, law: TokenLaw, lengths: Sequence[int], new_tokens: int, given: Collection[str] = ()
    ) -> None:
        """Decide where the rows of texts of these lengths live, and take up the settings that fit there.

        Args:
            given: names of options that stay as they are.

        Raises:
            DoesNotFitError: memory is short.
            ValueError: what cannot be offloaded would have to be.
        """
        self.memory, base = None, self.config
        if not base.offloads:
            return
        longest = max(lengths)
        key = (base, len(lengths), frozenset(given))
        plan = self._kept_plan(key, longest + new_tokens, lengths)
        if plan is None:
            self.release()
            plan = self._new_plan(given, len(lengths), longest, new_tokens)
        self.memory, self._planned = plan, (key, plan)
        if plan.offload is None:
            return
        self.config = plan.config
        reason = self._unfit(law, self.levels(min(lengths)))
        if reason is not None:
            names = ("offload", "gpu_memory", "host_memory", "offload_weights")
            name = next(n for n in names if getattr(base, n))
            asked = f"{name}={getattr(base, name)!r}"
            simpler = "" if self._unfit(law, 1) else ", or set levels=1, which needs neither draft nor tree"
            raise ValueError(f"{asked} needs the captured cycle, but {reason}; leave it out{simpler}")
        if self._too_short(min(lengths)) is not None:
            # So short a text has a small cache.
            self.memory, self.config = None, base

    def _new_plan(self, given: Collection[str], batch: int, prompt: int, new_tokens: int) -> MemoryPlan:
        target, base = self.target, self.config
        weights = sum(memory_map.device_bytes(m) for m in (target, self.draft) if m is not None)
        far = target.streamed.bytes if target.streamed is not None else 0
        machine = measured(target.device, weights, base.gpu_bytes, far, base.host_bytes)
        sizes = Sizes.of(target, self.draft, base)

        def planned() -> MemoryPlan:
            # With room for the next text too; without, where that is too much.
            new = self._rounded(prompt + new_tokens) - prompt
            try:
                return memory_plan.plan(sizes, machine, base, given, batch, prompt, new)
            except memory_plan.DoesNotFitError:
                return memory_plan.plan(sizes, machine, base, given, batch, prompt, new_tokens)

        plan = planned()
        if host_attends(target, base.host_attention) and plan.offload is not None:
            # Measured where there is something to attend to: it takes a second.
            machine = replace(machine, host_attention=host_rate(target.heads, target.dtype, target.device))
            plan = planned()
        return plan

    def _kept_plan(self, key: object, room: int, lengths: Sequence[int]) -> MemoryPlan | None:
        """The last plan, where its cycle serves these texts too."""
        if self._planned is None or self._cycle is None or self._cycle[1].closed:
            return None
        before, plan = self._planned
        with_plan = self.with_config(plan.config)
        fits = room <= self._cycle[1].room <= 2 * self._rounded(room)
        fits = fits and with_plan.levels(min(lengths)) == plan.levels
        return plan if before == key and fits else None

    def shrink(self) -> bool:
        """After device memory ran out: give some of the plan up; False where nothing is left to give.

        Raises:
            torch.OutOfMemoryError: one of several cards ran out; the others know nothing of it.
        """
        if (group := parallel.current()) is not None:
            raise torch.OutOfMemoryError(
                f"memory ran out on rank {group.rank} of {group.size}, and several cards cannot give some up "
                "in the middle of a text; plan for less (gpu_memory), or shorten the prompt"
            )
        smaller = self.memory.smaller() if self.memory is not None else None
        self.release()
        if smaller is None or self._planned is None:
            return False
        self.memory, what = smaller
        self.config = self.memory.config
        self._planned = (self._planned[0], self.memory)
        _LOG.warning("device memory ran out; going on with less: %s", what)
        return True

    def release(self) -> None:
        """Give the buffers of the last texts back, and every offloaded cache of these models."""
        for cycle in self._offloaded:
            cycle.close()
        self._offloaded.clear()
        self._cycle = None
        free_memory()

    def cycle(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        pinned: Callable[[int], None] | None = None,
    ) -> Cycle:
        """Buffers and graphs for these prompts: the last ones where they serve, else new ones.

        Args:
            pinned: called with bytes of host memory as they are taken.
        """
        batch, longest = len(prompts), max(len(p) for p in prompts)
        levels = self.levels(min(len(p) for p in prompts))
        split = self.memory.offload if self.memory is not None else None
        wanted = (self.config, batch, levels, split)
        room = longest + new_tokens
        if self._cycle is not None:
            kept, cycle = self._cycle
            if kept == wanted and cycle.room >= room and not cycle.closed:
                return cycle
            # Its memory is needed for the next one.
            cycle.close()
            self._cycle = None
            del cycle
            if split is None:
                free_memory()
        if split is not None:
            self.release()
        rounded = self._rounded(room)
        if split is not None and self.memory is not None:
            rounded = max(room, self.memory.texts.room)
        cycle = Cycle(self.target, self.draft, self.config, batch, rounded, levels, split, pinned)
        self._cycle = (wanted, cycle)
        if split is not None:
            self._offloaded.append(cycle)
        return cycle

    def _rounded(self, room: int) -> int:
        """Room for a little more than asked for, as far as the model has positions."""
        rounded = -(-room // _ROOM_STEP) * _ROOM_STEP
        return max(room, min(rounded, self.target.max_positions or rounded))

    def decoder(
        self,
        law: TokenLaw,
        seed: int,
        prompt_tokens: int,
        new_tokens: int,
        stop: frozenset[int],
        full: FullCache | None = None,
    ) -> Decoder:
        """Fresh caches and a decoder over them.

        Args:
            law: logits to law.
            seed: of every level's draws.
            prompt_tokens, new_tokens: how many rows the full cache should have room for.
            stop: ids that end the text.
            full: a full cache that holds a beginning of the prompt already; None for an empty one.
        """
        config, levels = self.config, self.levels(prompt_tokens)
        draft_rope = self.draft.length_rope if self.draft is not None else None
        fix_rotation(self.target.length_rope, draft_rope, [prompt_tokens], config.streaming)
        room = prompt_tokens + new_tokens + 2 * (config.gamma + 64)
        full = full or FullCache(self.target.layers, room)
        verifier = Verifier("target", self._level(self.target, full), law, self._random(seed, 2))
        drafter: Drafter = Autoregressive() if levels == 1 else self._base_drafter(law, seed)
        if levels == 3:
            retrieval = RetrievalCache(full, self.target.layers, config.retrieval)
            middle = Verifier("retrieval", self._level(self.target, retrieval), law, self._random(seed, 1))
            leaves = config.leaves
            if leaves is None:
                leaves = self.target.device.type != "cpu"
            drafter = HierarchicalDrafter(drafter, middle, config.gamma, leaves, stop)
        return Decoder(verifier, drafter)

    def _base_drafter(self, law: TokenLaw, seed: int) -> Drafter:
        if self.draft is None or self._rope is None:
            return PromptLookupDrafter(self.config.lookup)
        cache = StreamingCache(self.draft.layers, self.config.streaming, self._rope)
        level = self._level(self.draft, cache)
        return ModelDrafter(level, parse_shape(self.config.tree), law, self._random(seed, 0))

    def _level(self, model: HFModel, cache: FullCache | RetrievalCache | StreamingCache) -> Level:
        return Level(model, cache, self.config.prefill_chunk or 1024)

    def _random(self, seed: int, level: int) -> Random:
        device = self.target.device if level else (self.draft or self.target).device
        return Random(derived(seed, Stream.LEVEL, level), device)
