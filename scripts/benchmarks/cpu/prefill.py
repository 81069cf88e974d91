"""Prefill of the embedded target on a CPU beside transformers' own: docs/results/cpu_prefill.jsonl.

    python -m scripts.benchmarks cpu_prefill
    python -m scripts.benchmarks cpu_prefill --contexts 4096 --rounds 3

Our chunks into the full cache, and one forward of transformers over the whole prompt with its dynamic cache
and ``sdpa``, which compute the same logits of the last token. The two take turns in one process, in the order
of a round and then in the other order. Seconds of the process beside those of the clock tell what the
machine's other work did.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.cpu.tables import PREFILL
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.loading.checkpoints import PAIR, load_model
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.runtime.files.writing import check_writable

# By the clock, and of the process.
Seconds = tuple[float, float]


def ours(model: HFModel, prompt: list[int]) -> Callable[[], Seconds]:
    """Returns seconds of the engine's prefill; its memory is taken before."""
    config = HierarchyConfig.from_options(levels=1)
    program = DecodingProgram(model, None, config, 1, len(prompt) + 1, 1)

    def run() -> Seconds:
        with model.active():
            # The engine keeps the last token for the first pass.
            return _timed(lambda: program.prefill([[*prompt, 3]]))

    return run


def theirs(model: PreTrainedModel, prompt: list[int]) -> Callable[[], Seconds]:
    """Returns seconds of transformers' forward over the whole prompt, as ``generate`` begins."""
    ids = torch.tensor([prompt])

    @torch.no_grad()
    def run() -> Seconds:
        cache = DynamicCache(config=model.config)
        return _timed(lambda: model(ids, logits_to_keep=1, **{CACHE: cache}))

    return run


def _timed(work: Callable[[], object]) -> Seconds:
    start, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - own


def measure(target: PreTrainedModel, context: int, rounds: int) -> Record:
    """Measures both in turns, after a first run each."""
    target.set_attn_implementation("sdpa")
    model = HFModel(target)
    prompt = torch.randint(3, model.vocab_size, (context,)).tolist()
    runs = {"ours": ours(model, prompt), "transformers": theirs(target, prompt)}
    found: dict[str, list[Seconds]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            found[name].append(runs[name]())
    row: Record = {"context": context, "rounds": rounds}
    for at, clock in enumerate(("wall", "process")):
        times = {name: [seconds[at] for seconds in all_of] for name, all_of in found.items()}
        ratios = [b / a for a, b in zip(times["ours"], times["transformers"], strict=True)]
        row[clock] = {name: statistics.median(some) for name, some in times.items()}
        row[clock] |= {"speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return row


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks cpu_prefill", __doc__, tiny=False)
    made.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 4096, 16_384], metavar="N")
    made.add_argument("--rounds", type=int, default=6, help="timed prompts of each")
    made.add_argument("--threads", type=int, default=2, help="of torch")
    made.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    args = made.parse_args(words)
    out = check_writable(args.out or RESULTS / PREFILL)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rows: list[Record] = []
    for dtype in args.dtypes:
        target = load_model(PAIR / "target", torch.device("cpu"), getattr(torch, dtype))
        for context in args.contexts:
            rows.append({"dtype": dtype, **measure(target, context, args.rounds)})
            print(json.dumps(rows[-1]), flush=True)
    write(out, {**header(args.seed), "threads": args.threads, "rows": rows})
