"""Retrieval without hierarchy: the target on its retrieval cache drafts token by token.

No draft model takes part. The row of that name in table 2 of TriForce (Sun et al., arXiv 2404.11912).
Lossless.
"""

from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.engine import Engine
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

# Tokens that TriForce's retrieval level drafts for one pass of the target (its gamma_2).
ROUNDS = 6


class NoDraft(Drafter):
    """A drafter that proposes nothing: each pass of level 1 adds one token of its own to the chain."""

    name = "none"
    tree = "chain:1"
    deterministic = True
    capturable = True

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens.fill_(-1)
        tree.tokens[:, 0] = state.newest


def without_draft(engine: Engine) -> Engine:
    """Returns an engine of three levels over the same target, whose level 0 proposes nothing.

    Its rounds are fixed, so that no pass is a plain one where drafting does not pay.
    """
    config = engine.config
    rounds = config.rounds or min(config.gamma, ROUNDS)
    other = engine.with_options(levels=3, advanced={"prefix_cache": False, "rounds": rounds})
    return other.with_drafter(NoDraft())
