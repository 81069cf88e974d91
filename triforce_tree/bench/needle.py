"""Measures retrieval accuracy: a six-digit number is planted in a long text and asked for at its end."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from triforce_tree.bench.results import Record, Series
from triforce_tree.bench.texts import surrounding, token_ids
from triforce_tree.engine import Engine
from triforce_tree.pair import needle as planted
from triforce_tree.runtime.stats import Progress

ANSWER_TOKENS = 12  # enough for the digits in any tokenizer


@dataclass(frozen=True)
class Needle:
    """A prompt and what it asks for."""

    prompt: list[int]
    number: str


class Haystack:
    """Makes prompts of any length from one text.

    Args:
        text: the text that surrounds the needle.
        tokenizer: the tokenizer of the model under test.
        longest: the most tokens of a prompt.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> None:
        self.tokenizer = tokenizer
        # A short text is repeated; the needle is still in it once.
        self.ids = surrounding(tokenizer, text, longest, "needle")

    def needle(self, length: int, depth: float, trial: int, seed: int = 0) -> Needle:
        """Returns a prompt of ``length`` tokens with its needle at ``depth`` (0 the start, 1 the end)."""
        draw = random.Random(f"{seed}/{length}/{depth}/{trial}")
        name, number = planted.drawn(draw)
        fact = token_ids(self.tokenizer, planted.fact(name, number))
        question = token_ids(self.tokenizer, planted.question(name))
        hay_tokens = length - len(fact) - len(question)
        if hay_tokens < 1:
            raise ValueError(
                f"a needle prompt needs more than {length - hay_tokens} tokens, but length={length}; use a "
                "longer one"
            )
        start = draw.randrange(len(self.ids) - hay_tokens)
        hay = self.ids[start : start + hay_tokens]
        at = round(depth * hay_tokens)
        return Needle([*hay[:at], *fact, *hay[at:], *question], number)


def found(engine: Engine, needle: Needle, stop: StoppingCriteria | None, progress: Progress | None) -> bool:
    """Returns whether greedy decoding begins its answer with exactly the number."""
    out = engine.generate(
        needle.prompt,
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        stopping_criteria=StoppingCriteriaList([stop] if stop else []),
        progress=progress,
    )
    return str(out.text or "").strip().startswith(needle.number)


def measure(
    engine: Engine,
    haystack: Haystack,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    series: Series,
    through: Sequence[str] = ("hierarchy",),
    progress: Callable[[Record, int], Progress | None] = lambda key, tokens: None,
) -> None:
    """Measures the needles that the series lacks. Its seed decides their names, numbers and positions.

    Args:
        engine: our models and settings.
        haystack: makes the prompts.
        lengths: tokens of the prompts.
        depths: depths of the needles, 0 to 1.
        trials: needles for each length and depth.
        through: ``hierarchy`` answers by all levels, ``target`` by the target alone.
        progress: makes a prefill callback for a key and a number of tokens.
    """
    engines = {by: engine if by == "hierarchy" else engine.with_options(levels=1) for by in through}

    def answer(key: Record) -> Record:
        needle = haystack.needle(key["length"], key["depth"], key["trial"], series.seed)
        reading = progress(key, len(needle.prompt))
        return {"found": found(engines[key["through"]], needle, series.stop, reading)}

    cells = product(lengths, depths, range(trials), through)
    keys = ({"through": by, "length": n, "depth": depth, "trial": i} for n, depth, i, by in cells)
    series.fill(keys, answer)


def accuracy(records: Sequence[Record], **key: object) -> float | None:
    """Returns the share of needles found among the records with these values, or None if there are no such
    records.
    """
    hits = [r["found"] for r in records if all(r[k] == v for k, v in key.items())]
    return sum(hits) / len(hits) if hits else None


def heat_map(
    records: Sequence[Record],
    through: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    path: Path,
    model: str = "",
) -> None:
    """Writes an image of the accuracy by length and depth, whose title names the model and the trials of a
    cell.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + len(lengths), 1.5 + 0.5 * len(depths)), layout="constrained")
    axes: Any = figure.add_subplot()
    cells = [[accuracy(records, through=through, length=n, depth=d) for n in lengths] for d in depths]
    values = [[float("nan") if c is None else c for c in row] for row in cells]
    image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths])
    trials = len({r.get("trial", 0) for r in records})
    title = f"needle accuracy, {model + ', ' if model else ''}{through}, {trials} a cell"
    axes.set(xlabel="prompt, tokens", ylabel="depth of the needle")
    axes.set_title(title, fontsize="medium", wrap=True)
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            # The colours of the ends are dark.
            ink = "black" if value is None or 0.2 < value < 0.8 else "white"
            text = "" if value is None else f"{value:.2f}"
            axes.text(x, y, text, ha="center", va="center", color=ink)
    figure.colorbar(image, ax=axes)
    figure.savefig(path)
