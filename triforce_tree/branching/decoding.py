"""Decodes leaves of a tree together, one token of each in a forward."""

import math
from collections.abc import Sequence as Sequences
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_tree.branching.node import Node
from triforce_tree.branching.slots import TreeSlots, needs_before
from triforce_tree.decoding.sequence import Sequence
from triforce_tree.verify.sampling import NAN_LOGITS, ProbsFromLogits
from triforce_tree.verify.seeded import fill_noise


class Leaf(NamedTuple):
    """A leaf that is decoded.

    Attributes:
        node: is extended by the new tokens.
        sequence: the whole text, with its stop criteria and its seed.
        to_probs: maps logits to distributions.
    """

    node: Node
    sequence: Sequence
    to_probs: ProbsFromLogits

    @property
    def may_go_on(self) -> bool:
        """Returns whether the forward after the next token may be needed, and can be computed without
        knowing the token on the host.
        """
        return self.to_probs.context_free and self.sequence.left > 1


def decode(slots: TreeSlots, leaves: Sequences[Leaf]) -> None:
    """Extends leaves until all have ended.

    Raises:
        TreeFullError: there are too few KV slots for the most tokens of the leaves. Nothing was computed.
        ValueError: logits are NaN.
    """
    needs = needs_before([leaf.node for leaf in leaves])
    tips = {leaf.node.tip: len(leaf.node.tip.tokens) for leaf in leaves}
    # Nothing follows the last token, so it needs no slot.
    most = {leaf.node: len(leaf.node.tokens) + leaf.sequence.left - 1 for leaf in leaves}
    slots.pages.check({**needs, **tips, **most})
    slots.fill(needs)
    for first in range(0, len(leaves), slots.most_queries):
        _decode(slots, leaves[first : first + slots.most_queries])


def _decode(slots: TreeSlots, leaves: Sequences[Leaf]) -> None:
    going, nodes = list(leaves), [leaf.node for leaf in leaves]
    logits = slots.last_logits(nodes)
    while going:
        chosen = _Chosen(going, logits.float())
        queued = slots.queues and all(leaf.may_go_on for leaf in going)
        if queued:
            # The device goes on while the host waits for the tokens, and looks whether texts end.
            logits = slots.next_logits(nodes, chosen.tokens)
        chosen.append()
        if queued:
            for node in nodes:
                node.stored = len(node.tokens)
        kept = [number for number, leaf in enumerate(going) if leaf.sequence.finish_reason is None]
        going, nodes = [going[number] for number in kept], [nodes[number] for number in kept]
        if queued:
            logits = logits if len(kept) == len(logits) else logits[kept]
        elif going:
            logits = slots.last_logits(nodes)


class _Chosen:
    """One token for each of some leaves, on its way from the device to the host.

    Args:
        leaves: the leaves of one call.
        logits: their logits, fp32 ``[N, V]``.

    Attributes:
        tokens: int64 ``[N]``, on the device.
    """

    def __init__(self, leaves: Sequences[Leaf], logits: Tensor) -> None:
        self._leaves = leaves
        scores = _scores(leaves, logits)
        if not leaves[0].to_probs.greedy:
            scores = scores.softmax(-1).div_(_noise(leaves, logits))
        self.tokens = scores.argmax(-1)
        logprobs = logits.gather(1, self.tokens[:, None])[:, 0] - logits.logsumexp(-1)
        # One transfer: fp64 holds token ids exactly.
        both = torch.stack([self.tokens.double(), logprobs.double()])
        self._on_host = both.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if both.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def append(self) -> None:
        """Waits for the tokens, and appends them to the leaves.

        Raises:
            ValueError: logits are NaN.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens, logprobs = self._on_host.tolist()
        if any(map(math.isnan, logprobs)):
            raise ValueError(NAN_LOGITS)
        for leaf, token, logprob in zip(self._leaves, tokens, logprobs, strict=True):
            leaf.node.append([int(token)], [logprob])
            leaf.sequence.append([int(token)])


def _noise(leaves: Sequences[Leaf], like: Tensor) -> Tensor:
    """Returns the noise of the next position of each leaf, fp32 ``[N, V]``; see ``verify/seeded.py``."""
    noise, generator = torch.empty_like(like), torch.Generator(like.device)
    for own, leaf in zip(noise, leaves, strict=True):
        assert leaf.sequence.seed is not None
        fill_noise(own, generator, leaf.sequence.seed, len(leaf.sequence.tokens))
    return noise


def _scores(leaves: Sequences[Leaf], logits: Tensor) -> Tensor:
    """Returns the processed logits of leaves, fp32 ``[N, V]``."""
    if all(leaf.to_probs.context_free for leaf in leaves):
        # The leaves of a call have the same options. Only processors that read a text depend on its length.
        return leaves[0].to_probs.context_free_scores(logits)
    scores = []
    for leaf, own in zip(leaves, logits, strict=True):
        # The result of a processor may depend on the length of the prompt for which it was made.
        text = torch.tensor(leaf.sequence.tokens, device=logits.device)
        scores.append(leaf.to_probs.scores(own[None], partial(list, [text])))
    return torch.cat(scores)
