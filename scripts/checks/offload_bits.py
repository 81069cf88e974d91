"""Check on this machine that streamed weights and attention on the CPU give what they should.

    python -m scripts.checks.offload_bits                      # both, two minutes; --tiny on a CPU
    python -m scripts.checks.offload_bits --part weights       # streamed weights: the bits of the whole model
    python -m scripts.checks.offload_bits --part attention     # attention on the CPU: logits, and its gain

Each line is one JSON object; exit code 1 where anything is wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common.command import device_of, dtype_of, parser, shapes_of
from scripts.benchmarks.common.compare import last_logits
from scripts.benchmarks.common.engine import Bench
from scripts.benchmarks.common.texts import Library
from scripts.benchmarks.common.timing import bus_gbps, timed
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import hardware
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.planning.machine import host_rate
from triforce_tree.planning.memory_map import GIB
from triforce_tree.planning.pass_time import FarRows
from triforce_tree.runtime.executor import free_memory

_START = time.perf_counter()
# One level: plain decoding alone.
_PLAIN = HierarchyConfig.from_options(levels=1, offload=True)
# Last tokens whose logits are compared between caches.
_COMPARED = 9


def say(name: str, **facts: Any) -> None:
    print(json.dumps({"at": round(time.perf_counter() - _START, 1), "what": name, **facts}), flush=True)


class Subject:
    """An inflated pair, a prompt, and a split with the whole cache on the host."""

    def __init__(self, args: argparse.Namespace, device: torch.device, shape: str, context: int) -> None:
        self.bus = bus_gbps(device, 1 << 30)
        say(
            "machine",
            gpu=hardware(),
            torch=torch.__version__,
            bus_gbps=self.bus,
            threads=torch.get_num_threads(),
        )
        self.bench = Bench(*shapes_of(shape, args.tiny), device, dtype_of(device), args.seed)
        self.prompt = Library(self.bench.tokenizer, context).prompt(0, context).tokens
        self.split = Offload(0, 1 << 18 if args.tiny else 64 << 20, 3)
        say("models", peak_gib=self.bench.peak_gib())

    def logits(self, tokens: int, chunk: int, split: Offload | None) -> Tensor:
        """``[T, V]`` at the last of the first ``tokens``; without a split the cache is on the device."""
        prompt, options = self.prompt[:tokens], {"offload": split is not None, "prefill_chunk": chunk}
        config = HierarchyConfig.from_options(levels=1, **options)
        self.bench.open(config, 1, tokens + 64, (), split)
        self.bench.feed([prompt[: 1 - _COMPARED]])
        logits = last_logits(self.bench, [prompt], _COMPARED)[0]
        self.bench.close()
        return logits

    def close(self) -> None:
        self.bench.close()
        say("closed", allocated_gib=torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0)


def weights(args: argparse.Namespace, device: torch.device) -> bool:
    """Weights on the host: the bits of the model that is whole, and what they cost a pass."""
    context, new = (300, 4) if args.tiny else (4096, 12)
    own = Subject(args, device, args.shape or ("llama-2-13b" if args.tiny else "llama-2-7b"), context)
    bench = own.bench
    found = []
    for streamed in (False, True):
        if streamed:
            _, seconds = timed(device, bench.stream)
            say("streamed", seconds=seconds, gib=bench.weights_on_host / GIB)
        logits = [own.logits(context, context // 3, own.split) for _ in range(2)]
        bench.open(_PLAIN, 1, context + new, offload=own.split)
        bench.feed([own.prompt])
        run = bench.decode(0.0, [own.prompt], new)
        say("plain", streamed=streamed, prefill=bench.prefill_seconds, **run.as_dict())
        found.append((logits, run.texts))
        bench.close()
    [[first, *others], tokens], [streamed_logits, streamed_tokens] = found
    identical = all(torch.equal(first, logits) for logits in (*others, *streamed_logits))
    say("bits", identical=identical, spread=float(first.std()), same_tokens=tokens == streamed_tokens)
    assert bench.target.streamed is not None
    bench.target.streamed.close()
    own.close()
    return identical and tokens == streamed_tokens


def attention(args: argparse.Namespace, device: torch.device) -> bool:
    """Attention on the CPU: logits of streaming alone but for rounding, the same bits again, and the gain."""
    context, new = (600, 4) if args.tiny else (args.context, 6)
    own = Subject(args, device, args.shape or "llama-2-7b", context)
    bench, target = own.bench, own.bench.target
    rate = host_rate(target.heads, target.dtype, device)
    say("rate", cpu_gbps={queries: bytes_a_second / 1e9 for queries, bytes_a_second in rate.points})
    size = context // 4, context // 8
    alone, on_chip = own.logits(*size, own.split), own.logits(*size, None)
    noise, spread = float((alone - on_chip).abs().max()), float(alone.std())
    right = True
    for share in (0.5, 1.0):
        first, again = (own.logits(*size, replace(own.split, host_share=share)) for _ in range(2))
        off, same = float((first - alone).abs().max()), torch.equal(first, again)
        say("logits", share=share, off=off, off_on_chip=noise, spread=spread, repeated=same)
        right &= off <= max(4 * noise, 0.05 * spread) and same

    share = FarRows(1, 0, 1e9 * own.bus["in"], rate).share(1) or 0.5
    bench.open(_PLAIN, 1, context + 2 * new, offload=replace(own.split, plain_host_share=share))
    bench.feed([own.prompt])
    say("prefill", seconds=bench.prefill_seconds)
    runs = []
    for name in ("streamed", "attended", "streamed"):
        with bench.streaming_alone() if name == "streamed" else nullcontext():
            bench.decode(0.0, [own.prompt], 2)
            runs.append(bench.decode(0.0, [own.prompt], new))
        say(name, share=0.0 if name == "streamed" else share, **runs[-1].as_dict())
    streamed, attended, _ = runs
    gain = streamed.ms_per_token / attended.ms_per_token
    say("sum", gain=gain, expected=1 / (1 - share), same_tokens=streamed.texts == attended.texts)
    own.close()
    return right


PARTS = {"weights": weights, "attention": attention}


def main(words: Sequence[str] | None = None) -> int:
    made = parser("checks.offload_bits", __doc__)
    made.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to check")
    made.add_argument("--shape", help="what the target is inflated to; by default as the part has it")
    made.add_argument("--context", type=int, default=32768, help="tokens of the prompt of attention")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    wrong = []
    for name in args.part:
        if not PARTS[name](args, device):
            wrong.append(name)
        free_memory()
    print(json.dumps({"checks": len(args.part), "failed": wrong}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
