"""Level 1's chosen chunks on one GPU: a view of the full cache, or copies of them; which takes less time?

Both programs decode the same prompt with the same settings; the whole cache is on the device in both, so
that a copy costs no bus. What is timed is one run of each stage behind the prompt, with the host waiting in
between. The results are docs/results/view_or_copy_h200.json, after three minutes on an H200.
"""

import json
from collections.abc import Sequence

from scripts.benchmarks.common.command import TINY_OPTIONS, device_of, dtype_of, parser, shapes_of
from scripts.benchmarks.common.results import RESULTS, header, write
from scripts.benchmarks.common.texts import Library
from scripts.benchmarks.offload.engine import OffloadBench
from scripts.benchmarks.offload.tables import VIEW_OR_COPY
from scripts.benchmarks.on_chip.run import DEFAULTS
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import check_writable
from triforce_tree.kv.offload.host_store import Offload

_ROUNDS, _PASSES = 8, 6


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks view_or_copy", __doc__)
    made.add_argument("--context", type=int, default=122_880, help="tokens of the prompt")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    out = args.out or (None if args.tiny else RESULTS / VIEW_OR_COPY)
    if out is not None:
        check_writable(out)
    shapes = shapes_of("llama-2-7b", args.tiny)
    options = DEFAULTS | (TINY_OPTIONS if args.tiny else {})
    context = 600 if args.tiny else args.context
    bench = OffloadBench(*shapes, device, dtype_of(device), None, args.seed)
    prompt = Library(bench.tokenizer, context).prompt(0, context)
    rows = []
    # The view twice: what differs between its runs is noise.
    for name in ("view", "copies", "view"):
        everything = Offload(resident_bytes=1 << 50) if name == "copies" else None
        bench.open(HierarchyConfig.from_options(**options), context + 512, everything)
        bench.feed(prompt.tokens)
        times = bench.stage_ms(0.0, prompt.tokens, _ROUNDS, _PASSES)
        rows.append({"level_1": name, "context": context, "prompt": prompt.name, "stage_ms": times})
        print(json.dumps(rows[-1]), flush=True)
    if out is not None:
        write(out, header(args.seed, "engine") | {"shapes": shapes, "options": options, "rows": rows})
