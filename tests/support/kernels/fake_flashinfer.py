"""A stand-in for the package ``flashinfer``, in plain torch: what its documentation says of our calls.

It checks the arguments as far as FlashInfer's kernels rely on them.
"""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of requests with queries of their own over pages of a KV cache."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, *, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("HND", "fa2")
        self.plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        for table in tables:
            assert table.dtype == torch.int32
            assert table.ndim == 1
        self.queries, self.starts, self.indices = (table.tolist() for table in tables[:3])
        requests = len(self.queries) - 1
        assert len(self.starts) == requests + 1
        assert paged_kv_last_page_len.tolist() == [page_size] * requests == [1] * requests
        assert self.queries[0] == self.starts[0] == 0
        assert self.starts[-1] == len(self.indices)
        # What FlashInfer does with a request without pages is not documented.
        assert all(a < b for a, b in zip(self.starts, self.starts[1:], strict=False))
        assert not causal, "every query of an unmasked part sees all of it"
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type == kv_data_type
        self.heads, self.shape = num_qo_heads, (num_kv_heads, page_size, head_dim_qk)
        self.scale, self.cap, self.dtype = sm_scale, logits_soft_cap or 0.0, q_data_type
        self.masks: list[Tensor | None] = [None] * requests
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
            sizes = [
                (self.queries[i + 1] - self.queries[i], self.starts[i + 1] - self.starts[i])
                for i in range(requests)
            ]
            assert custom_mask.shape == (sum(a * b for a, b in sizes),)
            parts = custom_mask.split([a * b for a, b in sizes])
            self.masks = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:
        k_cache, v_cache = paged_kv_cache
        assert q.dtype == k_cache.dtype == v_cache.dtype == self.dtype
        assert q.is_contiguous()
        assert q.shape == (self.queries[-1], self.heads, self.shape[2])
        assert k_cache.shape[1:] == v_cache.shape[1:] == self.shape
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride(3) == 1
        assert max(self.indices) < len(k_cache)
        assert return_lse
        outs, lses = [], []
        for i, mask in enumerate(self.masks):
            pages = self.indices[self.starts[i] : self.starts[i + 1]]
            own = q[self.queries[i] : self.queries[i + 1]].float()
            k, v = (t[pages, :, 0].float() for t in (k_cache, v_cache))  # [n, H_kv, D]
            grouped = own.unflatten(1, (self.shape[0], -1))  # [T, H_kv, G, D]
            scores = torch.einsum("thgd,nhd->hgtn", grouped, k) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            if mask is not None:
                # As FlashInfer's kernels do, which have no infinite scores.
                scores = scores.masked_fill(~mask, -5e4)
            weights = scores.softmax(-1)
            outs.append(torch.einsum("hgtn,nhd->thgd", weights, v).flatten(1, 2).to(q.dtype))
            lses.append(scores.logsumexp(-1).flatten(0, 1).T / math.log(2))
        return torch.cat(outs), torch.cat(lses)


def module() -> ModuleType:
    """Returns a module to be put in ``sys.modules`` as ``flashinfer``."""
    made: Any = ModuleType("flashinfer")
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return made
