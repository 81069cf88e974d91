"""One captured cycle at a time, on rows that were computed once: decode, compare, and time its stages."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from cycle_measure import last_logits, rounds_per_pass
from timing import synchronize, timed
from torch import Tensor

from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.decoder import CycleDecoder
from triforce_tree.cycle.endings import Ending
from triforce_tree.cycle.growth import Growth
from triforce_tree.cycle.rows import TreeRows
from triforce_tree.cycle.shapes import Extent
from triforce_tree.cycle.store import KVStore
from triforce_tree.graphs import free_memory
from triforce_tree.hf_model import HFModel
from triforce_tree.inflate import inflate_pair
from triforce_tree.sampling import TokenLaw
from triforce_tree.stats import LevelStats

Texts = Sequence[Sequence[int]]

# Rows more than the first cycle needs, so that later ones of other settings fit into the same memory.
_SPARE_ROWS = 512
_LARGEST_CHUNK = 64
# Places before a parting at which the noise of two kinds of forward is looked at.
_NOISE_PLACES = 8
_WARM_UP_TOKENS = 8


@dataclass
class Run:
    """One decoding of a batch; ``stamps`` holds (seconds of decoding, tokens of a text) after each pass."""

    texts: list[list[int]]
    stamps: list[tuple[float, float]] = field(default_factory=list)
    levels: list[LevelStats] = field(default_factory=list)
    rounds: float = 0.0

    @property
    def ms_per_token(self) -> float:
        seconds, tokens = self.stamps[-1]
        return 1e3 * seconds / tokens


@dataclass
class Exactness:
    """Greedy tokens beside those of plain decoding: how many were compared, and where the two part.

    A parting is a tie where plain decoding's best logit beats the chosen one by no more than two forwards
    of different sizes differ by there.
    """

    compared: int = 0
    partings: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        ties = sum(p["gap"] <= p["noise"] for p in self.partings)
        return {
            "compared": self.compared,
            "ties": ties,
            "failures": len(self.partings) - ties,
            "partings": self.partings,
        }


class Bench:
    """An inflated pair, the cycle that is open, and the prompts whose rows stand in its full cache.

    Args:
        shape, draft_shape: what the embedded pair is inflated to.
        device, dtype: of everything.
        seed: of the weights without effect, and of all draws.
    """

    def __init__(
        self, shape: str, draft_shape: str, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        target, draft, self.tokenizer = inflate_pair(shape, device, dtype, draft_shape, seed)
        self.target, self.draft = HFModel(target), HFModel(draft)
        self.device, self.seed = device, seed
        self._cycle: Cycle | None = None
        self._fed: list[list[int]] = []
        self.prefill_seconds = 0.0
        self._warm: set[float] = set()

    @property
    def cycle(self) -> Cycle:
        assert self._cycle is not None, "no cycle is open"
        return self._cycle

    def open(self, config: HierarchyConfig, batch: int, room: int, temperatures: Sequence[float]) -> None:
        """A cycle for these settings, captured; rows that are there stay where the memory serves."""
        levels = config.levels if isinstance(config.levels, int) else 3
        old = self._cycle
        if old is not None and old.batch == batch and old.room >= room and old.serves(config):
            old.config = config
        else:
            rows = room + Extent.of(config, levels).behind
            kept = old.store if old is not None and old.batch == batch and old.store.rows >= rows else None
            self._cycle = old = None
            free_memory()
            store = kept or self._new_store(batch, rows)
            drafter = Growth(self.draft, config)
            self._cycle = Cycle(self.target, drafter, config, batch, room, levels, store=store)
            longest = max(map(len, self._fed), default=0)
            if kept is None or longest > room:
                # The rows are new, or the captures' trial runs will have written into them.
                self._fed = []
            self._warm = set()
        for temperature in temperatures:
            self.cycle.prepare(TokenLaw.at(temperature))
        self._renew_means()

    def _new_store(self, batch: int, rows: int) -> KVStore:
        """A full cache with room for later settings as well, in whole pages of any chunk."""
        rows = -(-(rows + _SPARE_ROWS) // _LARGEST_CHUNK) * _LARGEST_CHUNK
        target = self.target
        return KVStore(target.kv_shapes, batch, rows, self.device, target.dtype)

    def close(self) -> None:
        """Give everything back, the models too."""
        self._cycle, self._fed = None, []
        del self.target, self.draft
        free_memory()

    def feed(self, prompts: Texts) -> bool:
        """The prompts into the full cache; False where they are there already."""
        wanted = [list(p) for p in prompts]
        if self._fed == wanted:
            return False
        self._fed = []
        _, self.prefill_seconds = timed(self.device, lambda: self.cycle.prefill(wanted))
        self._fed = wanted
        return True

    def _renew_means(self) -> None:
        if self._fed:
            self.cycle.renew_means()

    @contextmanager
    def standing(self, prompts: Texts, new: int) -> Iterator[None]:
        """Inside, the texts begin with ``prompts``, or beginnings of what was fed; rows are then put back."""
        first = min(len(p) for p in prompts) - 1
        reach = max(len(p) for p in prompts) + new + 2 * _behind(self.cycle) - first
        rows = [group.kv[:, :, :, :, first : first + reach] for group in self.cycle.store.groups]
        before = [part.clone() for part in rows]
        try:
            yield
        finally:
            for part, old in zip(rows, before, strict=True):
                part.copy_(old)
            self._renew_means()

    def decode(self, temperature: float, prompts: Texts, new: int, rounds: int | None = None) -> Run:
        """Decode until the first text is complete; ``rounds`` = 0 is plain decoding.

        Where several texts grow at different speeds, those behind are thus no burden to the mean.
        """
        if temperature not in self._warm:
            self._warm.add(temperature)
            self.decode(temperature, prompts, _WARM_UP_TOKENS, 0)
            self.decode(temperature, prompts, _WARM_UP_TOKENS)
        decoder = self._decoder(temperature, rounds)
        self.cycle.rewind(prompts)
        synchronize(self.device)
        run = Run([[] for _ in prompts], levels=decoder.levels)
        for fresh in decoder.decode(prompts, [Ending(new)] * len(prompts)):
            for text, tokens in zip(run.texts, fresh, strict=True):
                text += tokens
            run.stamps.append((decoder.decode_seconds, statistics.fmean(map(len, run.texts))))
            if any(decoder.finish_reasons):
                break
        run.rounds = rounds_per_pass(self.cycle, run.levels)
        return run

    def _decoder(self, temperature: float, rounds: int | None) -> CycleDecoder:
        decoder = CycleDecoder(self.cycle, TokenLaw.at(temperature), self.seed)
        if rounds is not None:
            decoder.controller.fixed = rounds
        return decoder

    def replay(self, prompts: Texts, texts: Texts) -> tuple[float, Exactness]:
        """Plain greedy decoding along ``texts``: (its milliseconds a token, where it would part from them).

        Behind a parting it goes on from the tokens of ``texts``.
        """
        found, seconds, steps = Exactness(), 0.0, 0
        done = [0] * len(texts)
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            heads = [[*p, *t[:d]] for p, t, d in zip(prompts, texts, done, strict=True)]
            decoder = self._decoder(0.0, 0)
            self.cycle.rewind(heads)
            synchronize(self.device)
            parted = [False] * len(texts)
            endings = [Ending(max(1, len(t) - d)) for t, d in zip(texts, done, strict=True)]
            for fresh in decoder.decode(heads, endings):
                steps += 1
                for b, tokens in enumerate(fresh):
                    if done[b] < len(texts[b]) and tokens:
                        parted[b] = tokens[0] != texts[b][done[b]]
                        done[b] += not parted[b]
                if any(parted):
                    break
            seconds += decoder.decode_seconds
            places = [[*p, *t[:d]] for p, t, d in zip(prompts, texts, done, strict=True)]
            for b in range(len(texts)):
                if parted[b]:
                    found.partings.append(self._parting(places, b, texts[b][done[b]]))
                    done[b] += 1
        found.compared = sum(map(len, texts))
        return 1e3 * seconds / steps, found

    @torch.no_grad()
    def _parting(self, places: Texts, b: int, ours: int) -> dict[str, float]:
        """How near text ``b`` was to the token ``ours`` behind ``places[b]``, by logits of plain forwards."""
        width = 1 + self.cycle.reach * (2 if self.cycle.leaves else 1)
        with self.standing([p[: len(p) - width] for p in places], width):
            many = self._forward(places, width, b)[-_NOISE_PLACES:]
            beginnings = [
                [p[: len(p) - back] for p in places] for back in reversed(range(min(width, _NOISE_PLACES)))
            ]
            single = torch.cat([self._forward(texts, 1, b) for texts in beginnings])
        noise = 2 * float((many - single).abs().max())
        return {"gap": float(single[-1].max() - single[-1, ours]), "noise": noise}

    def _forward(self, texts: Texts, width: int, b: int) -> Tensor:
        """Logits ``[width, V]`` of text ``b`` at its last ``width`` tokens, in one forward of all texts."""
        mask = torch.ones(width, width, dtype=torch.bool).tril()
        rows = TreeRows(self.cycle.store, width, mask=mask)
        return last_logits(self.cycle.full, rows, texts, width)[b].float()

    def stage_ms(self, temperature: float, prompts: Texts, rounds: int, passes: int) -> dict[str, float]:
        """Median device milliseconds of one run of each stage, over some passes behind the prompts."""
        cycle = self.cycle
        cycle.prepare(TokenLaw.at(temperature))
        cycle.rewind(prompts)
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        refresh = cycle.config.retrieval.refresh
        one_pass: list[str] = []
        for done in range(rounds):
            one_pass.append("grow")
            if cycle.levels == 3:
                one_pass.append("choose" if done == 0 or (refresh and done % refresh == 0) else "middle")
        one_pass.append("full")
        names = one_pass * passes
        marks = _Marks(self.device)
        for at, name in enumerate(names):
            cycle.run(name, generator)
            marks.add()
            if (at + 1) % len(one_pass) == 0:
                cycle.texts.gathered.zero_()
        found: dict[str, list[float]] = {}
        for name, ms in zip(names, marks.intervals(), strict=True):
            found.setdefault(name, []).append(ms)
        return {name: statistics.median(times) for name, times in found.items()}


class _Marks:
    """Times between marks in the device's stream, in milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.add()

    def add(self) -> None:
        if self._on:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def intervals(self) -> list[float]:
        if self._on:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._times, self._times[1:], strict=False)]


def _behind(cycle: Cycle) -> int:
    """Rows behind a text that one pass may write."""
    return int(cycle.texts.capacity) - cycle.room
