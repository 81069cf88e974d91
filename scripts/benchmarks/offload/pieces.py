"""Passes over an offloaded cache as CUDA graphs in pieces, beside the same passes called directly.

    python -m scripts.benchmarks pieces              # a 7B, 65,536 tokens: four minutes on an H200
    python -m scripts.benchmarks pieces --tiny       # the same code on a CPU, where both are direct calls

By the share of the cache that stays on the device. ``stages`` and ``plain_ms_per_token`` are of passes that
are replayed; ``ms_per_token`` is a whole decoding of 64 tokens, in which the graphs are recorded.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from scripts.benchmarks.common.command import device_of, parser, results_folder
from scripts.benchmarks.common.results import Record, ResultsFile, settings_of
from scripts.benchmarks.common.session import Step, measure_part, print_rows
from scripts.benchmarks.offload.run import PARTS, Offloaded, OffloadSession
from scripts.benchmarks.offload.tables import PIECES
from triforce_tree.eval.attention.timing import synchronize
from triforce_tree.kv.offload import offloaded_view
from triforce_tree.runtime.executor import CapturedInPieces

SHARES = (0.95, 0.8, 0.5)
_PASSES = 6


@dataclass(frozen=True)
class Pieces(Offloaded):
    """A step for each share of the cache that stays on the device."""

    def steps(self) -> Iterator[Step]:
        [(batch, context)], [cap] = self.cells, self.caps
        for share in SHARES:
            keys = tuple({"share": share, "pieces": pieces} for pieces in (False, True))
            yield Step(0, batch, context, {"cap_gib": cap, "share": share}, keys)


PLAN = Pieces(
    PARTS["resident"].shape, ((1, 65_536),), prompts=1, temperatures=(0.0,), plain_tokens=12, new_tokens=64,
    caps=PARTS["resident"].caps, resident=PARTS["resident"].resident,
)  # fmt: skip


class PiecesSession(OffloadSession):
    """One share after the other, each without pieces and with them."""

    plan: Pieces

    def measure(self, step: Step) -> None:
        """The rows of a share; whether both ways have the same texts stands in them."""
        self.plan = replace(self.plan, resident=step.setting["share"])
        texts = []
        for key in step.keys:
            self.opened = None
            with (
                mock.patch.object(offloaded_view, "IN_PIECES", key["pieces"]),
                _recordings(self) as recorded,
            ):
                self.open(step.setting["cap_gib"])
                prompts, _ = self.feed(step)
                run = self.bench.decode(0.0, prompts, self.plan.new_tokens)
                stages = self.bench.stage_ms(0.0, prompts, max(1, round(run.rounds)), _PASSES)
                with self.bench.streaming_alone():
                    plain = self.bench.decode(0.0, prompts, self.plan.plain_tokens, rounds=0)
            texts.append(run.texts)
            bus = self.bench.pass_bytes / 1e6 / self.file.mine["bus_gbps"]["in"]
            self.file.add({
                **key, "plain_ms_per_token": plain.ms_per_token,
                "ms_per_token": run.ms_per_token, "tokens_per_pass": run.as_dict()["tokens_per_pass"],
                "stages": stages, "bus_ms": bus, "recordings": len(recorded),
                "recording_seconds": sum(recorded), "same_tokens": texts[0] == texts[-1],
            })  # fmt: skip


@contextmanager
def _recordings(session: PiecesSession) -> Iterator[list[float]]:
    """Inside, the seconds of each recording."""
    found: list[float] = []
    record = CapturedInPieces._record

    def timed(step: CapturedInPieces) -> object:
        start = time.perf_counter()
        made = record(step)
        synchronize(session.device)
        found.append(time.perf_counter() - start)
        return made

    with mock.patch.object(CapturedInPieces, "_record", timed):
        yield found


def rows(part: str, header: Record, samples: list[Record]) -> list[Record]:
    """The measurements as they are."""
    return [{"part": part, **sample} for sample in samples]


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks pieces", __doc__)
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    plan = PLAN.tiny(prompts=1) if args.tiny else PLAN
    settings = settings_of(plan.as_dict(), args.seed, args.tiny)
    file = ResultsFile(results_folder(args.out, args.tiny) / PIECES, "7b", settings, rows)
    measure_part(plan, file, lambda: PiecesSession(plan, file, device, args.seed))
    print_rows(file)
    return 0
