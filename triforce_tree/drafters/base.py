"""The contract of every drafter, and the drafter that proposes nothing.

*Honesty*: every proposed token was drawn, without replacement among its siblings, from the law that the
tree reports at its parent; or the tree reports no laws and its tokens are a deterministic function of the
context. How many tokens to draw may depend on anything but those draws. Whoever keeps this may be used
at any level, and the output law stays the target's (``docs/losslessness.md``).
"""

from typing import Protocol

from triforce_tree.stats import LevelStats
from triforce_tree.token_tree import Context, TokenTree


class Drafter(Protocol):
    """Proposes continuations of a context."""

    @property
    def stats(self) -> list[LevelStats]:
        """Statistics of the levels inside, lowest first."""

    def prefill(self, context: Context) -> None:
        """``context`` is final: make ready for proposals after it."""

    def propose(self, context: Context) -> TokenTree:
        """A tree whose root is the context's last token. The context may be provisional."""

    def commit(self, context: Context) -> None:
        """``context`` is final; what was kept for other continuations may go."""


class Autoregressive:
    """Proposes nothing, so each verification emits one token: ordinary decoding by the same engine."""

    stats: list[LevelStats] = []  # noqa: RUF012 - there is nothing to count, ever

    def prefill(self, context: Context) -> None: ...

    def propose(self, context: Context) -> TokenTree:
        return TokenTree([context[-1]], [-1])

    def commit(self, context: Context) -> None: ...
