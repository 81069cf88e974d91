"""Runs the stages of decoding for one batch size, context length and configuration on fixed buffers."""

import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.stage_progress import StageProgress
from triforce_tree.decoding.stages import (
    ChainVerifyStage,
    DraftStage,
    PlainStage,
    RetrievalVerifyStage,
    Stage,
    TreeVerifyStage,
)
from triforce_tree.drafters.base import Drafter, features_of, grown_shapes
from triforce_tree.kernels.ahead import compile_together
from triforce_tree.kv.cached_tokens import Reuse
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.weights.streamed_weights import check_level_one
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, low_bit_model, step_model
from triforce_tree.policy.costs import KnownCosts
from triforce_tree.policy.pass_policy import Learnt
from triforce_tree.policy.passes import PassKind
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import Cuts, executed_parts, free_memory, graph_pool
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.runtime.stage_clock import Mark
from triforce_tree.runtime.stats import Progress
from triforce_tree.runtime.token_ids import id_tensor
from triforce_tree.trees.device_shapes import DeviceTreeShape, most_sequences, pass_limits
from triforce_tree.verify.masks import GrammarMasks
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.row_bits import check_row_bits
from triforce_tree.verify.sampling import ProbsFromLogits, kind_of
from triforce_tree.verify.sampling_options import SamplingKind
from triforce_tree.verify.seeded import Seeded
from triforce_tree.verify.verifier import Verifier

# Kinds of sampling whose stages are kept. On a GPU it takes seconds to capture those of another one.
_MOST_PREPARED = 16
# The seconds that a further shape takes, as a share of those of the first one. It needs no stages of its own
# for the plain pass and for chains, and the layers are compiled already.
_SHARE = 0.5
# Tokens of a prompt whose prefill takes a GPU as long as the host takes for a few stages.
_LONG_PROMPT = 16_384
# Stages are made beside so many last tokens of the prompts: a later chunk takes the device longer, as it
# attends to more tokens.
_BESIDE = 49_152
# Tokens of a pass up to which on a GPU further ones cost next to nothing.
_FEW_TOKENS = 64
# The most seconds that a first shape took in this process, by device. If its kernels had to be compiled, so
# have those of a shape that no program has had yet.
_longest: dict[torch.device, float] = {}
# Devices, targets and nodes of the further shapes that this process has made.
_made: set[tuple[torch.device, str, int]] = set()


@dataclass
class PreparedStages:
    """Holds the stages for one kind of sampling.

    Attributes:
        to_probs: maps logits to probabilities.
        stages: the stages by name.
        runs: functions by the name of a stage; their calls in order run it.
        shapes: the numbers of the tree shapes that have stages.
        seconds: the seconds that were spent on making the stages with the first shape.
        costs: what the stages cost, by ``RetrievalConfig.refresh``.
    """

    to_probs: DeviceProbs
    stages: dict[str, Stage]
    runs: dict[str, list[Callable[[], None]]]
    shapes: set[int]
    seconds: float
    costs: dict[int, KnownCosts] = field(default_factory=dict)


def exhaust(parts: Iterator[None]) -> None:
    """Does work that yields between its parts."""
    for _ in parts:
        pass


def stage_name(name: str, shape: int) -> str:
    """Returns the name of a stage with trees of one shape: ``draft``, or ``draft/1`` for shape 1."""
    return f"{name}/{shape}" if shape else name


class DecodingProgram:
    """The buffers of one batch size, context length and configuration, with the stages that run on them.

    It is made once and used for many requests.

    Args:
        target: the model of levels 1 and 2.
        drafter: level 0; may be None for one level.
        config: the settings; ``tree`` is the drafter's.
        batch: the number of sequences.
        max_seq_len: the most tokens of a sequence, new ones included.
        levels: 1, 2 or 3.
        offload: how the full cache is split between device and host; None keeps it on the device.
        pinned: called with the bytes of host memory as they are pinned.
        noise: makes the random numbers of every stage.
        kept, pool: the cache of an earlier program, and a pool of KV slots, see :class:`FullCache`.
        level_one: makes the model of level 1 in fewer bits; it has the arguments of ``low_bit_model``.
        graph_memory: the memory of another program's graphs, for graphs that never run between those of one
            of its passes.

    Attributes:
        cache: the target's keys and values.
        state: tokens, lengths and draft chains of the batch.
        full: the target, as levels 2 and plain decoding run it.
        retrieval_model: the target as level 1 runs it; only with three levels.
        states, full_view, retrieval: see :class:`FullCache`.
        store: the KV slots on the device, see :class:`KVBackend`.
        shapes: the shapes of the drafter's trees, the configured one first. Stages of the others are made and
            captured by :meth:`prepare_shape` when a pass first needs them.
        max_draft_tokens: the most tokens that are proposed to level 2 on one path, without the tail.
        runner_ups: whether level 2 also verifies one runner-up beside each token of the chain.
        tail_tree: whether level 2 also verifies a tree of the first shape at the end of the chain.
        capture_seconds: seconds spent on making and capturing stages, and on level 1's copy of the weights.
        makes_slowly: whether making stages takes seconds, because kernels are compiled and graphs captured.
        two_levels: whether a pass may use two levels instead of three; true if the user gave no number.
        prepared: the stages of the last kinds of sampling by key, the one selected last at the end.
        selected: the stages that are used now.
        seeded: the noise of sequences with seeds of their own, see :meth:`use_seeds`.
        masks: the masks of the sequences' grammars, once stages with masks were prepared; else None.
        cuts_trees: whether the target verifies trees up to their last used node, as on a CPU.
        learnt: what later requests start from, by kind of sampling (``choice/chooser.py``).
        graph_memory: the memory of the stages' graphs; None without a GPU.

    Raises:
        ValueError: several levels without a drafter, or streamed weights with a level 1 of 16 bits.
        HostMemoryError: host memory is short.
    """

    selected: PreparedStages

    def __init__(
        self,
        target: HFModel,
        drafter: Drafter | None,
        config: HierarchyConfig,
        batch: int,
        max_seq_len: int,
        levels: int,
        offload: Offload | None = None,
        pinned: Callable[[int], None] | None = None,
        noise: NoiseFactory = Noise,
        kept: FullCache | None = None,
        pool: PoolSize | None = None,
        level_one: Callable[[HFModel, int, bool, Sequence[int]], StepModel] = low_bit_model,
        graph_memory: torch.cuda.MemPool | None = None,
    ) -> None:
        self.target, self.config, self.levels = target, config, levels
        self.batch, self.max_seq_len, self.device, self.noise = batch, max_seq_len, target.device, noise
        if levels > 1 and drafter is None:
            raise ValueError(f"levels={levels} needs a drafter; give one, or levels=1")
        self.drafter = drafter if levels > 1 else None
        self.seeded: Seeded | None = None
        self.masks: GrammarMasks | None = None
        self.prepared: dict[tuple[SamplingKind, bool], PreparedStages] = {}
        self.learnt: dict[Hashable, Learnt] = {}
        if target.streamed is not None and levels == 3:
            check_level_one(config.weight_bits)
        self.makes_slowly = compiled = self.device.type == "cuda"
        extent = pass_limits(config, levels)
        self.max_draft_tokens = extent.max_draft_tokens
        self.runner_ups = levels == 3 and (compiled if config.runner_ups is None else config.runner_ups)
        self.tail_tree = levels == 3 and config.tail_tree
        self.cache = FullCache(target, config, batch, max_seq_len, levels, offload, pinned, kept, pool)
        self.full_view, self.states, self.retrieval = self.cache.view, self.cache.states, self.cache.retrieval
        self.store = self.cache.backend.store
        self.two_levels = self._may_choose_levels(config)
        features = self.drafter.features if self.drafter is not None else ()
        self.shapes = grown_shapes(self.drafter) if self.drafter is not None else [DeviceTreeShape(())]
        if self.cache.backend.fixed_passes:
            del self.shapes[1:]
        deepest = extent.max_draft_tokens + extent.depth + 2
        self.state = SequenceState(
            batch, max_seq_len + extent.scratch_slots, extent.chain, extent.extra,
            target.vocab_size if levels == 3 else 0, self.device,
            features_of(self.drafter, target, batch, deepest), extent.tail,
        )  # fmt: skip
        if self.states is not None:
            self.state.recurrent = self.states.buffers
        self.full = step_model(target, compiled, features, config.exact)
        if self.drafter is not None:
            self.drafter.bind(self.state)
            if self.drafter.reads_slots:
                if not self.cache.backend.readable:
                    raise ValueError(
                        f"drafter {self.drafter.name!r} reads the target's keys and values, which must be on "
                        "the device, in slots of each sequence's own; leave out offload, and do not start "
                        "it by torchrun"
                    )
                self.drafter.read(self.store)
        if levels == 3:
            bits = config.weight_bits
            self.retrieval_model = self.full if bits == 16 else level_one(target, bits, compiled, features)
        self.graph_memory = graph_memory or graph_pool(self.device)
        self.capture_seconds = 0.0
        self.cuts_trees = False

    def _may_choose_levels(self, config: HierarchyConfig) -> bool:
        return self.levels == 3 and not self.cache.backend.fixed_passes and config.chooses_levels

    @contextmanager
    def trial(self, length: int) -> Iterator[Callable[[bool], None]]:
        """Is a context in which stages may run after made-up sequences of ``length`` tokens.

        A stage may run up to three times in a row. Afterwards the KV slots of the full cache are as before,
        and sequences must be prefilled or rewound.

        Yields:
            a function that sets the sequences back to ``length``, with draft chains of full length if its
            argument is True, else with empty ones.
        """

        def begin(chains: bool) -> None:
            self.state.length.fill_(length)
            self.state.chain.fill_(self.state.max_draft_tokens if chains else 0)

        with self.state.trial(length):
            if self.drafter is not None:
                self.drafter.start([[0] * (length + 1)] * self.batch)
            with self.cache.trial(length):
                yield begin

    # Stages

    def prepare(self, *settings: ProbsFromLogits, masked: bool = False, running: bool = False) -> bool:
        """Does all of :meth:`preparation`.

        Returns:
            whether the stages are other ones than before.
        """
        before = getattr(self, "selected", None)
        exhaust(self.preparation(*settings, masked=masked, running=running))
        return self.selected is not before

    def preparation(
        self, *settings: ProbsFromLogits, masked: bool = False, running: bool = False
    ) -> Iterator[None]:
        """Selects the stages for the sampling options of a batch, and makes and captures them if there are
        none. Every sequence gets the first ones; see ``DeviceProbs.begin``.

        It yields between parts of this work. After the first of them the cache may be prefilled.

        Args:
            masked: whether sequences may have grammars.
            running: whether sequences run, between two passes of which this is called; they go on afterwards.
                Otherwise sequences must be prefilled or rewound afterwards, because the trial runs of a
                capture use their buffers.
        """
        if masked and self.masks is None:
            self.masks = GrammarMasks(self.batch, self.target.vocab_size, self.device)
        if self.masks is not None:
            self.masks.clear()
        key = kind_of(settings), masked
        if key not in self.prepared and self.makes_slowly and self.batch > 1:
            # Stages that do more take a little longer in each pass, and others would be captured for seconds.
            covering = (other for other in self.prepared if other[1] == masked and other[0].covers(key[0]))
            key = next(covering, key)
        found = self.prepared.pop(key, None)
        if found is None:
            if len(self.prepared) >= _MOST_PREPARED:
                # The stages that were selected longest ago go, as each kind of sampling has buffers.
                del self.prepared[next(iter(self.prepared))]
                if self.device.type == "cuda":
                    free_memory()
            sizes = self.batch, self.target.vocab_size, self.device
            to_probs = DeviceProbs(settings, *sizes, self.noise, self.masks if masked else None)
            found = yield from self._new_stages(to_probs, running)
            self.capture_seconds += found.seconds
        self.selected = self.prepared[key] = found
        if not running:
            for index in range(self.batch):
                found.to_probs.begin(index, settings[0])
            if self.seeded is not None:
                self.seeded.clear()

    @property
    def masked(self) -> bool:
        """Returns whether sequences may have grammars."""
        return self.selected.to_probs.masked

    def _new_stages(self, to_probs: DeviceProbs, running: bool) -> Generator[None, None, PreparedStages]:
        """Returns the stages for one kind of sampling, with trees of the first shape.

        On a GPU they are captured: on the sequences that run, or on made-up sequences of the greatest length,
        after which sequences must be prefilled.
        """
        start, device = time.perf_counter(), self.device
        self.cache.backend.ready()
        stages = self._stages_of(to_probs)
        if self.config.exact and not running:
            self._check_exact(stages)
        runs: dict[str, list[Callable[[], None]]] = {}
        if device.type != "cuda":
            runs = {name: executed_parts(stage.steps(), device) for name, stage in stages.items()}
            return PreparedStages(to_probs, stages, runs, {0}, time.perf_counter() - start)
        around = self._unchanged if running else partial(self.trial, self.max_seq_len - 1)
        # The first trial clears slots that were never written, in which a prompt must not be yet.
        with around():
            pass
        seconds = time.perf_counter() - start
        yield
        start = time.perf_counter()
        with around() as begin:
            self._compile(stages, begin)
        seconds += time.perf_counter() - start
        progress = StageProgress(len(stages))
        for name, stage in stages.items():
            yield
            start = time.perf_counter()
            progress.next(name)
            with around() as begin:
                begin(False)
                steps = stage.steps()
                runs[name] = executed_parts(steps, device, self.graph_memory)
                if self.cache.backend.transfers and name in ("target", "plain") and to_probs.capturable:
                    # The first run compiles the kernels before decoding begins; a second one records pieces.
                    for _ in range(2 if any(isinstance(step.capturable, Cuts) for step in steps) else 1):
                        for part in runs[name]:
                            part()
            seconds += time.perf_counter() - start
        _longest[device] = max(seconds, _longest.get(device, 0.0))
        return PreparedStages(to_probs, stages, runs, {0}, seconds)

    def prepares_beside(self, tokens: int) -> bool:
        """Returns whether stages are made while a device computes a prompt: if that takes it seconds, and if
        a prefill and trial runs write nothing in common.
        """
        backend = self.cache.backend
        apart = not (backend.transfers or backend.pool_slots or self.states or self.state.features)
        alone = distributed.current() is None and not self.config.exact
        return self.makes_slowly and apart and alone and tokens > _LONG_PROMPT

    def _compile(self, stages: dict[str, Stage], begin: Callable[[bool], None]) -> None:
        """Compiles the kernels of the steps that become one graph.

        Args:
            begin: sets the sequences back; called before each stage.
        """

        def run() -> None:
            for stage in stages.values():
                begin(False)
                for step in stage.steps():
                    if step.capturable is True:
                        step.run()

        compile_together(run, self.device)

    def _stages_of(self, to_probs: DeviceProbs) -> dict[str, Stage]:
        """Returns the stages for one kind of sampling, by name, with trees of the first shape."""
        state = self.state
        stages: dict[str, Stage] = {}
        if self.drafter is not None:
            stages |= self._tree_stages(to_probs, 0)
            if self.levels == 3:
                tail = None
                if self.tail_tree:
                    tail = DraftStage(self.drafter, to_probs, state, probs=state.chain_probs)
                stages["target"] = ChainVerifyStage(
                    self.full, self.full_view, self.retrieval, to_probs, state, self.runner_ups, tail
                )
        stages["plain"] = PlainStage(self.full, self.cache.token_view, to_probs, state)
        return stages

    def _tree_stages(self, to_probs: DeviceProbs, shape: int) -> dict[str, Stage]:
        """Returns the stages that propose and verify trees of one shape."""
        assert self.drafter is not None
        draft = DraftStage(self.drafter, to_probs, self.state, shape)
        stages: dict[str, Stage] = {"draft": draft}
        nodes = draft.tree.nodes
        view = self.retrieval
        if view is not None and not (shape and self.shapes[shape].matched):
            if shape:
                view = view.resized(nodes, draft.tree.depths.tolist())
            for name, choosing in (("retrieval_refresh", True), ("retrieval", False)):
                # Each has its own verifier, which knows the outputs of one captured forward.
                verifier = Verifier(self.retrieval_model, to_probs, self.state, nodes)
                stages[name] = RetrievalVerifyStage(draft, verifier, view, self.runner_ups, choosing)
        if view is None or self.two_levels:
            verifier = Verifier(self.full, to_probs, self.state, nodes)
            whole = TreeVerifyStage(draft, verifier, self.full_view)
            stages["target_tree" if view is not None else "target"] = whole
            self.cuts_trees = whole.view.resizable
        return {stage_name(name, shape): stage for name, stage in stages.items()}

    def _check_exact(self, stages: dict[str, Stage]) -> None:
        """Raises UnsupportedModelError if the logits of a token depend on how many tokens a forward has."""
        verified = [
            s.tree.nodes for s in stages.values() if isinstance(s, ChainVerifyStage | TreeVerifyStage)
        ]
        vocabulary = self.target.vocab_size
        with self.trial(0):
            for nodes in sorted({*verified} or {self.batch}):
                name = self.target.name
                check_row_bits(self.full, self.full_view, self.batch, nodes, vocabulary, name)

    def use_seeds(self) -> Seeded:
        """Returns the noise for sequences with their own seeds, which all stages that are made later use.

        The existing stages are dropped. Sequences without a seed draw as before.
        """
        if self.seeded is None:
            self.seeded = self.noise = Seeded(self.state, self.target.vocab_size)
            self.prepared.clear()
        return self.seeded

    def prepare_shape(self, number: int) -> None:
        """Makes and captures the stages for trees of one shape, unless they exist.

        It may be called between two passes, or inside :meth:`trial`. The state of the sequences is as before
        afterwards, also if memory runs out, and KV slots after their ends are overwritten, as by any pass. A
        capture needs no made-up sequences, because everything that varies from pass to pass is in buffers on
        the device.

        Raises:
            torch.OutOfMemoryError: device memory is short; the stages then do not exist.
        """
        stages = self.selected
        if number in stages.shapes:
            return
        start = time.perf_counter()
        self.cache.backend.ready()
        made = self._tree_stages(stages.to_probs, number)
        progress = StageProgress(len(made))
        runs: dict[str, list[Callable[[], None]]] = {}
        with self._unchanged() as restore:
            self._compile(made, restore)
            for name, stage in made.items():
                progress.next(name)
                restore(False)
                # On a GPU this runs the stage.
                runs[name] = executed_parts(stage.steps(), self.device, self.graph_memory)
        stages.stages.update(made)
        stages.runs.update(runs)
        stages.shapes.add(number)
        _made.add(self._kernels_of(number))
        self.capture_seconds += time.perf_counter() - start

    @contextmanager
    def _unchanged(self) -> Iterator[Callable[[bool], None]]:
        """Is a context in which stages may run after the sequences, whose state is restored at its end.

        Yields:
            a function that restores the state, like that of :meth:`trial`.
        """
        state = self.state
        saved, had_nan = state.save(), state.has_nan.clone()
        try:
            yield lambda chains: state.restore(saved)
        finally:
            state.restore(saved)
            state.has_nan.copy_(had_nan)

    def prepare_shapes(self) -> None:
        """Makes and captures the stages of every shape that passes may use (:meth:`prepare_shape`)."""
        for number in range(len(self.shapes)):
            if self.allows(number):
                self.prepare_shape(number)

    def allows(self, number: int) -> bool:
        """Returns whether passes may use trees of a shape. On a GPU they need no chain of matched tokens
        where a longer one costs the same.
        """
        shape = self.shapes[number]
        longer = shape.matched and any(
            other.matched and other.depth > shape.depth and other.nodes * self.batch <= _FEW_TOKENS
            for other in self.shapes
        )
        return number == 0 or (self.batch <= most_sequences(shape) and not (longer and self.makes_slowly))

    def held_back(self) -> dict[int, float]:
        """Returns the shapes whose stages do not exist and take long to make, with the expected seconds of
        each.

        Shapes of matched tokens are never in the result, because they use the kernels of the first shape. All
        ranks get the same result.
        """
        if not self.makes_slowly:
            return {}
        made = self.selected
        grown = (number for number, shape in enumerate(self.shapes) if not shape.matched)
        missing = [number for number in grown if number not in made.shapes]
        cold = max(made.seconds, _longest.get(self.device, 0.0))
        known = {number: self._kernels_of(number) in _made for number in missing}
        seconds = {number: _SHARE * (made.seconds if known[number] else cold) for number in missing}
        return distributed.broadcast_object(seconds)

    def _kernels_of(self, number: int) -> tuple[torch.device, str, int]:
        """Returns a key of the kernels that the stages of a shape need."""
        return self.device, self.target.name, self.shapes[number].nodes

    # Sequences

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        reuse: Reuse = "none",
        lengths: Sequence[int] = (),
        preparation: Iterator[None] | None = None,
    ) -> list[int]:
        """Prefills every level with all but each prompt's last token, which is the first root.

        If the prefill of an offloaded cache is interrupted, its memory is released, and the program cannot be
        used any more.

        Args:
            lengths: tokens of the texts by which rotary frequencies are chosen, also for prompts that are
                placed later; by default those of the prompts.
            preparation: the rest of a :meth:`preparation`, whose parts after the first are done while the
                device computes the chunks of the prompts.

        Returns:
            how many tokens of each prompt were reused.

        Raises:
            ValueError: a prompt is too short for the levels, or too long for the buffers.
        """
        self._check(prompts)
        self._choose_frequencies(prompts, lengths)
        parts, before, left = preparation or iter(()), Mark(self.device), sum(map(len, prompts))
        # The first part must come before the prompt.
        next(parts, None)

        def launched(tokens: int) -> None:
            nonlocal before, left
            if progress is not None:
                progress(tokens)
            left -= tokens
            # A device that still computes the chunk before this one has enough work meanwhile.
            if left < _BESIDE and not before.reached:
                next(parts, None)
            before = Mark(self.device)

        try:
            reused = self.cache.prefill(prompts, launched, reuse, self.state.features)
            exhaust(parts)
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        except BaseException:
            self.cache.close()
            raise
        return reused

    def place(
        self, index: int, prompt: Sequence[int], progress: Progress | None = None, reuse: Reuse = "none"
    ) -> int:
        """Gives KV slots to a prompt in place of a sequence that has ended, if the backend ``replaces``.

        The others may continue once :meth:`begin` was called.

        Returns:
            how many tokens of the prompt are reused.
        """
        self._check([prompt])
        return self.cache.place(index, prompt, progress, reuse, self.state.features)

    def prefill_chunk(
        self,
        index: int,
        prompt: Sequence[int],
        start: int,
        progress: Progress | None = None,
        reuse: Reuse = "none",
    ) -> tuple[int, int]:
        """Prefills the next chunk of a prompt that was placed; see :meth:`FullCache.prefill_chunk`."""
        return self.cache.prefill_chunk(index, prompt, start, reuse, progress, self.state.features)

    def begin(self, index: int, sequences: Sequence[Sequence[int]]) -> None:
        """Begins a sequence at one batch index while the others continue.

        Args:
            sequences: all committed tokens of each sequence. The cache holds those at ``index`` but the last;
                they may be the beginning of a prompt that is not prefilled yet.
        """
        tokens, state = sequences[index], self.state
        state.tokens[index, : len(tokens)] = id_tensor(tokens, self.device)
        # An assignment of a number would wait for the device.
        state.length[index].fill_(len(tokens) - 1)
        for counter in (state.chain, state.retrieval_emitted):
            counter[index].zero_()
        if self.drafter is not None:
            self.drafter.start_one(index, sequences)
        self.cache.begin([tokens], index)

    def ended(self, index: int, tokens: Sequence[int], reuse: Reuse) -> None:
        """Lets later prompts continue the text of a sequence that has ended (:meth:`FullCache.ended`)."""
        self.cache.ended(index, tokens, reuse, self.state.features)

    def rewind(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int] = ()) -> None:
        """Continues from these prompts, which are prefixes of the sequences in the cache.

        If layers with a window have overwritten what is needed there, the prompts are prefilled again.

        Args:
            lengths: see :meth:`prefill`.
        """
        self._check(prompts)
        self._choose_frequencies(prompts, lengths)
        if self.cache.holds([len(p) - 1 for p in prompts]):
            if self.state.features is not None:
                self.state.features.rewind(id_tensor([len(p) - 1 for p in prompts], self.device))
            self._start(prompts)
            if self.drafter is not None:
                self.drafter.start(prompts)
        else:
            self.prefill(prompts, lengths=lengths)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        least = self.cache.backend.least_prompt
        for prompt in prompts:
            if not least <= len(prompt) <= self.max_seq_len:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens does not fit buffers for {self.levels} levels "
                    f"and {least} to {self.max_seq_len} tokens; use fewer levels or a smaller budget"
                )

    def _choose_frequencies(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        if (rope := self.target.length_rope) is not None:
            rope.choose_for_texts(lengths or [len(prompt) for prompt in prompts])

    def _start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Sets the state of the sequences to the ends of prompts whose keys and values are in the cache."""
        state, lengths = self.state, [len(p) - 1 for p in prompts]
        for b, prompt in enumerate(prompts):
            state.tokens[b, : len(prompt)] = id_tensor(prompt, self.device)
        state.length.copy_(id_tensor(lengths, self.device))
        state.active.fill_(1)
        for counts in (state.has_nan, state.chain, state.retrieval_emitted):
            counts.zero_()
        self.cache.begin(prompts)

    # Passes

    def transferred_bytes(self, tokens: int, plain: bool = False) -> int:
        """Returns the bytes of keys, values and weights that a pass of level 2 copies to the device.

        Args:
            tokens: committed tokens of each sequence.
            plain: whether the pass is the autoregressive one.
        """
        queries = 1 if plain or self.levels == 1 else self.max_draft_tokens + 1
        streamed = self.target.streamed
        weights = streamed.pass_bytes(self.batch * queries) if streamed is not None else 0
        return weights + self.cache.backend.transferred_bytes(tokens, queries)

    def serves(self, config: HierarchyConfig) -> bool:
        """Returns whether the program serves other settings once ``self.config`` is set to them.

        They may differ in options that every pass reads again. All others are built into buffers and graphs.
        """

        def built_in(settings: HierarchyConfig) -> HierarchyConfig:
            return replace(settings, rounds=None, retrieval=replace(settings.retrieval, refresh=0))

        return built_in(self.config) == built_in(config) and self.two_levels >= self._may_choose_levels(
            config
        )

    def stages_of_pass(self, kind: PassKind) -> list[tuple[str, str]]:
        """Returns the stages of a pass in their order, each with the level to which its seconds belong."""
        stages: list[tuple[str, str]] = []
        for done in range(kind.rounds):
            stages.append((stage_name("draft", kind.shape), "draft"))
            if kind.levels == 3:
                name = "retrieval_refresh" if self.config.retrieval.chooses(done) else "retrieval"
                stages.append((stage_name(name, kind.shape), "retrieval"))
        if kind.levels == 2:
            last = stage_name("target" if self.levels == 2 else "target_tree", kind.shape)
        else:
            last = "target" if kind.levels == 3 else "plain"
        return [*stages, (last, "target")]

    @property
    def stage_names(self) -> Collection[str]:
        """Returns the names of the prepared stages."""
        return self.selected.stages.keys()

    def stage(self, name: str) -> Stage:
        return self.selected.stages[name]

    def verifier(self, name: str) -> Verifier:
        """Returns the object with which a verifying stage verifies."""
        stage = self.stage(name)
        assert isinstance(stage, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage | PlainStage)
        return stage.verifier

    def run(self, name: str, *generators: torch.Generator) -> None:
        """Runs one stage with fresh random numbers, from one generator or one for each sequence."""
        self.cache.backend.ready()
        for noise in self.selected.stages[name].noise:
            if len(generators) == 1:
                noise.draw(*generators)
            else:
                noise.draw_rows(generators)
        for part in self.selected.runs[name]:
            part()

    @property
    def chain_nodes(self) -> int:
        """Returns the tokens per sequence in the target's forward over a chain of full length."""
        return pass_limits(self.config, self.levels).chain_nodes(self.runner_ups)

    def drafted(self, levels: int, rounds: int, shape: int) -> tuple[int, int]:
        """Returns the forwards of the drafter in a pass, and the tokens that it proposes to each sequence.

        Args:
            levels, rounds, shape: the kind of the pass, see ``PassKind``.
        """
        assert self.drafter is not None
        trees = [self.shapes[shape]] * rounds
        if levels == 3 and self.tail_tree:
            trees.append(self.shapes[0])
        # A deterministic drafter proposes a whole tree in one forward, and matched tokens take no forward.
        one = self.drafter.deterministic
        forwards = sum(0 if tree.matched else 1 if one else len(tree.widths) for tree in trees)
        return forwards, sum(tree.nodes - 1 for tree in trees)
