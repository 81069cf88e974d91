"""Decodes one prompt by turns with several levels and with the target alone, after a single prefill.

Both decode the same pieces of text, one after the other. Other load on the machine then slows both, and
the median over the pieces leaves out those that it slowed unequally.
"""

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from triforce_tree.decoding.explain.tally import AcceptanceTally, Node
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.origins import MATCHED, Origins
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.sequence import Ending, Sequence
from triforce_tree.runtime.stats import LevelStats
from triforce_tree.verify.sampling import ProbsFromLogits, Stream, derived


@dataclass(frozen=True)
class Piece:
    """Holds a few tokens decoded with all levels, and as many decoded by the target alone.

    Attributes:
        tokens: decoded with all levels; ``origins``: what proposed each one, as in ``Origins.take``.
        alone: tokens of the target alone after the same text. Greedy decoding gives as many, and the same.
            With sampling they are other draws, and are not continued.
        seconds, alone_seconds: the seconds of decoding ``tokens`` and ``alone``.
    """

    tokens: list[int]
    origins: list[str]
    seconds: float
    alone: list[int]
    alone_seconds: float


@dataclass(frozen=True)
class Speeds:
    """Medians over pieces: milliseconds a token of both, and the median of the pieces' own ratios."""

    ms_per_token: float
    alone_ms_per_token: float
    speedup: float
    pieces: int

    @classmethod
    def of(cls, pieces: Sequences[Piece]) -> "Speeds | None":
        """Returns the speeds without the first piece, which warms both up, where there are others."""
        timed = list(pieces[1:] or pieces)
        if not timed:
            return None
        ours = [1e3 * piece.seconds / len(piece.tokens) for piece in timed]
        alone = [1e3 * piece.alone_seconds / len(piece.alone) for piece in timed]
        ratios = [b / a for a, b in zip(ours, alone, strict=True)]
        return cls(statistics.median(ours), statistics.median(alone), statistics.median(ratios), len(timed))


class SideBySide:
    """Decodes one prompt by all levels and by the target alone, in turns.

    Args:
        program: a program that holds the prompt, or more of the text than that.
        to_probs: the function from logits to probabilities.
        seed: the seed of all draws.
        stop: whether to end, asked after each pass.
        stop_tokens: ids that end the text.

    Attributes:
        trees: drafted trees of the first piece, in the order in which they were verified.
    """

    def __init__(
        self,
        program: DecodingProgram,
        to_probs: ProbsFromLogits,
        seed: int,
        stop: Callable[[], bool] = lambda: False,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._program, self._greedy, self._stop = program, to_probs.greedy, stop
        self._stop_tokens = stop_tokens
        # A sampled text repeats by its seed only where the choice of passes does.
        self._ours = DecodingLoop.over(program, to_probs, seed, repeatable=not to_probs.greedy)
        self._alone = DecodingLoop.over(program, to_probs, derived(seed, Stream.ROW, 1), repeatable=True)
        self._alone.policy.fixed = 0
        self.trees: list[list[Node]] = []

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of all levels, level 0 first."""
        return self._ours.levels

    @property
    def origins(self) -> list[str]:
        """Returns the possible values of ``Piece.origins``: the levels' names, level 0 first, then
        ``MATCHED``.
        """
        names = [level.name for level in self.levels]
        matched = any(shape.matched for shape in self._program.shapes)
        return [names[0], MATCHED, *names[1:]] if matched and MATCHED not in names else names

    def pieces(self, prompt: Sequences[int], new_tokens: int, least: int = 16) -> Iterator[Piece]:
        """Decodes in pieces of at least ``least`` tokens, ``new_tokens`` in all.

        A greedy text ends with the first piece in which the two differ.
        """
        text, end = list(prompt), len(prompt) + new_tokens
        while len(text) < end and not self._stop():
            # The text is continued in the cache, so the run whose tokens the text gets must be the last one.
            if self._greedy:
                tokens, origins, seconds = self._by_levels(text, least, end - len(text))
                alone, alone_seconds = self._run(self._alone, text, len(tokens), len(tokens))
            else:
                count = min(least, end - len(text))
                alone, alone_seconds = self._run(self._alone, text, count, count)
                tokens, origins, seconds = self._by_levels(text, least, end - len(text))
            if not tokens or not alone:
                return
            yield Piece(tokens, origins, seconds, alone, alone_seconds)
            text += tokens
            if (self._greedy and alone != tokens) or tokens[-1] in self._stop_tokens:
                return

    def _by_levels(self, text: list[int], least: int, most: int) -> tuple[list[int], list[str], float]:
        origins = Origins(self._ours)
        first = not self.trees
        seen = AcceptanceTally(self._program)

        def note(stage: str) -> None:
            origins(stage)
            # Counting costs more than naming levels, so only the first piece, which is not timed, is counted.
            if first:
                before = seen.tree
                seen(stage)
                if seen.tree is not before:
                    self.trees.append(seen.tree)

        self._ours.after_stage = note
        tokens, seconds = self._run(self._ours, text, least, most)
        [names] = origins.take() or [[]]
        return tokens, names[: len(tokens)], seconds

    def _run(self, loop: DecodingLoop, text: list[int], least: int, most: int) -> tuple[list[int], float]:
        """At least ``least`` tokens after the text, at most ``most``, and their seconds."""
        sequence = Sequence(text, Ending(most, self._stop_tokens))
        loop.begin([sequence], cached=True)
        if self._program.levels == 3:
            # Chunk means that the other one has not updated: not a part of decoding.
            self._program.cache.means.catch_up()
        before = loop.decode_seconds
        for _ in loop.decode():
            if len(sequence.new) >= least or self._stop():
                break
        return sequence.new, loop.decode_seconds - before
