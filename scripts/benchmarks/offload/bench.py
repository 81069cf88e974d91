"""An inflated pair whose KV cache is in host memory, with a limit of device memory; decoding and stages are
timed.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from scripts.benchmarks.common.timing import synchronize, timed
from scripts.inflate.pair import inflate_pair
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending
from triforce_tree.decoding.sequence import Sequence as DecodedSequence
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kv.offload.backend import OffloadedBackend
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.weights.streamed_weights import StreamedWeights
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

# Tokens that are decoded before anything is timed, with drafts and without: kernels are compiled and tuned.
_WARM_UP, _PLAIN_WARM_UP = 8, 2


@dataclass
class Run:
    """One decoding of a text.

    Attributes:
        text: the new tokens.
        stamps: (seconds of decoding, number of new tokens) after each pass.
        levels: their statistics.
        rounds: trees that level 0 drafted for each pass of level 2; 0 after autoregressive decoding.
        traffic: bytes that came over the bus for level 2, bytes that the CPU attended to, and its seconds.
    """

    text: list[int] = field(default_factory=list)
    stamps: list[tuple[float, int]] = field(default_factory=list)
    levels: list[LevelStats] = field(default_factory=list)
    rounds: float = 0.0
    traffic: tuple[float, float, float] = (0, 0, 0.0)

    def as_dict(self) -> dict[str, Any]:
        streamed, attended, attending = self.traffic
        seconds, tokens = self.stamps[-1]
        last = self.levels[-1].seconds
        return {
            "ms_per_token": 1e3 * seconds / tokens,
            "tokens_per_pass": self.levels[-1].mean_accepted_length,
            "rounds_per_pass": self.rounds,
            "pass_ms": 1e3 * seconds / len(self.stamps),
            "acceptance": {v.name: v.acceptance_rate for v in self.levels if v.acceptance_rate is not None},
            "mean_accepted_length": {v.name: v.mean_accepted_length for v in self.levels[1:] if v.forwards},
            "pcie_gbps": streamed / 1e9 / last if streamed and last else None,
            "cpu_gbps": attended / 1e9 / attending if attended else None,
        }


class Bench:
    """An inflated pair, the program that is open, and the prompt whose keys and values its cache holds.

    Args:
        shape, draft_shape: what the embedded pair is inflated to.
        device: of everything; models are bf16 on a GPU, else fp32.
        seed: of the weights without effect, and of all draws.
        limit_gib: the limit of device memory; None for no limit.
        weights_on_host: stream the target's weights. It is built whole on the device, before the limit holds.
    """

    def __init__(
        self,
        shape: str,
        draft_shape: str,
        device: torch.device,
        seed: int,
        limit_gib: float | None,
        weights_on_host: bool,
    ) -> None:
        self.device, self.seed = device, seed
        if limit_gib is not None and not weights_on_host:
            bound_memory(device, int(limit_gib * GIB))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target, draft, self.tokenizer = inflate_pair(shape, device, dtype, draft_shape, seed)
        if (group := distributed.current()) is not None:
            shard(target, group)
        free_memory()
        self.draft = HFModel(draft)
        self.target = HFModel(target, StreamedWeights(target, device) if weights_on_host else None)
        free_memory()
        if weights_on_host and limit_gib is not None:
            bound_memory(device, int(limit_gib * GIB))
        self._program: DecodingProgram | None = None
        self._fed: list[int] = []
        self._warm: set[tuple[float, bool]] = set()
        self.prefill_seconds = 0.0

    @property
    def program(self) -> DecodingProgram:
        assert self._program is not None, "no program is open"
        return self._program

    @property
    def cache(self) -> OffloadedCache:
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
        return self.cache.host.streamed_bytes(self.cache.share(2)) + self.weights_on_host

    def peak_gib(self) -> float:
        """Returns the most that torch's allocator has reserved, graphs included."""
        return torch.cuda.max_memory_reserved(self.device) / GIB if self.device.type == "cuda" else 0.0

    def open(
        self, config: HierarchyConfig, max_seq_len: int, temperatures: Sequence[float], offload: Offload
    ) -> None:
        """Makes and captures a program of three levels for these settings, with this split of its cache."""
        self.close()
        drafter = TreeDrafter(self.draft, config)
        self._program = DecodingProgram(self.target, drafter, config, 1, max_seq_len, 3, offload)
        self._warm = set()
        for temperature in temperatures:
            self.program.prepare(ProbsFromLogits.at(temperature))

    def close(self) -> None:
        """Gives the memory of program and cache back."""
        if self._program is not None:
            self._program.cache.close()
        self._program, self._fed = None, []
        free_memory()

    def limit(self, gib: float) -> None:
        """Sets another limit of device memory, and forgets peaks under the last one."""
        self.close()
        bound_memory(self.device, int(gib * GIB))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def feed(self, prompt: list[int]) -> bool:
        """Prefills the prompt into the cache; returns False if it is in it already."""
        if self._fed == prompt:
            return False
        self._fed, self._warm = [], set()
        _, self.prefill_seconds = timed(self.device, lambda: self.program.prefill([prompt]))
        self._fed = prompt
        return True

    @contextmanager
    def streaming_alone(self) -> Iterator[None]:
        """Returns a context in which the CPU attends to nothing."""
        cache = self.cache
        before = cache.settings
        cache.settings = replace(before, host_share=0.0, plain_host_share=0.0)
        try:
            yield
        finally:
            cache.settings = before

    def _traffic(self) -> tuple[float, float, float]:
        """Returns ``Run.traffic`` since the program was opened."""
        weights, own = self.target.streamed, self.cache.attention
        bus = self.cache.host.ring.bytes + (weights.copied if weights is not None else 0)
        return bus, own.bytes if own else 0, own.seconds if own else 0.0

    def passes(
        self, run: Run, temperature: float, text: Sequence[int], new: int, rounds: int | None
    ) -> Iterator[tuple[float, list[int]]]:
        """Yields (seconds of ``run`` so far, new tokens) after each pass behind a text whose tokens are
        cached.
        """
        loop = DecodingLoop.over(self.program, ProbsFromLogits.at(temperature), self.seed)
        if rounds is not None:
            loop.policy.fixed = rounds
        sequence = DecodedSequence(list(text), Ending(new))
        loop.begin([sequence], cached=True)
        synchronize(self.device)
        start, traffic, levels = self._traffic(), run.traffic, run.levels
        earlier = run.stamps[-1][0] if run.stamps else 0.0
        for fresh in loop.decode():
            now = zip(traffic, self._traffic(), start, strict=True)
            run.traffic = tuple(before + b - a for before, b, a in now)
            run.levels = added(levels, loop.levels)
            yield earlier + loop.decode_seconds, dict(fresh).get(sequence, [])

    def decode(self, temperature: float, prompt: Sequence[int], new: int, rounds: int | None = None) -> Run:
        """Decodes ``new`` tokens; 0 rounds is autoregressive decoding."""
        if (kind := (temperature, rounds == 0)) not in self._warm:
            self._warm.add(kind)
            self.decode(temperature, prompt, _PLAIN_WARM_UP if rounds == 0 else _WARM_UP, rounds)
        run = Run()
        for seconds, fresh in self.passes(run, temperature, prompt, new, rounds):
            run.text += fresh
            run.stamps.append((seconds, len(run.text)))
        if rounds != 0:
            depth = pass_limits(self.program.config, self.program.levels).depth
            run.rounds = run.levels[0].forwards / depth / run.levels[-1].forwards
        return run

    def replay(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Run, dict[str, int]]:
        """Decodes greedily without drafts along ``text``.

        After a token that differs from that of ``text``, it goes on from the token of ``text``.

        Returns:
            the times, and the number of tokens that were compared and of those that differ.
        """
        run, partings, done = Run(), 0, 0
        # Kernels are compiled before anything is timed.
        self.decode(0.0, prompt, 1, rounds=0)
        while done < len(text):
            for seconds, [token] in self.passes(run, 0.0, [*prompt, *text[:done]], len(text) - done, 0):
                run.stamps.append((seconds, len(run.stamps) + 1))
                done += 1
                if token != text[done - 1]:
                    partings += 1
                    break
        return run, {"compared": len(text), "partings": partings}

    def stage_ms(
        self, temperature: float, prompt: Sequence[int], rounds: int, passes: int
    ) -> dict[str, float]:
        """Returns milliseconds of one run of each stage: means of a pass, and their median over some passes.

        The host has a part in a pass, so the device is waited for after each stage.
        """
        program = self.program
        program.prepare(ProbsFromLogits.at(temperature))
        program.rewind([list(prompt)])
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        one_pass: list[str] = []
        for done in range(rounds):
            chooses = program.config.retrieval.chooses(done)
            one_pass += ["draft", "retrieval_refresh" if chooses else "retrieval"]
        one_pass.append("target")
        clocks = [StageClock(self.device) for _ in range(passes)]
        for clock in clocks:
            clock.start()
            for name in one_pass:
                program.run(name, generator)
                clock.synchronize()
                clock.mark(name)
            report = program.state.pass_results().tolist()
            tokens = [emitted[:count] for count, _, _, _, *emitted in report]
            program.cache.committed(tokens, with_means=True)
            program.state.retrieval_emitted.zero_()
        synchronize(self.device)
        runs = Counter(one_pass)
        taken = [clock.seconds() for clock in clocks]
        return {name: 1e3 * statistics.median(t[name] for t in taken) / runs[name] for name in runs}
