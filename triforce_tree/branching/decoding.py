"""Leaves of a tree that are generated together, one token each in a forward."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from triforce_tree.branching.forward import Ahead
from triforce_tree.branching.node import Node
from triforce_tree.branching.options import Draws, drawn
from triforce_tree.branching.slots import TreeSlots, needs_before
from triforce_tree.decoding.stop_criteria import Ending, finish_reason
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits


@dataclass(eq=False)
class Leaf:
    """The state of a leaf during generation.

    Attributes:
        node: the node that is extended.
        to_probs: maps logits to distributions.
        ending: decides when the leaf ends.
        draws: its random numbers; None takes the most probable tokens.
        tokens: tokens of the whole text.
        new: number of new tokens so far; ``logprobs`` are their log-probabilities by the raw logits.
        reason: why it ended; None while it is running.
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
    def most_slots(self) -> int:
        """Returns the KV slots of the node when it has its most tokens; the last token needs no slot."""
        return len(self.node.tokens) + self.ending.max_new_tokens - 1

    @property
    def may_go_on(self) -> bool:
        """Returns whether a forward after the next token may be needed, whatever the token is, and can be
        computed now.
        """
        return self.to_probs.context_free and len(self.new) + 1 < self.ending.max_new_tokens

    def add(self, token: int, logprob: float) -> None:
        self.node.append([token], [logprob])
        self.new.append(token)
        self.logprobs.append(logprob)
        self.tokens.append(token)
        self.reason = finish_reason(self.tokens, token, len(self.new), self.ending)


def decode(slots: TreeSlots, leaves: Sequence[Leaf]) -> None:
    """Extend leaves until all have ended.

    Raises:
        TreeFullError: there are too few KV slots for the most tokens of the leaves; nothing was computed.
        ValueError: logits are NaN.
    """
    needs = needs_before([leaf.node for leaf in leaves])
    tips = {leaf.node.tip: len(leaf.node.tip.tokens) for leaf in leaves}
    most = {leaf.node: leaf.most_slots for leaf in leaves}
    slots.pool.check(slots.missing_pages({**needs, **tips, **most}))
    slots.fill(needs)
    ahead, going = Ahead(), list(leaves)
    # Logits after the last tokens of all leaves that go on, where they were computed already.
    known: Tensor | None = None
    while going:
        parts: Iterable[tuple[Sequence[int], Tensor]] = (
            slots.last_logits([leaf.node.tip for leaf in going], ahead)
            if known is None
            else [(range(len(going)), known)]
        )
        known = None
        for numbers, logits in parts:
            part = [going[number] for number in numbers]
            chosen = _Chosen(part, logits.float())
            if len(part) == len(going) and slots.queues and all(leaf.may_go_on for leaf in part):
                # The device goes on while the host waits for its tokens, and looks whether texts end.
                known = slots.next_logits([leaf.node for leaf in part], chosen.tokens, ahead)
            chosen.append()
            if known is not None:
                slots.add_stored([leaf.node for leaf in part])
        kept = [number for number, leaf in enumerate(going) if leaf.reason is None]
        if known is not None and len(kept) < len(going):
            known = known[kept]
        going = [going[number] for number in kept]


class _Chosen:
    """One chosen token for each of some leaves, on its way from the device to the host.

    Args:
        leaves: the leaves of one call.
        logits: their logits, fp32 ``[N, V]``.

    Attributes:
        tokens: int64 ``[N]``, on the device.
    """

    def __init__(self, leaves: Sequence[Leaf], logits: Tensor) -> None:
        self._leaves = leaves
        draws = [leaf.draws for leaf in leaves if leaf.draws is not None]
        self.tokens = drawn(_scores(leaves, logits), draws or None)
        logprobs = logits.gather(1, self.tokens[:, None])[:, 0] - logits.logsumexp(-1)
        # One transfer: fp64 holds token ids exactly.
        both = torch.stack([self.tokens.double(), logprobs.double()])
        self._on_host = both.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if both.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def append(self) -> None:
        """Append the tokens to the leaves; waits for them.

        Raises:
            ValueError: NaN logits.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens, logprobs = self._on_host.tolist()
        if any(map(math.isnan, logprobs)):
            raise ValueError(NAN_LOGITS)
        for leaf, token, logprob in zip(self._leaves, tokens, logprobs, strict=True):
            leaf.add(int(token), logprob)


def _scores(leaves: Sequence[Leaf], logits: Tensor) -> Tensor:
    """Returns the processed logits of leaves, fp32 ``[N, V]``."""
    if all(leaf.to_probs.context_free for leaf in leaves):
        # The leaves of a call have the same options, of which only processors that read a text depend on its
        # length.
        return leaves[0].to_probs.context_free_scores(logits)
    scores = []
    for leaf, row in zip(leaves, logits, strict=True):
        # One by one: their texts differ in length, and so may what a processor makes of the same text.
        own = torch.tensor(leaf.tokens, device=logits.device)
        scores.append(leaf.to_probs.scores(row[None], partial(list, [own])))
    return torch.cat(scores)
