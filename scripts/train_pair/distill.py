"""The draft under a StreamingLLM cache, as one batched forward, and its distillation loss.

The cache keeps ``SINKS`` first tokens of the document and between ``WINDOW`` and 2 ``WINDOW``
recent ones, dropping blocks of ``WINDOW``; positions are relative to the cache. A segment of the
document behind its sinks is run in one pass: after k blocks have left, sinks stand k blocks further
on, seen from the window, so each phase gets its own copy of the sinks' keys, turned by k blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train_pair.model import Llama, linear, rms_norm, rotate, rotation

SINKS, WINDOW = 4, 256
SEGMENT = 1020  # tokens behind the sinks: 1,024 rows with them
PHASES = -(-SEGMENT // WINDOW) - 1  # window starts: 0, WINDOW, 2 WINDOW


def streaming_mask(device: torch.device) -> Tensor:
    """True where row i of [sinks; segment] sees column j of [copies of the sinks; segment]."""
    at = torch.arange(-SINKS, SEGMENT, device=device)  # place behind the sinks; sinks are negative
    phase = (torch.div(at, WINDOW, rounding_mode="floor") - 1).clamp(min=0)
    column = torch.arange(SEGMENT, device=device)
    window = (column <= at[:, None]) & (column >= phase[:, None] * WINDOW)
    copy = torch.arange(PHASES, device=device).repeat_interleave(SINKS)
    sink = torch.arange(SINKS, device=device).repeat(PHASES) - SINKS
    sinks = (copy == phase[:, None]) & (sink <= at[:, None])
    return torch.cat((sinks, window), dim=1)


class StreamingForward:
    """Last hidden states of the draft on [sinks; segment] rows."""

    def __init__(self, draft: Llama, device: torch.device) -> None:
        self.draft = draft
        self.mask = streaming_mask(device)
        shape = draft.shape
        self.cos, self.sin = rotation(SINKS + SEGMENT, shape.head_dim, shape.theta, device)

    def __call__(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens [B, SINKS + SEGMENT] -> hidden states of the segment, [B, SEGMENT, hidden]."""
        draft, (batch, length) = self.draft, tokens.shape
        cos, sin = self.cos.repeat(batch, 1), self.sin.repeat(batch, 1)
        x = F.embedding(tokens.flatten(), draft.model.embed_tokens.weight).to(dtype)
        for block in draft.model.layers:
            parts = draft.before(x, *block.before_weights, cos, sin, block.head_dim)
            q, k, v = (p.unflatten(0, (batch, length)).transpose(1, 2) for p in parts)
            copies = [
                rotate(k[:, :, :SINKS].float(), self.cos[s], self.sin[s]).to(k.dtype)
                for s in range(0, PHASES * WINDOW, WINDOW)
            ]
            k = torch.cat((*copies, k[:, :, SINKS:]), dim=2)
            v = torch.cat((*[v[:, :, :SINKS]] * len(copies), v[:, :, SINKS:]), dim=2)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
            mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
            x = draft.after(x, mixed, *block.after_weights)
        return x.unflatten(0, (batch, length))[:, SINKS:]


def cut(tokens: Tensor, hidden: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Draft inputs and the target's hidden states on the same places.

    Args:
        tokens: [B, L]; hidden: [B, L, H], the target's, computed on the whole of L.
        starts: [B, S] first token of each segment, at least ``SINKS``.

    Returns:
        inputs [B * S, SINKS + SEGMENT] and hidden [B * S, SEGMENT, H].
    """
    batch, count = starts.shape
    at = starts[:, :, None] + torch.arange(SEGMENT, device=tokens.device)  # [B, S, SEGMENT]
    row = torch.arange(batch, device=tokens.device)[:, None, None]
    sinks = tokens[:, None, :SINKS].expand(batch, count, SINKS)
    return torch.cat((sinks, tokens[row, at]), dim=-1).flatten(0, 1), hidden[row, at].flatten(0, 1)


def probs(
    student: Tensor, norm_d: Tensor, embedding_d: Tensor, teacher: Tensor, norm_t: Tensor, embedding_t: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the target's whole law and overlap sum(min(p, q)), each [N] fp32.

    student [N, H_d] and teacher [N, H_t] are last hidden states before the final norm.
    """
    log_q = F.log_softmax(linear(rms_norm(student, norm_d), embedding_d).float(), dim=-1)
    p = F.softmax(linear(rms_norm(teacher, norm_t), embedding_t).float(), dim=-1)
    return -(p * log_q).sum(-1), torch.minimum(p, log_q.exp()).sum(-1)
