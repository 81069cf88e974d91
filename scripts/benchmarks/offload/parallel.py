"""Speed of the inflated pair on several cards, whose cache in host memory each card streams its part of.

    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --out docs/results   # four minutes
    torchrun --nproc-per-node 2 -m scripts.benchmarks parallel --tiny               # the same code, on a CPU

What ``offload`` measures on one card, by the same session, written into one file of its own. All ranks run
the same steps; rank 0 prints a JSON line a step, and writes. The cap holds for each card.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.benchmarks.common.command import TINY_SHAPES, device_of, parser, results_folder
from scripts.benchmarks.common.results import Record, ResultsFile, settings_of
from scripts.benchmarks.offload.bench import Run
from scripts.benchmarks.offload.rows import STREAMED
from scripts.benchmarks.offload.rows import rows as rows_of_one
from scripts.benchmarks.offload.run import PARTS, Session, measure_part, print_rows
from scripts.benchmarks.offload.tables import PARALLEL
from scripts.benchmarks.sources.registry import Texts
from triforce_tree.runtime import distributed


class SharedSession(Session):
    """A session whose ranks have the same plan and write the same tokens."""

    def machine(self) -> Record:
        # The links are measured at the same time: they may share a switch.
        distributed.all_reduce_min([0.0])
        found = super().machine()
        by_rank = distributed.all_gather_object(found["bus_gbps"]["in"])
        bus, read = distributed.all_reduce_min([found["bus_gbps"]["in"], found["read_gbps"]])
        return {"bus_gbps": {"in": bus}, "read_gbps": read, "bus_gbps_by_rank": by_rank}

    def say(self, text: str) -> None:
        if distributed.is_first_rank():
            print(json.dumps({"what": text}), flush=True)

    def ours(self, key: Record, prompt: list[int], source: str) -> Run:
        run = super().ours(key, prompt, source)
        distributed.check_equal({"tokens": run.text})
        self.say(f"all ranks wrote the same {len(run.text)} tokens")
        return run

    def add(self, sample: Record) -> None:
        by_rank = distributed.all_gather_object(sample["pcie_gbps"])
        super().add(sample | {"pcie_gbps_by_rank": by_rank})


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """Returns the rows of one card, with the bandwidth of each rank's bus."""
    more = {"gpus": header["settings"]["gpus"], "bus_gbps_by_rank": header["bus_gbps_by_rank"]}
    found = []
    for row in rows_of_one(part, header, samples):
        streamed = row["baselines"].get(STREAMED, {}).get("pcie_gbps_by_rank")
        found.append(row | more | {"baseline_pcie_gbps_by_rank": streamed})
    return found


def path_of(out: Path) -> Path:
    """Returns the results file; of other ranks a copy, so that all know what is measured and one writes."""
    copy = out if distributed.is_first_rank() else Path(tempfile.mkdtemp())
    held = {path.name: path.read_text(encoding="utf-8") for path in out.glob(f"{Path(PARALLEL).stem}.*")}
    for name, content in distributed.broadcast_object(held).items():
        if not distributed.is_first_rank():
            (copy / name).write_text(content, encoding="utf-8")
    return copy / PARALLEL


def main(words: Sequence[str] | None = None) -> None:
    made = parser("benchmarks parallel", __doc__)
    made.add_argument("--texts", type=Path, help="file that `texts` wrote; by default what is installed")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    group = distributed.join(device.type)
    gpus, device = (group.size, group.device) if group is not None else (1, device)
    plan = replace(PARTS["7b"], prompts=1)
    if args.tiny:
        # Its heads can be shared by two and by four.
        plan = replace(plan.tiny(), shape=TINY_SHAPES["llama-2-13b"])
    settings = settings_of({**plan.as_dict(), "gpus": gpus}, args.seed, args.tiny)
    file = ResultsFile(path_of(results_folder(args.out, args.tiny)), f"7b on {gpus}", settings, rows)
    measure_part(plan, file, lambda: SharedSession(plan, file, Texts(args.texts), device, args.seed))
    if distributed.is_first_rank():
        print_rows(file)
    distributed.leave()
