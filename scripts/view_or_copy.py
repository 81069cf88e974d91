"""Level 1's chosen chunks on one GPU: a view of the full cache, or copies of them; which takes less time?

    python scripts/view_or_copy.py --out docs/results          # view_or_copy_h200.json, in three minutes
    python scripts/view_or_copy.py --smoke                     # the same code, tiny, on a CPU

Both cycles decode the same prompt with the same settings; all rows are on the device in both, so that a copy
costs no bus. What is timed is one run of each stage behind the prompt, with the host waiting in between.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from bench_command import TINY_DRAFT, TINY_OPTIONS, TINY_SHAPES
from offload_measure import Bench
from on_chip_parts import DEFAULTS
from prompt_library import Library

from triforce_tree.bench.results import check_writable, header
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle.host_store import Offload

FILE = "view_or_copy_h200.json"
_ROUNDS, _PASSES = 8, 6


def measured(bench: Bench, prompt: list[int], options: dict[str, Any], copies: bool) -> dict[str, Any]:
    """Milliseconds of each stage with the one or the other."""
    everything = Offload(resident_bytes=1 << 50) if copies else None
    bench.open(HierarchyConfig.from_options(**options), len(prompt) + 512, everything)
    bench.feed(prompt)
    return bench.stage_ms(0.0, prompt, _ROUNDS, _PASSES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help=f"folder that {FILE} is written to")
    parser.add_argument("--context", type=int, default=122_880, help="tokens of the prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU as well")
    args = parser.parse_args()
    path = check_writable(args.out / FILE) if args.out is not None else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (TINY_SHAPES["llama-2-7b"], TINY_DRAFT) if args.smoke else ("llama-2-7b", "llama-68m")
    options = DEFAULTS | {"captured": True} | (TINY_OPTIONS if args.smoke else {})
    context = 600 if args.smoke else args.context
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bench = Bench(*shapes, device, dtype, None, args.seed)
    prompt = Library(bench.tokenizer, context).prompt(0, context)
    rows = []
    # The view twice: what differs between its runs is noise.
    for name in ("view", "copies", "view"):
        times = measured(bench, prompt.tokens, options, copies=name == "copies")
        rows.append({"level_1": name, "context": context, "prompt": prompt.name, "stage_ms": times})
        print(json.dumps(rows[-1]), flush=True)
    if path is not None:
        result = header(args.seed) | {"shapes": shapes, "options": options, "rows": rows}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
