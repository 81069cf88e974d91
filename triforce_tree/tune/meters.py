"""One generation under given settings, timed; the text before it is read once for all of them.

The captured cycle and the eager engine each have a meter. Both keep the target's rows of the text, decode
from some place in it, and put back what they overwrote.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from triforce_tree.caches.full import FullCache
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.decoder import CycleDecoder
from triforce_tree.cycle.endings import Decoder, Ending
from triforce_tree.cycle.growth import MOST_TAIL
from triforce_tree.cycle.prefill import chunk_tokens, prefill
from triforce_tree.cycle.store import KVStore
from triforce_tree.graphs import free_memory
from triforce_tree.hierarchy import Hierarchy
from triforce_tree.sampling import TokenLaw
from triforce_tree.stats import LevelStats, Progress
from triforce_tree.token_tree import Context

_WARM_UP_TOKENS = 8
# Tokens before a starting place that are fed again, since some caches choose by the newest queries.
_FED_AGAIN = 32
# Tokens more than asked for that a last pass may bring; it counts whole.
_BEYOND = 2 * MOST_TAIL


@dataclass(frozen=True)
class Sample:
    """One timed generation.

    ``draft_length``: the estimates that the captured cycle chooses its rounds by, as they were in the end.
    ``alone_ms``: a token of the target alone, just before and after, where the machine may be doing other
    things as well.
    """

    ms_per_token: float
    tokens: list[int]
    levels: list[LevelStats]
    draft_length: dict[str, float] = field(default_factory=dict)
    alone_ms: float | None = None


class Meter(Protocol):
    """Made for a text, which is read when it is made."""

    def run(self, config: HierarchyConfig, place: int, temperature: float, new: int, seed: int) -> Sample:
        """Decode at least ``new`` tokens behind the first ``place`` tokens of the text."""

    def close(self) -> None:
        """Give the memory back."""


class EagerMeter:
    """The engine without captured stages.

    Args:
        hierarchy: models.
        tokens: the text.
        new: most tokens that will be asked for.
        progress: of reading.
    """

    def __init__(
        self, hierarchy: Hierarchy, tokens: Sequence[int], new: int, progress: Progress | None = None
    ) -> None:
        self._hierarchy, self._tokens = hierarchy, list(tokens)
        self._warm: HierarchyConfig | None = None
        self._full = FullCache(hierarchy.target.layers, len(tokens) + new + _BEYOND + 2 * MOST_TAIL)
        with hierarchy.active():
            chunk = hierarchy.config.prefill_chunk or 1024
            Level(hierarchy.target, self._full, chunk).prefill(Context(self._tokens), progress)

    def run(self, config: HierarchyConfig, place: int, temperature: float, new: int, seed: int) -> Sample:
        hierarchy = self._hierarchy.with_config(config)
        if config != self._warm:
            self._decode(hierarchy, place, temperature, _WARM_UP_TOKENS, seed)
            self._warm = config
        before = self._alone(place)
        sample = self._decode(hierarchy, place, temperature, new, seed)
        return replace(sample, alone_ms=(before + self._alone(place)) / 2)

    def _alone(self, place: int) -> float:
        alone = self._hierarchy.with_config(replace(self._hierarchy.config, levels=1))
        return self._decode(alone, place, 0.0, _WARM_UP_TOKENS, 0).ms_per_token

    def _decode(self, hierarchy: Hierarchy, place: int, temperature: float, new: int, seed: int) -> Sample:
        law, most = TokenLaw.at(temperature), new + _BEYOND
        with hierarchy.active(), self._standing(place):
            decoder = hierarchy.decoder(law, seed, place, most, frozenset(), self._full)
            context = decoder.prefill(self._tokens[:place])
            return _timed(decoder, decoder.decode(context, Ending(most)), new)

    @contextmanager
    def _standing(self, place: int) -> Iterator[None]:
        """Inside, the cache holds no more than a beginning of the text that ends before ``place``."""
        full, start, stop = self._full, max(0, place - 1 - _FED_AGAIN), len(self._tokens) - 1
        kept = {i: [t.clone() for t in full.rows.view(i, start, stop)] for i in full.rows.filled}
        full.stand(start)
        try:
            yield
        finally:
            for index, (k, v) in kept.items():
                full.rows.write(index, start, k, v)
            full.stand(stop)

    def close(self) -> None:
        del self._full


class CapturedMeter:
    """The captured cycle; a new one for each setting that is built into its graphs.

    Args:
        hierarchy: models.
        tokens: the text.
        new: most tokens that will be asked for.
        gamma: the largest one that will be.
        progress: of reading.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        tokens: Sequence[int],
        new: int,
        gamma: int,
        progress: Progress | None = None,
    ) -> None:
        self._hierarchy, self._tokens = hierarchy, list(tokens)
        self._cycle: Cycle | None = None
        self._warm: set[bool] = set()
        self._room = len(tokens) + new + _BEYOND + gamma
        target, config = hierarchy.target, hierarchy.config
        rows = self._room + 4 * (gamma + 2 * MOST_TAIL) + 64
        self._store = KVStore(target.kv_shapes, 1, -(-rows // 64) * 64, target.device, target.dtype)
        chunk = chunk_tokens(config.prefill_chunk, target.device)
        with target.active():
            prefill(target, self._store, 0, self._tokens[:-1], chunk, progress)

    def run(self, config: HierarchyConfig, place: int, temperature: float, new: int, seed: int) -> Sample:
        law = TokenLaw.at(temperature)
        cycle = self._open(config)
        try:
            with self._standing(cycle, place, new):
                if law.greedy not in self._warm:
                    self._decode(cycle, law, place, _WARM_UP_TOKENS, seed)
                    self._warm.add(law.greedy)
                return self._decode(cycle, law, place, new, seed)
        except torch.OutOfMemoryError:
            self._cycle = None
            raise

    def _decode(self, cycle: Cycle, law: TokenLaw, place: int, new: int, seed: int) -> Sample:
        prompt = self._tokens[:place]
        decoder = CycleDecoder(cycle, law, seed)
        # Of the text as it was read: captures and earlier generations wrote behind their places.
        cycle.renew_means()
        cycle.rewind([prompt])
        if cycle.device.type == "cuda":
            torch.cuda.synchronize(cycle.device)
        blocks = (block for [block] in decoder.decode([prompt], [Ending(new + _BEYOND)]))
        sample = _timed(decoder, blocks, new)
        if cycle.levels == 1:
            return sample
        controller = decoder.controller
        estimates = {
            "acceptance": controller.acceptance,
            "tokens_per_round": controller.tokens_per_round,
        }
        return replace(sample, draft_length=estimates)

    def _open(self, config: HierarchyConfig) -> Cycle:
        old = self._cycle
        if old is not None and old.serves(config):
            old.config = config
            return old
        self._cycle = old = None
        self._warm = set()
        free_memory()
        hierarchy, levels = self._hierarchy, config.levels
        assert isinstance(levels, int), "the search names the number of levels"
        draft = hierarchy.draft if levels > 1 else None
        self._cycle = Cycle(hierarchy.target, draft, config, 1, self._room, levels, store=self._store)
        return self._cycle

    @contextmanager
    def _standing(self, cycle: Cycle, place: int, new: int) -> Iterator[None]:
        behind = int(cycle.texts.capacity) - cycle.room
        first, reach = place - 1, 1 + new + 2 * _BEYOND + 2 * behind
        rows = [group.kv[:, :, :, :, first : first + reach] for group in self._store.groups]
        before = [part.clone() for part in rows]
        try:
            yield
        finally:
            for part, old in zip(rows, before, strict=True):
                part.copy_(old)

    def close(self) -> None:
        self._cycle = None
        del self._store
        free_memory()


def _timed(decoder: Decoder | CycleDecoder, blocks: Iterable[list[int]], new: int) -> Sample:
    tokens: list[int] = []
    for block in blocks:
        tokens += block
        if len(tokens) >= new:
            break
    return Sample(1e3 * decoder.decode_seconds / len(tokens), tokens, decoder.levels)
