"""Check an offloaded cache on a GPU where things go wrong: memory runs out, Ctrl-C, faults; and for long.

    python -m scripts.checks.check_offload                     # a small pair, 8,192 tokens, in two minutes
    python -m scripts.checks.check_offload --dtype bfloat16    # with attention on the CPU
    python -m scripts.checks.check_offload --tiny              # on a CPU, without what only a GPU can show

Every text is compared with the one of the ordinary cycle, whose cache is on the device, in fp32; in 16 bits,
where other sums may round to other tokens, with the first one of the same split. Exit code 1 where anything
fails; the last line is JSON.
"""

import argparse
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from scripts.benchmarks.common.command import TINY_DRAFT, TINY_SHAPES
from scripts.checks.verdicts import Verdicts
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.text import pydoc_text, token_ids
from triforce_tree.kv.offload.copy_stream import BufferRing
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.planning import memory_plan
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import MIB
from triforce_tree.runtime.executor import free_memory

_OPTIONS: dict[str, Any] = {"levels": 3, "gamma": 8, "tree": "best-first:4,3", "recent": 128, "budget": 1024}
_TINY: dict[str, Any] = _OPTIONS | {"budget": 128, "recent": 32, "window": 64}
_SHAPES = ("2048x8x16/16x128x5632", "llama-68m")
_TINY_SHAPES = (TINY_SHAPES["llama-2-7b"], TINY_DRAFT)
# Of the cache's rows, those that are in host memory.
_AWAY = 0.7
# What a plan leaves free, and a little more.
_SPARE = 193 * MIB
# A pass that keeps memory shows after a thousand of them, however little it keeps.
_PASSES, _TINY_PASSES, _GROWTH = 1000, 100, 4 * MIB
# How often the memory is looked at meanwhile: a look collects garbage, which takes longer than a pass.
_LOOKS = 50


class Checks:
    """An inflated pair, a prompt, and what has been found."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tiny: bool, seed: int) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.same_bits_only = dtype != torch.float32
        options, shapes = (_TINY, _TINY_SHAPES) if tiny else (_OPTIONS, _SHAPES)
        self.passes = _TINY_PASSES if tiny else _PASSES
        target, draft, tokenizer = inflate_pair(shapes[0], device, dtype, shapes[1], seed)
        target.generation_config.eos_token_id = None
        config = HierarchyConfig.from_options(**options)
        self.whole = Engine(target, draft, tokenizer, config, given=options)
        self.prompt = token_ids(tokenizer, pydoc_text())[: 600 if tiny else 8192]
        roomy = self.whole.with_options(offload=True, gpu_memory=1 << 50)
        plan = roomy.memory_plan(len(self.prompt), self.passes)
        assert plan is not None, "offload=True always makes a plan"
        self.memory = plan.peak + _SPARE - int(_AWAY * plan.device["resident rows"])
        self.offloaded = self.whole.with_options(offload=True, gpu_memory=self.memory)
        self.verdicts = Verdicts()
        self.add = self.verdicts.add

    def text(self, engine: Engine, new: int, **hooks: Any) -> list[int]:
        out = engine.generate(self.prompt, max_new_tokens=new, temperature=0, **hooks)
        self.split = (out.memory or {}).get("split")
        tokens: list[int] = out.sequences[0, len(self.prompt) :].tolist()
        return tokens

    def same_text(self, name: str, new: int = 64, **hooks: Any) -> None:
        self.add(name, self.text(self.offloaded, new, **hooks) == self.expected[:new])

    def begin(self, new: int) -> None:
        """What is to come out; then the ordinary cycle's memory is free again."""
        self.expected = self.text(self.whole, new)
        self.whole.hierarchy.release()
        bound_memory(self.device, self.memory)
        if self.same_bits_only:
            self.expected = self.text(self.offloaded, 64)

    def last_layer_resident(self) -> None:
        """Prompts are fed in the memory of the last layer's rows, which all stay on the device."""
        decide, hierarchy = memory_plan.plan, self.offloaded.hierarchy

        def plan(*args: Any) -> memory_plan.MemoryPlan:
            made = decide(*args)
            assert made.offload is not None
            return replace(made, offload=replace(made.offload, last_resident=True))

        hierarchy.release()
        with mock.patch.object(memory_plan, "plan", plan):
            self.same_text("the text with a resident last layer")
        program = hierarchy._program[1] if hierarchy._program is not None else None
        there = program is not None and program.offloaded is not None and program.offloaded.host.last_resident
        self.add("the last layer is resident", there)
        hierarchy.release()

    def interrupted(self) -> None:
        """Ctrl-C while memory is taken, and while the prompt is read: all of it is given back."""
        for what, at in (("pinned", 2), ("progress", 3)):
            self.offloaded.hierarchy.release()
            before = self._held()
            try:
                self.text(self.offloaded, 8, **{what: _raising_at(at)})
                stopped = False
            except KeyboardInterrupt:
                stopped = True
            self.offloaded.hierarchy.release()
            kept = [now - then for now, then in zip(self._held(), before, strict=True)]
            passed = stopped and kept[0] <= 0 and kept[1] < 64 * MIB
            self.add(f"Ctrl-C in {what}", passed, kept_device=kept[0], kept_host=kept[1])
        self.same_text("the text after Ctrl-C")

    def faulty(self) -> None:
        """A copy that fails in the middle of a pass."""
        issue, calls = BufferRing._issue, 0

        def failing(ring: BufferRing) -> None:
            nonlocal calls
            calls += 1
            if calls == 40:
                raise RuntimeError("the bus is gone")
            issue(ring)

        error = ""
        with mock.patch.object(BufferRing, "_issue", failing):
            try:
                self.text(self.offloaded, 64)
            except RuntimeError as raised:
                error = str(raised)
        self.add("a fault in a copy is raised", error == "the bus is gone")
        self.same_text("the text after the fault")

    def short_of_memory(self) -> None:
        """Somebody takes device memory, before the graphs are captured and in the middle of a text."""
        plan = self.offloaded.memory_plan(len(self.prompt), self.passes)
        assert plan is not None
        kept = plan.device["resident rows"] // 2
        moments = [("capture", "pinned", 1), ("decoding", "streamer", 3)]
        # In 16 bits nothing is allocated any more once the graphs are there.
        for name, hook, at in moments[: 1 if self.same_bits_only else 2]:
            self.offloaded.hierarchy.release()
            hog = _Hog(self.device, at, kept)
            log = logging.getLogger("triforce_tree.decoding.assembly")
            log.addHandler(hog)
            try:
                made = self.text(self.offloaded, 64, **{hook: hog})
            finally:
                log.removeHandler(hog)
            same = len(made) == 64 if self.same_bits_only else made == self.expected[:64]
            self.add(f"the text when memory runs out in {name}", same)
            self.add("it is said", bool(hog.lines), lines=hog.lines, kept=kept)
            del hog
            free_memory()

    def enduring(self) -> None:
        """Many passes of level 2."""
        held: list[tuple[int, int]] = []
        passes = -1  # the prompt is put first

        class Watching(BaseStreamer):  # type: ignore[misc]
            def put(_, value: Tensor) -> None:
                nonlocal passes
                passes += 1
                if passes % (self.passes // _LOOKS) == 0:
                    held.append(self._held())

            def end(_) -> None: ...

        single = self.offloaded.with_options(levels=1)
        tokens = self.text(single, self.passes, streamer=Watching())
        settled = held[len(held) // 10 :]
        growth = [max(h[i] for h in settled) - settled[0][i] for i in (0, 1)]
        passed = passes >= self.passes and growth[0] <= 0 and growth[1] < _GROWTH
        self.add("memory stays", passed, passes=passes, device_growth=growth[0], host_growth=growth[1])
        same = len(tokens) == self.passes if self.same_bits_only else tokens == self.expected
        self.add("the long text", same, tokens=len(tokens))

    def _held(self) -> tuple[int, int]:
        """Bytes on the device and on the host."""
        gc.collect()
        near = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return near, pages * 4096


class _Hog(logging.Handler):
    """Takes all device memory when it is called for the n-th time, and keeps a part once that is noticed.

    A hook of a generation, and the handler of the log that hears of the shortage.
    """

    def __init__(self, device: torch.device, at: int, kept: int) -> None:
        super().__init__()
        self.device, self.at, self.kept = device, at, kept
        self.lines: list[str] = []
        self._held: list[Tensor] = []

    def __call__(self, count: int = 0) -> None:
        self.at -= 1
        size = 512 * MIB if self.at == 0 else 0
        while size >= MIB:
            try:
                self._held.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:
                size //= 2

    def put(self, value: Tensor) -> None:
        self()

    def end(self) -> None: ...

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        while self._held and sum(tensor.nbytes for tensor in self._held) > self.kept:
            self._held.pop(0)


def _raising_at(call: int) -> Callable[[int], None]:
    calls = 0

    def hook(count: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    return hook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="on a CPU: no shortage of device memory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny checks on the CPU what can be checked there")
    if args.tiny and args.dtype != "float32":
        parser.error("--tiny is for float32: on a CPU oneDNN keeps 120 MB for what it multiplies in 16 bits")
    transformers_logging.disable_progress_bar()
    checks = Checks(
        torch.device("cpu") if args.tiny else torch.device("cuda", torch.cuda.current_device()),
        getattr(torch, args.dtype),
        args.tiny,
        args.seed,
    )
    checks.begin(checks.passes)
    checks.same_text("the text")
    checks.add("it is offloaded", bool(checks.split), split=checks.split)
    checks.last_layer_resident()
    checks.interrupted()
    checks.faulty()
    if checks.on_gpu:
        checks.short_of_memory()
    checks.enduring()
    return checks.verdicts.tell(rows=checks.verdicts.rows)


if __name__ == "__main__":
    sys.exit(main())
