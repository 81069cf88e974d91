"""Makes what the stages of decoding compute on: models, KV cache, and token buffers."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.full_cache import FullCache
from triforce_tree.decoding.stages import Stage
from triforce_tree.drafters.base import Drafter, features_of, grown_shapes
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.weights.streamed_weights import check_level_one
from triforce_tree.kv.pool.size import PoolSize
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel, low_bit_model, step_model
from triforce_tree.policy.costs import KnownCosts
from triforce_tree.policy.pass_policy import Learnt
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import DeviceTreeShape, PassLimits, pass_limits
from triforce_tree.verify.noise import Noise, NoiseFactory
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.seeded import Seeded


@dataclass(frozen=True)
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


class Buffers:
    """Holds what the stages of decoding compute on. It is made once and used for many requests.

    Args:
        target: the model of levels 1 and 2.
        drafter: level 0; may be None for one level.
        config: the settings; ``tree`` is the drafter's.
        batch: the number of sequences.
        max_seq_len: the most tokens of a sequence, new ones included.
        levels: 1, 2 or 3.
        offload: how the full cache is split between device and host; None keeps it on the device.
        progress: called with the bytes of host memory as they are pinned.
        store: KV slots on the device to use, with their present contents; by default new slots are allocated.
        noise: makes the random numbers of every stage.
        kept, pool: the cache of an earlier program, and a pool of KV slots, see :class:`FullCache`.
        level_one: makes the model of level 1 in fewer bits; it has the arguments of ``low_bit_model``.

    Attributes:
        cache: the target's keys and values.
        state: tokens, lengths and draft chains of the batch.
        full: the target, as levels 2 and plain decoding run it.
        retrieval_model: the target as level 1 runs it; only with three levels.
        states, full_view, retrieval: see :class:`FullCache`.
        store: the KV slots on the device, see :class:`KVBackend`.
        shapes: the shapes of the drafter's trees, the configured one first. Stages of the others are made and
            captured by ``DecodingProgram.prepare_shape`` when a pass first needs them.
        max_draft_tokens: the most tokens that are proposed to level 2 on one path, without the tail.
        runner_ups: whether level 2 also verifies one runner-up beside each token of the chain.
        tail_tree: whether level 2 also verifies a tree of the first shape at the end of the chain.
        capture_seconds: seconds spent on making and capturing stages, and on level 1's copy of the weights.
        makes_slowly: whether making stages takes seconds, because kernels are compiled and graphs captured.
        two_levels: whether a pass may use two levels instead of three; true if the user gave no number.
        prepared: the stages of the last kinds of sampling by key, the one selected last at the end.
        selected: the stages that are used now.
        seeded: the noise of sequences with seeds of their own, see ``prepared_stages.seeded``.
        learnt: what later requests start from, by kind of sampling (``choice/chooser.py``).

    Raises:
        ValueError: several levels without a drafter; a store that is too small, or cannot be paged by chunks;
            streamed weights with a level 1 of 16 bits.
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
        progress: Callable[[int], None] | None = None,
        store: KVStore | None = None,
        noise: NoiseFactory = Noise,
        kept: FullCache | None = None,
        pool: PoolSize | None = None,
        level_one: Callable[[HFModel, int, bool, Sequence[int]], StepModel] = low_bit_model,
    ) -> None:
        self.target, self.config, self.levels = target, config, levels
        self.batch, self.max_seq_len, self.device, self.noise = batch, max_seq_len, target.device, noise
        if levels > 1 and drafter is None:
            raise ValueError(f"levels={levels} needs a drafter; give one, or levels=1")
        self.drafter = drafter if levels > 1 else None
        self.seeded: Seeded | None = None
        self.prepared: dict[Hashable, PreparedStages] = {}
        self.learnt: dict[Hashable, Learnt] = {}
        if target.streamed is not None and levels == 3:
            check_level_one(config.weight_bits)
        self.makes_slowly = compiled = self.device.type == "cuda"
        extent = pass_limits(config, levels)
        self.max_draft_tokens = extent.max_draft_tokens
        self.runner_ups = levels == 3 and (compiled if config.runner_ups is None else config.runner_ups)
        self.tail_tree = levels == 3 and config.tail_tree
        size = batch, max_seq_len, levels
        self.cache = FullCache(target, config, *size, offload, progress, store, kept, pool)
        self.full_view, self.states, self.retrieval = self.cache.view, self.cache.states, self.cache.retrieval
        self.store = self.cache.backend.store
        self.two_levels = self._may_choose_levels(config)
        features = self.drafter.features if self.drafter is not None else ()
        self.shapes = grown_shapes(self.drafter) if self.drafter is not None else [DeviceTreeShape(())]
        if self.cache.backend.fixed_passes:
            del self.shapes[1:]
        self.state = new_state(target, self.drafter, extent, batch, max_seq_len, levels)
        if self.states is not None:
            self.state.recurrent = self.states.buffers
        self.full = step_model(target, compiled, features, config.exact)
        if self.drafter is not None:
            self.drafter.bind(self.state)
        if levels == 3:
            bits = config.weight_bits
            self.retrieval_model = self.full if bits == 16 else level_one(target, bits, compiled, features)
        self.capture_seconds = 0.0

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


def new_state(
    target: HFModel,
    drafter: Drafter | None,
    extent: PassLimits,
    batch: int,
    max_seq_len: int,
    levels: int,
) -> SequenceState:
    """Allocates the state of ``batch`` sequences of at most ``max_seq_len`` tokens."""
    vocabulary = target.vocab_size if levels == 3 else 0
    features = features_of(drafter, target, batch, extent.max_draft_tokens + extent.depth + 2)
    return SequenceState(
        batch, max_seq_len + extent.scratch_slots, extent.chain, extent.extra, vocabulary,
        target.device, features, extent.tail,
    )  # fmt: skip
