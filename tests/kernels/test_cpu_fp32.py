"""The C kernels for fp32 on the CPU against torch: errors, uninitialised memory, equal bits in any batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import KV, AttentionParams, FirstVisible, Heads, Plan, plan_trees
from triforce_tree.kernels.cpu import tree_attention
from triforce_tree.kernels.cpu.fp32 import attention as fp32_attention
from triforce_tree.kernels.cpu.fp32 import linear as fp32_linear

pytestmark = pytest.mark.usefixtures("each_instruction_set")


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 40, 64), (7, 75, 403), (13, 4, 9), (25, 131, 96)])
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outs, ins = shape
    x, weight, bias = torch.randn(1, rows, ins), torch.randn(outs, ins).to(dtype), torch.randn(outs)
    for own in (None, bias):
        out = fp32_linear.linear(x, fp32_linear.matrix(weight, own))
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if own is None else own.double())
        plain = torch.nn.functional.linear(x, weight.float(), own)
        assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
        for row in range(rows):
            alone = fp32_linear.linear(x[:, row : row + 1], fp32_linear.matrix(weight, own))
            assert torch.equal(alone[:, 0], out[:, row])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(1, 40, 64), (7, 75, 403), (13, 4, 9), (25, 131, 96)])
def test_linear_in_8_bits(shape: tuple[int, int, int]) -> None:
    rows, outs, ins = shape
    x, weight, bias = torch.randn(1, rows, ins), torch.randn(outs, ins), torch.randn(outs)
    weight[outs // 2] = 0
    codes, scales = fp32_linear.in_8_bits(weight)
    by = fp32_linear.matrix(codes, bias, scales)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((fp32_linear.widened(by) - weight).abs() <= 0.501 * step).all()
    exact = torch.nn.functional.linear(x.double(), fp32_linear.widened(by).double(), bias.double())
    plain = torch.nn.functional.linear(x, fp32_linear.widened(by), bias)
    out = fp32_linear.linear(x, by)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    for row in range(rows):
        assert torch.equal(fp32_linear.linear(x[:, row : row + 1], by)[:, 0], out[:, row])
    gated = fp32_linear.gated(x, fp32_linear.matrix(codes, None, scales), by)
    expected = torch.nn.functional.silu(exact - bias) * exact
    assert (gated - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def _random_blocks(name: str, outs: int, ins: int) -> tuple[Tensor, Tensor]:
    """Returns random packed rows, and their values by the package gguf."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    blocks = fp32_linear.BLOCKS[name]
    packed = torch.randint(256, (outs, ins // blocks.elements, blocks.bytes), dtype=torch.uint8)
    for at in (208,) if name == "Q6_K" else (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        scales = torch.randn(outs, ins // blocks.elements, 1).half()
        packed[..., at : at + 2] = scales.view(torch.uint8)
    packed = packed.flatten(1)
    values = gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[name])
    return packed, torch.from_numpy(values)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 40, 512), (2, 75, 256), (7, 3, 768), (130, 131, 2304)])
@pytest.mark.parametrize("name", list(fp32_linear.BLOCKS))
def test_blocks_give_the_bits_of_their_unpacked_values(
    name: str, shape: tuple[int, int, int], threads: int
) -> None:
    rows, outs, ins = shape
    blocks = fp32_linear.BLOCKS[name]
    if blocks.elements < 256:  # lengths that no larger block has
        ins += 32 * 3
    packed, values = _random_blocks(name, outs, ins)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(fp32_linear.unpacked(packed, blocks), values)
        x, bias = torch.randn(1, rows, ins), torch.randn(outs)
        for own in (None, bias):
            by, plain = fp32_linear.matrix(packed, own, blocks=blocks), fp32_linear.matrix(values, own)
            out = fp32_linear.linear(x, by)
            assert torch.equal(out, fp32_linear.linear(x, plain))
            assert torch.equal(out[:, :1], fp32_linear.linear(x[:, :1], by))
            assert torch.equal(fp32_linear.gated(x, by, by), fp32_linear.gated(x, plain, plain))
        error = torch.nn.functional.linear(x.double(), values.double(), bias.double()) - out
        assert error.abs().max() <= 1e-5 * values.norm(dim=1).max() * x.norm(dim=-1).max()
    finally:
        torch.set_num_threads(before)


def test_weights_are_narrowed_only_where_no_value_changes() -> None:
    weight = torch.randn(80, 70).bfloat16().float()
    found = fp32_linear.narrowed(weight)
    assert found is not None
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), weight)
    halves = fp32_linear.narrowed((1 + torch.rand(40, 9)).half().float())
    assert halves is not None
    assert halves.dtype == torch.float16
    weight[-1, -1] += 2**-20
    assert fp32_linear.narrowed(weight) is None


PARAMS = AttentionParams(0.1)


def _planned(
    heads: Heads, batch: int, queries: int, tail: int, length: int
) -> tuple[Plan, Tensor, Tensor, Tensor]:
    """A plan over random trees, and queries, keys and values, with NaN after each sequence's end."""
    # Parents before children: what a node sees comes before it.
    mask = torch.rand(queries, tail).tril(tail - queries) > 0.5
    mask[torch.arange(queries), tail - queries + torch.arange(queries)] = True
    lengths = [length - 3 * b for b in range(batch)]
    plan = plan_trees(heads, [mask] * batch, lengths, device="cpu")
    slots = -(-(length + tail + 5) // 8) * 8
    k = torch.randn(batch, heads.kv, slots, heads.dim)
    v = torch.randn(batch, heads.kv, slots, heads.value_dim)
    for b, own in enumerate(lengths):
        for slot in (k, v):
            slot[b, :, own + tail :] = torch.nan
    return plan, torch.randn(batch * queries, heads.query, heads.dim), k, v


def _check(
    q: Tensor, kv: KV, plan: Plan, params: AttentionParams, first: FirstVisible | None = None
) -> Tensor:
    """Compares with torch's definition: twice its error in fp32 at most."""
    out = fp32_attention.attention(q, kv, plan, params, first)
    assert out is not None
    double = kv._replace(k=kv.k.double(), v=kv.v.double())
    exact = tree_attention.planned_attention(q.double(), double, plan, params, first)
    plain = tree_attention.planned_attention(q, kv, plan, params, first)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    return out


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("length", [4, 700, 1025])
@pytest.mark.parametrize(
    ("heads", "queries", "tail"),
    [
        (Heads(3, 3, 128), 1, 1),
        (Heads(8, 2, 80), 13, 13),
        (Heads(4, 2, 36, 48), 7, 70),
        (Heads(2, 1, 256), 25, 25),
    ],
)
def test_attention(heads: Heads, queries: int, tail: int, length: int) -> None:
    plan, q, k, v = _planned(heads, 2, queries, tail, length)
    out = _check(q, KV(k, v), plan, PARAMS)
    _check(q, KV(k, v), plan, AttentionParams(0.1, softcap=2.0, sinks=torch.randn(heads.query)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(fp32_attention.attention(q, KV(k, v), plan, PARAMS), out)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fewer", [1, 4])
def test_attention_of_fewer_queries_than_planned(fewer: int) -> None:
    plan, q, k, v = _planned(Heads(4, 2, 32), 1, 9, 9, 600)
    out = _check(q, KV(k, v), plan, PARAMS)
    assert torch.equal(_check(q[:fewer], KV(k, v), plan, PARAMS), out[:fewer])


@pytest.mark.usefixtures("poisoned_empty")
def test_attention_through_a_table_and_in_windows() -> None:
    heads, page = Heads(4, 2, 64), 8
    plan, q, k, v = _planned(heads, 2, 6, 6, 630)
    pages = k.shape[2] // page
    order = torch.stack([torch.randperm(2 * pages).view(2, pages) for _ in range(heads.kv)], 1)
    table = order.int().contiguous()  # [B, H, pages]
    paged = [k.new_full((2 * pages, heads.kv, page, 64), torch.nan) for _ in (k, v)]
    for b in range(2):
        for h in range(heads.kv):
            for pool, slots in zip(paged, (k, v), strict=True):
                pool[order[b, h], h] = slots[b, h].view(pages, page, 64)
    out = _check(q, KV(k, v), plan, PARAMS)
    assert torch.equal(_check(q, KV(*paged, table), plan, PARAMS), out)
    first = torch.randint(520, 627, (12,), dtype=torch.int32)
    low, high = first.view(2, 6).amin(1), first.view(2, 6).amax(1)
    for b in range(2):
        k[b, :, : low[b]] = v[b, :, : low[b]] = torch.nan
    _check(q, KV(k, v), plan, PARAMS, FirstVisible(first, low, high))


def test_attention_leaves_other_dtypes_and_shapes_to_torch() -> None:
    plan, q, k, v = _planned(Heads(2, 2, 40), 1, 3, 3, 50)
    assert fp32_attention.attention(q, KV(k, v), plan, PARAMS) is None
    plan, q, k, v = _planned(Heads(2, 2, 48), 1, 3, 3, 50)
    assert fp32_attention.attention(q, KV(k.double(), v.double()), plan, PARAMS) is None
    assert fp32_attention.attention(q, KV(k, v), replace(plan, queries=4), PARAMS) is None


@pytest.mark.parametrize(("ring", "page"), [(0, 0), (24, 0), (0, 6)])
def test_append(ring: int, page: int) -> None:
    cache = torch.randn(2, 3, 24, 20), torch.randn(2, 3, 24, 12)
    new = torch.randn(2, 5, 3, 20).transpose(1, 2), torch.randn(2, 5, 3, 12).transpose(1, 2)
    start = torch.tensor([4, 21])
    expected = [slots.clone() for slots in cache]
    table = torch.tensor([[3, 0, -1, 2], [1, 2, 3, 0]], dtype=torch.int32)
    paged = (None, None, table, page) if page else ()
    step.append_kv.definition(*expected, *new, start, ring, *paged)
    step.append_kv(*cache, *new, start, ring, *paged)
    for slots, wanted in zip(cache, expected, strict=True):
        assert torch.equal(slots, wanted)
    with pytest.raises(ValueError, match="ring=4"):
        step.append_kv(*cache, *new, start, 4)
