"""Causal attention of a prefill chunk to the preceding positions and to itself."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from triforce_tree.kernels.attention import flash_attn_4
from triforce_tree.kernels.attention.reference import merge_parts
from triforce_tree.kernels.cpu.fp32 import prefill as host
from triforce_tree.kernels.device import describe

FLASH_DIM = 256
"""Largest number of elements of a head that torch's flash attention supports on a GPU."""
# Queries of a block in ``attention_in_blocks``, and most scores of a block.
_QUERIES = 1024
_SCORES = 1 << 26
# Fewest queries and positions of a call of cuDNN's attention.
_BLOCK = 4096


def capacity(positions: int) -> int:
    """Returns for how many positions a copy of keys and values on a GPU should have memory.

    cuDNN's attention makes a plan, for 0.04 s, whenever strides are new. Powers of two have few strides.
    """
    return 1 << (positions - 1).bit_length() if positions > _BLOCK else positions


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of query t of T to positions 0 ... S - T + t, or to the last ``window`` of them.

    Args:
        q: ``[B, H_q, T, D]``.
        k, v: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``; the last T positions are the chunk.

    Returns:
        ``[B, H_q, T, D_v]``.
    """
    if window is None and flash_attn_4.offered(q, k, v):
        own = partial(_causal, q, k, v, scale, None, softcap, sinks)
        return flash_attn_4.faster(own, q, k, v, scale=scale, softcap=softcap, sinks=sinks)
    return _causal(q, k, v, scale, window, softcap, sinks)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes ``causal_attention`` by torch and cuDNN, on a CPU in fp32 by our kernel."""
    queries, positions = q.shape[2], k.shape[2]
    if q.is_cpu and softcap is None and sinks is None:
        out = host.causal_attention(q, k, v, scale, window)
        if out is not None:
            return out
    wide = q.is_cuda and max(k.shape[3], v.shape[3]) > FLASH_DIM
    if wide or softcap is not None or sinks is not None:
        return attention_in_blocks(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]
    if k.shape[3] != v.shape[3]:
        return _of_equal_widths(q, k, v, scale, window)
    if window is None and positions > queries:
        if q.is_cuda and _cudnn_pays(q):
            return _prefix_and_chunk(q, k, v, scale)
        if _flash_on_host(q, k, v):
            return _prefix_and_chunk_on_host(q, k, v, scale)
    if window is not None and positions > window + queries:
        skip = positions - window - queries
        k, v, positions = k[:, :, skip:], v[:, :, skip:], positions - skip
    grouped = q.shape[1] != k.shape[1]
    if queries == positions and (window is None or window >= positions):
        if q.is_cuda and _cudnn_runs(q):
            return _own_chunk(q, k, v, scale)[0]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    bias = causal_lower_right(queries, positions) if window is None else _band(queries, positions, window, q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)


def _cudnn_pays(q: Tensor) -> bool:
    """Returns whether ``_prefix_and_chunk`` is used: for long chunks on Hopper and data-centre Blackwell.

    On these GPUs cuDNN's attention without a mask has 1.9 times the speed of torch's flash attention. It
    makes a plan for every new shape, which takes 0.04 s. Chunks of few queries do not save this time.
    """
    return bool(_queries_of_cudnn(q.shape[2])) and _cudnn_runs(q)


def _cudnn_runs(q: Tensor) -> bool:
    """Returns whether cuDNN's attention supports a tensor on a GPU where it is faster than torch's."""
    if torch.version.hip is not None or q.shape[3] % 8:
        return False
    usable = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    half = q.dtype in (torch.bfloat16, torch.float16)
    return usable and half and describe(q.device).capability[0] in (9, 10)


def _queries_of_cudnn(count: int) -> int:
    """Returns the queries that cuDNN computes for ``count`` of them, so that it plans few shapes; 0 if they
    are too few.

    A prefill has chunks of ``_BLOCK`` tokens, half as many after many positions (``kv.prefill.forward_end``),
    and fewer at the end of a prompt. Up to 1.6 times as many queries take less time than torch's attention.
    """
    if count >= _BLOCK:
        return count
    return next((size for size in (_BLOCK // 2, _BLOCK) if count <= size < 1.6 * count), 0)


def _prefix_and_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Computes ``causal_attention`` as attention to the preceding positions, merged with the chunk's."""
    before = k.shape[2] - q.shape[2]
    parts = _unmasked(q, k[:, :, :before], v[:, :, :before], scale)
    parts.append(_own_chunk(q, k[:, :, before:], v[:, :, before:], scale))
    return _merged(parts)[0]


def _own_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Computes causal attention of T queries to their own T positions, on a GPU where cuDNN's is faster.

    The chunk is padded to one of a few sizes, since torch would let cuDNN make a plan for each length of a
    prompt. No query sees the padding, which is behind it.
    """
    queries = q.shape[2]
    size = _queries_of_cudnn(queries)
    if not size or size % (_BLOCK // 2):
        return _flash(q, k, v, scale, causal=True)
    q, k, v = (_padded(part, size) for part in (q, k, v))
    out, lse = _cudnn(q, k, v, scale, causal=True)
    return out[:, :, :queries], lse[:, :, :queries]


def _padded(x: Tensor, count: int) -> Tensor:
    """Returns ``[B, H, T, D]`` with zeros behind it up to ``count`` tokens.

    All heads of a token follow each other in its memory, as layers compute them. cuDNN's output then has the
    same order, and needs no copy.
    """
    missing = count - x.shape[2]
    if not missing:
        return x  # torch would copy it
    return F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2)


def _unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Computes partial outputs and log-sum-exps for all positions, by cuDNN and torch's flash attention.

    cuDNN computes blocks of ``_BLOCK`` positions times a power of two, so that it plans only a few shapes.
    Flash attention computes the remaining positions.
    """
    parts, start, count, queries = [], 0, k.shape[2], q.shape[2]
    padded = _padded(q, _queries_of_cudnn(queries))
    for power in reversed(range((count // _BLOCK).bit_length())):
        if count - start >= (size := _BLOCK << power):
            stop = start + size
            out, lse = _cudnn(padded, k[:, :, start:stop], v[:, :, start:stop], scale, causal=False)
            parts.append((out[:, :, :queries], lse[:, :, :queries]))
            start = stop
    if start < count:
        parts.append(_flash(q, k[:, :, start:], v[:, :, start:], scale, causal=False))
    return parts


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges partial outputs ``[B, H_q, T, D]`` and their log-sum-exps, fp32 ``[B, H_q, T]``."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return merge_parts(outs, lses)


def attention_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention to some of the visible positions, with the log-sum-exps that merging needs.

    Args:
        q: ``[B, H_q, T, D]``.
        k, v: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``, S at least 1.
        causal: whether query t sees only positions 0 ... S - T + t; else it sees all positions.

    Returns:
        outputs ``[B, H_q, T, D_v]`` and log-sum-exps (natural logarithm), fp32 ``[B, H_q, T]``.
    """
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    plain = softcap is None and sinks is None and k.shape[3] == v.shape[3] <= FLASH_DIM
    # Flash attention aligns its mask to the first position, which is correct only if S = T.
    square = not causal or q.shape[2] == k.shape[2]
    if plain and square and _flash_on_host(q, k, v):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        on_host: tuple[Tensor, Tensor] = flash(q, k, v, 0.0, causal, scale=scale)
        return on_host
    if not (half and plain and square and torch.version.hip is None):
        return attention_in_blocks(q, k, v, scale=scale, causal=causal, softcap=softcap, sinks=sinks)
    if causal or not _cudnn_pays(q):
        return _flash(q, k, v, scale, causal)
    return _merged(_unmasked(q, k, v, scale))


def _flash_on_host(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether torch's flash attention for CPUs supports these tensors."""
    narrow = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return q.device.type == "cpu" and narrow and all(t.stride(-1) == 1 and t.numel() > 0 for t in (q, k, v))


def _prefix_and_chunk_on_host(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Computes ``causal_attention`` on a CPU, as attention to earlier positions merged with the chunk's.

    It is a quarter faster than one call with a mask over all positions. That call reads the mask for every
    head, and also computes the hidden scores.
    """
    before = k.shape[2] - q.shape[2]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    prefix, prefix_lse = flash(q, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scale)
    own, own_lse = flash(q, k[:, :, before:], v[:, :, before:], 0.0, True, scale=scale)
    # With log-sum-exps a and b, neither -inf, the second part has the weight exp(b) / (exp(a) + exp(b)).
    weight = torch.sigmoid(own_lse - prefix_lse)[..., None]
    return torch.lerp(prefix.float(), own.float(), weight).to(q.dtype)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes cuDNN's attention: outputs ``[B, H_q, T, D]`` and log-sum-exps, fp32 ``[B, H_q, T]``."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(out.shape[:3])


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Computes torch's flash attention, with results like ``_cudnn``."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def attention_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes ``attention_states``, also under a window, by products over blocks of queries and positions.

    It supports wide heads, softcap and attention sinks, which torch's flash attention does not. Torch's
    fallback would hold the scores of a chunk over all positions in memory. The softmax is the online softmax
    of FlashAttention-2 (arXiv 2307.08691, section 3.1), with scores, sums and outputs of a block in fp32.
    """
    (batch, q_heads, queries, dim), value_dim = q.shape, v.shape[3]
    kv_heads, positions = k.shape[1], k.shape[2]
    # If not causal, all positions precede the queries.
    before = positions - queries if causal else positions
    group, sums = q_heads // kv_heads, torch.promote_types(q.dtype, torch.float32)
    size = max(256, _SCORES // (batch * q_heads * min(queries, _QUERIES)))
    parts, lses = [], []
    for start in range(0, queries, _QUERIES):
        stop = min(queries, start + _QUERIES)
        rows = q[:, :, start:stop].reshape(batch * kv_heads, -1, dim)  # [B * H_kv, G * t, D]
        best = torch.full(rows.shape[:2], -torch.inf, dtype=sums, device=q.device)
        weight = torch.zeros_like(best)
        if sinks is not None:
            # A sink acts as a position whose value is zero.
            best = best.view(batch, kv_heads, group, -1)
            best = sinks.to(sums).view(kv_heads, group, 1).expand_as(best).reshape(weight.shape)
            weight += 1
        total = torch.zeros(*weight.shape, value_dim, dtype=sums, device=q.device)
        position = torch.arange(before + start, before + stop, device=q.device).repeat(group)[:, None]
        first = 0 if window is None else max(0, before + start - window + 1)
        last = min(before + stop, positions)
        for at in range(first, last, size):
            end = min(at + size, last)
            keys, values = (t[:, :, at:end].flatten(0, 1) for t in (k, v))
            scores = _product(rows, keys.transpose(1, 2), sums).mul_(scale)
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            if window is not None or end > before + start + 1:
                seen = torch.arange(at, end, device=q.device)
                hidden = seen > position
                if window is not None:
                    hidden |= seen <= position - window
                scores.masked_fill_(hidden, -torch.inf)
            top = torch.maximum(best, scores.amax(-1))
            # A query may see no position of a block, and -inf - -inf is NaN.
            floor = top.clamp_min(torch.finfo(sums).min)
            probs = scores.sub_(floor[..., None]).exp_()
            rescale = (best - floor).exp_()
            weight = weight * rescale + probs.sum(-1)
            total.mul_(rescale[..., None]).add_(_product(probs.to(v.dtype), values, sums))
            best = top
        parts.append(total.div_(weight[..., None]).to(q.dtype).view(batch, q_heads, stop - start, value_dim))
        lses.append((best + weight.log()).float().view(batch, q_heads, stop - start))
    if len(parts) == 1:
        return parts[0], lses[0]
    return torch.cat(parts, 2), torch.cat(lses, 2)


def block_bytes(q_heads: int, dim: int, value_dim: int, itemsize: int) -> int:
    """Returns the bytes that :func:`attention_in_blocks` allocates for the blocks of one sequence."""
    outs = q_heads * _QUERIES * (dim * itemsize + 2 * value_dim * 4)
    return _SCORES * (4 + itemsize) + outs


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``a @ b`` in ``dtype``; on a CPU and on AMD it is first rounded to the operands' dtype."""
    if a.is_cuda and a.dtype != dtype and torch.version.hip is None:
        return torch.bmm(a, b, out_dtype=dtype)
    return torch.bmm(a, b).to(dtype)


def _of_equal_widths(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Computes ``causal_attention`` with zeros appended to keys or values, whichever are narrower.

    Torch's flash attention needs equal widths, and its fallback holds the scores of a whole chunk in memory.
    The zeros change neither scores nor outputs.
    """
    value_dim, missing, positions = v.shape[3], k.shape[3] - v.shape[3], k.shape[2]
    rest = capacity(positions) - positions if k.is_cuda else 0
    if missing > 0:
        v = F.pad(v, (0, missing, 0, rest))[:, :, :positions]
    else:
        q, k = F.pad(q, (0, -missing)), F.pad(k, (0, -missing, 0, rest))[:, :, :positions]
    return _causal(q, k, v, scale, window, None, None)[..., :value_dim]


def _band(queries: int, positions: int, window: int, like: Tensor) -> Tensor:
    """Returns the causal mask of a sliding window, bool ``[T, S]``."""
    query_position = torch.arange(queries, device=like.device)[:, None] + positions - queries
    kv_position = torch.arange(positions, device=like.device)
    return (kv_position <= query_position) & (kv_position > query_position - window)
