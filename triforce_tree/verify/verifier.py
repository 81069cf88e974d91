"""Verification by one model: one forward over a tree, then acceptance."""

from dataclasses import dataclass

from torch import Tensor

from triforce_tree.level import Level, Progress
from triforce_tree.sampling import Random, TokenLaw
from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree
from triforce_tree.verify.acceptance import accept_greedy, accept_sampling


@dataclass(frozen=True)
class Verdict:
    """What a verification emits.

    ``tokens``: n >= 1 ids, the accepted ones and the next one, each following the verifier's law given
    those before it. ``rows``: fp32 ``[n, V]``, those laws (in greedy mode the scores that were compared).
    """

    tokens: list[int]
    rows: Tensor


class Verifier:
    """A level that accepts or refuses what a drafter proposes.

    Args:
        name: for the statistics.
        level: the model and its cache.
        law: logits to law; every level uses the same one.
        random: this level's draws.
    """

    def __init__(self, name: str, level: Level, law: TokenLaw, random: Random) -> None:
        self.level = level
        self.law = law
        self.random = random
        self.stats = LevelStats(name)

    def prefill(self, context: Context, progress: Progress | None = None) -> None:
        self.level.prefill(context, progress)

    def verify(self, context: Context, tree: TokenTree) -> Verdict:
        """Emit at least one token after ``context``, whose last token is the tree's root.

        Raises:
            ValueError: the model returned NaN.
        """
        with self.stats.clock():
            logits = self.level.forward_tree(context, tree)
            verdict = self._judge(context, tree, logits)
        self.stats.forwards += 1
        self.stats.proposed += tree.depth
        self.stats.accepted += len(verdict.tokens) - 1
        self.stats.emitted += len(verdict.tokens)
        return verdict

    def commit(self, context: Context) -> None:
        with self.stats.clock():
            self.level.commit(context)

    def _judge(self, context: Context, tree: TokenTree, logits: Tensor) -> Verdict:
        def paths() -> list[list[int]]:
            below = [[tree.tokens[i] for i in tree.path(node)[1:]] for node in range(len(tree))]
            return [list(context.plus(tokens)) for tokens in below]

        if self.law.greedy:
            rows = self.law.scores(logits, paths)
            accepted = accept_greedy(tree, rows.argmax(-1).tolist())
        else:
            rows = self.law(logits, paths)
            accepted = accept_sampling(tree, rows, self.random)
        tokens = [tree.tokens[node] for node in accepted.path[1:]]
        return Verdict([*tokens, accepted.next_token], rows[accepted.path])
