"""The draft under a StreamingLLM cache, as one batched forward, and its distillation loss.

The cache keeps ``SINKS`` first tokens of the document and between ``WINDOW`` and 2 ``WINDOW`` recent ones,
dropping blocks of ``WINDOW``; positions are relative to the cache. A segment of the document is run in one
pass, with the sinks before it: after k blocks have left, the sinks are k blocks further on, seen from the
window, so each phase gets its own copy of the sinks' keys, turned by k blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

SINKS, WINDOW = 4, 256
SEGMENT = 1020  # tokens after the sinks: 1,024 with them
PHASES = -(-SEGMENT // WINDOW) - 1  # window starts: 0, WINDOW, 2 WINDOW


def streaming_mask(device: torch.device) -> Tensor:
    """True where token i of [sinks; segment] sees column j of [copies of the sinks; segment]."""
    at = torch.arange(-SINKS, SEGMENT, device=device)  # place after the sinks; sinks are negative
    phase = (torch.div(at, WINDOW, rounding_mode="floor") - 1).clamp(min=0)
    column = torch.arange(SEGMENT, device=device)
    window = (column <= at[:, None]) & (column >= phase[:, None] * WINDOW)
    copy = torch.arange(PHASES, device=device).repeat_interleave(SINKS)
    sink = torch.arange(SINKS, device=device).repeat(PHASES) - SINKS
    sinks = (copy == phase[:, None]) & (sink <= at[:, None])
    return torch.cat((sinks, window), dim=1)


class StreamingForward:
    """Last hidden states of the draft on [sinks; segment] tokens."""

    def __init__(self, draft: LlamaForCausalLM, device: torch.device) -> None:
        starts = torch.arange(0, PHASES * WINDOW, WINDOW, device=device)[None]
        turns = draft.model.rotary_emb(torch.zeros(1, device=device), position_ids=starts)
        self.draft, self.sinks = draft, (SINKS, streaming_mask(device), *turns)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns hidden states ``[B, SEGMENT, hidden]`` for tokens ``[B, SINKS + SEGMENT]``."""
        made = self.draft.model(tokens, use_cache=False, sinks=self.sinks)
        return made.last_hidden_state[:, SINKS:]


def cut(tokens: Tensor, hidden: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns draft inputs and the target's hidden states at the same positions.

    Args:
        tokens: ``[B, L]``; hidden: ``[B, L, H]``, the target's, computed on the whole of L.
        starts: ``[B, S]`` first token of each segment, at least ``SINKS``.

    Returns:
        inputs ``[B * S, SINKS + SEGMENT]`` and hidden ``[B * S, SEGMENT, H]``.
    """
    batch, count = starts.shape
    at = starts[:, :, None] + torch.arange(SEGMENT, device=tokens.device)  # [B, S, SEGMENT]
    row = torch.arange(batch, device=tokens.device)[:, None, None]
    sinks = tokens[:, None, :SINKS].expand(batch, count, SINKS)
    return torch.cat((sinks, tokens[row, at]), dim=-1).flatten(0, 1), hidden[row, at].flatten(0, 1)


def compare(
    student: Tensor,
    draft_head: Tensor,
    teacher: Tensor,
    target_head: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy against the target's whole distribution and overlap sum(min(p, q)), each ``[N]``
    fp32.

    Args:
        student, teacher: last hidden states, ``[N, H_d]`` and ``[N, H_t]``.
        draft_head, target_head: heads, ``[V, H_d]`` and ``[V, H_t]``.
    """
    ours, theirs = F.linear(student, draft_head).float(), F.linear(teacher, target_head).float()
    entropy = -(F.softmax(theirs, dim=-1) * F.log_softmax(ours, dim=-1)).sum(-1)
    return entropy, torch.minimum(F.softmax(theirs, dim=-1), F.softmax(ours, dim=-1)).sum(-1)
