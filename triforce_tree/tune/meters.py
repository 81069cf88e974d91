"""Times generations under given settings, or compares levels; the text is prefilled once for all of them.

The target's KV slots of the text are kept. Every generation starts at some position of it, and the slots that
it overwrites are restored.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.assembly import Hierarchy
from triforce_tree.decoding.choice.passes import StageSeconds
from triforce_tree.decoding.choice.stage_costs import measure, measure_shape
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.eval.overlap import LevelProbs, forced_passes
from triforce_tree.kv.prefill import chunk_tokens, prefill
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import LevelStats, Progress
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits
from triforce_tree.tune.fitted import DRAFT
from triforce_tree.verify.sampling import ProbsFromLogits

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Sample:
    """One timed generation.

    Attributes:
        draft_length: final acceptance and draft tokens per round; empty for the target alone.
        alone_ms: time per token of the target alone, just before and after, on a CPU, whose load by other
            programs may change.
    """

    ms_per_token: float
    tokens: list[int]
    levels: list[LevelStats]
    draft_length: dict[str, float] = field(default_factory=dict)
    alone_ms: float | None = None


class Meter:
    """Times generations; buffers and graphs are made anew where a setting is built into them.

    Args:
        hierarchy: models.
        tokens: the text, which is prefilled here.
        new: most new tokens of a generation.
        most: the largest trees and chains.
        progress: of prefill.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        tokens: Sequence[int],
        new: int,
        most: PassLimits,
        progress: Progress | None = None,
    ) -> None:
        self._hierarchy, self._tokens = hierarchy, list(tokens)
        self._shared = hierarchy.target.device.type != "cuda"
        self._program: DecodingProgram | None = None
        self._alone: DecodingProgram | None = None
        self._warm: set[bool] = set()
        # The last pass may emit more tokens than were asked for, and all of them are counted.
        self._beyond = most.max_draft_tokens + most.depth + 2
        self._max_seq_len = len(tokens) + new + self._beyond
        target, config = hierarchy.target, hierarchy.config
        page = math.lcm(64, config.retrieval.chunk)
        slots = -(-(self._max_seq_len + most.scratch_slots) // page) * page
        chunk = chunk_tokens(config.prefill_chunk, target.device)
        with hierarchy.active():
            self._store = KVStore(
                target.kv_layers, 1, slots, target.device, target.dtype, bits=config.kv_bits
            )
            prefill(target, self._store, 0, self._tokens[:-1], chunk, progress)

    def run(self, config: HierarchyConfig, position: int, temperature: float, new: int, seed: int) -> Sample:
        """Decode at least ``new`` tokens after the first ``position`` tokens of the text.

        With ``levels="auto"`` there are three, which passes of two may replace.
        """
        to_probs = ProbsFromLogits.at(temperature)
        with self._hierarchy.active():
            program = self._open(config)
            try:
                with self._restoring(program, position, new):
                    if to_probs.greedy not in self._warm:
                        self._decode(program, to_probs, position, _WARM_UP_TOKENS, seed)
                        self._warm.add(to_probs.greedy)
                    before = self._alone_ms(position)
                    sample = self._decode(program, to_probs, position, new, seed)
                    after = self._alone_ms(position)
            except torch.OutOfMemoryError:
                self._program = None
                raise
        return sample if before is None or after is None else replace(sample, alone_ms=(before + after) / 2)

    def stages(self, config: HierarchyConfig, temperature: float) -> dict[str, list[tuple[int, float]]]:
        """Seconds of stages after the whole text, in passes with trees of each of the settings' shapes.

        Returns:
            (tokens of the pass, seconds) of ``target`` and ``retrieval``, where there are such, and of
            ``draft`` for one depth; by ascending tokens.
        """
        shapes, costs = self._costs(config, temperature)
        found: dict[str, list[tuple[int, float]]] = {DRAFT: [], "target": [], "retrieval": []}
        for shape, at in zip(shapes, costs, strict=True):
            each = {DRAFT: at.draft / len(shape.widths), "target": at.tree, "retrieval": at.retrieval}
            for name, seconds in each.items():
                found[name] += [(shape.nodes, seconds)] if seconds < math.inf else []
        return {name: sorted(points) for name, points in found.items() if points}

    def stage_seconds(self, config: HierarchyConfig, temperature: float) -> StageSeconds:
        """Of each stage after the whole text, with trees of the settings' own shape."""
        return self._costs(config, temperature)[1][0]

    def _costs(
        self, config: HierarchyConfig, temperature: float
    ) -> tuple[list[DeviceTreeShape], list[StageSeconds]]:
        """The settings' shapes of trees, and for each the seconds after the whole text."""
        with self._hierarchy.active():
            try:
                program = self._open(config)
                program.prepare(ProbsFromLogits.at(temperature))
                longest, refresh = program.max_seq_len - 1, config.retrieval.refresh
                first = measure(program, longest, refresh)
                others = range(1, len(program.shapes))
                costs = [first, *(measure_shape(program, shape, first, refresh) for shape in others)]
            except torch.OutOfMemoryError:
                self._program = None
                raise
        return program.shapes, [of.at(len(self._tokens)) for of in costs]

    def probs(
        self, config: HierarchyConfig, position: int, new: int, temperature: float
    ) -> Iterator[LevelProbs]:
        """Distributions of level 1 and of the target along the text itself, without the drafter's.

        Args:
            config: of three levels.
            position: how many tokens of the text come first.
            new: how many that follow are given to both levels, pass by pass.
        """
        with self._hierarchy.active():
            program = self._open(config)
            with self._restoring(program, position, new):
                program.update_chunk_means()
                program.rewind([self._tokens[:position]])
                text = self._tokens[: position + new]
                yield from forced_passes(program, text, position, ProbsFromLogits.at(temperature))

    def _alone_ms(self, position: int) -> float | None:
        """Milliseconds per token of the target alone; None on a GPU, which no other program shares."""
        if not self._shared:
            return None
        if self._alone is None:
            plain = replace(self._hierarchy.config, levels=1)
            self._alone = DecodingProgram(
                self._hierarchy.target, None, plain, 1, self._max_seq_len, 1, store=self._store
            )
        return self._decode(
            self._alone, ProbsFromLogits(greedy=True), position, _WARM_UP_TOKENS, 0
        ).ms_per_token

    def _decode(
        self, program: DecodingProgram, to_probs: ProbsFromLogits, position: int, new: int, seed: int
    ) -> Sample:
        prompt = self._tokens[:position]
        decoder = Decoder(program, to_probs, seed)
        # As prefill left them: captures and earlier generations wrote after their positions.
        program.update_chunk_means()
        program.rewind([prompt])
        if program.device.type == "cuda":
            torch.cuda.synchronize(program.device)
        blocks = (block for [block] in decoder.decode([prompt], [Ending(new + self._beyond)]))
        sample = _timed(decoder, blocks, new)
        if program.levels == 1:
            return sample
        controller = decoder.controller
        estimates = {
            "acceptance": controller.acceptance,
            "tokens_per_round": controller.tokens_per_round,
        }
        return replace(sample, draft_length=estimates)

    def _open(self, config: HierarchyConfig) -> DecodingProgram:
        old = self._program
        if old is not None and old.serves(config):
            old.config = config
            return old
        self._program = old = None
        self._warm = set()
        free_memory()
        levels = config.levels if isinstance(config.levels, int) else 3
        hierarchy = self._hierarchy.with_config(config)
        drafter = hierarchy.drafter() if levels > 1 else None
        self._program = DecodingProgram(
            hierarchy.target, drafter, hierarchy.config, 1, self._max_seq_len, levels, store=self._store
        )
        return self._program

    @contextmanager
    def _restoring(self, program: DecodingProgram, position: int, new: int) -> Iterator[None]:
        """KV slots of the text from its token ``position`` on are restored on exit."""
        written = max(new, _WARM_UP_TOKENS) + self._beyond + int(program.state.capacity) - program.max_seq_len
        stop = min(len(self._tokens), position + written)
        slots = [t[..., position - 1 : stop, :] for group in self._store.groups for t in group.parts]
        before = [part.clone() for part in slots]
        try:
            yield
        finally:
            for part, old in zip(slots, before, strict=True):
                part.copy_(old)

    def close(self) -> None:
        """Free the memory."""
        self._program = self._alone = None
        del self._store
        free_memory()


def _timed(decoder: Decoder, blocks: Iterable[list[int]], new: int) -> Sample:
    tokens: list[int] = []
    for block in blocks:
        tokens += block
        if len(tokens) >= new:
            break
    return Sample(1e3 * decoder.decode_seconds / len(tokens), tokens, decoder.levels)
