"""One shape on a grid of texts, contexts and temperatures: our engine and plain decoding, in one process.

Each text is prefilled once for its longest context; shorter contexts are beginnings of it, and every
temperature and plain decoding start again from the same keys and values. (Prompts that copy passages are
made for one length, and are prefilled at each.) Programs and settings are those that ``Engine.generate``
would take for the prompt; what earlier requests taught the engine is forgotten before each measurement.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedModel

import triforce_tree
from scripts.benchmarks.common.results import OURS, PLAIN, STATIC, Record, ResultsFile
from scripts.benchmarks.common.timing import synchronize, timed
from scripts.benchmarks.sources.registry import Texts, TextSource, prompts
from scripts.benchmarks.texts.positions import Positions
from scripts.benchmarks.texts.transformers_static import static_decoding
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine
from triforce_tree.bench.results import repeated_share
from triforce_tree.bench.texts import token_ids
from triforce_tree.config import load_arguments
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.memory_size import bytes_of
from triforce_tree.models.few_row import low_bit_copy
from triforce_tree.planning.machine import bound_memory
from triforce_tree.runtime.executor import free_memory
from triforce_tree.verify.sampling import ProbsFromLogits

# Tokens decoded before anything is timed, with drafts and without: kernels are compiled then.
_WARM_UP, _PLAIN_WARM_UP = 8, 2


@dataclass(frozen=True)
class Grid:
    """Lists what is measured of one shape.

    Attributes:
        shape, draft_shape: what the embedded pair is inflated to; with a ``shape`` of None it stays as it is.
        sources: the texts.
        contexts: prompt tokens.
        seeds: of sampled texts; greedy ones have the first one.
        new_tokens, plain_tokens: of each text with drafts and without.
        pairs: runs with each seed, each beside one of plain decoding, first one and then the other ahead, so
            that what else the machine does meets both alike; 0: plain decoding is measured once.
        options: of the engine, where they are not its defaults.
        bits: of the target's linear layers and experts; 8 or 4 round them by our own format.
        bin_tokens: new tokens of a bin of :class:`Positions`; plain decoding then continues our texts in the
            middle of each bin. 0: figures of whole texts alone.
    """

    shape: str | None
    draft_shape: str
    sources: tuple[TextSource, ...]
    contexts: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    seeds: tuple[int, ...] = (0, 1)
    new_tokens: int = 128
    plain_tokens: int = 48
    pairs: int = 0
    options: Record = field(default_factory=dict)
    bits: int = 16
    bin_tokens: int = 0

    @property
    def offloads(self) -> bool:
        """Returns whether a part of the cache may be in host memory, where transformers' static cache cannot
        be.
        """
        return bool(self.options.keys() & {"offload", "gpu_memory"})

    def keys(self, source: TextSource, context: int, temperature: float, static: bool) -> list[Record]:
        """Returns the measurements of a cell in their order: ours by seed, then plain decoding, or pairs of
        both.
        """
        place = {
            "text": source.name, "kind": source.kind, "context": context, "temperature": temperature,
        }  # fmt: skip
        seeds = self.seeds if temperature > 0 else self.seeds[:1]
        ours = [{"method": OURS, **place, "seed": seed, "new_tokens": self.new_tokens} for seed in seeds]
        plain = {**place, "seed": self.seeds[0], "new_tokens": self.plain_tokens}
        if size := self.bin_tokens:
            # From the end: each place is then a beginning of what the cache holds.
            places = [first + size // 2 for first in reversed(range(0, self.new_tokens, size))]
            beside = [{"method": PLAIN, **plain, "after": after} for after in places]
            return [
                key for own in ours
                for key in (own | {"bin": size}, *(each | {"seed": own["seed"]} for each in beside))
            ]  # fmt: skip
        compared = [{"method": STATIC, **plain}] if static and temperature == 0 else []
        if not self.pairs:
            return [*ours, {"method": PLAIN, **plain}, *compared]
        made: list[Record] = []
        for own in ours:
            for run in range(self.pairs):
                pair = [own | {"run": run}, {"method": PLAIN, **plain, "seed": own["seed"], "run": run}]
                made += pair if run % 2 == 0 else pair[::-1]
                made += [key | {"seed": own["seed"], "run": run} for key in compared]
        return made

    def engine(self, device: torch.device, seed: int) -> Engine:
        """Returns an engine of the embedded pair, in bf16 on a GPU, else fp32; ``seed`` is that of weights
        without effect.
        """
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if self.shape is None:
            return triforce_tree.load(device=device, dtype=dtype, **load_arguments(self.options))
        # Of the last shape: models are inflated on the device as a whole.
        bound_memory(device, 1 << 62)
        target, draft, tokenizer = inflate_pair(self.shape, device, dtype, self.draft_shape, seed)
        model: PreTrainedModel = target if self.bits == 16 else low_bit_copy(target, self.bits)
        del target
        engine = triforce_tree.load(model, draft, tokenizer=tokenizer, **load_arguments(self.options))
        if "gpu_memory" in self.options:
            free_memory()
            bound_memory(device, bytes_of(self.options["gpu_memory"], "gpu_memory"))
        return engine


def continued(
    program: DecodingProgram,
    prompt: list[int],
    temperature: float,
    seed: int,
    new: int,
    rounds: int | None,
    watched: Positions | None = None,
) -> tuple[list[int], DecodingLoop]:
    """Returns the tokens after a prompt that the cache holds, and the loop that made them, which has learnt
    nothing before. ``rounds`` 0 is plain decoding.
    """
    program.learnt.clear()
    loop, text = (
        DecodingLoop.over(program, ProbsFromLogits.at(temperature), seed),
        Sequence(prompt, Ending(new)),
    )
    if rounds is not None:
        loop.policy.fixed = rounds
    loop.begin([text], cached=True)
    synchronize(program.device)
    for _ in loop.decode():
        if watched is not None:
            watched.watch(loop, len(text.new), text.finish_reason is not None)
    return text.new, loop


class TimeLimit:
    """Ends a run in time: whether the longest step so far would still fit.

    Args:
        seconds: from now on; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._start, self._seconds, self._longest = time.perf_counter(), seconds, 0.0
        self._step = self._start

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def reached(self) -> bool:
        """Called before each step."""
        now = time.perf_counter()
        self._longest, self._step = max(self._longest, now - self._step), now
        return self._seconds is not None and self.elapsed + self._longest > self._seconds

    def say(self, text: str) -> None:
        """Prints what is being measured, with the time since the beginning."""
        print(f"[{self.elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


class GridRun:
    """Measures what a grid lacks.

    Args:
        grid: of one shape.
        file: what is measured already, and where measurements go.
        texts: where the texts are read from.
        device: of the models; bf16 on a GPU, else fp32.
        limit: ends the run.
        seed: of the weights without effect.
        new_engine: makes the engine, where it is not that of the embedded pair.
    """

    def __init__(
        self,
        grid: Grid,
        file: ResultsFile,
        texts: Texts,
        device: torch.device,
        limit: TimeLimit,
        seed: int,
        new_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self.grid, self.file, self.device, self.limit = grid, file, device, limit
        self._texts, self._seed = texts, seed
        self._engine = new_engine or partial(grid.engine, device, seed)
        self._program: DecodingProgram | None = None
        self._fed: list[int] = []
        self._prefill_seconds = 0.0
        self._warm: set[tuple[int, float]] = set()
        self._ids: tuple[str, list[int]] = ("", [])

    def measure(self) -> bool:
        """Measures what is missing, as far as the time goes; whether it was all."""
        static = self.device.type == "cpu" and not self.grid.offloads
        contexts = sorted(self.grid.contexts, reverse=True)
        cells = [(source, context) for source in self.grid.sources for context in contexts]
        missing = [
            (source, context)
            for source, context in cells
            if any(
                self.file.find(**key) is None
                for t in self.grid.temperatures
                for key in self.grid.keys(source, context, t, static)
            )
        ]
        if not missing:
            return True
        if self.limit.reached():
            return False
        self.limit.say(f"{self.file.mine['settings']['model']}: loading ...")
        engine = self._engine()
        # Prompts of as many levels are measured together, since they share a program, which takes long to
        # capture. Prompts of fewer levels come first, because the program of more levels serves them too.
        levels = {context: engine.levels(context) for context in contexts}
        missing.sort(key=lambda cell: levels[cell[1]])
        try:
            return all(self._text(engine, source, context, static) for source, context in missing)
        finally:
            self._program = None
            engine.close()
            del engine
            free_memory()

    def _text(self, engine: Engine, source: TextSource, context: int, static: bool) -> bool:
        """Measures one text at one context; returns False if the time is up."""
        if self._ids[0] != source.name:
            self._ids = source.name, token_ids(engine.tokenizer, self._texts.read(source))
        try:
            [prompt] = prompts(source, self._ids[1], context)
        except ValueError as error:
            self.limit.say(str(error))
            self.file.note(str(error))
            return True
        for temperature in self.grid.temperatures:
            to_probs = ProbsFromLogits.at(temperature)
            for key in self.grid.keys(source, context, temperature, static):
                if self.file.find(**key) is not None:
                    continue
                if self.limit.reached():
                    return False
                text = [*prompt, *self._written(key)]
                with engine.program([prompt], self.grid.new_tokens, to_probs) as program:
                    self._feed(program, text)
                    self._sample(engine, program, text, key)
        return True

    def _written(self, key: Record) -> list[int]:
        """Returns our tokens that come between the prompt and the place of a measurement."""
        if (after := key.get("after")) is None:
            return []
        place = {name: key[name] for name in ("text", "context", "temperature", "seed")}
        own = self.file.find(method=OURS, **place)
        assert own is not None, "our text is measured first"
        tokens: list[int] = own["tokens"][:after]
        return tokens

    def _feed(self, program: DecodingProgram, prompt: list[int]) -> None:
        """Prefills the prompt if the cache does not hold it."""
        held = self._program is program and self._fed[: len(prompt)] == prompt
        if held and program.state.features is not None:
            # Hidden states for the drafter are kept of the newest positions alone.
            program.prefill([prompt], reuse="all")
        elif held:
            program.rewind([prompt])
            # Passes after a longer prompt have gone into the mean of the chunk that this one ends in.
            program.cache.means.update_all()
        else:
            if self._program is not program:
                self._warm.clear()
            self._program, self._fed = program, []
            _, self._prefill_seconds = timed(self.device, lambda: program.prefill([prompt]))
            self.limit.say(f"prefill of {len(prompt):,} tokens {self._prefill_seconds:.2f} s")
        # What follows the prompt is about to be overwritten.
        self._fed = list(prompt)

    def _sample(self, engine: Engine, program: DecodingProgram, prompt: list[int], key: Record) -> None:
        if key["method"] == STATIC:
            target = engine.target
            ms = static_decoding(target, program.store, [prompt], key["new_tokens"])
            # It has cleared all that follows the prompt.
            self._fed = list(prompt)
            self.add(key | {"ms_per_token": ms})
            return
        temperature, plain = key["temperature"], key["method"] == PLAIN
        if (len(prompt), temperature) not in self._warm:
            self._warm.add((len(prompt), temperature))
            for rounds, tokens in ((None, _WARM_UP), (0, _PLAIN_WARM_UP)):
                self.decode(program, prompt, temperature, self._seed, tokens, rounds)
        rounds = 0 if plain else None
        measured = self.decode(program, prompt, temperature, key["seed"], key["new_tokens"], rounds)
        self.add(key | measured | {"prefill_seconds": self._prefill_seconds})

    def decode(
        self,
        program: DecodingProgram,
        prompt: list[int],
        temperature: float,
        seed: int,
        new: int,
        rounds: int | None = None,
    ) -> Record:
        """Decodes after the prompt, which the cache holds; ``rounds`` 0 without drafts."""
        bins = self.grid.bin_tokens if rounds != 0 else 0
        watched = Positions(program, bins) if bins else None
        tokens, loop = continued(program, prompt, temperature, seed, new, rounds, watched)
        self._fed = [*prompt, *tokens]
        levels, passes = loop.levels, loop.passes.total()
        measured: Record = {
            "ms_per_token": 1e3 * loop.decode_seconds / len(tokens),
            "tokens_per_pass": len(tokens) / passes,
            "repeated_8grams": repeated_share(tokens),
            "tokens": tokens,
        }
        if watched is not None:
            measured["bins"] = watched.bins(tokens)
        if rounds != 0:
            made = sum(kind.rounds * count for kind, count in loop.passes.items())
            drafting = sum(count for kind, count in loop.passes.items() if kind.rounds)
            options = program.config.as_options()
            names = ("gamma", "budget", "chunk") if program.levels == 3 else ()
            measured |= {
                "acceptance": {v.name: v.acceptance_rate for v in levels if v.acceptance_rate is not None},
                "mean_accepted_length": {v.name: v.mean_accepted_length for v in levels[1:] if v.forwards},
                "chosen": {
                    "levels": program.levels,
                    "tree": str(options["tree"]) if program.levels > 1 else None,
                    # A pass with drafts; one of two levels has one round.
                    "rounds": made / max(1, drafting),
                    "plain_passes": 1 - drafting / passes,
                    **{name: options[name] for name in names},
                },
            }
        return measured

    def add(self, sample: Record) -> None:
        self.file.add(sample)
        names = (
            "text", "context", "temperature", "method", "seed", "after", "ms_per_token", "tokens_per_pass"
        )  # fmt: skip
        said = (sample.get(name) for name in names)
        self.limit.say(
            ", ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in said if v is not None)
        )
