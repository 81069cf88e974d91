"""The steps of a series: commands that measure on one machine what the tables show."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEXTS, OUT = "{texts}", "{out}"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of its log, and for ``--only``.
        words: after ``python -m``; ``{out}`` is the folder of results, ``{texts}`` the file of texts.
        minutes: that it takes on one H200. It is not begun where less is left, unless it is ``timed``.
        timed: ends by itself before ``--seconds``, with what it has.
        alone: with nothing beside it, as it uses the host's memory and cores too.
        every_card: runs on all cards under torchrun, alone.
        tiny: words that replace those after the name of the benchmark where ``--tiny`` alone takes too long
            on a CPU; None where the command has no tiny form.
    """

    name: str
    words: str
    minutes: float
    timed: bool = False
    alone: bool = False
    every_card: bool = False
    tiny: str | None = ""

    @property
    def benchmark(self) -> str:
        """By which steps that write one results file are told: they do not run side by side."""
        return " ".join(shlex.split(self.words)[:2])

    def command(
        self, out: Path, texts: Path | None, cards: int, seconds: float | None, tiny: bool
    ) -> list[str]:
        """The whole command line.

        Args:
            texts: without them a step reads those that are installed.
            seconds: left to a timed step; None for any number.

        Raises:
            ValueError: the step has no tiny form.
        """
        module, *words = shlex.split(self.words)
        if tiny:
            if self.tiny is None:
                raise ValueError(f"step {self.name!r} has no tiny form; leave it out by --only")
            words = [words[0], *shlex.split(self.tiny), "--tiny", "--out", OUT]
        given = {TEXTS: texts, OUT: out}
        kept = [word for n, word in enumerate(words) if not _lacks_texts(words, n, texts)]
        filled = [str(given[word]) if word in given else word.replace(OUT, str(out)) for word in kept]
        if self.timed and seconds is not None:
            filled += ["--seconds", f"{seconds:.0f}"]
        launcher = [sys.executable, "-m"]
        if self.every_card and cards > 1:
            launcher += ["torch.distributed.run", "--nproc-per-node", str(cards), "-m"]
        return [*launcher, module, *filled]


def _lacks_texts(words: Sequence[str], number: int, texts: Path | None) -> bool:
    """Whether a word is ``--texts {texts}``, and there are none."""
    return texts is None and TEXTS in words[number : number + 2]


def _bench(name: str, words: str, minutes: float, **more: bool | str | None) -> Step:
    """A benchmark of ``scripts.benchmarks``, its name the step's unless words begin with another."""
    return Step(name, f"scripts.benchmarks {words} --out {OUT}", minutes, **more)  # type: ignore[arg-type]


_TINY_GRID = "--shapes pair --contexts 1024 --kinds documentation --temperatures 0 --new-tokens 8"

GPU = (
    # What decides whether the rest is worth its time comes first.
    Step("step-kernels", "scripts.checks.step_kernels_check", 1.5, tiny=None),
    _bench("requests", f"requests --texts {TEXTS}", 5, tiny="--text python-topics"),
    _bench("any-text-7b", f"any_text --shapes 7b --texts {TEXTS}", 9, timed=True, tiny=_TINY_GRID),
    _bench("any-text-8b", f"any_text --shapes 8b --texts {TEXTS}", 8, timed=True, tiny=_TINY_GRID),
    _bench(
        "any-text-offloaded",
        f"any_text --shapes 7b --seeds 1 --plain-tokens 4 --set gpu_memory=24GiB --texts {TEXTS}",
        10,
        timed=True,
        alone=True,
        tiny=f"{_TINY_GRID} --set gpu_memory=1GiB",
    ),
    _bench("never-slower-7b", f"never_slower --shapes 7b --texts {TEXTS}", 9, timed=True, tiny=_TINY_GRID),
    _bench("never-slower-8b", f"never_slower --shapes 8b --texts {TEXTS}", 9, timed=True, tiny=_TINY_GRID),
    _bench(
        "never-slower-pair", f"never_slower --shapes pair --texts {TEXTS}", 5, timed=True, tiny=_TINY_GRID
    ),
    _bench(
        "tuned-8b",
        "tuned --shapes 8b --contexts 122880 --kinds prose --temperatures 0 0.6 --tune-seconds 150 "
        f"--texts {TEXTS}",
        8,
        timed=True,
        tiny=f"{_TINY_GRID} --tune-seconds 0 --pairs 1",
    ),
    _bench("prefill", "prefill --chunks 4096 16384", 4),
    _bench("workloads", "workloads", 8, tiny="--workloads deft/keyword --new 4"),
    _bench("shared-prefix", "shared_prefix", 4, tiny="--context 256 --questions 2 --new 8 --runs 1"),
    _bench("on-chip-7b", "on_chip --part 7b", 6, tiny="--part 7b"),
    _bench("on-chip-8b", "on_chip --part 8b", 6, tiny="--part 8b"),
    _bench("on-chip-batch", "on_chip --part batch", 5, tiny="--part batch"),
    _bench("on-chip-lengths", "on_chip --part lengths", 5, tiny="--part lengths"),
    _bench("offload-7b", "offload --part 7b", 9, alone=True, tiny="--part 7b"),
    _bench("offload-8b", "offload --part 8b", 6, alone=True, tiny="--part 8b"),
    _bench("exact", "exact", 30, timed=True),
    Step(
        "paper",
        f"triforce_tree bench paper --prompts 2 --new-tokens 128 --out {OUT}/paper.jsonl",
        20,
        tiny=None,
    ),
    Step("linear", f"scripts.benchmarks linear --quick --out {OUT}/linear_h200.json", 2, tiny=None),
    Step("tree-attention", f"scripts.benchmarks tree_attention --every 2 --out {OUT}", 5, tiny=None),
    _bench("rope", f"rope --texts {TEXTS} --contexts 122880 524288 --settings 1 8 8:1.0", 8, tiny=""),
    _bench("split", "split", 5, every_card=True),
)
"""Measured on one GPU, or side by side on several; those on all cards last."""
