"""Speed of the inflated pair with its cache in host memory, under a cap of device memory.

    python scripts/bench_offload.py --part 7b               # in eight minutes; again: goes on
    python scripts/bench_offload.py --part 7b --tiny        # the same code, tiny, on a CPU
    python scripts/bench_offload.py --part smoke            # does it work here, in three minutes
    python scripts/bench_offload.py --part weights          # do streamed weights, in one
    python scripts/bench_offload.py --part attention        # does attention on the CPU, in one

A part goes into docs/results/offload_h200.json, one measurement after the other; what was made with other
settings or another engine is not continued. Models, prompts and clocks are those of bench_on_chip.py. The
cap is that of torch's allocator, and holds for weights, graphs and prefill as well. The baseline is plain
decoding of this engine, whose cache is streamed too. Each line of a smoke run is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_command import (
    LONG_OPTIONS,
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    prepare,
    results_folder,
    setting,
    settings_of,
)
from deadline import Deadline
from offload_measure import Bench, LastRows, bus_gbps, peak_gib
from offload_parts import PARTS, Session
from offload_results import FILE, book
from prompt_library import Library

from triforce_tree.bench.results import hardware, repeated_share
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle import copied
from triforce_tree.cycle.host_store import Offload
from triforce_tree.graphs import free_memory
from triforce_tree.machine import host_rate
from triforce_tree.memory_map import GIB
from triforce_tree.pass_time import FarRows

_START = time.perf_counter()


def say(name: str, **facts: Any) -> None:
    print(json.dumps({"at": round(time.perf_counter() - _START, 1), "what": name, **facts}), flush=True)


def smoke(args: argparse.Namespace, device: torch.device) -> None:
    """All that has never run on this machine, once, with everything it takes."""
    tiny = args.tiny
    dtype = torch.float32 if tiny else torch.bfloat16
    shape, draft = (TINY_SHAPES["llama-3.1-8b"], TINY_DRAFT) if tiny else (args.shape, "llama-68m")
    context = 600 if tiny else args.context
    say("machine", gpu=hardware(), torch=torch.__version__, bus_gbps=bus_gbps(device))
    start = time.perf_counter()
    bench = Bench(shape, draft, device, dtype, None if tiny else args.cap, args.seed)
    say("models", seconds=time.perf_counter() - start, peak_gib=peak_gib(device))
    prompt = Library(bench.tokenizer, context).prompt(0, context).tokens
    piece = 1 << 18 if tiny else 64 << 20

    # The same rows wherever they live: bit for bit.
    rows = LastRows(bench, prompt[: 300 if tiny else 8192], 128 if tiny else 4096)
    near = 3 * piece * bench.target.layers
    split = {
        name: rows.offloaded(Offload(size, piece, 3))
        for name, size in (("host", 0), ("mixed", near // 2), ("device", 1 << 40 if tiny else 5 * GIB))
    }
    on_chip = rows.on_chip()
    say(
        "splits",
        identical=all(torch.equal(split["host"], logits) for logits in split.values()),
        off_on_chip=float((split["host"] - on_chip).abs().max()),
        spread=float(on_chip.std()),
        same_choice=float((split["host"].argmax(-1) == on_chip.argmax(-1)).float().mean()),
    )
    del rows, split, on_chip
    free_memory()

    options = {**LONG_OPTIONS, **(TINY_OPTIONS if tiny else {}), **dict(args.set)}
    config = HierarchyConfig.from_options(**options)
    new = 24 if tiny else args.new_tokens
    peak_gib(device, reset=True)
    bench.open(config, context + new, Offload(int(args.resident * GIB), piece, 3), (0.0, 0.6))
    host = bench.cycle.offloaded.host
    say(
        "open",
        seconds=bench.seconds,
        host_gib=host.host_bytes / GIB,
        resident_gib=host.resident_bytes / GIB,
        store_gib=bench.cycle.offloaded.store.kv.nbytes / GIB,
        means_gib=bench.cycle.copies.means.nbytes / GIB,
        peak_gib=peak_gib(device),
    )
    bench.feed(prompt)
    say("prefill", seconds=bench.seconds["prefill"], peak_gib=peak_gib(device))
    say("stages", ms=bench.stage_ms(0.0, prompt, 6))
    greedy = bench.decode(0.0, prompt, new)
    say("greedy", **greedy.as_dict(), repeated_8grams=repeated_share(greedy.tokens))
    sampled = bench.decode(0.6, prompt, new)
    say("sampled", **sampled.as_dict(), repeated_8grams=repeated_share(sampled.tokens))
    again = bench.decode(0.0, prompt, min(new, 32))
    say("again", same=again.tokens == greedy.tokens[: len(again.tokens)])
    plain, partings = bench.plain(prompt, greedy.tokens[:16])
    say("plain", **plain.as_dict(), partings=partings)
    say(
        "sum",
        speedup={
            "greedy": plain.ms_per_token / greedy.ms_per_token,
            "sampled": plain.ms_per_token / sampled.ms_per_token,
        },
        peak_gib=peak_gib(device),
    )
    bench.close()
    say("closed", allocated_gib=torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0)


def weights(args: argparse.Namespace, device: torch.device) -> None:
    """Weights on the host: the bits of the model that is whole, and what they cost a pass."""
    tiny = args.tiny
    shape, draft = (TINY_SHAPES["llama-2-13b"], TINY_DRAFT) if tiny else (args.shape, "llama-68m")
    context, new = (300, 4) if tiny else (4096, 12)
    say("machine", gpu=hardware(), torch=torch.__version__, bus_gbps=bus_gbps(device, 1 << 30))
    bench = Bench(shape, draft, device, torch.float32 if tiny else torch.bfloat16, None, args.seed)
    prompt = Library(bench.tokenizer, context).prompt(0, context).tokens
    say("models")
    split = Offload(0, 1 << 18 if tiny else 64 << 20, 3)
    config = HierarchyConfig.from_options(levels=1, offload=True)
    found = []
    for streamed in (False, True):
        if streamed:
            bench.timed("stream", bench.stream)
            say("streamed", seconds=bench.seconds["stream"], gib=bench.weights_on_host / GIB)
        rows = LastRows(bench, prompt, context // 3)
        logits = [rows.offloaded(split) for _ in range(2)]
        del rows
        bench.open(config, context + new, split)
        bench.feed(prompt)
        bench.decode(0.0, prompt, 2)
        run = bench.decode(0.0, prompt, new)
        say("plain", streamed=streamed, prefill=bench.seconds["prefill"], **run.as_dict())
        found.append((logits, run.tokens))
        bench.close()
    [[first, *others], tokens], [streamed_logits, streamed_tokens] = found
    identical = [torch.equal(first, logits) for logits in (*others, *streamed_logits)]
    say("bits", identical=all(identical), spread=float(first.std()), same_tokens=tokens == streamed_tokens)
    own = bench.target.streamed
    assert own is not None
    own.close()
    say("closed", allocated_gib=torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0)
    if not all(identical) or tokens != streamed_tokens:
        raise SystemExit("streamed weights do not give the bits of the model that is whole")


def attention(args: argparse.Namespace, device: torch.device) -> None:
    """Attention on the CPU: logits of streaming alone but for rounding, the same bits again, and the gain."""
    tiny = args.tiny
    shape, draft = (TINY_SHAPES["llama-2-7b"], TINY_DRAFT) if tiny else (args.shape, "llama-68m")
    context, new = (600, 4) if tiny else (args.context, 6)
    bus = bus_gbps(device, 1 << 30)
    say("machine", gpu=hardware(), torch=torch.__version__, bus_gbps=bus, threads=torch.get_num_threads())
    bench = Bench(shape, draft, device, torch.float32 if tiny else torch.bfloat16, None, args.seed)
    prompt = Library(bench.tokenizer, context).prompt(0, context).tokens
    heads, dtype = bench.target.heads, bench.target.dtype
    rate = host_rate(heads, dtype, device)
    say("models", cpu_gbps={queries: bytes_a_second / 1e9 for queries, bytes_a_second in rate.points})

    split = Offload(0, 1 << 18 if tiny else 64 << 20, 3)
    rows = LastRows(bench, prompt[: context // 4], context // 8)
    alone, on_chip = rows.offloaded(split), rows.on_chip()
    noise, spread = float((alone - on_chip).abs().max()), float(alone.std())
    wrong = False
    for share in (0.5, 1.0):
        first, again = (rows.offloaded(replace(split, host_share=share)) for _ in range(2))
        off, same = float((first - alone).abs().max()), torch.equal(first, again)
        say("logits", share=share, off=off, off_on_chip=noise, spread=spread, repeated=same)
        wrong |= off > max(4 * noise, 0.05 * spread) or not same
    del rows

    share = FarRows(1, 0, 1e9 * bus["in"], rate).share(1) or 0.5
    bench.open(
        HierarchyConfig.from_options(levels=1, offload=True), context + 2 * new,
        replace(split, plain_host_share=share),
    )  # fmt: skip
    bench.feed(prompt)
    say("prefill", seconds=bench.seconds)
    runs = []
    for name in ("streamed", "attended", "streamed"):
        with bench.streaming_alone() if name == "streamed" else nullcontext():
            bench.decode(0.0, prompt, 2)
            runs.append(bench.decode(0.0, prompt, new))
        say(name, share=0.0 if name == "streamed" else share, **runs[-1].as_dict())
    streamed, attended, _ = runs
    gain = streamed.ms_per_token / attended.ms_per_token
    say("sum", gain=gain, expected=1 / (1 - share), same_tokens=streamed.tokens == attended.tokens)
    bench.close()
    say("closed", allocated_gib=torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0)
    if wrong:
        raise SystemExit("attention on the CPU does not give the logits of streaming, or not twice the same")


def measure(args: argparse.Namespace, name: str, device: torch.device) -> None:
    """One part, into the book."""
    part = PARTS[name]
    plan = part.full.smoke() if args.tiny else part.full
    plan = replace(
        plan,
        options=plan.options | dict(args.set),
        prompts=args.prompts or plan.prompts,
        caps=tuple(args.caps or plan.caps),
        temperatures=tuple(args.temperatures or plan.temperatures),
    )
    deadline = Deadline(args.seconds)
    settings = settings_of(plan.as_dict(), args.seed, args.tiny)
    written = book(results_folder(args.out, args.tiny) / FILE, name, settings, args.fresh)
    session = Session(plan, written, device, args.seed)
    try:
        part.loop(session, deadline)
    finally:
        written.write()
        session.bench.close()
    for row in written.all["rows"]:
        if row["part"] == name:
            print(json.dumps({k: v for k, v in row.items() if k not in ("config", "memory_plan")}))


def main(words: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    checks = {"smoke": smoke, "weights": weights, "attention": attention}
    add("--part", choices=[*checks, *PARTS], nargs="+", required=True, help="what to measure")
    add("--out", type=Path, help="folder of the results file; without it docs/results, or none with --tiny")
    add("--seconds", type=float, default=450, help="begin nothing that would not end within this time")
    add("--set", type=setting, nargs="*", default=[], metavar="NAME=VALUE", help="options of the hierarchy")
    add("--prompts", type=int, help="of a part; by default as the part has it")
    add("--caps", type=float, nargs="+", help="GiB of device memory; likewise")
    add("--temperatures", type=float, nargs="+", help="0 is greedy; likewise")
    add("--fresh", action="store_true", help="drop what the part has measured before")
    add("--seed", type=int, default=0, help="of all draws, and of the weights without effect")
    add("--tiny", action="store_true", help="tiny shapes and prompts, on any machine")
    alone = made.add_argument_group("smoke run")
    add = alone.add_argument
    add("--shape", default="llama-2-7b", help="what the target is inflated to")
    add("--context", type=int, default=32768, help="tokens of the prompt")
    add("--new-tokens", type=int, default=128, help="tokens of each text")
    add("--cap", type=float, default=24.0, help="GiB of device memory")
    add("--resident", type=float, default=0.0, help="GiB of the cache that stay on the device")
    add("--asked", type=float, help="share of level 1's slots that one choice asks for")
    args = made.parse_args(words)
    if not args.tiny and not torch.cuda.is_available():
        made.error("there is no GPU here; --tiny runs the same code with tiny models on the CPU")
    prepare()
    if args.asked:
        copied._ASKED = args.asked
    device = torch.device("cpu" if args.tiny else "cuda")
    for name in args.part:
        if name in checks:
            checks[name](args, device)
        else:
            measure(args, name, device)


if __name__ == "__main__":
    sys.exit(main())
