"""The engine as benchmarks and checks use it: an inflated pair with one captured program at a time.

``Bench`` decodes, and times stages. The full cache is on the device, or in host memory under a cap of device
memory.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scripts.benchmarks.common.timing import synchronize, timed
from scripts.inflate.pair import inflate_pair
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.offload.backend import OffloadedBackend
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
from triforce_tree.kv.store import KVStore
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.tensor_parallel import shard
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import GIB
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stage_clock import StageClock
from triforce_tree.runtime.stats import LevelStats, added
from triforce_tree.trees.device_shapes import pass_limits
from triforce_tree.verify.sampling import ProbsFromLogits

Prompts = Sequences[Sequences[int]]

# Slots more than the first program needs, so that later ones of other settings fit into the same memory.
_SPARE_SLOTS = 512
_LARGEST_CHUNK = 64
# Tokens that are decoded before anything is timed, with drafts and without: kernels are compiled and tuned.
_WARM_UP, _PLAIN_WARM_UP = 8, 2


@dataclass
class Run:
    """One decoding of a batch.

    Attributes:
        texts: the new tokens of each sequence.
        stamps: (seconds of decoding, mean new tokens of a sequence) after each pass.
        levels: their statistics.
        rounds: trees that level 0 drafted for each pass of level 2; 0 after autoregressive decoding.
        traffic: bytes that came over the bus for level 2, bytes that the CPU attended to, and its seconds.
    """

    texts: list[list[int]]
    stamps: list[tuple[float, float]] = field(default_factory=list)
    levels: list[LevelStats] = field(default_factory=list)
    rounds: float = 0.0
    traffic: tuple[float, float, float] = (0, 0, 0.0)

    @property
    def ms_per_token(self) -> float:
        seconds, tokens = self.stamps[-1]
        return 1e3 * seconds / tokens

    def as_dict(self) -> dict[str, Any]:
        streamed, attended, attending = self.traffic
        last = self.levels[-1].seconds
        return {
            "ms_per_token": self.ms_per_token,
            "tokens_per_pass": self.levels[-1].mean_accepted_length,
            "rounds_per_pass": self.rounds,
            "pass_ms": 1e3 * self.stamps[-1][0] / len(self.stamps),
            "acceptance": {v.name: v.acceptance_rate for v in self.levels if v.acceptance_rate is not None},
            "mean_accepted_length": {v.name: v.mean_accepted_length for v in self.levels[1:] if v.forwards},
            "pcie_gbps": streamed / 1e9 / last if streamed and last else None,
            "cpu_gbps": attended / 1e9 / attending if attended else None,
        }


class Bench:
    """An inflated pair, the program that is open, and the prompts whose keys and values its cache holds.

    Args:
        shape, draft_shape: what the embedded pair is inflated to.
        device: of everything; models are bf16 on a GPU, else fp32.
        seed: of the weights without effect, and of all draws.
        cap_gib: of device memory; None for no cap.
        weights_on_host: stream the target's weights. It is built whole on the device, before the cap holds.
    """

    def __init__(
        self,
        shape: str,
        draft_shape: str,
        device: torch.device,
        seed: int,
        cap_gib: float | None = None,
        weights_on_host: bool = False,
    ) -> None:
        self.device, self.seed = device, seed
        if cap_gib is not None and not weights_on_host:
            bound_memory(device, int(cap_gib * GIB))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target, draft, self.tokenizer = inflate_pair(shape, device, dtype, draft_shape, seed)
        if (group := distributed.current()) is not None:
            shard(target, group)
        free_memory()
        self.draft = HFModel(draft)
        self.target = HFModel(target, StreamedWeights(target, device) if weights_on_host else None)
        free_memory()
        if weights_on_host and cap_gib is not None:
            bound_memory(device, int(cap_gib * GIB))
        self._program: DecodingProgram | None = None
        self._fed: list[list[int]] = []
        self._warm: set[tuple[float, bool]] = set()
        self.prefill_seconds = 0.0

    @property
    def program(self) -> DecodingProgram:
        assert self._program is not None, "no program is open"
        return self._program

    @property
    def offloaded(self) -> OffloadedCache:
        backend = self.program.cache.backend
        assert isinstance(backend, OffloadedBackend), "the program that is open keeps its cache on the device"
        return backend.cache

    @property
    def weights_on_host(self) -> int:
        """Returns the bytes that every pass of level 2 brings beside the cache."""
        return self.target.streamed.bytes if self.target.streamed is not None else 0

    @property
    def pass_bytes(self) -> int:
        """Returns the bytes that a pass of level 2 over several tokens copies to the device."""
        return self.offloaded.host.streamed_bytes(self.offloaded.share(2)) + self.weights_on_host

    def peak_gib(self) -> float:
        """Returns the most that torch's allocator has reserved, graphs included."""
        return torch.cuda.max_memory_reserved(self.device) / GIB if self.device.type == "cuda" else 0.0

    def open(
        self,
        config: HierarchyConfig,
        batch: int,
        max_seq_len: int,
        temperatures: Sequences[float] = (0.0,),
        offload: Offload | None = None,
    ) -> None:
        """Makes and captures a program for these settings; a cache on the device is kept if it is large
        enough.

        Args:
            offload: the split of a cache in host memory; None keeps it on the device.
        """
        levels, old = levels_of(config), self._program
        if offload is not None or (old is not None and old.cache.backend.transfers):
            self.close()
            old = None
        fits = old is not None and old.batch == batch and old.config.kv_bits == config.kv_bits
        if fits and old.max_seq_len >= max_seq_len and old.serves(config):
            old.config = config
        else:
            store = None
            if offload is None:
                slots = max_seq_len + pass_limits(config, levels).scratch_slots
                store = old.store if fits and old.store.slots >= slots else None
                if store is None or max(map(len, self._fed), default=0) > max_seq_len:
                    # The slots are new, or the captures' trial runs will have written into them.
                    self._fed = []
                self._program = old = None
                free_memory()
                store = self._new_store(batch, slots, config.kv_bits) if store is None else store
            drafter = drafter_of(self.draft, config, levels)
            self._program = DecodingProgram(
                self.target, drafter, config, batch, max_seq_len, levels, offload, store=store
            )
            self._warm = set()
        for temperature in temperatures:
            self.program.prepare(ProbsFromLogits.at(temperature))
        self._update_chunk_means()

    def _new_store(self, batch: int, slots: int, bits: int) -> KVStore:
        """Returns a full cache that later settings fit into as well, in whole pages of any chunk."""
        slots = -(-(slots + _SPARE_SLOTS) // _LARGEST_CHUNK) * _LARGEST_CHUNK
        return KVStore(self.target.kv_shapes, batch, slots, self.device, self.target.dtype, bits=bits)

    def close(self) -> None:
        """Gives the memory of program and cache back."""
        if self._program is not None:
            self._program.cache.close()
        self._program, self._fed = None, []
        free_memory()

    def cap(self, gib: float) -> None:
        """Bound the device memory anew, and forget peaks under the last bound."""
        self.close()
        bound_memory(self.device, int(gib * GIB))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def feed(self, prompts: Prompts) -> bool:
        """Prefills the prompts into the full cache; returns False if they are in it already."""
        wanted = [list(p) for p in prompts]
        if self._fed == wanted:
            return False
        self._fed, self._warm = [], set()
        _, self.prefill_seconds = timed(self.device, lambda: self.program.prefill(wanted))
        self._fed = wanted
        return True

    def _update_chunk_means(self) -> None:
        if self._fed:
            self.program.cache.means.update_all()

    @contextmanager
    def shortened(self, prompts: Prompts, new: int) -> Iterator[None]:
        """Inside, decode from ``prompts``, beginnings of what was fed; afterwards the cache is as before."""
        scratch_slots = int(self.program.state.capacity) - self.program.max_seq_len
        first = min(len(p) for p in prompts) - 1
        count = max(len(p) for p in prompts) + new + 2 * scratch_slots - first
        parts = [part for group in self.program.store.groups for part in group.parts]
        written = [part[..., first : first + count, :] for part in parts]
        before = [slots.clone() for slots in written]
        try:
            yield
        finally:
            for slots, old in zip(written, before, strict=True):
                slots.copy_(old)
            self._update_chunk_means()

    @contextmanager
    def streaming_alone(self) -> Iterator[None]:
        """Inside, the CPU attends to nothing."""
        cache = self.offloaded
        before = cache.settings
        cache.settings = replace(before, host_share=0.0, plain_host_share=0.0)
        try:
            yield
        finally:
            cache.settings = before

    def _traffic(self) -> tuple[float, float, float]:
        """Returns ``Run.traffic`` since the program was opened."""
        weights = self.target.streamed
        bus = weights.copied if weights is not None else 0
        if not self.program.cache.backend.transfers:
            return bus, 0, 0.0
        cache = self.offloaded
        own = cache.attention
        return bus + cache.host.ring.bytes, own.bytes if own else 0, own.seconds if own else 0.0

    def passes(
        self, run: Run, temperature: float, prompts: Prompts, ends: Sequences[int], rounds: int | None
    ) -> Iterator[tuple[float, list[list[int]]]]:
        """Returns (seconds of ``run`` so far, new tokens of each sequence) after each pass behind the
        prompts.
        """
        loop = DecodingLoop.over(self.program, ProbsFromLogits.at(temperature), self.seed)
        if rounds is not None:
            loop.policy.fixed = rounds
        sequences = [Sequence(list(prompt), Ending(end)) for prompt, end in zip(prompts, ends, strict=True)]
        loop.begin(sequences, cached=True)
        synchronize(self.device)
        start, traffic, levels = self._traffic(), run.traffic, run.levels
        earlier = run.stamps[-1][0] if run.stamps else 0.0
        for fresh in loop.decode():
            now = zip(traffic, self._traffic(), start, strict=True)
            run.traffic = tuple(before + b - a for before, b, a in now)
            run.levels = added(levels, loop.levels)
            new = dict(fresh)
            yield earlier + loop.decode_seconds, [new.get(sequence, []) for sequence in sequences]

    def decode(self, temperature: float, prompts: Prompts, new: int, rounds: int | None = None) -> Run:
        """Decodes until the first sequence is complete; 0 rounds is autoregressive decoding.

        Where sequences of a batch advance at different speeds, the slower ones do not burden the mean.
        """
        if (kind := (temperature, rounds == 0)) not in self._warm:
            self._warm.add(kind)
            self.decode(temperature, prompts, _PLAIN_WARM_UP if rounds == 0 else _WARM_UP, rounds)
        run = Run([[] for _ in prompts])
        for seconds, fresh in self.passes(run, temperature, prompts, [new] * len(prompts), rounds):
            for text, tokens in zip(run.texts, fresh, strict=True):
                text += tokens
            run.stamps.append((seconds, statistics.fmean(map(len, run.texts))))
            if max(map(len, run.texts)) >= new:
                break
        if self.program.drafter is not None and rounds != 0:
            depth = pass_limits(self.program.config, self.program.levels).depth
            run.rounds = run.levels[0].forwards / depth / run.levels[-1].forwards
        return run

    def stage_ms(self, temperature: float, prompts: Prompts, rounds: int, passes: int) -> dict[str, float]:
        """Returns milliseconds of one run of each stage: means of a pass, and their median over some passes.

        By events of the device; where the host has a part in the pass, waiting for the device in between.
        """
        program = self.program
        program.prepare(ProbsFromLogits.at(temperature))
        program.rewind(prompts)
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        one_pass: list[str] = []
        for done in range(rounds):
            chooses = program.config.retrieval.chooses(done)
            retrieval = ["retrieval_refresh" if chooses else "retrieval"] if program.levels == 3 else []
            one_pass += ["draft", *retrieval]
        one_pass.append("target")
        clocks = [StageClock(self.device) for _ in range(passes)]
        for clock in clocks:
            clock.start()
            for name in one_pass:
                program.run(name, generator)
                if program.cache.backend.transfers:
                    clock.synchronize()
                clock.mark(name)
            if program.cache.backend.transfers:
                report = program.state.pass_results().tolist()
                tokens = [emitted[:count] for count, _, _, _, *emitted in report]
                program.cache.committed(tokens, with_means=program.levels == 3)
            program.state.retrieval_emitted.zero_()
        synchronize(self.device)
        runs = Counter(one_pass)
        taken = [clock.seconds() for clock in clocks]
        return {name: 1e3 * statistics.median(t[name] for t in taken) / runs[name] for name in runs}


def levels_of(config: HierarchyConfig) -> int:
    return config.levels if isinstance(config.levels, int) else 3


def drafter_of(draft: HFModel, config: HierarchyConfig, levels: int) -> TreeDrafter | None:
    """Returns the draft model as level 0 under these settings; None where there is no level 0."""
    return TreeDrafter(draft, config) if levels > 1 else None
