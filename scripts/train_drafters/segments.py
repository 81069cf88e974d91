"""Parts of texts that a drafter learns from, as it reads them while decoding: through sinks and a window.

A drafter that reads the target's hidden states keeps one pair of keys and values for each of the first
``sinks`` positions and each of the newest ``window`` ones. Positions are counted within this cache: while
position i is decoded, sink j is ``min(i, sinks + window - 1) - j`` positions away, and any other pair as far
as in the text.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from triforce_tree.drafters.heads.attention import rotated_one

# The first does not keep the scores; the second serves sizes that it refuses.
_ON_GPU = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Cache:
    """The sizes of a drafter's cache in pairs; the defaults are those of ``drafters/heads``."""

    sinks: int = 4
    window: int = 512


class Segments:
    """N segments of L tokens each, with the pairs that a drafter keeps before them.

    Args:
        cache: the sizes of the drafter's cache.
        rows: int64 ``[N]``, the row of the batch of texts that each segment is cut from.
        starts: int64 ``[N]``, the first position of each segment.
        length: L.
        every: a drafter learns from every so many positions.

    Attributes:
        positions: int64 ``[N, P]``, these positions in the text; P is L where it is all of them.
        kept: int64 ``[N, K]``, the positions of the pairs in the cache: sinks, then those before and in the
            segment; 0 where there is none.
        visible: bool ``[N, P, K]``, whether a position attends to a pair.
    """

    def __init__(self, cache: Cache, rows: Tensor, starts: Tensor, length: int, every: int = 1) -> None:
        device = starts.device
        self.cache, self.rows, self.length = cache, rows[:, None], length
        self.positions = starts[:, None] + torch.arange(0, length, every, device=device)
        first = torch.arange(cache.sinks, device=device).expand(len(starts), -1)
        near = starts[:, None] + torch.arange(-cache.window, length, device=device)
        at, here = near[:, None], self.positions[..., None]
        in_window = (at <= here) & (at > here - cache.window) & (at >= cache.sinks)
        self.visible = torch.cat([first[:, None] <= here, in_window], 2)
        self.kept = torch.cat([first, near.clamp_min(0)], 1)
        # Rotary positions: of pairs before and in the segment, and of the segment as the sinks see it.
        self.near = torch.arange(cache.window + length, device=device)
        self.far = self.positions.clamp_max(cache.sinks + cache.window - 1)

    def take(self, values: Tensor, offset: int = 0) -> Tensor:
        """Returns values ``[R, T, ...]`` of the texts at the kept pairs, ``[N, K, ...]``.

        Args:
            offset: is added to the positions; those after the end of a text give its last value.
        """
        return values[self.rows, (self.kept + offset).clamp_max(values.shape[1] - 1)]

    def take_own(self, values: Tensor, offset: int = 0) -> Tensor:
        """Returns values ``[R, T, ...]`` of the texts at the segments' positions, ``[N, P, ...]``."""
        return values[self.rows, (self.positions + offset).clamp_max(values.shape[1] - 1)]


class Rotary:
    """Rotary embeddings of ``dim`` dimensions."""

    def __init__(self, dim: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        self._frequencies = torch.cat([theta**-exponents] * 2)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates queries or keys ``[N, H, T, D]`` to positions ``[T]`` or ``[N, T]``."""
        angles = torch.atleast_2d(positions)[..., None] * self._frequencies
        return rotated_one(x, angles.cos(), angles.sin())


class StreamingAttention:
    """Attention of segments over their cache and over the pairs of the depths that were drafted before.

    Args:
        segments: of N segments with K pairs.
        rotary: turns queries and keys.
        keys, values: ``[N, H_kv, K, D]``, before rotation.
        within_cache: whether the sinks are as far away as in the cache; otherwise as far as in the text.
    """

    def __init__(
        self, segments: Segments, rotary: Rotary, keys: Tensor, values: Tensor, within_cache: bool = True
    ) -> None:
        self._segments, self._rotary = segments, rotary
        self._far = segments.far if within_cache else segments.positions
        sinks = segments.cache.sinks
        first = rotary(keys[:, :, :sinks], segments.kept[0, :sinks])
        near = rotary(keys[:, :, sinks:], segments.near)
        # Half of the dimensions compare a query with the sinks, the other half with all other pairs.
        self._keys = [torch.cat([torch.zeros_like(first), first], -1), _padded(near)]
        self._values, self._masks = [values], [segments.visible]

    def add(self, keys: Tensor, values: Tensor, depth: int) -> None:
        """Adds the pairs ``[N, H_kv, L, D]`` of a depth; each is seen by its own position alone."""
        segments = self._segments
        alone = torch.eye(segments.length, dtype=torch.bool, device=keys.device)
        self._keys.append(_padded(self._rotary(keys, segments.near[-segments.length :] + depth)))
        self._values.append(values)
        self._masks.append(alone.expand(len(keys), -1, -1))

    def __call__(self, queries: Tensor, depth: int) -> Tensor:
        """Returns attention outputs ``[N, H, L, D]`` of the queries at a depth."""
        segments, dim = self._segments, queries.shape[-1]
        near = self._rotary(queries, segments.near[-segments.length :] + depth)
        both = torch.cat([near, self._rotary(queries, self._far + depth)], -1)
        groups = queries.shape[1] // self._keys[0].shape[1]
        keys, values = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in (self._keys, self._values))
        mask = torch.cat(self._masks, 2)[:, None]
        how = {"attn_mask": mask, "scale": dim**-0.5}
        if not queries.is_cuda:
            return F.scaled_dot_product_attention(both, keys, values, **how)
        with sdpa_kernel(_ON_GPU, set_priority=True):
            return F.scaled_dot_product_attention(both, keys, _padded(values), **how)[..., :dim]


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, x.shape[-1]))
