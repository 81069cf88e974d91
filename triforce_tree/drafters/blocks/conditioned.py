"""Heads that correct the distribution at a slot by the token before it: DSpark's and DFlash2's.

The children of a node are predicted from the slot of their depth and from the node's own token, so that nodes
of one depth have different distributions. Nothing depends on the draws of the children themselves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triforce_tree.drafters.token_map import ABSENT


class ParentHead(nn.Module):
    """Corrects logits by the token of the parent.

    Attributes:
        state_size: numbers that a node hands down to its children; 0 if the head keeps none.
    """

    state_size = 0

    def forward(
        self, logits: Tensor, hidden: Tensor, tokens: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits of the children of F nodes, ``[B, F, V]``, and states ``[B, F, state_size]`` for
        the next depth.

        Args:
            logits: ``[B, V]``, those of the slot.
            hidden: ``[B, H]``, what they were computed from.
            tokens: int64 ``[B, F]``, the tokens of the nodes.
            states: ``[B, F, state_size]``, those of the nodes' parents; zeros at the root.
        """
        raise NotImplementedError


class MarkovHead(ParentHead):
    """Adds W2 e to the logits, where e is the embedding of the parent's token of low rank (DSpark, arXiv
    2607.05147).

    Args:
        kind: ``vanilla``; ``gated``, where a gate that reads the slot multiplies e; or ``rnn``, where a
            recurrent state of the path takes its place.
        rank: size of e.
        vocabulary, drafted: sizes of the target's vocabulary and of the drafter's.
        size: H.
    """

    def __init__(self, kind: str, rank: int, vocabulary: int, drafted: int, size: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)
            self.state_size = rank

    def forward(
        self, logits: Tensor, hidden: Tensor, tokens: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self.markov_w1(tokens)
        slot = hidden[:, None].expand(-1, tokens.shape[1], -1)
        if self.kind == "gated":
            embedded = embedded * torch.sigmoid(self.gate_proj(torch.cat([slot, embedded], -1)))
        elif self.kind == "rnn":
            gate, new, out = self.joint_proj(torch.cat([states, embedded, slot], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            states, embedded = gate * states + (1 - gate) * torch.tanh(new), torch.tanh(out)
        return logits[:, None] + self.markov_w2(embedded), states


class CandidateSelector(ParentHead):
    """Scores the k most probable tokens of a slot, and no others: b after a by its logit plus
    <A[a] * P h, B[b]> of low rank (DFlash2).

    Args:
        rank: size of A[a], P h and B[b].
        candidates: k.
        vocabulary: size of the vocabulary.
        size: H.
        scale, softcap: applied to the logits; 0 for no softcap.
    """

    def __init__(
        self, rank: int, candidates: int, vocabulary: int, size: int, scale: float, softcap: float
    ) -> None:
        super().__init__()
        self.candidates, self._scale, self._softcap = min(candidates, vocabulary), scale, softcap
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(
        self, logits: Tensor, hidden: Tensor, tokens: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(self.candidates)
        best = best.float() * self._scale
        if self._softcap:
            best = self._softcap * torch.tanh(best / self._softcap)
        before = F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(hidden)[:, None]
        pairs = before @ F.embedding(ids, self.successor_codebook).mT
        scores = torch.full((*tokens.shape, logits.shape[-1]), ABSENT, device=logits.device)
        scores.scatter_(2, ids[:, None].expand_as(pairs), best[:, None] + pairs.float())
        return scores, states


class GroupedConvolution(nn.Module):
    """Two convolutions over the slots of a block, before and after a part of a layer (DFlash2).

    Output t is the sum over taps i of (base[i] + correction[t, i]) * input t - i. The corrections are
    computed from the input of the first convolution, one for each group of channels.

    Args:
        size: H.
        taps: number of taps.
        group: channels that share a correction.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def corrections(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the corrections of both convolutions, ``[B, T, taps, H]`` each."""
        taps = self.base_kernel.shape[1]
        found = self.kernel_projection(hidden).unflatten(-1, (2, taps, -1))
        first, second = found.repeat_interleave(self.group, -1).unbind(-3)
        return first, second

    def convolve(self, side: int, hidden: Tensor, corrections: Tensor) -> Tensor:
        """Returns the convolution before (0) or after (1) of ``hidden`` ``[B, T, H]``."""
        out = torch.zeros_like(hidden)
        for i, base in enumerate(self.base_kernel[side]):
            shifted = F.pad(hidden, (0, 0, i, 0))[:, : hidden.shape[1]]
            out = out + (base + corrections[:, :, i]) * shifted
        return out
