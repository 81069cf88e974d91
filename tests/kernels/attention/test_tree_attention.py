"""The tree-attention kernels against fp64 on small shapes; see ``tests/gpu/test_tree_attention.py``.

The interpreter multiplies bf16 tiles wrongly, so these run fp16 and fp32.
"""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.kernels import triton_ops
from tests.support.kernels.kernels_cases import (
    ERROR_LIMIT,
    Case,
    build,
    poisoned_memory,
    random_tree,
    run_case,
)
from tests.support.kernels.triton_ops import DEVICE

pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")

from triforce_tree.kernels.attention import merge, reference
from triforce_tree.kernels.attention.configs import KernelConfig, choose, key_parts, value_columns
from triforce_tree.kernels.attention.launch import prepare, prepare_pieces, row_views
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, pack_mask, plan_trees
from triforce_tree.kernels.device import KNOWN

triton_ops.require_triton()

pytestmark = triton_ops.runs_kernels

HALF, SINGLE = torch.float16, torch.float32
SMALL = KernelConfig(16, 64, 4, 2, 1)
PLAIN = KernelConfig(16, 32, 4, 2, 1, tma=False)


@pytest.mark.parametrize(
    "case",
    [
        Case(Heads(4, 2, 64), ((0, 1),), HALF, config=SMALL),
        Case(Heads(4, 2, 64), ((0, 7),), SINGLE, order="breadth", config=PLAIN),
        Case(Heads(4, 4, 64), ((1, 16),), HALF, "rows", config=SMALL),
        Case(Heads(4, 1, 64), ((63, 7),), HALF, "rows", config=PLAIN),
        Case(Heads(3, 1, 64), ((64, 33),), HALF, order="breadth", config=SMALL),
        Case(Heads(2, 2, 64), ((65, 65),), SINGLE, config=PLAIN),
        Case(
            Heads(4, 2, 64), ((40, 5), (99, 9)), SINGLE, 16, window=50, softcap=5.0, sinks=True, config=PLAIN
        ),
        Case(Heads(2, 2, 64), ((500, 3),), HALF, config=SMALL),
        Case(Heads(2, 1, 64), ((1000, 3),), HALF, config=SMALL),
        Case(Heads(2, 1, 96), ((129, 2),), HALF, config=SMALL),
        Case(Heads(2, 1, 128), ((200, 3),), HALF, config=SMALL),
        Case(Heads(2, 2, 192, 128), ((130, 5),), HALF, config=SMALL),
        Case(Heads(2, 1, 96, 64), ((130, 5),), HALF, "rows", config=SMALL),
        Case(Heads(2, 2, 96, 64), ((130, 5),), HALF, "packed", config=SMALL),
        Case(Heads(4, 2, 96, 64), ((99, 3), (130, 5)), HALF, "packed", config=PLAIN),
        Case(Heads(2, 2, 72, 40), ((130, 5), (31, 9)), HALF, config=PLAIN),
        Case(Heads(2, 1, 12, 6), ((75, 4),), SINGLE, config=PLAIN),
        Case(Heads(2, 1, 16, 80), ((75, 4),), HALF, config=SMALL),
        Case(Heads(4, 2, 96, 64), ((99, 5),), SINGLE, 16, window=50, softcap=5.0, sinks=True, config=PLAIN),
        Case(Heads(4, 2, 96, 64), ((150, 9),), HALF, ("cache", 64), config=SMALL),
        Case(Heads(4, 2, 72, 40), ((150, 9),), HALF, ("view", 8), window=20, config=SMALL),
        # Chosen tiles: fp32 of more than 256 elements has keys and values in parts.
        Case(Heads(4, 2, 512), ((75, 9),), HALF),
        Case(Heads(2, 1, 512), ((40, 20), (67, 3)), HALF, ("cache", 32)),
        Case(Heads(2, 1, 512), ((75, 4),), SINGLE),
        Case(Heads(2, 1, 320, 512), ((75, 4),), HALF, "packed"),
        Case(Heads(2, 1, 320, 512), ((40, 3), (33, 5)), SINGLE, window=20),
        Case(Heads(2, 1, 512, 320), ((40, 5),), SINGLE, softcap=5.0, sinks=True),
        Case(Heads(4, 1, 576, 512), ((75, 4),), HALF),
        # So many heads that a program merges several of them.
        Case(Heads(72, 12, 16), ((20, 6),) * 5, HALF, 16, window=12, softcap=5.0, sinks=True, config=SMALL),
        Case(Heads(2, 1, 576, 512), ((40, 3),), SINGLE),
    ],
    ids=str,
)
def test_trees(case):
    assert run_case(case, DEVICE) <= ERROR_LIMIT


@pytest.mark.parametrize("layout", [1, 16, 64, ("view", 8), ("cache", 8), ("cache", 64)], ids=str)
@pytest.mark.parametrize("config", [SMALL, PLAIN], ids=["bulk", "plain"])
def test_pages(layout, config):
    assert run_case(Case(Heads(4, 2, 64), ((150, 9),), HALF, layout, config=config), DEVICE) <= ERROR_LIMIT


@pytest.mark.parametrize("page, heads", [(8, Heads(2, 2, 128)), (32, Heads(8, 2, 128))], ids=str)
def test_tiles_for_small_pages(page, heads):
    config = choose(9 * heads.group, heads.dim, 2, KNOWN["sm_90"], page=page)
    assert run_case(Case(heads, ((150, 9),), HALF, ("view", page), config=config), DEVICE) <= ERROR_LIMIT


@pytest.mark.parametrize("how", [{"window": 40}, {"window": 3}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("layout", ["heads", 16], ids=str)
def test_variants(how, layout):
    case = Case(Heads(4, 2, 64), ((150, 9),), HALF, layout, config=SMALL, **how)
    assert run_case(case, DEVICE) <= ERROR_LIMIT


@pytest.mark.parametrize("window", [None, 40])
def test_ragged_batch(window):
    trees = ((0, 3), (130, 9), (64, 1), (31, 20))
    case = Case(Heads(4, 2, 64), trees, HALF, 16, window=window, config=SMALL)
    assert run_case(case, DEVICE) <= ERROR_LIMIT


def test_reference_is_the_definition():
    torch.manual_seed(0)
    mask, depths = random_tree(9, "depth", random.Random(0))
    q, k, v = (torch.randn(2, h, n, 16) for h, n in [(4, 9), (2, 59), (2, 59)])
    sinks, first = torch.randn(4), (50 + depths - 19).clamp(0)
    out, lse = reference.tree_attention(q, k, v, mask, scale=0.3, first=first, softcap=4.0, sinks=sinks)
    seen = torch.ones(9, 59, dtype=torch.bool)
    seen[:, 50:] = mask
    seen &= torch.arange(59) >= first[:, None]
    scores = 4 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3 / 4)
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 9, 1)], -1)
    exact = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_plan_is_updated_in_place():
    heads, rng = Heads(4, 2, 64), random.Random(2)
    first, second = (random_tree(9, order, rng)[0] for order in ("depth", "breadth"))
    torch.manual_seed(2)
    q = torch.randn(9, 4, 64, dtype=HALF, device=DEVICE)
    k, v = (torch.randn(1, 2, 300, 64, dtype=HALF, device=DEVICE) for _ in range(2))
    plan, params = plan_trees(heads, [first], [50], device=DEVICE), AttentionParams(0.125)
    attention = prepare(plan, HALF, config=SMALL)
    attention.run(q, KV(k, v), params)
    places = [plan.lengths.data_ptr(), plan.mask.data_ptr()]
    plan.mask.copy_(pack_mask(second))
    plan.lengths.fill_(201)
    assert places == [plan.lengths.data_ptr(), plan.mask.data_ptr()]
    changed = attention.states(q, KV(k, v), params)
    other = prepare(plan_trees(heads, [second], [201], device=DEVICE), HALF, config=SMALL)
    fresh = other.states(q, KV(k, v), params)
    assert all(torch.equal(a, b) for a, b in zip(changed, fresh, strict=True))


FULL_SIZE = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow for pieces of 64 MiB")


@pytest.mark.parametrize(
    ("heads", "positions", "queries", "dtype"),
    [
        (Heads(4, 2, 128), 1200, 5, HALF),
        (Heads(3, 3, 32), 176, 7, SINGLE),
        *(
            pytest.param(*case, torch.bfloat16, marks=FULL_SIZE)
            for case in (
                (Heads(32, 32, 128), 4096, 97),
                (Heads(32, 8, 128), 16384, 49),
                (Heads(32, 8, 128), 16384, 1),
                (Heads(40, 40, 128), 3264, 97),
            )
        ),
    ],
)
def test_pieces_give_the_same_bits_alone_and_together(
    heads: Heads, positions: int, queries: int, dtype: torch.dtype
):
    torch.manual_seed(3)
    q = torch.randn(queries, heads.query, heads.dim, dtype=dtype, device=DEVICE)
    kv = torch.randn(3, positions, 2, heads.kv, heads.dim, dtype=dtype, device=DEVICE)
    k, v = (part.transpose(1, 2) for part in kv.unbind(2))
    made = {}
    with poisoned_memory():
        pieces = prepare_pieces(heads, queries, positions, 3, device=DEVICE, dtype=dtype)
        for first, count in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)):
            own = slice(first, first + count)
            found = pieces[count - 1].states(q.repeat(count, 1, 1), KV(k[own], v[own]), AttentionParams(0.09))
            made[first, count] = [t.unflatten(0, (count, queries)) for t in found]
    for (first, count), states in made.items():
        for i in range(count):
            assert all(torch.equal(a[i], b[0]) for a, b in zip(states, made[first + i, 1], strict=True))
    nothing = torch.ones(queries, 0, dtype=torch.bool, device=DEVICE)
    exact = reference.tree_attention(
        q.double().transpose(0, 1)[None], k[:1].double(), v[:1].double(), nothing, scale=0.09
    )
    out, lse = made[0, 1]
    torch.testing.assert_close(out.double(), exact[0].transpose(1, 2), atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact[1].transpose(1, 2), atol=1e-3, rtol=0, check_dtype=False)


def test_query_that_sees_nothing_gets_zero():
    plan = plan_trees(Heads(2, 1, 64), [torch.zeros(3, 3, dtype=torch.bool)], [0], device=DEVICE)
    q, k = (torch.randn(s, dtype=HALF, device=DEVICE) for s in [(3, 2, 64), (1, 1, 3, 64)])
    with poisoned_memory():
        out, lse = prepare(plan, HALF, config=SMALL).states(q, KV(k, k), AttentionParams(1.0))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_mask_words():
    mask = torch.rand(5, 130) < 0.5
    words = pack_mask(mask)
    bits = (words[..., None] >> torch.arange(64)) & 1
    assert words.shape == (5, 3)
    assert torch.equal(bits.flatten(1)[:, :130].bool(), mask)
    with pytest.raises(ValueError, match="plan for 3 words"):
        pack_mask(mask, 2)


def test_merge():
    torch.manual_seed(3)
    outs = torch.randn(3, 5, 7, 64, device=DEVICE)
    lses = torch.randn(3, 5, 7, device=DEVICE)
    lses[0, 0], lses[:, 1] = -torch.inf, -torch.inf
    outs[0, 0], outs[:, 1] = torch.nan, torch.nan
    exact = reference.merge_states.definition(outs, lses)
    with poisoned_memory():
        made = merge.merge_states(outs, lses)
    for a, b in zip(made, exact, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("count", [1, 3, 14])
def test_merge_of_parts_in_their_own_tensors(count):
    torch.manual_seed(3)
    # As attention kernels lay them out.
    outs = [torch.randn(2, 5, 3, 24, device=DEVICE).transpose(1, 2) for _ in range(count)]
    lses = [torch.randn(2, 3, 5, device=DEVICE) for _ in range(count)]
    for out, lse in zip(outs[::2], lses[::2], strict=True):
        lse[0, 1], out[0, 1] = -torch.inf, torch.nan
    for out, lse in zip(outs, lses, strict=True):
        lse[1, 2, 3:], out[1, 2, 3:] = -torch.inf, torch.nan
    exact = reference.merge_states.definition(torch.stack(outs), torch.stack(lses))
    with poisoned_memory():
        made = merge.merge_parts(outs, lses)
    defined = reference.merge_parts.definition(outs, lses)
    for found, plain, expected in zip(made, defined, exact, strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(plain, expected)
        assert found.stride() == plain.stride()


def test_fakes_agree_with_the_operators():
    """torch.compile needs it to keep the operators in its graph."""
    outs, lses = torch.randn(2, 3, 64, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(reference.merge_states.overload, (outs, lses), test_utils=checks)
    parts = [torch.randn(1, 2, 3, 8, device=DEVICE)] * 2, [torch.randn(1, 2, 3, device=DEVICE)] * 2
    torch.library.opcheck(reference.merge_parts.overload, parts, test_utils=checks)


def test_fake_output_has_the_width_of_the_values():
    heads, mask = Heads(2, 1, 96, 64), torch.ones(3, 3, dtype=torch.bool)
    attention = prepare(plan_trees(heads, [mask], [5], device=DEVICE), HALF, config=SMALL)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(shape, dtype=HALF) for shape in [(3, 2, 96), (1, 1, 8, 96), (1, 1, 8, 64)])
        out, lse = attention.states(q, KV(k, v), AttentionParams(1.0))
    assert (out.shape, lse.shape) == ((3, 2, 64), (3, 2))


def test_keys_wider_than_their_values_are_parts_of_powers_of_two():
    assert key_parts(192, 128) == (128, 64)
    assert key_parts(96, 64) == (64, 32)
    assert key_parts(80, 64) == (64, 16)
    assert key_parts(72, 40) == (64, 16)
    assert key_parts(127, 64) == (128, 0), "two parts would be as wide"
    assert key_parts(12, 6) == (16, 0)
    assert key_parts(64, 128) == (64, 0)
    for dim in (64, 80, 96, 128, 192, 256):
        whole = 1 << (dim - 1).bit_length()
        assert key_parts(dim, dim) == key_parts(dim, dim, 4) == (whole, 0), "as wide as the values: as ever"
        assert value_columns(dim, 2) == value_columns(dim, 4) == whole
    # Latent attention: DeepSeek-V3's 512 and 64 rotary elements.
    assert key_parts(576, 512) == key_parts(576, 512, 4) == (512, 64)
    assert (key_parts(512, 512), value_columns(512, 2)) == ((512, 0), 512)
    assert (key_parts(512, 512, 4), value_columns(512, 4)) == ((256, 256), 256)
    assert value_columns(320, 4) == 256, "and a second part of 64 of its columns"


@pytest.mark.parametrize("layout", ["heads", "packed"])
def test_keys_in_two_parts_are_loaded_in_bulk(layout):
    """Both layouts of the engine have views for the bulk copy engine, with a third one for the keys' rest."""
    problem = build(Case(Heads(2, 2, 192, 128), ((300, 3),), HALF, layout), DEVICE)
    views = row_views(problem.k, problem.v, 0, 64)
    assert [view.block_shape for view in views.tensors] == [[64, 128], [64, 64], [64, 128]]
    assert views.steps == ((0, 0, 192) if layout == "packed" else (0, 340, 0))
    assert row_views(problem.k[..., :176], problem.v, 0, 64) is None, "no whole parts"


def test_table_of_configs():
    hopper = KNOWN["sm_90"]
    assert choose(1, 128, 2, hopper).block_m == 16
    assert choose(64, 128, 2, hopper).block_m == 64
    assert choose(4096, 64, 2, hopper) == choose(129, 64, 2, hopper)
    assert choose(1, 512, 2, hopper).block_m == 16
    assert choose(4096, 512, 2, hopper).block_m == 32
    assert [choose(16, 128, 2, hopper, page=page).block_n for page in (8, 32, 64)] == [64, 64, 128]
    assert [choose(64, 128, 2, hopper, page=page).block_n for page in (8, 32, 64)] == [64, 32, 64]
    with pytest.raises(ValueError, match="keys of 520 and values of 520 elements exceed 576 and 512"):
        choose(16, 520, 2, hopper)
    with pytest.raises(ValueError, match="keys of 64 and values of 576 elements exceed"):
        choose(16, 64, 2, hopper, 576)


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="multiple"):
        Heads(5, 2, 64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    attention = prepare(plan_trees(Heads(2, 1, 64), [mask], [0], device=DEVICE), SINGLE)
    one, zero = AttentionParams(1.0), AttentionParams(0.0)
    q, k = torch.zeros(2, 2, 64, device=DEVICE), torch.zeros(1, 1, 1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="make a new plan"):
        attention.run(q, KV(k, k), one)
    with pytest.raises(ValueError, match=r"v has shape .*, and must have \(1, 1, 1, 64\)"):
        attention.run(q[:1], KV(k, k[..., :32]), one)
    with pytest.raises(ValueError, match="positive"):
        attention.run(q[:1], KV(k, k), zero)
    with pytest.raises(ValueError, match=r"plan with dtype=torch\.float16"):
        attention.run(q[:1].half(), KV(k, k), one)
