"""What outlives one generation: models, drafter, memory plan, and the buffers of the last texts."""

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import Drafter
from triforce_tree.drafters.prompt_lookup import PromptLookup
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.offload.host_attention import host_attends
from triforce_tree.kv.offload.offloaded_cache import one_shape
from triforce_tree.loading.load_guard import compare_at_load
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import memory_map, memory_plan
from triforce_tree.planning.machine import host_rate, measured
from triforce_tree.planning.memory_map import Sizes
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.locks import generation, held
from triforce_tree.trees.device_shapes import least_prompt
from triforce_tree.trees.shapes import chain_shape, parse_shape
from triforce_tree.verify.sampling import ProbsFromLogits

# Captured buffers are made for texts of a multiple of this many tokens, so that the next text fits too.
_MAX_SEQ_LEN_STEP = 1024
_LOG = logging.getLogger(__name__)


class Hierarchy:
    """The parts that outlive one generation.

    Args:
        target: level 2, and level 1 on its retrieval cache.
        draft: a model for level 0, a drafter, or None for prompt lookup.
        config: what each level does.

    Attributes:
        guard: what of the target was compared with transformers' own forward.
        memory: where KV slots live, as :meth:`settle_memory` decided; None where nothing may be offloaded.

    Raises:
        ValueError: the vocabularies differ; a drafter's tree is no tree shape, or it reads features of layers
            that are not there.
        UnsupportedModelError: the target's logits are not transformers' own.
    """

    def __init__(self, target: HFModel, draft: HFModel | Drafter | None, config: HierarchyConfig) -> None:
        self.target = target
        self.draft = draft if isinstance(draft, HFModel) else None
        self._drafter = None if isinstance(draft, HFModel) else draft
        if self._drafter is not None:
            _check_drafter(self._drafter, target.layers)
        self.config = config
        self.memory: MemoryPlan | None = None
        self._planned: tuple[object, MemoryPlan] | None = None
        self._program: tuple[object, DecodingProgram] | None = None
        # Of all configurations of these models: host memory holds one full cache at a time.
        self._offloaded: list[DecodingProgram] = []
        # The buffers that a drafter of the user's is bound to, which siblings with other settings share.
        self._bound: list[weakref.ref[DecodingProgram]] = []
        self.guard = compare_at_load(target)
        if self.draft is not None and self.draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft's vocabulary has {self.draft.vocab_size} tokens, the target's "
                f"{target.vocab_size}: they must share one tokenizer; choose another draft, or none "
                "(prompt lookup)"
            )

    @property
    def config(self) -> HierarchyConfig:
        """The settings; ``tree`` is that of the drafter, where it is no model."""
        return self._config

    @config.setter
    def config(self, config: HierarchyConfig) -> None:
        if self.draft is None:
            tree = chain_shape(config.lookup) if self._drafter is None else self._drafter.tree
            config = replace(config, tree=tree)
        self._config = config

    def drafter(self) -> Drafter:
        """Level 0 under the present settings, with buffers of its own."""
        if self.draft is not None:
            return TreeDrafter(self.draft, self.config)
        return PromptLookup(self.config.lookup) if self._drafter is None else self._drafter

    def with_config(self, config: HierarchyConfig) -> "Hierarchy":
        """The same checked models under another configuration."""
        other = copy.copy(self)
        other.config = config
        other.memory = other._planned = other._program = None
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

    @property
    def offloads(self) -> bool:
        """Whether the full cache is to live in host memory."""
        return self.memory is not None and self.memory.offload is not None

    def together(self, to_probs: ProbsFromLogits, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether these prompts can be decoded as one batch."""
        rope = self.target.length_rope
        return len(prompts) == 1 or (
            to_probs.context_free and not (rope is not None and rope.mixed([len(p) for p in prompts]))
        )

    def settle_memory(self, lengths: Sequence[int], new_tokens: int, given: Collection[str] = ()) -> None:
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
        one_shape(self.target)
        if min(lengths) < least_prompt(self.config, self.levels(min(lengths)), self.offloads):
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

    def _kept_plan(self, key: object, max_seq_len: int, lengths: Sequence[int]) -> MemoryPlan | None:
        """The last plan, where its cycle serves these texts too."""
        if self._planned is None or self._program is None or self._program[1].closed:
            return None
        before, plan = self._planned
        with_plan = self.with_config(plan.config)
        fits = max_seq_len <= self._program[1].max_seq_len <= 2 * self._rounded(max_seq_len)
        fits = fits and with_plan.levels(min(lengths)) == plan.levels
        return plan if before == key and fits else None

    def shrink(self) -> bool:
        """After device memory ran out: give some of the plan up; False where nothing is left to give.

        Raises:
            torch.OutOfMemoryError: one of several cards ran out; the others know nothing of it.
        """
        if (group := distributed.current()) is not None:
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
        for program in self._offloaded:
            program.close()
        self._offloaded.clear()
        self._program = None
        free_memory()

    def program(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        pinned: Callable[[int], None] | None = None,
    ) -> DecodingProgram:
        """Buffers and graphs for these prompts: the last ones where they serve, else new ones.

        Args:
            pinned: called with bytes of host memory as they are taken.
        """
        batch, longest = len(prompts), max(len(p) for p in prompts)
        levels = self.levels(min(len(p) for p in prompts))
        split = self.memory.offload if self.memory is not None else None
        wanted = (self.config, batch, levels, split)
        max_seq_len = longest + new_tokens
        if self._program is not None:
            kept, program = self._program
            if (
                kept == wanted
                and program.max_seq_len >= max_seq_len
                and not program.closed
                and self._binds(program)
            ):
                return program
            # Its memory is needed for the next one.
            program.close()
            self._program = None
            del program
            if split is None:
                free_memory()
        if split is not None:
            self.release()
        rounded = self._rounded(max_seq_len)
        if split is not None and self.memory is not None:
            rounded = max(max_seq_len, self.memory.workload.max_seq_len)
        drafter = self.drafter() if levels > 1 else None
        program = DecodingProgram(self.target, drafter, self.config, batch, rounded, levels, split, pinned)
        self._program = (wanted, program)
        self._bound[:] = [weakref.ref(program)]
        if split is not None:
            self._offloaded.append(program)
        return program

    def _binds(self, program: DecodingProgram) -> bool:
        """Whether the drafter writes into this cycle's buffers; a user's object serves one at a time."""
        return self._drafter is None or program.drafter is None or self._bound[0]() is program

    def _rounded(self, max_seq_len: int) -> int:
        """Room for a little more than asked for, as far as the model has positions."""
        rounded = -(-max_seq_len // _MAX_SEQ_LEN_STEP) * _MAX_SEQ_LEN_STEP
        return max(max_seq_len, min(rounded, self.target.max_positions or rounded))


def _check_drafter(drafter: Drafter, layers: int) -> None:
    """Raise ValueError where a drafter's tree or features are beyond what the target can serve."""
    parse_shape(drafter.tree)
    for layer in drafter.features:
        if not 0 <= layer < layers:
            raise ValueError(
                f"drafter {drafter.name!r} reads features of layer {layer}, but the target's layers are 0 to "
                f"{layers - 1}; change drafter.features"
            )
