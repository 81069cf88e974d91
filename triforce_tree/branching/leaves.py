"""Leaves of a tree that are generated together, one token each in a forward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from triforce_tree.branching.forward import Ahead
from triforce_tree.branching.node import Node
from triforce_tree.branching.options import Draws, drawn
from triforce_tree.branching.rows import TreeRows, needs_before
from triforce_tree.decoding.stop_criteria import Ending, finish_reason
from triforce_tree.verify.sampling import ProbsFromLogits


@dataclass(eq=False)
class Leaf:
    """A leaf while it is generated.

    Attributes:
        node: what it extends.
        to_probs: logits to distributions.
        ending: when it ends.
        draws: its random numbers; None takes the most probable tokens.
        tokens: of the whole text.
        new: tokens so far; ``logprobs`` theirs by the raw logits.
        reason: why it ended; None while it goes on.
    """

    node: Node
    to_probs: ProbsFromLogits
    ending: Ending
    draws: Draws | None
    tokens: list[int]
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def most_rows(self) -> int:
        """Rows of the node when it has its most tokens, of which the last has none yet."""
        return len(self.node.tokens) + self.ending.max_new_tokens - 1

    def add(self, token: int, logprob: float) -> None:
        """Append a token."""
        self.node.append([token], [logprob])
        self.new.append(token)
        self.logprobs.append(logprob)
        self.tokens.append(token)
        self.reason = finish_reason(self.tokens, token, len(self.new), self.ending)


def decode(rows: TreeRows, leaves: Sequence[Leaf]) -> None:
    """Extend leaves until all have ended.

    Raises:
        TreeFullError: there is no room for their most tokens; nothing was computed.
        ValueError: NaN logits.
    """
    needs = needs_before([leaf.node for leaf in leaves])
    tips = {leaf.node.tip: len(leaf.node.tip.tokens) for leaf in leaves}
    most = {leaf.node: leaf.most_rows for leaf in leaves}
    rows.pool.check(rows.missing_pages({**needs, **tips, **most}))
    rows.fill(needs)
    ahead = Ahead()
    while going := [leaf for leaf in leaves if leaf.reason is None]:
        for numbers, logits in rows.last_logits([leaf.node.tip for leaf in going], ahead):
            _choose([going[number] for number in numbers], logits.float())


def _choose(leaves: Sequence[Leaf], logits: Tensor) -> None:
    """Append one token to each leaf, by logits fp32 ``[N, V]``."""
    draws = [leaf.draws for leaf in leaves if leaf.draws is not None]
    tokens = drawn(_scores(leaves, logits), draws or None)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    # One transfer: fp64 holds token ids exactly.
    both = torch.stack([tokens.double(), logprobs.double()]).tolist()
    for leaf, token, logprob in zip(leaves, *both, strict=True):
        leaf.add(int(token), logprob)


def _scores(leaves: Sequence[Leaf], logits: Tensor) -> Tensor:
    """Processed logits, each leaf's by its own processors."""
    first = leaves[0].to_probs
    if first.context_free and all(leaf.to_probs is first for leaf in leaves):
        return first.scores(logits, list)
    scores = torch.empty_like(logits)
    alike: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.to_probs.context_free:
            alike.setdefault(id(leaf.to_probs), []).append(number)
        else:
            # One by one: their texts differ in length, and so may what a processor makes of the same text.
            own = torch.tensor(leaf.tokens, device=logits.device)
            scores[number] = leaf.to_probs.scores(logits[number : number + 1], partial(list, [own]))[0]
    for numbers in alike.values():
        scores[numbers] = leaves[numbers[0]].to_probs.scores(logits[numbers], list)
    return scores
