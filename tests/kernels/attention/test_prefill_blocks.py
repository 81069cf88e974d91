"""Prefill attention in blocks: against the definition, where it is used, and the memory that it takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triforce_tree.kernels.attention import prefill
from triforce_tree.kernels.attention.reference import tree_attention

SHAPES = [(13, 31), (31, 31), (1, 20), (40, 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("extras", [False, True])
def test_blocks_are_the_definition(
    shape: tuple[int, int], window: int | None, extras: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "_QUERIES", 7)
    count, positions = shape
    q, k, v = torch.randn(2, 6, count, 24), torch.randn(2, 2, positions, 24), torch.randn(2, 2, positions, 10)
    how: dict[str, Any] = {"scale": 0.3}
    if extras:
        how |= {"softcap": 2.0, "sinks": torch.randn(6)}
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    first = None if window is None else (torch.arange(positions - count, positions) - window + 1).clamp(0)
    exact, _ = tree_attention(q.double(), k.double(), v.double(), mask, first=first, **how)
    # Blocks of 256 positions, the fewest.
    monkeypatch.setattr(prefill, "_SCORES", 1)
    out = prefill.attention_in_blocks(q, k, v, window=window, **how)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


class _Sizes(TorchDispatchMode):
    """Sizes in bytes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.sizes.add(leaf.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (64, 320), (256, 256)], ids=str)
def test_wide_heads_go_in_blocks_on_a_gpu(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flash attention ends at 256 elements."""
    made, shapes = object(), [(1, 4, 9, dims[0]), (1, 2, 9, dims[0]), (1, 2, 9, dims[1])]
    monkeypatch.setattr(prefill, "attention_in_blocks", lambda *_, **__: made)
    monkeypatch.setattr(prefill, "_of_equal_widths", lambda *_, **__: None)
    monkeypatch.setattr(prefill.F, "scaled_dot_product_attention", lambda *_, **__: None)
    q, k, v = (SimpleNamespace(shape=shape, is_cuda=True) for shape in shapes)
    assert (prefill.causal_attention(q, k, v, scale=1.0) is made) == (max(dims) > 256)
    q.is_cuda = False
    assert prefill.causal_attention(q, k, v, scale=1.0) is not made


@pytest.mark.parametrize(("dim", "softcap"), [(512, None), (128, 30.0)])
def test_no_scores_of_a_chunk_over_all_positions(dim: int, softcap: float | None) -> None:
    """By the shapes alone; all scores in fp32 would be 32 GiB."""
    shapes = (1, 16, 4096, dim), (1, 4, 131_072, dim), (1, 4, 131_072, dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    with _Sizes() as made:
        out = prefill.attention_in_blocks(q, k, v, scale=0.1, softcap=softcap)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    # Scores of a block; keys and values themselves have been allocated before.
    own = [size for size in made.sizes if size != k.nbytes]
    assert max(own) == 4 * (1 << 26)
    assert 3 * max(own) > prefill.block_bytes(16, dim, dim, 2) > max(own)
