"""Prompt lookup: propose what followed the last few tokens when they stood in the context before."""

from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree, chain


class PromptLookupDrafter:
    """A drafter without a model, deterministic given the context.

    Args:
        length: tokens to propose at most.
        ngram: longest suffix to look for; shorter ones are tried in turn.
    """

    def __init__(self, length: int = 8, ngram: int = 3) -> None:
        self.length = length
        self.ngram = ngram
        self._stats = LevelStats("lookup")
        self._text: list[int] = []
        # For every n: n-gram -> the position after its last occurrence in the committed text.
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(ngram)]

    @property
    def stats(self) -> list[LevelStats]:
        return [self._stats]

    def prefill(self, context: Context) -> None:
        self.commit(context)

    def commit(self, context: Context) -> None:
        with self._stats.clock():
            for token in context.since(len(self._text)):
                # The n-grams that end before this token now have a continuation: it.
                for n, after in enumerate(self._after, 1):
                    if len(self._text) >= n:
                        after[tuple(self._text[-n:])] = len(self._text)
                self._text.append(token)

    def propose(self, context: Context) -> TokenTree:
        with self._stats.clock():
            self._stats.forwards += 1
            found = self._continuation(context)
            self._stats.emitted += len(found)
        return chain([context[-1], *found])

    def _continuation(self, context: Context) -> list[int]:
        for n in range(min(self.ngram, len(context)), 0, -1):
            at = self._after[n - 1].get(tuple(context[len(context) - n :]))
            if at is not None:
                return self._text[at : at + self.length]
        return []
