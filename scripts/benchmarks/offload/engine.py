"""An inflated pair whose full cache is offloaded: feed, decode, compare, and time it, under a memory cap."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common.engine import (
    drafter_of,
    last_logits,
    levels_of,
    new_decoder,
    rounds_per_pass,
)
from scripts.benchmarks.common.timing import synchronize, timed
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.kv.offload.copy_stream import CopyStream
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.offload.offloaded_view import StreamedView
from triforce_tree.kv.offload.pinned import HostMemory
from triforce_tree.kv.offload.streamed_weights import StreamedWeights
from triforce_tree.kv.prefill import prefill
from triforce_tree.kv.store import KVStore
from triforce_tree.kv.tree_attention_view import TreeAttentionView
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.models.few_row import few_row_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel
from triforce_tree.models.tensor_parallel import shard
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import GIB
from triforce_tree.runtime import distributed
from triforce_tree.runtime.executor import free_memory
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.verify.sampling import ProbsFromLogits

# Last tokens whose logits are compared between caches.
_COMPARED = 9


@dataclass
class Run:
    """One decoding: ``tokens`` that were written, and what it took.

    ``attended_bytes`` are those that the CPU attended to, in ``attending_seconds`` of its own.
    """

    tokens: list[int]
    seconds: float
    passes: int
    streamed_bytes: int
    attended_bytes: int
    attending_seconds: float
    levels: list[LevelStats] = field(default_factory=list)
    rounds: float = 0.0

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / len(self.tokens)

    def as_dict(self) -> dict[str, Any]:
        """Figures of the run; of each level its share of one pass."""
        last = self.levels[-1].seconds
        return {
            "ms_per_token": self.ms_per_token,
            "tokens": len(self.tokens),
            "passes": self.passes,
            "tokens_per_pass": len(self.tokens) / self.passes,
            "rounds_per_pass": self.rounds,
            "pass_ms": {level.name: 1e3 * level.seconds / self.passes for level in self.levels},
            "pcie_gbps": self.streamed_bytes / 1e9 / last if last else None,
            "cpu_gbps": self.attended_bytes / 1e9 / self.attending_seconds if self.attended_bytes else None,
            "acceptance": {level.name: level.acceptance_rate for level in self.levels},
            "mean_accepted_length": {level.name: level.mean_accepted_length for level in self.levels},
        }


def peak_gib(device: torch.device, reset: bool = False) -> float:
    """What torch's allocator has held at most, reserved memory and graphs included."""
    if device.type != "cuda":
        return 0.0
    peak = torch.cuda.max_memory_reserved(device) / GIB
    if reset:
        free_memory()
        torch.cuda.reset_peak_memory_stats(device)
    return peak


def bus_gbps(device: torch.device, size: int = 2 * GIB) -> dict[str, float]:
    """Host to device and back, from locked memory in pieces, in GB/s; ``size`` bytes where there is a bus."""
    size, piece = (size, 64 << 20) if device.type == "cuda" else (1 << 26, 1 << 22)
    memory = HostMemory(device.type == "cuda")
    host = memory.take((size // piece, piece), torch.uint8)
    near = torch.empty(piece, dtype=torch.uint8, device=device)
    stream, result = CopyStream(device), {}
    for name, order in (("in", lambda row: (near, row)), ("out", lambda row: (row, near))):
        times = []
        for _ in range(3):
            stream.synchronize()
            start = time.perf_counter()
            for row in host:
                stream.copy(*order(row))
            stream.synchronize()
            times.append(time.perf_counter() - start)
        result[name] = size / 1e9 / min(times)
    del host
    memory.release()
    return result


class OffloadBench:
    """The pair and the program that is open.

    Args:
        shape, draft_shape: what the embedded pair is inflated to.
        device, dtype: of everything.
        cap_gib: of device memory; None for no cap.
        seed: of the weights without effect, and of all draws.
        weights_on_host: stream the target's weights. It is built whole on the device, before the cap holds.
    """

    def __init__(
        self,
        shape: str,
        draft_shape: str,
        device: torch.device,
        dtype: torch.dtype,
        cap_gib: float | None,
        seed: int,
        weights_on_host: bool = False,
    ) -> None:
        self.device, self.seed = device, seed
        if cap_gib is not None and not weights_on_host:
            bound_memory(device, int(cap_gib * GIB))
        target, draft, self.tokenizer = inflate_pair(shape, device, dtype, draft_shape, seed)
        if (group := distributed.current()) is not None:
            shard(target, group)
        free_memory()
        self.target, self.draft = HFModel(target), HFModel(draft)
        if weights_on_host:
            self.stream()
            if cap_gib is not None:
                bound_memory(device, int(cap_gib * GIB))
        self._program: DecodingProgram | None = None
        self._fed: list[int] = []
        self.seconds: dict[str, float] = {}

    def stream(self) -> None:
        """Move the target's weights to the host; copies of the target from before are of no use any more."""
        model = self.target.model
        self.target = HFModel(model, StreamedWeights(model, self.device))
        free_memory()

    @property
    def weights_on_host(self) -> int:
        """Bytes that every pass of level 2 brings beside the cache."""
        return self.target.streamed.bytes if self.target.streamed is not None else 0

    @property
    def pass_bytes(self) -> int:
        """What a pass of level 2 copies to the device when it verifies more than one token."""
        return self.offloaded.host.streamed_bytes(self.offloaded.share(2)) + self.weights_on_host

    def _counters(self) -> tuple[int, int, float]:
        """Bytes that have come over the bus for level 2 and those that the CPU attended to, in seconds."""
        far, own = self.target.streamed, self.offloaded.attention
        bus = self.offloaded.host.ring.bytes + (far.copied if far is not None else 0)
        return (bus, own.bytes, own.seconds) if own is not None else (bus, 0, 0.0)

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

    @property
    def program(self) -> DecodingProgram:
        assert self._program is not None, "no program is open"
        return self._program

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Do the work, and note its seconds under ``name``."""
        result, self.seconds[name] = timed(self.device, work)
        return result

    def open(
        self,
        config: HierarchyConfig,
        max_seq_len: int,
        offload: Offload | None,
        temperatures: Sequence[float] = (0.0,),
    ) -> None:
        """A program for these settings, captured; without ``offload`` its cache is on the device."""
        self.close()
        levels = levels_of(config)
        drafter = drafter_of(self.draft, config, levels)
        self._program = self.timed(
            "allocate", lambda: DecodingProgram(self.target, drafter, config, 1, max_seq_len, levels, offload)
        )
        for temperature in temperatures:
            self.timed(
                f"capture {temperature}", lambda t=temperature: self.program.prepare(ProbsFromLogits.at(t))
            )

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._program, self._fed = None, []
        free_memory()

    def cap(self, gib: float) -> None:
        """Bound the device memory anew, and forget peaks under the last bound."""
        self.close()
        bound_memory(self.device, int(gib * GIB))
        peak_gib(self.device, reset=True)

    @property
    def offloaded(self) -> OffloadedCache:
        assert self.program.offloaded is not None, "the program that is open keeps its cache on the device"
        return self.program.offloaded

    def feed(self, prompt: Sequence[int]) -> None:
        """The prompt into the full cache, unless it is there."""
        if self._fed != list(prompt):
            self._fed = []
            self.timed("prefill", lambda: self.program.prefill([list(prompt)]))
            self._fed = list(prompt)

    def decode(self, temperature: float, prompt: Sequence[int], new: int, rounds: int | None = None) -> Run:
        """``new`` tokens behind a prompt that was fed, or the beginning of its text; 0 rounds: plain."""
        program = self.program
        decoder = new_decoder(program, temperature, self.seed, rounds)
        program.rewind([list(prompt)])
        synchronize(self.device)
        before = self._counters()
        tokens = [token for fresh in decoder.decode([list(prompt)], [Ending(new)]) for token in fresh[0]]
        streamed, attended, seconds = (b - a for a, b in zip(before, self._counters(), strict=True))
        forwards = decoder.levels[-1].forwards
        run = Run(
            tokens, decoder.decode_seconds, forwards, int(streamed), int(attended), seconds, decoder.levels
        )
        run.rounds = rounds_per_pass(program, run.levels)
        return run

    def plain(self, prompt: Sequence[int], text: Sequence[int]) -> tuple[Run, list[dict[str, float]]]:
        """Plain greedy decoding along ``text``: its time, and where it parts from it (never, but at ties)."""
        partings, runs, done = [], [], 0
        while done < len(text):
            run = self.decode(0.0, [*prompt, *text[:done]], len(text) - done, rounds=0)
            pairs = enumerate(zip(run.tokens, text[done:], strict=True))
            same = next((i for i, (a, b) in pairs if a != b), None)
            runs.append(run)
            if same is None:
                break
            partings.append({"at": done + same, "plain": run.tokens[same], "ours": text[done + same]})
            done += same + 1
            if len(partings) > 8:
                break
        return runs[0], partings

    def stage_ms(
        self, temperature: float, prompt: Sequence[int], rounds: int, passes: int = 2, last: str = "target"
    ) -> dict[str, float]:
        """Median milliseconds of one run of each stage; every round of level 1 but the second chooses.

        Args:
            last: stage of level 2 behind the rounds, "target" or, without any, "plain".
        """
        program = self.program
        program.prepare(ProbsFromLogits.at(temperature))
        program.rewind([list(prompt)])
        generator = torch.Generator(self.device)
        generator.manual_seed(self.seed)
        found: dict[str, list[float]] = {}
        exchanged = []
        for _ in range(passes):
            names = [
                n for i in range(rounds) for n in ("draft", "retrieval" if i == 1 else "retrieval_refresh")
            ]
            for name in [*names, last]:
                _, seconds = timed(self.device, lambda n=name: program.run(n, generator))
                found.setdefault(name, []).append(1e3 * seconds)
                if name == "retrieval_refresh" and program.gathered_view is not None:
                    exchanged.append(float(program.gathered_view.exchanged.float().mean()))
            program.committed([row[0] for row in program.state.pass_results().tolist()])
            program.state.retrieval_emitted.zero_()
        result = {name: statistics.median(times) for name, times in found.items()}
        if exchanged:
            result["exchanged chunks a head"] = statistics.fmean(exchanged)
        return result


class LastRows:
    """Logits of the last tokens of a prompt, from caches that are split in several ways.

    Args:
        bench: its target is used.
        prompt: whose keys and values are computed anew for each split.
        chunk: tokens of prefill at once.
    """

    def __init__(self, bench: OffloadBench, prompt: Sequence[int], chunk: int) -> None:
        self.bench, self.prompt, self.chunk = bench, list(prompt), chunk
        compiled = bench.device.type == "cuda"
        self.model = StepModel(few_row_copy(bench.target.model), compiled)
        self._chain = torch.ones(_COMPARED, _COMPARED, dtype=torch.bool).tril()

    def offloaded(self, offload: Offload) -> Tensor:
        """``[T, V]``."""
        target, count = self.bench.target, len(self.prompt)
        cache = OffloadedCache(target, 1, count + 64, 0, 256, 0, 0, offload)
        with target.active():
            cache.prefill([self.prompt[: count - _COMPARED + 1]], self.chunk)
        logits = self._logits(StreamedView(cache, _COMPARED, mask=self._chain))
        cache.close()
        del cache
        free_memory()
        return logits

    def on_chip(self) -> Tensor:
        """``[T, V]``."""
        target, count = self.bench.target, len(self.prompt)
        store = KVStore(target.kv_shapes, 1, count + 256, target.device, target.dtype)
        with target.active():
            prefill(target, store, 0, self.prompt[: count - _COMPARED], self.chunk, None)
        logits = self._logits(TreeAttentionView(store, _COMPARED, mask=self._chain))
        del store
        free_memory()
        return logits

    def _logits(self, rows: TreeAttentionView) -> Tensor:
        return last_logits(self.model, rows, [self.prompt], _COMPARED)[0].float()
