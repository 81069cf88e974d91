"""Keys and values in 8 bits: quantisation, kernels against definitions, attention against fp64.

The kernels run in Triton's interpreter where there is no GPU.
"""

import pytest
import torch

from tests.support.kernels import step_cases, triton_ops
from tests.support.kernels.kernels_cases import ERROR_LIMIT, Case, run_case
from tests.support.kernels.triton_ops import DEVICE, runs_kernels

pytest.importorskip("triton", reason="the kernels need Triton; install triton to run their tests")

from triforce_tree.kernels.attention.configs import KernelConfig
from triforce_tree.kernels.attention.launch import prepare
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.step.kv_slots import dequantized, quantized

triton_ops.require_triton()

pytestmark = triton_ops.runs_kernels

HALF, SINGLE = torch.float16, torch.float32
SMALL = KernelConfig(16, 64, 4, 2, 1)
PLAIN = KernelConfig(16, 32, 4, 2, 1, tma=False)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 3e4, 1e37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, SINGLE], ids=str)
def test_round_trip(magnitude: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 2, 50, 24) * magnitude).clamp(-3e38, 3e38).to(dtype)
    x[1, 1, 7] = 0
    stored, scale = quantized(x)
    assert stored.dtype == torch.int8
    assert scale.shape == (3, 2, 50, 1)
    # Each vector uses the whole range, and nothing is further off than half a step.
    assert torch.equal(stored.abs().amax(-1) == 127, x.abs().amax(-1) > 0)
    error = (dequantized(stored, scale, SINGLE).double() - x.double()).abs()
    assert bool((error <= scale.double() * 0.5001).all())
    # Each vector is quantised alone.
    alone = quantized(x[1:2, 1:, 20:21])
    assert torch.equal(alone[0], stored[1:2, 1:, 20:21])
    assert torch.equal(alone[1], scale[1:2, 1:, 20:21])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_vectors_that_are_not_finite_stay_so(wrong: float) -> None:
    x = torch.randn(2, 8)
    x[1, 3] = wrong
    assert dequantized(*quantized(x), SINGLE).isfinite().all(1).tolist() == [True, False]


def test_dequantized_rounds_once() -> None:
    stored, scale = quantized(torch.randn(4, 9, 16))
    assert torch.equal(dequantized(stored, scale, torch.bfloat16), (stored.float() * scale).bfloat16())


@runs_kernels
@pytest.mark.parametrize(
    "shape", [(1, 2, 20, 1, 16), (3, 2, 40, 7, 24), (2, 3, 90, 70, 128), (2, 2, 40, 9, (24, 10))], ids=str
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_append_kv(shape, dtype, ops) -> None:
    step_cases.agree(step_cases.append_int8(step_cases.append(*shape, dtype, DEVICE)), ops)


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "ring"), [((3, 2, 40, 7, 24), 33), ((2, 1, 9, 9, 16), 9), ((2, 1, 40, 9, (6, 20)), 33)]
)
def test_append_to_ring(shape, ring, ops) -> None:
    problem = step_cases.append_to_ring(*shape, SINGLE, DEVICE, ring=ring)
    step_cases.agree(step_cases.append_int8(problem), ops)


@runs_kernels
def test_move_of_scales(ops) -> None:
    """Scales move as KV slots of one column."""
    step_cases.agree(step_cases.move(2, 3, 2, 60, 9, (1, 1), SINGLE, DEVICE), ops)


@runs_kernels
@pytest.mark.parametrize("shape", [(2, 3, 2, 70, 5, 24, 6), (1, 3, 1, 300, 40, 128, 8)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_chunk_means(shape, dtype, ops) -> None:
    step_cases.agree(step_cases.means_int8(*shape, dtype, DEVICE), ops)


@runs_kernels
def test_scales_that_do_not_fit_raise(ops) -> None:
    cache, new = torch.zeros(1, 2, 8, 4, dtype=torch.int8), torch.zeros(1, 2, 5, 4)
    scale, start = torch.zeros(1, 2, 8, 1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="scales belong to int8"):
        ops.append_kv(cache, cache, new, new, start)
    with pytest.raises(ValueError, match=r"scales \(1, 2, 7, 1\) do not fit a cache of \(1, 2, 8, 4\)"):
        ops.append_kv(cache, cache, new, new, start, 0, scale[:, :, :7], scale[:, :, :7])
    plan = plan_trees(Heads(2, 2, 4), [torch.ones(1, 1, dtype=torch.bool)], [5], device="cpu")
    attention, q, params = prepare(plan, SINGLE), torch.zeros(1, 2, 4), AttentionParams(1.0)
    with pytest.raises(ValueError, match="int8 need the scales of both"):
        attention.run(q, KV(cache, cache), params)
    with pytest.raises(ValueError, match=r"must be \(1, 2, 8, 1\)"):
        attention.run(q, KV(cache, cache, scales=(scale[:, :1], scale[:, :1])), params)


@pytest.mark.parametrize(
    "case",
    [
        Case(Heads(4, 2, 64), ((0, 1),), HALF, config=SMALL),
        Case(Heads(4, 2, 64), ((130, 7),), SINGLE, order="breadth", config=PLAIN),
        Case(Heads(4, 1, 64), ((63, 7), (200, 3)), HALF, config=PLAIN),
        Case(Heads(2, 1, 128), ((200, 3),), HALF, config=SMALL),
        Case(Heads(4, 2, 64), ((150, 9),), HALF, ("view", 8), config=SMALL),
        Case(Heads(4, 2, 64), ((150, 9),), HALF, ("cache", 64), config=SMALL),
        Case(Heads(2, 2, 192, 128), ((130, 5),), HALF, config=SMALL),
        Case(Heads(4, 2, 96, 64), ((99, 5),), SINGLE, 16, window=50, softcap=5.0, sinks=True, config=PLAIN),
        Case(Heads(4, 2, 72, 40), ((150, 9),), HALF, ("view", 8), window=20, config=SMALL),
        Case(Heads(4, 2, 64), ((150, 9),), HALF, window=40, softcap=5.0, sinks=True, config=SMALL),
    ],
    ids=str,
)
def test_attention(case: Case) -> None:
    case = Case(**(vars(case) | {"int8": True}))
    assert run_case(case, DEVICE) <= ERROR_LIMIT
