"""Every registered attention backend over the same problems, and FlashInfer's planning over a stand-in."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.kernels import fake_flashinfer, triton_ops
from tests.support.kernels.kernels_cases import ERROR_LIMIT, Case, enough_seeds, run_case
from triforce_tree.kernels.attention import backend as backends
from triforce_tree.kernels.attention import flashinfer_backend
from triforce_tree.kernels.attention.backend import AttentionBackend
from triforce_tree.kernels.attention.flashinfer_backend import FlashInferBackend, single_slots
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees

HALF, SINGLE = torch.float16, torch.float32
pytestmark = triton_ops.runs_kernels

GROUPED, RAGGED = Heads(4, 2, 64), ((0, 3), (130, 9), (31, 20))
CASES = [
    Case(GROUPED, ((0, 1),), HALF),
    Case(GROUPED, ((130, 9),), HALF, "rows", order="breadth"),
    Case(Heads(3, 1, 64), RAGGED, HALF),
    Case(Heads(2, 2, 128), RAGGED, HALF, "packed"),
    Case(GROUPED, ((40, 70),), HALF, 16),
    Case(GROUPED, RAGGED, HALF, 1),
    Case(GROUPED, RAGGED, HALF, ("view", 8)),
    Case(GROUPED, ((150, 9),), HALF, ("cache", 64)),
    Case(GROUPED, RAGGED, HALF, 16, window=40, softcap=5.0, sinks=True),
    Case(GROUPED, ((150, 9),), HALF, ("view", 8), window=5),
    Case(GROUPED, RAGGED, HALF, sinks=True),
    Case(GROUPED, ((75, 9),), HALF, softcap=5.0),
]
CASES += [
    replace(CASES[1], dtype=SINGLE),
    replace(CASES[6], dtype=SINGLE, int8=True),
    replace(CASES[8], dtype=SINGLE, int8=True),
]


@pytest.fixture(scope="module", autouse=True)
def sdpa() -> None:
    """A backend of a module outside the package is registered as those of the package are."""
    backends.register("sdpa", "tests.support.kernels.sdpa_backend", "SdpaBackend")


def serves(made: AttentionBackend, case: Case) -> bool:
    """Returns whether a backend says that it serves a case."""
    dims = made.can.head_dims
    return (
        case.dtype in made.can.dtypes
        and (8 if case.int8 else 16) in made.can.kv_bits
        and (dims is None or case.heads.dim in dims)
    )


def device_of(made: AttentionBackend) -> str:
    """A device of this machine on which the backend runs; skips the test where there is none."""
    if made.name == "triton":
        triton_ops.require_triton()
        return triton_ops.DEVICE
    if reason := made.missing():
        pytest.skip(f"{made.name}: {reason}")
    if "cpu" in made.can.devices:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip(f"{made.name} runs on {' and '.join(made.can.devices)}, and this machine has none")
    return "cuda"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", [*backends.names(), "sdpa"])
def test_every_backend(name: str, case: Case) -> None:
    made = backends.backend(name)
    device = device_of(made)
    if not serves(made, case):
        pytest.skip(f"{name} says that it does not serve {case}")
    assert run_case(case, device, enough_seeds(case, 0), made) <= ERROR_LIMIT


@pytest.mark.parametrize("name", [*backends.names(), "sdpa"])
def test_every_backend_refuses_by_name_what_it_cannot(name: str) -> None:
    made = backends.backend(name)
    good = {"kv_bits": 16, "exact": False, "offload": False}
    device = torch.device(made.can.devices[0])
    dtype = made.can.dtypes[0]
    heads = {Heads(4, 2, 64)}
    if reason := made.missing():
        with pytest.raises(ValueError, match=f"attention_backend='{name}': {reason[:20]}"):
            backends.refuse(name, device, dtype, heads, good)
        return
    backends.refuse(name, device, dtype, heads, good)
    wrong = {"kv_bits=8": {"kv_bits": 8}, "exact=True": {"exact": True}, "an offloaded": {"offload": True}}
    able = {"kv_bits=8": 8 in made.can.kv_bits, "exact=True": made.can.exact, "an offloaded": made.can.pieces}
    for words, option in wrong.items():
        if not able[words]:
            with pytest.raises(ValueError, match=f"'{name}' does not work with {words}"):
                backends.refuse(name, device, dtype, heads, good | option)
    with pytest.raises(ValueError, match=f"'{name}' runs on .*, not on meta"):
        backends.refuse(name, torch.device("meta"), dtype, heads, good)


def test_unknown_backends_are_refused() -> None:
    options = {"kv_bits": 16, "exact": False, "offload": False}
    with pytest.raises(ValueError, match="'flash' is not known; use auto, triton, cpu, flashinfer"):
        backends.refuse("flash", torch.device("cpu"), SINGLE, set(), options)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionBackend]:
    """FlashInfer's backend over the stand-in for its package, on the CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    flashinfer_backend._workspace.cache_clear()
    yield FlashInferBackend()
    flashinfer_backend._workspace.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashinfers_planning(case: Case, flashinfer: AttentionBackend) -> None:
    """Page indices, requests and masks: the stand-in has FlashInfer's function of them."""
    if serves(flashinfer, case):
        assert run_case(case, "cpu", backend=flashinfer) <= ERROR_LIMIT


def test_flashinfer_plans_once_a_forward_or_once_a_table(flashinfer: AttentionBackend) -> None:
    heads = Heads(4, 2, 64)
    plan = plan_trees(heads, [torch.ones(3, 3, dtype=torch.bool).tril()], [20], device="cpu")
    made, params = flashinfer.trees(plan, HALF), AttentionParams(0.1)
    q, (k, v) = torch.randn(3, 4, 64).half(), torch.randn(2, 6, 2, 8, 64).half()
    tables = [torch.randperm(6, dtype=torch.int32).repeat(1, 2, 1) for _ in range(2)]
    for forward in range(1, 4):
        plan.lengths.fill_(18 + forward)
        made.begin()
        for layer in range(4):
            kv = KV(k, v, tables[layer // 2])
            dense = flashinfer.trees(plan, HALF)
            assert torch.equal(made.run(q, kv, params), dense.run(q, kv, params))
        assert [wrapper.plans for wrapper in made._wrappers.values()] == [2 * forward] * 2
    assert torch.equal(made.run(q, KV(k, v, tables[1]), params), dense.run(q, KV(k, v, tables[1]), params))


def test_flashinfer_gives_nothing_to_a_query_that_sees_nothing(flashinfer: AttentionBackend) -> None:
    mask = torch.tensor([[True, False], [False, False]])
    q, (k, v) = torch.randn(2, 2, 64).half(), torch.randn(2, 1, 2, 2, 64).half()
    made = flashinfer.trees(plan_trees(Heads(2, 2, 64), [mask], [0], device="cpu"), HALF)
    out, lse = made.states(q, KV(k, v), AttentionParams(1.0))
    assert torch.equal(out[0], v[0, :, 0])
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    empty = plan_trees(Heads(2, 2, 64), [torch.ones(2, 0, dtype=torch.bool)], [0], device="cpu")
    out, lse = flashinfer.trees(empty, HALF).states(q, KV(k, v), AttentionParams(1.0))
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_slots_that_flashinfer_cannot_describe_are_refused() -> None:
    k = torch.zeros(1, 2, 8, 64)
    with pytest.raises(ValueError, match="in int8; use kv_bits=16"):
        single_slots(KV(k, k, scales=(k, k)))
    with pytest.raises(ValueError, match="needs the same of both"):
        single_slots(KV(k, k.transpose(1, 2).contiguous().transpose(1, 2)))
