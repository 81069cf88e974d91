"""A pass of level 2 where much of an offloaded cache is on the device: its pieces one by one, and together.

    python scripts/bench_resident.py           # the shape of a 7B at 65,536 tokens, in three minutes
    python scripts/bench_resident.py --tiny    # the same code with tiny models on the CPU; writes nothing

The host asks for attention to every piece of every layer. The more of them are resident, the less the pass
waits for the bus, and the more for the host. The results are docs/results/resident_h200.json: milliseconds of
a pass of one row and of one that verifies a chain, beside those that its bytes take on the bus.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from bench_command import LONG_OPTIONS, RESULTS, TINY_DRAFT, TINY_OPTIONS, TINY_SHAPES, prepare
from measurements import Record, rounded
from offload_measure import Bench, LastRows, bus_gbps
from prompt_library import Library

from triforce_tree.bench import results
from triforce_tree.config import HierarchyConfig
from triforce_tree.cycle import streamed_rows
from triforce_tree.cycle.host_store import Offload
from triforce_tree.graphs import free_memory

OUT = RESULTS / "resident_h200.json"
SHARES = (0.5, 0.8, 0.95)
# Without leaves a pass verifies a chain alone.
_OPTIONS: Record = LONG_OPTIONS | {"offload": True, "leaves": False}
# Passes of a median, after others of warm-up.
_PASSES = 6


class Measured:
    """An inflated pair, a prompt, and passes over the cache of its text."""

    def __init__(self, tiny: bool, context: int, device: torch.device, seed: int) -> None:
        self.bus = bus_gbps(device)
        dtype = torch.float32 if tiny else torch.bfloat16
        shape, draft = (TINY_SHAPES["llama-2-7b"], TINY_DRAFT) if tiny else ("llama-2-7b", "llama-68m")
        self.bench = Bench(shape, draft, device, dtype, None, seed)
        self.prompt = Library(self.bench.tokenizer, context).prompt(0, context).tokens
        self.piece = 1 << 16 if tiny else 64 << 20
        self.config = HierarchyConfig.from_options(**(_OPTIONS | (TINY_OPTIONS if tiny else {})))
        heads, target = self.bench.target.heads, self.bench.target
        self.row = 2 * heads.kv * heads.dim * dtype.itemsize * target.layers

    def same_bits(self, length: int) -> bool:
        """Whether a text's last logits are the same with all rows on the host, some, and none."""
        rows = LastRows(self.bench, self.prompt[:length], length)
        sizes = (0, length * self.row * 2 // 3, length * self.row * 2)
        first, *others = (rows.offloaded(Offload(size, self.piece, 3)) for size in sizes)
        return all(torch.equal(first, logits) for logits in others)

    def passes(self, share: float, together: int) -> Record:
        """Milliseconds, with ``share`` of the rows on the device and so many of their pieces at once."""
        bench, room = self.bench, len(self.prompt) + 128
        split = Offload(int(share * room * self.row), self.piece, 3)
        with mock.patch.object(streamed_rows, "TOGETHER", together):
            bench.open(self.config, room, split)
        bench.feed(self.prompt)
        bench.decode(0.0, self.prompt, 3, rounds=0)
        plain = bench.stage_ms(0.0, self.prompt, 0, _PASSES, last="plain")["plain"]
        verify = bench.stage_ms(0.0, self.prompt, 3, _PASSES)["full"]
        found = {"plain_ms": plain, "verify_ms": verify, "bus_ms": bench.pass_bytes / 1e6 / self.bus["in"]}
        bench.close()
        return {"share": share, "together": together} | {k: rounded(v) for k, v in found.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="results file; docs/results, or none with --tiny")
    parser.add_argument("--context", type=int, default=65_536, help="tokens of the prompt")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any machine")
    parser.add_argument("--seed", type=int, default=0, help="of the weights without effect")
    args = parser.parse_args(words)
    if not args.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny runs the same code with tiny models on the CPU")
    out = args.out or (None if args.tiny else OUT)
    if out is not None:
        results.check_writable(out)
    prepare()
    device = torch.device("cpu" if args.tiny else "cuda")
    context = 600 if args.tiny else args.context
    measured = Measured(args.tiny, context, device, args.seed)
    result = results.header(args.seed) | {"context": context, "passes": _PASSES, "bus": measured.bus}
    result["same_bits"] = measured.same_bits(context // 4)
    free_memory()
    print(json.dumps(result), flush=True)
    result["rows"] = []
    for share in SHARES:
        for together in (1, streamed_rows.TOGETHER):
            result["rows"].append(measured.passes(share, together))
            print(json.dumps(result["rows"][-1]), flush=True)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not result["same_bits"]:
        raise SystemExit("logits depend on where rows live")


if __name__ == "__main__":
    main()
