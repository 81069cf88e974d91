"""From measurements to profile entries, one for each context length and temperature.

A measurement is one generation from one position of the text. Each is written to a results file as it is made
and is not repeated, so that an interrupted search continues.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from triforce_tree.engine import Engine
from triforce_tree.eval import overlap
from triforce_tree.eval.results import Record, Records, repeated_share
from triforce_tree.models.few_row import why_not_replaceable
from triforce_tree.planning.device_defaults import bytes_read, device_defaults, gains_from_few_bits
from triforce_tree.planning.profiles import Entry
from triforce_tree.trees.shapes import with_chain
from triforce_tree.tune.fitted import MOST_DEPTH, RANKS, fitted_trees
from triforce_tree.tune.meters import Meter
from triforce_tree.tune.plan import Plan, Watch
from triforce_tree.tune.search import Options, OutOfTime, Space, relevant, search

# A setting this many times slower than the best one at one position of the text is not tried at others.
_CLEARLY_WORSE = 1.15
# Drafting must be at least this much faster than the target alone to be chosen.
LEAST_SPEEDUP = 1.05
# Speeds of the target alone that differ by less do not show a change of the machine's load.
_USUAL = 0.1
# Acceptance by sibling rank hardly depends on the context's length.
_ACCEPTANCE_CONTEXT = 8192
_Cell = tuple[int, float]


class Tuner:
    """Finds profile entries.

    Args:
        engine: models, and the settings to begin from.
        tokens: a text at least as long as the longest context.
        plan: what to measure.
        records: earlier measurements, and where new ones are added.
        watch: callbacks.

    Raises:
        ValueError: the engine keeps its full cache in host memory, or its target has recurrent layers.
    """

    def __init__(
        self, engine: Engine, tokens: Sequence[int], plan: Plan, records: Records, watch: Watch | None = None
    ) -> None:
        self.engine, self.tokens, self.plan, self.records = engine, list(tokens), plan, records
        self.watch = watch or Watch()
        self.hierarchy = engine.hierarchy
        config = self.hierarchy.config
        if self.hierarchy.target.states is not None:
            raise ValueError(
                f"{self.hierarchy.target.name} has recurrent layers, so that only two levels and chains are "
                "possible: there is nothing to tune, and decoding chooses when to draft by itself"
            )
        if config.offloads:
            raise ValueError(
                f"the full cache must be on the device, but offload={config.offload!r}, "
                f"gpu_memory={config.gpu_memory!r}, host_memory={config.host_memory!r} and "
                f"offload_weights={config.offload_weights!r}; leave them out, or choose shorter contexts"
            )
        self.complete = True
        """Whether every search was completed."""
        self._meter: Meter | None = None
        self._reading: int | None = None

    @property
    def _impossible(self) -> frozenset[str]:
        """Options that these models do not take."""
        replaceable = why_not_replaceable(self.hierarchy.target.model) is None
        return frozenset() if replaceable else frozenset({"retrieval_weight_bits"})

    def space(self, context: int) -> Space:
        """What is searched for prompts of this length, from the settings that they have without a profile."""
        hierarchy, fixed = self.hierarchy, self.plan.fixed
        own, gpu = hierarchy.config, hierarchy.target.device.type == "cuda"
        draft = hierarchy.draft is not None
        if draft:
            # As they were given, without what the hierarchy makes of them.
            others = own.other_trees if own.other_trees or "other_trees" in fixed else None
            own = replace(own, tree=with_chain(own.tree, 0), other_trees=others)
        read = partial(bytes_read, hierarchy.target, hierarchy.draft, own)
        config = device_defaults(own, fixed, gpu, context, hierarchy.target.heads.group, draft, read=read)
        if config.retrieval_weight_bits == "auto":
            # The fastest that is measured, from those that "auto" takes where memory is to spare.
            fixed -= {"retrieval_weight_bits"}
            if gains_from_few_bits(hierarchy.target):
                config = replace(config, retrieval_weight_bits=8)
        return Space(
            hierarchy.with_config(config).config,
            context,
            gpu=gpu,
            draft=draft,
            fixed=fixed | self._impossible,
            grid=self.plan.grid,
        )

    def entries(self, found: Callable[[Entry], None]) -> list[Entry]:
        """All entries that time allows, each passed to ``found`` when it is made.

        However short the time is, the first entry has measurements of the target alone and of the first
        settings. Time that one entry does not need goes to those that had too little.
        """
        begun = time.perf_counter()
        done: dict[_Cell, Entry] = {}
        starts: dict[_Cell, list[Options] | None] = {}
        waiting = [(c, t) for c in self.plan.contexts for t in self.plan.temperatures]
        try:
            while waiting:
                unfinished = []
                best: list[Options] | None = None
                for number, cell in enumerate(waiting):
                    if number and cell[0] != waiting[number - 1][0]:
                        best = None
                    self._end: float | None = None
                    if self.plan.seconds is not None:
                        now = time.perf_counter()
                        self._end = now + (begun + self.plan.seconds - now) / (len(waiting) - number)
                    self._must = not done
                    try:
                        # The same starting points as before, so that their measurements are used again.
                        entry, best, finished = self._entry(*cell, starts.setdefault(cell, best))
                    except OutOfTime:
                        unfinished.append(cell)
                        continue
                    if not finished:
                        unfinished.append(cell)
                    done[cell] = entry
                    found(entry)
                waiting = unfinished
                if self._end is None or not self.watch.wanted() or self._late():
                    break
        finally:
            self._close()
        self.complete = not waiting
        return list(done.values())

    def _entry(
        self, context: int, temperature: float, starts: list[Options] | None
    ) -> tuple[Entry, list[Options], bool]:
        """The entry, the best options for each number of levels, and whether the search was completed."""
        space = self.space(context)
        self._cell: Record = {"context": context, "temperature": temperature}
        plain: Options = {"levels": 1}
        plain_ms = self._measure(plain)
        found = starts or space.starts()
        self._measure(found[0])
        # There are two settings to choose from now; from here on the time limit applies.
        self._must, finished = False, False
        acceptance: dict[str, list[float]] = {}
        try:
            measured = self._acceptance()
            acceptance = measured.get("acceptance", {})
            fitted = self._fitted(space, found[0], measured.get("by_depth", {}))
            found, finished = search(self._measure, found, space.coordinates(fitted), space.allows)
        except OutOfTime:
            pass
        return self._made(space, found[0], plain, plain_ms, acceptance), found, finished

    def _made(
        self,
        space: Space,
        best: Options,
        plain: Options,
        plain_ms: float,
        acceptance: dict[str, list[float]],
    ) -> Entry:
        ms = self._median(best, "ms_per_token")
        if ms * LEAST_SPEEDUP > plain_ms:
            best, ms = plain, plain_ms
        records = self._found(best)
        names = records[0]["step_ms"].keys()

        def medians(name: str, keys: Sequence[str]) -> dict[str, float]:
            return {
                key: round(statistics.median(r[name][key] for r in records if key in r[name]), 4)
                for key in keys
            }

        return Entry(
            **self._cell,
            options=space.complete(best),
            ms_per_token=round(ms, 4),
            plain_ms_per_token=round(plain_ms, 4),
            step_ms=medians("step_ms", list(names)),
            tokens_per_pass=medians("tokens_per_pass", list(records[0]["tokens_per_pass"])),
            acceptance=acceptance,
            draft_length=medians("draft_length", list(records[0]["draft_length"])),
            repeated_8grams=round(statistics.median(r["repeated_8grams"] for r in records), 4),
        )

    def _measure(self, options: Options, against: Options | None = None) -> float:
        """Median milliseconds per token; infinite if memory is short, or clearly worse than ``against``."""
        times: list[float] = []
        for number in range(self.plan.places):
            if times and self._must and self._late():
                break
            record = self._sample(options, number)
            if record is None:
                return float("inf")
            times.append(record["ms_per_token"])
            other = (self._recorded(against, number) or {}) if against is not None else {}
            if times[-1] > _CLEARLY_WORSE * other.get("ms_per_token", float("inf")):
                return float("inf")
        return statistics.median(times)

    def _sample(self, options: Options, number: int) -> Record | None:
        """One measurement, made now or earlier; None if memory is short."""
        record = self._recorded(options, number)
        if record is None:
            if not self.watch.wanted() or (self._late() and not self._must):
                raise OutOfTime
            self.watch.says(f"{self._cell['context']:,} tokens, T={self._cell['temperature']:g}")
            record = self._key(options, number) | self._measured(options, number)
            self.records.add(record)
            self.watch.measured(record)
        return None if "error" in record else record

    def _late(self) -> bool:
        return self._end is not None and time.perf_counter() > self._end

    def _measured(self, options: Options, number: int) -> Record:
        plan, context, temperature = self.plan, self._cell["context"], self._cell["temperature"]
        config = self.engine.with_options(**self.space(context).measured(options)).hierarchy.config
        place = plan.starts(context)[number]
        try:
            meter = self._reader(context)
            sample = meter.run(config, place, temperature, plan.new_tokens, plan.seed + number)
        except torch.OutOfMemoryError as error:
            if options["levels"] == 1:
                raise
            return {"error": str(error)[:200]}
        levels = [level for level in sample.levels if level.forwards]
        return {
            "ms_per_token": sample.ms_per_token * self._load_correction(sample.alone_ms),
            "alone_ms": sample.alone_ms,
            "step_ms": {level.name: 1e3 * level.seconds / level.forwards for level in levels},
            "tokens_per_pass": {level.name: level.mean_accepted_length for level in levels if level.proposed},
            "draft_length": sample.draft_length,
            "repeated_8grams": repeated_share(sample.tokens),
        }

    def _load_correction(self, alone_ms: float | None) -> float:
        """The factor from a measured time to that under the load of this context's first measurement."""
        context = self._cell["context"]
        first = next((r for r in self.records.all if r.get("alone_ms") and r["context"] == context), None)
        if first is None or alone_ms is None:
            return 1.0
        factor = float(first["alone_ms"]) / alone_ms
        return 1.0 if abs(factor - 1) < _USUAL else factor

    def _reader(self, context: int) -> Meter:
        """The meter for this context; any other is closed first, since each holds the whole text."""
        if self._meter is None or self._reading != context:
            self._close()
            tokens, progress = self.tokens[:context], self.watch.reading(context - 1)
            most = self.space(context).extent()
            self._meter = Meter(self.hierarchy, tokens, self.plan.new_tokens, most, progress)
            self._reading = context
        return self._meter

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = self._reading = None

    def _acceptance(self) -> Record:
        """Acceptance by sibling rank, and of the draft by depth too; empty without a draft model, or where
        ``tree`` is not varied."""
        temperature, draft = self._cell["temperature"], self.hierarchy.draft
        if draft is None or "tree" in self.plan.fixed:
            return {}
        return self._once("acceptance by depth", lambda: self._accepted(self._cell["context"], temperature))

    def _fitted(self, space: Space, options: Options, by_depth: dict[str, list[list[float]]]) -> list[str]:
        """The best trees for the acceptance by depth and rank, and for the times of the stages."""
        config = space.probes(options) if by_depth else None
        if config is None:
            return []
        config = self.hierarchy.with_config(config).config  # with what stands beside each tree
        stages = self._once(
            "stages", lambda: self._reader(space.context).stages(config, self._cell["temperature"])
        )
        return fitted_trees(by_depth, stages, 1 + config.matched_tokens(True)) if stages else []

    def _once(self, what: str, measure: Callable[[], Record]) -> Record:
        """What was measured now or earlier; empty if memory is short."""
        record = self.records.find(**self._cell, measured=what)
        if record is None:
            if not self.watch.wanted() or self._late():
                raise OutOfTime
            self.watch.says(f"{self._cell['context']:,} tokens, T={self._cell['temperature']:g}: {what}")
            found: Record = {}
            try:
                found = measure()
            except torch.OutOfMemoryError:
                self.watch.says(f"too little memory to measure {what}")
            record = self._cell | {"measured": what, "found": found}
            self.records.add(record)
        measured: Record = record["found"]
        return measured

    def _accepted(self, context: int, temperature: float) -> Record:
        new = min(self.plan.new_tokens, context // 2)
        tokens = self.tokens[max(0, context - _ACCEPTANCE_CONTEXT - new) : context]
        steps = []
        for step in overlap.teacher_forced(
            self.engine, tokens, len(tokens) - new, temperature or 1.0, seed=self.plan.seed
        ):
            if not self.watch.wanted():
                raise OutOfTime
            steps.append(step)
        greedy, seed = temperature == 0, self.plan.seed
        return {
            "acceptance": overlap.acceptance_by_rank(steps, RANKS, greedy, seed),
            "by_depth": overlap.acceptance_by_depth(steps, RANKS, MOST_DEPTH, greedy, seed),
        }

    def _key(self, options: Options, number: int) -> Record:
        return self._cell | {"measured": "speed", "options": relevant(options), "place": number}

    def _recorded(self, options: Options, number: int) -> Record | None:
        return self.records.find(**self._key(options, number))

    def _found(self, options: Options) -> list[Record]:
        every = (self._recorded(options, number) for number in range(self.plan.places))
        return [record for record in every if record is not None and "error" not in record]

    def _median(self, options: Options, name: str) -> float:
        found = [record[name] for record in self._found(options)]
        return statistics.median(found) if found else float("inf")
