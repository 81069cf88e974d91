"""Check an offloaded cache on a GPU where things go wrong: memory runs out, Ctrl-C, faults; and for long.

    python -m scripts.checks.check_offload                     # a small pair, 8,192 tokens, in two minutes
    python -m scripts.checks.check_offload --dtype bfloat16    # with attention on the CPU
    python -m scripts.checks.check_offload --tiny              # on a CPU, without what only a GPU can show

All output is compared with that of the program whose cache is on the device, in fp32; in 16 bits, where other
orders of sums may round to other tokens, with the first output of the same split. Weights streamed from the
host must give the same bits in every dtype. Exit code 1 where anything fails; the last line is JSON.
"""

import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from scripts.benchmarks.common.command import TINY_DRAFT, TINY_SHAPES
from scripts.checks.report import Report, need_gpu, parser
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine, load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.kv.offload.copy_stream import BufferRing
from triforce_tree.planning import memory_plan
from triforce_tree.planning.machine import bound_memory
from triforce_tree.planning.memory_map import MIB
from triforce_tree.runtime.executor import free_memory

_OPTIONS: dict[str, Any] = {"levels": 3, "gamma": 8, "tree": "best-first:4,3", "recent": 128, "budget": 1024}
_TINY: dict[str, Any] = _OPTIONS | {"budget": 128, "recent": 32, "window": 64}
_SHAPES = ("2048x8x16/16x128x5632", "llama-68m")
_TINY_SHAPES = (TINY_SHAPES["llama-2-7b"], TINY_DRAFT)
# Of the KV slots, the share that is in host memory.
_ON_HOST = 0.7
# What a plan leaves free, and a little more.
_SPARE = 193 * MIB
# After a thousand passes even a small leak is above this growth.
_PASSES, _TINY_PASSES, _GROWTH = 1000, 100, 4 * MIB
# How often memory is read meanwhile: that collects garbage, which takes longer than a pass.
_READINGS = 50


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
        self.memory = plan.peak + _SPARE - int(_ON_HOST * plan.device["resident KV"])
        self.offloaded = self.whole.with_options(offload=True, gpu_memory=self.memory)
        self.report = Report()
        self.add = self.report.add
        self.inflated = shapes[0], device, dtype, shapes[1], seed
        self.options, self.calls = options, 5 if tiny else 40

    def text(self, engine: Engine, new: int, **hooks: Any) -> list[int]:
        out = engine.generate(self.prompt, max_new_tokens=new, temperature=0, **hooks)
        self.split = (out.memory or {}).get("split")
        tokens: list[int] = out.sequences[0, len(self.prompt) :].tolist()
        return tokens

    def same_text(self, name: str, new: int = 64, **hooks: Any) -> None:
        self.add(name, self.text(self.offloaded, new, **hooks) == self.expected[:new])

    def begin(self, new: int) -> None:
        """The expected tokens; then the memory of the program without offloading is free again."""
        self.expected = self.text(self.whole, new)
        self.whole.hierarchy.release()
        bound_memory(self.device, self.memory)
        if self.same_bits_only:
            self.expected = self.text(self.offloaded, 64)

    def last_layer_resident(self) -> None:
        """All KV of the last layer stays on the device, and prefill works in its memory."""
        decide, hierarchy = memory_plan.plan, self.offloaded.hierarchy

        def plan(*args: Any) -> memory_plan.MemoryPlan:
            made = decide(*args)
            assert made.offload is not None
            return replace(made, offload=replace(made.offload, last_resident=True))

        hierarchy.release()
        with mock.patch.object(memory_plan, "plan", plan):
            self.same_text("the text with a resident last layer")
        assert hierarchy._program is not None
        cache = hierarchy._program[1].offloaded
        self.add("the last layer is resident", cache is not None and cache.host.last_resident)
        hierarchy.release()

    def interrupted(self) -> None:
        """Ctrl-C while memory is allocated, and during prefill: all of it is given back."""
        for what, at in (("pinned", 2), ("progress", 3)):
            self.offloaded.hierarchy.release()
            before = self._held()
            try:
                hook = mock.Mock(side_effect=[*[None] * (at - 1), KeyboardInterrupt])
                self.text(self.offloaded, 8, **{what: hook})
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
            if calls == self.calls:
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
        """Another program takes device memory, before the graphs are captured and while decoding."""
        plan = self.offloaded.memory_plan(len(self.prompt), self.passes)
        assert plan is not None
        kept = plan.device["resident KV"] // 2
        moments = [("capture", "pinned", 1), ("decoding", "streamer", 3)]
        # In 16 bits nothing is allocated any more once the graphs are captured.
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
            # What decoding still allocates is small, and may lie in what the allocator has kept.
            if name == "capture":
                self.add("a warning is logged", bool(hog.lines), lines=hog.lines, kept=kept)
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
                if passes % (self.passes // _READINGS) == 0:
                    held.append(self._held())

            def end(_) -> None: ...

        single = self.offloaded.with_options(levels=1)
        tokens = self.text(single, self.passes, streamer=Watching())
        later = held[len(held) // 10 :]
        growth = [max(h[i] for h in later) - later[0][i] for i in (0, 1)]
        passed = passes >= self.passes and growth[0] <= 0 and growth[1] < _GROWTH
        self.add("memory stays", passed, passes=passes, device_growth=growth[0], host_growth=growth[1])
        same = len(tokens) == self.passes if self.same_bits_only else tokens == self.expected
        self.add("the long text", same, tokens=len(tokens))

    def streamed_weights(self) -> None:
        """Weights in host memory: the bits of the whole model; in fp32 the same tokens as well."""
        ids = torch.tensor([self.prompt[:512]], device=self.device)
        target, draft, _ = inflate_pair(*self.inflated)
        target.generation_config.eos_token_id = None
        with torch.inference_mode():
            whole = target(ids).logits
        engine = load(target, draft, **load_arguments({**self.options, "offload_weights": True}))
        with torch.inference_mode():
            same = torch.equal(whole, engine.hierarchy.target.model(ids).logits)
        self.add("streamed weights give the same bits", same and engine.hierarchy.target.streamed is not None)
        expected = self.text(engine if self.same_bits_only else self.whole, 16)
        self.add("the text with streamed weights", self.text(engine, 16) == expected)
        engine.close()

    def _held(self) -> tuple[int, int]:
        """Bytes on the device and on the host."""
        gc.collect()
        allocated = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return allocated, pages * 4096


class _Hog(logging.Handler):
    """Takes all device memory at its n-th call, and frees most of it when the shortage is logged.

    A hook of a generation, and a handler of the log.
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


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tiny", action="store_true", help="on a CPU: no shortage of device memory")
    made.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of models"
    )
    made.add_argument("--seed", type=int, default=0, help="of the weights without effect")
    args = made.parse_args()
    if not args.tiny:
        need_gpu(made)
    elif args.dtype != "float32":
        made.error("--tiny is for float32: on a CPU oneDNN keeps 120 MB for what it multiplies in 16 bits")
    transformers_logging.disable_progress_bar()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", torch.cuda.current_device())
    checks = Checks(device, getattr(torch, args.dtype), args.tiny, args.seed)
    checks.streamed_weights()
    checks.begin(checks.passes)
    checks.same_text("the text")
    checks.add("it is offloaded", bool(checks.split), split=checks.split)
    checks.last_layer_resident()
    checks.interrupted()
    checks.faulty()
    if checks.on_gpu:
        checks.short_of_memory()
    checks.enduring()
    return checks.report.finish(rows=checks.report.rows)


if __name__ == "__main__":
    sys.exit(main())
