"""The engine's parts as benchmarks and checks use them, so that few files know where they are.

``Bench`` is an inflated pair with one captured program at a time, whose cache is on the device: decode,
compare, time its stages. ``scripts/benchmarks/offload/engine.py`` is the same for a cache in host memory.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from scripts.benchmarks.common.timing import Marks, synchronize, timed
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.verify.sampling import ProbsFromLogits

Prompts = Sequence[Sequence[int]]

# Slots more than the first program needs, so that later ones of other settings fit into the same memory.
_SPARE_SLOTS = 512
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
        failures = len(self.partings) - ties
        return {"compared": self.compared, "ties": ties, "failures": failures, "partings": self.partings}


class Bench:
    """An inflated pair, the program that is open, and the prompts that stand in its full cache.

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
        self._program: DecodingProgram | None = None
        self._fed: list[list[int]] = []
        self.prefill_seconds = 0.0
        self._warm: set[float] = set()

    @property
    def program(self) -> DecodingProgram:
        assert self._program is not None, "no program is open"
        return self._program

    def open(
        self, config: HierarchyConfig, batch: int, max_seq_len: int, temperatures: Sequence[float]
    ) -> None:
        """A program for these settings, captured; what the cache holds stays where the memory serves."""
        levels = levels_of(config)
        old = self._program
        if old is not None and old.batch == batch and old.max_seq_len >= max_seq_len and old.serves(config):
            old.config = config
        else:
            rows = max_seq_len + PassLimits.of(config, levels).scratch_slots
            kept = old.store if old is not None and old.batch == batch and old.store.rows >= rows else None
            self._program = old = None
            free_memory()
            store = kept or self._new_store(batch, rows)
            drafter = drafter_of(self.draft, config, levels)
            self._program = DecodingProgram(
                self.target, drafter, config, batch, max_seq_len, levels, store=store
            )
            longest = max(map(len, self._fed), default=0)
            if kept is None or longest > max_seq_len:
                # The slots are new, or the captures' trial runs will have written into them.
                self._fed = []
            self._warm = set()
        for temperature in temperatures:
            self.program.prepare(ProbsFromLogits.at(temperature))
        self._update_chunk_means()

    def _new_store(self, batch: int, rows: int) -> KVStore:
        """A full cache with room for later settings as well, in whole pages of any chunk."""
        rows = -(-(rows + _SPARE_SLOTS) // _LARGEST_CHUNK) * _LARGEST_CHUNK
        target = self.target
        return KVStore(target.kv_shapes, batch, rows, self.device, target.dtype)

    def close(self) -> None:
        """Give everything back, the models too."""
        self._program, self._fed = None, []
        del self.target, self.draft
        free_memory()

    def feed(self, prompts: Prompts) -> bool:
        """The prompts into the full cache; False where they are there already."""
        wanted = [list(p) for p in prompts]
        if self._fed == wanted:
            return False
        self._fed = []
        _, self.prefill_seconds = timed(self.device, lambda: self.program.prefill(wanted))
        self._fed = wanted
        return True

    def _update_chunk_means(self) -> None:
        if self._fed:
            self.program.update_chunk_means()

    @contextmanager
    def standing(self, prompts: Prompts, new: int) -> Iterator[None]:
        """Inside, texts begin with ``prompts``, beginnings of what was fed; then the cache is put back."""
        scratch_slots = int(self.program.state.capacity) - self.program.max_seq_len
        first = min(len(p) for p in prompts) - 1
        max_draft_tokens = max(len(p) for p in prompts) + new + 2 * scratch_slots - first
        written = [group.kv[..., first : first + max_draft_tokens, :] for group in self.program.store.groups]
        before = [slots.clone() for slots in written]
        try:
            yield
        finally:
            for slots, old in zip(written, before, strict=True):
                slots.copy_(old)
            self._update_chunk_means()

    def decode(self, temperature: float, prompts: Prompts, new: int, rounds: int | None = None) -> Run:
        """Decode until the first text is complete; ``rounds`` = 0 is plain decoding.

        Where several texts grow at different speeds, those behind are thus no burden to the mean.
        """
        if temperature not in self._warm:
            self._warm.add(temperature)
            self.decode(temperature, prompts, _WARM_UP_TOKENS, 0)
            self.decode(temperature, prompts, _WARM_UP_TOKENS)
        decoder = new_decoder(self.program, temperature, self.seed, rounds)
        self.program.rewind(prompts)
        synchronize(self.device)
        run = Run([[] for _ in prompts], levels=decoder.levels)
        for fresh in decoder.decode(prompts, [Ending(new)] * len(prompts)):
            for text, tokens in zip(run.texts, fresh, strict=True):
                text += tokens
            run.stamps.append((decoder.decode_seconds, statistics.fmean(map(len, run.texts))))
            if any(decoder.finish_reasons):
                break
        run.rounds = rounds_per_pass(self.program, run.levels)
        return run

    def replay(self, prompts: Prompts, texts: Prompts) -> tuple[float, Exactness]:
        """Plain greedy decoding along ``texts``: (its milliseconds a token, where it would part from them).

        Behind a parting it goes on from the tokens of ``texts``.
        """
        found, seconds, steps = Exactness(), 0.0, 0
        done = [0] * len(texts)
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            heads = [[*p, *t[:d]] for p, t, d in zip(prompts, texts, done, strict=True)]
            decoder = new_decoder(self.program, 0.0, self.seed, 0)
            self.program.rewind(heads)
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
    def _parting(self, places: Prompts, b: int, ours: int) -> dict[str, float]:
        """How near text ``b`` was to the token ``ours`` behind ``places[b]``, by logits of plain forwards."""
        width = 1 + self.program.max_draft_tokens * (2 if self.program.runner_ups else 1)
        with self.standing([p[: len(p) - width] for p in places], width):
            many = self._forward(places, width, b)[-_NOISE_PLACES:]
            beginnings = [
                [p[: len(p) - back] for p in places] for back in reversed(range(min(width, _NOISE_PLACES)))
            ]
            single = torch.cat([self._forward(texts, 1, b) for texts in beginnings])
        noise = 2 * float((many - single).abs().max())
        return {"gap": float(single[-1].max() - single[-1, ours]), "noise": noise}

    def _forward(self, texts: Prompts, width: int, b: int) -> Tensor:
        """Logits ``[width, V]`` of text ``b`` at its last ``width`` tokens, in one forward of all texts."""
        mask = torch.ones(width, width, dtype=torch.bool).tril()
        rows = TreeAttentionView(self.program.store, width, mask=mask)
        return last_logits(self.program.full, rows, texts, width)[b].float()

    def stage_ms(self, temperature: float, prompts: Prompts, rounds: int, passes: int) -> dict[str, float]:
        """Median device milliseconds of one run of each stage, over some passes behind the prompts."""
        program = self.program
        program.prepare(ProbsFromLogits.at(temperature))
        program.rewind(prompts)
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        one_pass: list[str] = []
        for done in range(rounds):
            one_pass.append("draft")
            if program.levels == 3:
                one_pass.append(
                    "retrieval_refresh" if program.config.retrieval.chooses(done) else "retrieval"
                )
        one_pass.append("target")
        names = one_pass * passes
        marks = Marks(self.device)
        for at, name in enumerate(names):
            program.run(name, generator)
            marks.add()
            if (at + 1) % len(one_pass) == 0:
                program.state.retrieval_emitted.zero_()
        found: dict[str, list[float]] = {}
        for name, ms in zip(names, marks.intervals(), strict=True):
            found.setdefault(name, []).append(ms)
        return {name: statistics.median(times) for name, times in found.items()}


def levels_of(config: HierarchyConfig) -> int:
    return config.levels if isinstance(config.levels, int) else 3


def drafter_of(draft: HFModel, config: HierarchyConfig, levels: int) -> TreeDrafter | None:
    """The draft model as level 0 under these settings; None where there is no level 0."""
    return TreeDrafter(draft, config) if levels > 1 else None


def new_decoder(
    program: DecodingProgram, temperature: float, seed: int, rounds: int | None = None
) -> Decoder:
    """For one text or batch; ``rounds`` = 0 is plain decoding, None leaves them to the acceptance."""
    decoder = Decoder(program, ProbsFromLogits.at(temperature), seed)
    if rounds is not None:
        decoder.controller.fixed = rounds
    return decoder


def rounds_per_pass(program: DecodingProgram, levels: Sequence[LevelStats]) -> float:
    """Trees that level 0 grew for each pass of level 2; 0 after plain decoding."""
    if program.drafter is None:
        return 0.0
    depth = PassLimits.of(program.config, program.levels).depth
    return levels[0].forwards / depth / levels[-1].forwards


def last_logits(model: StepModel, rows: TreeAttentionView, texts: Prompts, width: int) -> Tensor:
    """``[B, width, V]`` at the last ``width`` tokens of each text, in one forward.

    Args:
        model: the full target.
        rows: for ``width`` new slots, each of which sees those before it; all slots before them are filled.
        texts: as long as what is fed, the last tokens included.
    """
    starts = torch.tensor([len(text) - width for text in texts], device=model.device)
    rows.begin(starts)
    tokens = torch.tensor([list(text[-width:]) for text in texts], device=model.device)
    positions = starts[:, None] + torch.arange(width, device=model.device)
    return model(tokens, positions, rows)


def weight_bytes(model: PreTrainedModel) -> int:
    """What one forward reads of a model: all but an input embedding that is not the head as well."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    read = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    if head.weight is not embedding.weight:
        read.pop(id(embedding.weight), None)
    return sum(t.numel() * t.element_size() for t in read.values())


def roofs_ms(program: DecodingProgram, lengths: Sequence[int], bandwidth: float) -> dict[str, float]:
    """The least milliseconds a run of each stage can take: the bytes it must read over the bandwidth.

    Args:
        lengths: tokens of each text.
        bandwidth: bytes a second, measured in the same run.
    """

    def slot(store: KVStore) -> int:
        """K and V of one token in all layers."""
        heads = [group.shape.heads for group in store.groups for _ in group.layers]
        return sum(2 * h.kv * h.dim * store.dtype.itemsize for h in heads)

    row = slot(program.store)
    full = weight_bytes(program.full.model) + sum(lengths) * row
    needed = {"plain": full, "target": full}
    growth = program.drafter
    if isinstance(growth, TreeDrafter):
        window = program.batch * (growth.config.sinks + growth.config.window) * slot(growth.store)
        needed["draft"] = growth.depth * (weight_bytes(growth.model.model) + window)
    if program.retrieval_view is not None:
        config = program.retrieval_view.config
        seen = sum(min(config.budget, length) for length in lengths)
        needed["retrieval"] = weight_bytes(program.retrieval_model.model) + seen * row
        # The chunks are chosen by the means of their keys: half a row a chunk.
        needed["retrieval_refresh"] = (
            needed["retrieval"] + sum(length // config.chunk for length in lengths) * row // 2
        )
    return {name: 1e3 * size / bandwidth for name, size in needed.items()}
