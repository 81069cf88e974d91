"""Putting the levels together: models, caches and drafters for one generation."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from triforce_tree.caches import FullCache, RetrievalCache, StreamingCache
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.growth import MOST_TAIL
from triforce_tree.cycle.shapes import device_shape
from triforce_tree.decoder import Decoder
from triforce_tree.drafters import (
    Autoregressive,
    Drafter,
    HierarchicalDrafter,
    ModelDrafter,
    PromptLookupDrafter,
)
from triforce_tree.hf_model import HFModel
from triforce_tree.level import Level
from triforce_tree.rope import FamilyRope
from triforce_tree.sampling import Random, TokenLaw
from triforce_tree.tree_search import parse_shape
from triforce_tree.verify.verifier import Verifier

# Captured buffers are made for texts of a multiple of this many tokens, so that the next text fits too.
_ROOM_STEP = 1024


class Hierarchy:
    """The parts that outlive one generation.

    Args:
        target: level 2, and level 1 on its retrieval cache.
        draft: level 0; None proposes by prompt lookup.
        config: what each level does.

    Raises:
        ValueError: the vocabularies differ, or the draft cannot run on a streaming cache.
    """

    def __init__(self, target: HFModel, draft: HFModel | None, config: HierarchyConfig) -> None:
        self.target = target
        self.draft = draft
        self.config = config
        self._rope: FamilyRope | None = None
        self._cycle: tuple[tuple[HierarchyConfig, int, int], Cycle] | None = None
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
        other._cycle = None
        return other

    @contextmanager
    def active(self) -> Iterator[None]:
        """Both models with our attention, and as they were afterwards."""
        with ExitStack() as stack:
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
        elif wanted is None and reason is None and self.target.device.type != "cuda":
            reason = "captured cycles are for GPUs"
        if reason and (wanted or self.config.middle_bits != 16):
            asked = "captured=True" if wanted else f"middle_bits={self.config.middle_bits}"
            raise ValueError(f"{asked} needs the captured cycle, but {reason}; leave it out")
        return reason

    def _obstacle(self, law: TokenLaw, lengths: list[int]) -> str | None:
        levels = self.levels(min(lengths))
        if self.target.has_windows:
            return f"{self.target.name} has sliding windows"
        if not law.context_free:
            return "a logits processor looks at the tokens so far"
        if levels == 1:
            return None
        if self.draft is None:
            return "there is no draft model"
        if self.draft.has_windows:
            return f"{self.draft.name} has sliding windows"
        shape = device_shape(parse_shape(self.config.tree))
        if shape is None:
            return f"tree={self.config.tree!r} has no fixed size"
        limit = MOST_TAIL - 3
        if sum(shape.widths) + 1 + len(shape.widths) > limit:
            return f"tree={self.config.tree!r} is larger than {limit} nodes and depth"
        need = len(shape.widths) + 3
        if levels == 3:
            need = max(need, self.config.retrieval.budget + 2 * self.config.retrieval.chunk)
        if min(lengths) < need:
            return f"a prompt of {min(lengths)} tokens is shorter than the {need} that {levels} levels need"
        return None

    def cycle(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Cycle:
        """Buffers and graphs for these prompts: the last ones where they serve, else new ones."""
        batch, longest = len(prompts), max(len(p) for p in prompts)
        levels = self.levels(min(len(p) for p in prompts))
        wanted = (self.config, batch, levels)
        room = longest + new_tokens
        if self._cycle is not None:
            kept, cycle = self._cycle
            if kept == wanted and cycle.room >= room:
                return cycle
            # Its memory is needed for the next one.
            self._cycle = None
            del cycle
        room = -(-room // _ROOM_STEP) * _ROOM_STEP
        cycle = Cycle(self.target, self.draft, self.config, batch, room, levels)
        self._cycle = (wanted, cycle)
        return cycle

    def decoder(
        self, law: TokenLaw, seed: int, prompt_tokens: int, new_tokens: int, stop: frozenset[int]
    ) -> Decoder:
        """Fresh caches and a decoder over them.

        Args:
            law: logits to law.
            seed: of every level's draws.
            prompt_tokens, new_tokens: how many rows the full cache should have room for.
            stop: ids that end the text.
        """
        config, levels = self.config, self.levels(prompt_tokens)
        room = prompt_tokens + new_tokens + 2 * (config.gamma + 64)
        full = FullCache(self.target.layers, room)
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
        # Odd multiples of a 64-bit constant keep the levels' streams apart for any two seeds.
        mixed = (seed + (2 * level + 1) * 0x9E3779B97F4A7C15) % 2**63
        return Random(mixed, self.target.device if level else (self.draft or self.target).device)
