"""A pass of level 2 where much of an offloaded cache is on the device: its pieces one by one, and together.

The host asks for attention to every piece of every layer. The more of them are resident, the less the pass
waits for the bus, and the more for the host. The results are docs/results/resident_h200.json: milliseconds
of a pass of one token and of one that verifies a chain, beside those that its bytes take on the bus. On an
H200 the shape of a 7B at 65,536 tokens takes three minutes.
"""

import json
from collections.abc import Sequence
from unittest import mock

import torch

from scripts.benchmarks.common.command import (
    LONG_OPTIONS,
    TINY_OPTIONS,
    device_of,
    dtype_of,
    parser,
    shapes_of,
)
from scripts.benchmarks.common.results import RESULTS, Record, header, rounded, write
from scripts.benchmarks.common.texts import Library
from scripts.benchmarks.offload.engine import LastRows, OffloadBench, bus_gbps
from scripts.benchmarks.offload.tables import RESIDENT
from triforce_tree.config import HierarchyConfig
from triforce_tree.eval.results import check_writable
from triforce_tree.kv.offload import offloaded_view
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.runtime.executor import free_memory

SHARES = (0.5, 0.8, 0.95)
# Without leaves a pass verifies a chain alone.
_OPTIONS: Record = LONG_OPTIONS | {"offload": True, "runner_ups": False}
# Passes of a median, after others of warm-up.
_PASSES = 6


class Measured:
    """An inflated pair, a prompt, and passes over the cache of its text."""

    def __init__(self, tiny: bool, context: int, device: torch.device, seed: int) -> None:
        self.bus, dtype = bus_gbps(device), dtype_of(device)
        self.bench = OffloadBench(*shapes_of("llama-2-7b", tiny), device, dtype, None, seed)
        self.prompt = Library(self.bench.tokenizer, context).prompt(0, context).tokens
        self.piece = 1 << 16 if tiny else 64 << 20
        self.config = HierarchyConfig.from_options(**(_OPTIONS | (TINY_OPTIONS if tiny else {})))
        heads, target = self.bench.target.heads, self.bench.target
        self.row = 2 * heads.kv * heads.dim * dtype.itemsize * target.layers

    def same_bits(self, length: int) -> bool:
        """Whether a text's last logits are the same with all of the cache on the host, some, and none."""
        rows = LastRows(self.bench, self.prompt[:length], length)
        sizes = (0, length * self.row * 2 // 3, length * self.row * 2)
        first, *others = (rows.offloaded(Offload(size, self.piece, 3)) for size in sizes)
        return all(torch.equal(first, logits) for logits in others)

    def passes(self, share: float, together: int) -> Record:
        """Milliseconds, with ``share`` of the cache on the device and so many of its pieces at once."""
        bench, max_seq_len = self.bench, len(self.prompt) + 128
        split = Offload(int(share * max_seq_len * self.row), self.piece, 3)
        with mock.patch.object(offloaded_view, "TOGETHER", together):
            bench.open(self.config, max_seq_len, split)
        bench.feed(self.prompt)
        bench.decode(0.0, self.prompt, 3, rounds=0)
        plain = bench.stage_ms(0.0, self.prompt, 0, _PASSES, last="plain")["plain"]
        verify = bench.stage_ms(0.0, self.prompt, 3, _PASSES)["target"]
        found = {"plain_ms": plain, "verify_ms": verify, "bus_ms": bench.pass_bytes / 1e6 / self.bus["in"]}
        bench.close()
        return {"share": share, "together": together} | {k: rounded(v) for k, v in found.items()}


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks resident", __doc__)
    made.add_argument("--context", type=int, default=65_536, help="tokens of the prompt")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    out = args.out or (None if args.tiny else RESULTS / RESIDENT)
    if out is not None:
        check_writable(out)
    context = 600 if args.tiny else args.context
    measured = Measured(args.tiny, context, device, args.seed)
    result = header(args.seed, "engine") | {"context": context, "passes": _PASSES, "bus": measured.bus}
    result["same_bits"] = measured.same_bits(context // 4)
    free_memory()
    print(json.dumps(result), flush=True)
    result["rows"] = []
    for share in SHARES:
        for together in (1, offloaded_view.TOGETHER):
            result["rows"].append(measured.passes(share, together))
            print(json.dumps(result["rows"][-1]), flush=True)
    if out is not None:
        write(out, result)
    if not result["same_bits"]:
        raise SystemExit("logits depend on where the cache lives")
