"""Putting the levels together: models, caches and drafters for one generation."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from triforce_tree.caches import FullCache, RetrievalCache, StreamingCache
from triforce_tree.config import HierarchyConfig
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
        return Level(model, cache, self.config.prefill_chunk)

    def _random(self, seed: int, level: int) -> Random:
        # Odd multiples of a 64-bit constant keep the levels' streams apart for any two seeds.
        mixed = (seed + (2 * level + 1) * 0x9E3779B97F4A7C15) % 2**63
        return Random(mixed, self.target.device if level else (self.draft or self.target).device)
