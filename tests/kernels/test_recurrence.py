"""Recurrences in rows: the definition against transformers' functions, the kernel against the definition."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from tests.support.kernels.triton_ops import DEVICE, require_triton, runs_kernels
from triforce_tree.kernels.recurrent import linear_recurrence

# Batch, rows, heads of queries and keys, heads, values, keys.
SHAPES = [(1, 1, 1, 1, 16, 16), (2, 5, 2, 6, 24, 20), (3, 4, 1, 1, 70, 8), (1, 3, 2, 2, 33, 130)]
KINDS = ["head", "key", "both"]


def problem(shape: tuple[int, ...], kind: str, delta: bool) -> dict[str, Tensor | None]:
    """Random arguments on the device; a step keeps 0.4 to 1 of the state."""
    batch, rows, groups, heads, values, keys = shape
    wide = {"head": 1, "key": keys, "both": values}[kind]
    sign = 1 if kind == "both" else -1
    made: dict[str, Tensor | None] = {
        "state": torch.randn(batch, heads, values, keys),
        "q": torch.randn(batch, rows, groups, keys),
        "k": functional.normalize(torch.randn(batch, rows, groups, keys), dim=-1),
        "v": torch.randn(batch, rows, heads, values),
        "decay": sign * torch.rand(batch, rows, heads, wide),
        "rates": -torch.rand(heads, values, keys) if kind == "both" else None,
        "beta": torch.rand(batch, rows, heads) if delta else None,
    }
    return {name: None if t is None else t.to(DEVICE) for name, t in made.items()}


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [False, True])
def test_the_kernel_agrees_with_the_definition(shape: tuple[int, ...], kind: str, delta: bool) -> None:
    require_triton()
    from triforce_tree.kernels.recurrent import recurrence_kernels

    given = problem(shape, kind, delta)
    batch, rows = shape[:2]
    counts = torch.randint(rows + 1, (batch,), device=DEVICE)
    for stored in (None, counts):
        for read in (True, False):
            results = []
            for compute in (linear_recurrence.definition, recurrence_kernels.linear_recurrence):
                out = torch.full_like(given["v"], torch.nan) if read else None
                state = given["state"].clone()
                compute(**{**given, "state": state}, counts=stored, out=out)
                results.append((state, out))
            (state, out), (found, written) = results
            torch.testing.assert_close(found, state, atol=1e-5, rtol=1e-5)
            if read:
                torch.testing.assert_close(written, out, atol=1e-5, rtol=1e-5, equal_nan=True)
            assert torch.equal(found, given["state"]) is (stored is None or not bool(stored.any()))


@runs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [False, True])
def test_the_kernel_follows_paths(shape: tuple[int, ...], kind: str, delta: bool) -> None:
    require_triton()
    from triforce_tree.kernels.recurrent import recurrence_kernels

    given = problem(shape, kind, delta)
    paths = random_paths(*shape[:2], 4)
    results = []
    for compute in (linear_recurrence.definition, recurrence_kernels.linear_recurrence):
        out = torch.full((*paths.shape[:2], *given["v"].shape[2:]), torch.nan, device=DEVICE)
        state = given["state"].clone()
        compute(**{**given, "state": state}, counts=None, out=out, paths=paths)
        assert torch.equal(state, given["state"])
        results.append(out)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def random_paths(batch: int, rows: int, count: int) -> Tensor:
    """Ascending rows of each path, at least one."""
    paths = torch.full((batch, count, rows), -1)
    for path in paths.flatten(0, 1):
        chosen = torch.randperm(rows)[: torch.randint(1, rows + 1, ()).item()].sort().values
        path[: len(chosen)] = chosen
    return paths.to(DEVICE)


def test_the_output_of_a_path_is_that_of_its_tokens_alone() -> None:
    given = problem((2, 6, 2, 4, 8, 12), "head", delta=True)
    paths = random_paths(2, 6, 5)
    out = torch.empty(2, 5, 4, 8, device=DEVICE)
    linear_recurrence(**given, counts=None, out=out, paths=paths)
    names = ("q", "k", "v", "decay", "beta")
    for b in range(2):
        for path, read in zip(paths[b], out[b], strict=True):
            tokens = path[path >= 0]
            rows = {name: given[name][b : b + 1, tokens] for name in names}
            alone = torch.empty_like(rows["v"])
            state = given["state"][b : b + 1].clone()
            linear_recurrence(**{**given, **rows, "state": state}, counts=None, out=alone)
            torch.testing.assert_close(read, alone[0, -1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_once_are_rows_one_by_one_to_the_bit(kind: str) -> None:
    """A sequence that keeps k of them has the state after k, whatever the others keep."""
    given = problem((3, 6, 2, 4, 8, 12), kind, delta=kind != "both")
    out, state = torch.empty_like(given["v"]), given["state"].clone()
    linear_recurrence(**given, counts=None, out=out)
    linear_recurrence(**{**given, "state": state}, counts=torch.tensor([0, 4, 6], device=DEVICE), out=None)
    rows = ("q", "k", "v", "decay", *(("beta",) if given["beta"] is not None else ()))
    for b, count in enumerate((0, 4, 6)):
        own = given["state"][b : b + 1].clone()
        one = torch.ones(1, dtype=torch.int64, device=DEVICE)
        for t in range(6):
            if t == count:
                assert torch.equal(own, state[b : b + 1])
            read = torch.empty_like(given["v"][:1, :1])
            row = {name: given[name][b : b + 1, t : t + 1].contiguous() for name in rows}
            linear_recurrence(**{**given, **row, "state": own}, counts=one, out=read)
            assert torch.equal(read[0, 0], out[b, t])
    assert torch.equal(own, state[2:])


def test_gated_delta_rule() -> None:
    given = problem((2, 7, 4, 4, 8, 12), "head", delta=True)
    q, k, v, decay, beta, state = (given[name].cpu() for name in ("q", "k", "v", "decay", "beta", "state"))
    expected, after = qwen.torch_recurrent_gated_delta_rule(
        q * 12**0.5, k, v, decay[..., 0], beta, initial_state=state.mT, output_final_state=True
    )
    out = torch.empty_like(v)
    linear_recurrence(state, q, k, v, decay, None, beta, torch.tensor([7, 7]), out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, after.mT, atol=1e-5, rtol=1e-5)


def test_mamba_2() -> None:
    given = problem((2, 1, 2, 6, 8, 12), "head", delta=False)
    q, k, v, state = (given[name].cpu() for name in ("q", "k", "v", "state"))
    step, rates = torch.rand(2, 6), -torch.rand(6)
    after = state.clone()
    expected = granite.mamba2_selective_state_update(
        after, v[:, 0], step[..., None].expand(-1, -1, 8), rates[:, None, None].expand(6, 8, 12),
        k[:, 0], q[:, 0],
    )  # fmt: skip
    out = torch.empty_like(v)
    decay = (step * rates)[:, None, :, None]
    linear_recurrence(state, q, k, v * step[:, None, :, None], decay, None, None, torch.tensor([1, 1]), out)
    torch.testing.assert_close(out[:, 0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, after, atol=1e-5, rtol=1e-5)


def test_mamba() -> None:
    given = problem((2, 1, 1, 1, 24, 8), "both", delta=False)
    q, k, v, step, rates, state = (given[name].cpu() for name in ("q", "k", "v", "decay", "rates", "state"))
    after = state[:, 0].clone()
    expected = jamba.mamba_selective_state_update(
        after, v[:, 0, 0], step[:, 0, 0], rates[0], k[:, 0, 0], q[:, 0, 0]
    )
    out = torch.empty_like(v)
    linear_recurrence(state, q, k, v * step, step, rates, None, torch.tensor([1, 1]), out)
    torch.testing.assert_close(out[:, 0, 0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[:, 0], after, atol=1e-5, rtol=1e-5)


def test_the_operator() -> None:
    given = problem((2, 3, 1, 2, 4, 6), "head", delta=True)
    arguments = (*given.values(), torch.tensor([1, 3], device=DEVICE), torch.zeros_like(given["v"]))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(linear_recurrence.overload, arguments, test_utils=checks)


def test_memory_of_the_kernel_must_be_contiguous() -> None:
    require_triton()
    from triforce_tree.kernels.recurrent import recurrence_kernels

    given = problem((2, 3, 1, 2, 4, 4), "head", delta=False)
    with pytest.raises(ValueError, match="must be contiguous"):
        recurrence_kernels.linear_recurrence(
            **{**given, "state": given["state"].transpose(2, 3)}, counts=None, out=None
        )
