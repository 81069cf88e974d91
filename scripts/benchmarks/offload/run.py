"""Speed of the inflated pair with its cache in host memory, under a cap of device memory.

A part goes into docs/results/offload_h200.json, one measurement after the other; what was made with other
settings or another engine is not continued. Models, prompts and clocks are those of ``on_chip``. The cap is
that of torch's allocator, and holds for weights, graphs and prefill as well. The baseline is plain decoding
of this engine, whose cache is streamed too. Whether the bits are right on a machine says
``scripts.checks.offload_bits``.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scripts.benchmarks.common.command import device_of, parts_parser, results_folder
from scripts.benchmarks.common.deadline import Deadline
from scripts.benchmarks.common.results import ResultsFile, settings_of
from scripts.benchmarks.offload.rows import FED, FILE, ON_CHIP, rows
from scripts.benchmarks.offload.session import Plan, Session
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan


def headline(session: Session, deadline: Deadline) -> None:
    """Every temperature beside streamed plain decoding, on one prompt after the other."""
    plan = session.plan
    for cap in plan.caps:
        memory: MemoryPlan | None = None
        for number in deadline.steps(range(plan.prompts)):
            if not session.lacking(cap, number):
                continue
            try:
                memory = session.open(cap, session.memory(cap)) if memory is None else memory
            except DoesNotFitError as error:
                session.say(str(error))
                session.file.note(f"cap {cap:g} GiB: {error}")
                break
            memory = session.measure(cap, memory, number)


def prefills(session: Session, deadline: Deadline) -> None:
    """The same prompts' prefill with the cache on the device, then offloaded."""
    plan, bench = session.plan, session.bench
    [cap] = plan.caps
    config = session.memory(cap).config
    shorter = max(plan.context // 16, 2 * config.retrieval.budget + 64)
    for method in (ON_CHIP, FED):
        opened = False
        for number in deadline.steps(range(plan.prompts)):
            base = session.sample(method, number, 0.0, cap)
            if session.file.find(method=method, prompt=base["prompt"]) is not None:
                continue
            prompt = session.library.prompt(number, plan.context)
            if not opened and method == ON_CHIP:
                bench.open(config, plan.context + plan.new_tokens, None, ())
            elif not opened:
                session.open(cap, session.memory(cap))
            opened = True
            bench.feed(prompt.tokens[:shorter])
            bench.feed(prompt.tokens)
            seconds = bench.seconds["prefill"]
            session.say(f"{method}, {base['prompt']}: {seconds:.2f} s")
            session.file.add(base | {"sources": [prompt.name], "prefill_seconds": seconds})


@dataclass(frozen=True)
class Part:
    """One part: its settings at full size, and the loop."""

    full: Plan
    loop: Callable[[Session, Deadline], None] = headline


_LONG = 122_880
_WITH_THE_CPU = {"host_attention": True}
PARTS: dict[str, Part] = {
    "7b": Part(Plan("llama-2-7b", _LONG)),
    "8b": Part(Plan("llama-3.1-8b", _LONG)),
    "8b-512k": Part(Plan("llama-3.1-8b", 524_288, prompts=1, one_text=True, new_tokens=128)),
    # 24 GiB of weights and 75 of cache are what a host of 128 GiB can lock.
    "13b": Part(Plan("llama-2-13b", 98_304, prompts=1, weights_on_host=True)),
    "resident": Part(Plan("llama-2-7b", _LONG, caps=(80.0,), resident=0.75)),
    "caps": Part(Plan("llama-2-7b", _LONG, caps=(16.0, 48.0), prompts=1)),
    "host-attention": Part(Plan("llama-2-7b", _LONG, prompts=2, options=_WITH_THE_CPU)),
    "host-attention-8b": Part(Plan("llama-3.1-8b", _LONG, prompts=2, options=_WITH_THE_CPU)),
    "prefill": Part(Plan("llama-2-7b", _LONG, prompts=2, on_chip=True), prefills),
}


def main(words: Sequence[str] | None = None) -> None:
    made = parts_parser("benchmarks offload", __doc__, list(PARTS), seconds=450)
    made.add_argument(
        "--caps", type=float, nargs="+", help="GiB of device memory; by default as the part has it"
    )
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    for name in PARTS if "all" in args.part else args.part:
        full = PARTS[name].full
        plan = full.tiny() if args.tiny else full
        plan = replace(
            plan,
            options=plan.options | dict(args.set),
            prompts=args.prompts or plan.prompts,
            caps=tuple(args.caps or plan.caps),
            temperatures=tuple(args.temperatures or plan.temperatures),
        )
        deadline = Deadline(args.seconds)
        settings = settings_of(plan.as_dict(), args.seed, args.tiny)
        file = ResultsFile(
            results_folder(args.out, args.tiny) / FILE, name, settings, rows, ["engine"], args.fresh
        )
        session = Session(plan, file, device, args.seed)
        try:
            PARTS[name].loop(session, deadline)
        finally:
            file.write()
            session.bench.close()
        for row in file.rows:
            print(json.dumps({k: v for k, v in row.items() if k != "memory_plan"}))
