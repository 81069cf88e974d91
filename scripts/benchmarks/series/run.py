"""Runs all benchmarks of a GPU or a CPU one after another within a time limit; on several cards side by side.

    python -m scripts.benchmarks series --list
    python -m scripts.benchmarks series --texts texts.json.xz --out results
    python -m scripts.benchmarks series --texts texts.json.xz --out results --seconds 560 --only exact
    python -m scripts.benchmarks series --device cpu --out results                  # what a CPU measures
    python -m scripts.benchmarks series --tiny --only exact prefill                 # on any machine

Each step is a command of its own, whose output goes to OUT/logs. OUT/series.json lists the steps that are
done, each with its commit: the same command continues with the other steps, and repeats those of another
commit. ``--out`` may hold the files of an earlier run. Results are copied to docs/results by hand. Exit
code 1: a step failed. Exit code 3: steps were left out, by the time limit or for a file that they need.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.common.command import parser, results_folder
from scripts.benchmarks.common.results import ROOT, Record
from scripts.benchmarks.series.steps import GROUPS, Step
from triforce_tree.bench.results import commit
from triforce_tree.runtime.files.writing import replace_file

STATE = "series.json"
# A timed step is begun only if this many seconds are left, and is told to end so many before the limit.
_LEAST, _RESERVE = 90.0, 20.0
# From an interrupt to the end of a process, in seconds.
_GRACE = 15.0
# Exit code of a step that its time limit ended.
_INCOMPLETE = 3
_LOCK = threading.Lock()
_PAUSE = 1.0


class StepRunner:
    """Steps that wait for a card, and what became of the others.

    Args:
        args: of the command line.
        cards: on which steps run, one at a time each; at least 1.
    """

    def __init__(self, steps: Sequence[Step], args: Any, cards: int, console: Console) -> None:
        self.args, self.cards, self.console = args, cards, console
        self.out: Path = results_folder(args.out, args.tiny).resolve()
        self._deadline = time.perf_counter() + args.seconds if args.seconds else None
        self._commit = commit()
        path = self.out / STATE
        self.state: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        left = [step for step in steps if not self._done(step)]
        self._waiting = [step for step in left if args.tiny or (self.out / step.needs).exists()]
        self._lacking = [step for step in left if step not in self._waiting]
        self._running = set[str]()

    def run(self) -> int:
        """Runs what is left; the exit code."""
        for alone in (False, True):
            count = 1 if alone else self.cards
            workers = [threading.Thread(target=self._work, args=(n, alone)) for n in range(count)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        for step in self._waiting:
            self.console.print(f"{step.name}: not begun, it takes some {step.minutes:g} minutes")
        for step in self._lacking:
            self.console.print(f"{step.name}: left out, there is no {self.out / step.needs}")
        codes = [known["code"] for known in self.state.values() if known["commit"] == self._commit]
        if any(code not in (0, _INCOMPLETE) for code in codes):
            return 1
        return _INCOMPLETE if self._waiting or self._lacking or _INCOMPLETE in codes else 0

    def _done(self, step: Step) -> bool:
        known = self.state.get(step.name, {})
        return known.get("commit") == self._commit and known.get("code") == 0

    def _work(self, card: int, alone: bool) -> None:
        """Takes one step after another, until none fits the time left."""
        while steps := self._fitting(alone):
            with _LOCK:
                free = [s for s in steps if s in self._waiting and s.benchmark not in self._running]
                if free:
                    self._waiting.remove(free[0])
                    self._running.add(free[0].benchmark)
            if free:
                self._run(free[0], card)
            else:
                time.sleep(_PAUSE)  # until the step that writes the same file has ended

    def _fitting(self, alone: bool) -> list[Step]:
        """Returns the waiting steps that fit the time left."""
        left = self._left()
        return [
            step
            for step in list(self._waiting)
            if (step.alone or step.every_card) == alone
            and (left is None or left >= (_LEAST if step.timed else 60 * step.minutes))
        ]

    def _left(self) -> float | None:
        """Seconds; None where there is no limit."""
        return None if self._deadline is None else self._deadline - time.perf_counter() - _RESERVE

    def _run(self, step: Step, card: int) -> None:
        left, texts = self._left(), self.args.texts and self.args.texts.resolve()
        command = step.command(self.out, texts, self.cards, left, self.args.tiny)
        environment = dict(os.environ)
        if self.args.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif not step.every_card and self.cards > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(card)
        log = self.out / "logs" / f"{step.name}.txt"
        log.parent.mkdir(exist_ok=True)
        self.console.print(f"{step.name}: begins")
        start = time.perf_counter()
        with log.open("w", encoding="utf-8") as file:
            file.write(" ".join(command) + "\n")
            file.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
            code = _ended(process, left)
        seconds = time.perf_counter() - start
        with _LOCK:
            self._running.discard(step.benchmark)
            self.state[step.name] = {"commit": self._commit, "code": code, "seconds": round(seconds, 1)}
            replace_file(self.out / STATE, json.dumps(self.state, indent=1) + "\n")
        said = {0: "done", _INCOMPLETE: "ended by the time limit"}.get(code, f"failed with code {code}")
        self.console.print(f"{step.name}: {said} after {seconds:.0f} s; {log}")


def _ended(process: subprocess.Popen[bytes], left: float | None) -> int:
    """Returns the exit code of a process; one that exceeds the time limit is interrupted, and then killed."""
    try:
        return process.wait(left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return _INCOMPLETE


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks series", __doc__)
    made.add_argument(
        "--device", choices=[*GROUPS], default="cuda", help="the steps of a GPU, or those of a CPU"
    )
    made.add_argument("--only", nargs="+", metavar="STEP", help="those of --list; default all")
    made.add_argument("--list", action="store_true", help="print the steps, and run nothing")
    made.add_argument("--texts", type=Path, help="file that `texts` wrote; by default what is installed")
    made.add_argument("--seconds", type=float, help="end before this many, with what is measured")
    args = made.parse_args(words)
    console, on_gpu = Console(stderr=True), args.device == "cuda"
    group = {step.name: step for step in GROUPS[args.device]}
    if args.list:
        table = Table("step", "minutes on " + ("one H200" if on_gpu else "two cores"), "command")
        for step in group.values():
            table.add_row(step.name, f"{step.minutes:g}", "python -m " + step.words)
        Console().print(table)
        return 0
    if unknown := set(args.only or ()) - group.keys():
        known = ", ".join(group)
        made.error(
            f"--only {' '.join(sorted(unknown))}: no such step of --device {args.device}; known: {known}"
        )
    if args.texts is not None and not args.texts.is_file():
        made.error(f"--texts {args.texts} is no file; python -m scripts.benchmarks texts makes one")
    steps = [step for step in group.values() if args.only is None or step.name in args.only]
    if args.tiny:
        steps = [step for step in steps if step.tiny is not None]
    elif on_gpu and not torch.cuda.is_available():
        made.error(
            "there is no GPU here; --device cpu runs the steps of a CPU, --tiny these with tiny models"
        )
    cards = 1 if args.tiny or not on_gpu else torch.cuda.device_count()
    return StepRunner(steps, args, cards, console).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
