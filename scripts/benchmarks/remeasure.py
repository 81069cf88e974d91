"""Measure the cells of a published results file on this machine, by the commands that the file names.

    python -m scripts.benchmarks remeasure docs/results/rope_cpu.json --out mine
    python -m scripts.benchmarks remeasure docs/results/rope_cpu.json --out mine --extra --needles 1

``triforce-tree bench verify`` calls it. Words after ``--extra`` are added to the commands, where they replace
the same options: fewer cells, other texts. Time limits and places of the other machine are left out. A file
of scripts that are no more is measured by the steps of ``series`` that write it now. The last line on stdout
is the path of the file that was written; all else goes to stderr.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from scripts.benchmarks.common.results import Record
from scripts.benchmarks.registry import BENCHMARKS, MACHINE
from scripts.benchmarks.series.steps import CPU, GPU, OUT, Step
from triforce_tree.eval.report.code_digest import ROOT

# Options of recorded commands that name files, and those that are of the run and not of its figures.
_READ = ("--texts", "--text", "--gguf", "--target", "--draft")
_DROPPED = ("--out", "--seconds")
# Exit code of a benchmark that its time limit ended, with what it has.
_INCOMPLETE = 3
_ELSE = "compare it with a file of your own by --mine FILE"


@dataclass(frozen=True)
class Planned:
    """A command, and whether it was measured on a GPU."""

    step: Step
    on_gpu: bool

    def lacks(self, more: Sequence[str]) -> str:
        """What keeps it from running on this machine; "" for nothing.

        Args:
            more: words of the caller, which replace those of the step.
        """
        if self.on_gpu and not torch.cuda.is_available():
            return f"was measured on a GPU, and there is none here; {_ELSE}"
        words = shlex.split(self.step.words)
        for option, path in pairwise(words):
            named = option in _READ and ("/" in path or Path(path).suffix) and "{" not in path
            if named and option not in more and not (ROOT / path).exists():
                made = "python -m scripts.benchmarks texts makes one; " if option == "--texts" else ""
                return f"reads {option} {path}, which is not here; {made}give yours by --extra {option} PATH"
        return ""


def planned(file: str, content: Record) -> list[Planned]:
    """The commands that a file names, or those that write it now; none where it is of neither.

    Args:
        file: its name.
    """
    headers = (content.get("parts") or content.get("evaluated") or {"": content}).values()
    hardware = {str(h.get("command", "")): str(h.get("hardware") or h.get("gpu") or "") for h in headers}
    recorded = [(_recorded(file, command), name) for command, name in hardware.items()]
    known = [Planned(step, name.startswith("NVIDIA")) for step, name in recorded if step is not None]
    if len(known) == len(recorded):
        return known
    of_gpu, of_cpu = ([step for step in group if step.writes(file)] for group in (GPU, CPU))
    if of_gpu and (torch.cuda.is_available() or not of_cpu):
        return [Planned(step, True) for step in of_gpu]
    return [Planned(step, False) for step in of_cpu]


def _recorded(file: str, command: str) -> Step | None:
    """A command without what is of its machine; None where no benchmark that writes the file is named."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    at = words.index("-m") + 1 if "-m" in words else len(words)
    if words[at : at + 1] != ["scripts.benchmarks"] or not words[at + 1 :]:
        return None
    name, *given = words[at + 1 :]
    if name not in BENCHMARKS or not BENCHMARKS[name].wrote(file):
        return None
    kept: list[str] = []
    rest = iter(given)
    for word in rest:
        if word in _DROPPED:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in _DROPPED)):
            kept.append(word)
    out = f"{OUT}/{file}" if BENCHMARKS[name].to_file else OUT
    line = shlex.join(["scripts.benchmarks", name, *kept, "--out", out])
    return Step("recorded", line, 0, every_card=words[0] == "torchrun")


def run(plan: Planned, out: Path, more: Sequence[str]) -> int:
    """Its exit code; what was measured on a CPU sees no GPU."""
    cards = max(1, torch.cuda.device_count())
    command = [*plan.step.command(out, None, cards, None, tiny=False), *more]
    print("python", shlex.join(command[1:]), file=sys.stderr, flush=True)
    environment = os.environ if plan.on_gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode


def written(file: str, plans: Sequence[Planned], out: Path) -> Path | None:
    """The newest file that the commands wrote; its name may be that of another machine."""
    patterns = {file}
    for plan in plans:
        module, *words = shlex.split(plan.step.words)
        if module == "scripts.benchmarks":
            patterns.add(BENCHMARKS[words[0]].writes.replace(MACHINE, "*"))
    found = [path for pattern in patterns for path in out.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks remeasure", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument("results", type=Path, help="file of docs/results")
    made.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    made.add_argument(
        "--extra", nargs=argparse.REMAINDER, default=[], metavar="WORD", help="added to the commands"
    )
    args = made.parse_args(words)
    file, out = args.results.name, args.out.resolve()
    try:
        content = json.loads(args.results.read_text(encoding="utf-8"))
        out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        made.error(str(error))
    plans = planned(file, content)
    if not plans:
        return _refused(f"{file} is of no script of this checkout, and cannot be measured again; {_ELSE}")
    lacking = {plan: plan.lacks(args.extra) for plan in plans}
    for plan, lack in lacking.items():
        if lack and not all(lacking.values()):
            print(f"left out: {plan.step.words} {lack}", file=sys.stderr)
    if all(lacking.values()):
        return _refused(f"the command of {file} {lacking[plans[0]]}")
    for plan in plans:
        if not lacking[plan] and (code := run(plan, out, args.extra)) not in (0, _INCOMPLETE):
            return code
    path = written(file, plans, out)
    if path is None:
        return _refused(f"nothing was measured: there is no results file in {out}")
    print(path)
    return 0


def _refused(why: str) -> int:
    # As `triforce-tree bench verify` says what it refuses itself.
    print(f"triforce-tree: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
