"""The C kernels of a decoding step against the definitions, on problems of the Triton kernels."""

import pytest
import torch

from tests.support.kernels import acceptance_cases, grow_cases, step_cases
from triforce_tree.kernels import step
from triforce_tree.kernels.cpu.fp32 import library as fp32_library

pytestmark = pytest.mark.usefixtures("each_instruction_set")
HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem is served by C: without the library its operator fails."""
    plain = step_cases.Problem.run

    def run(problem: step_cases.Problem, op, args=None):
        served = fp32_library.library()
        calls = []

        class Counted:
            def __getattr__(self, name: str):
                calls.append(name)
                return getattr(served, name)

        monkeypatch.setattr(fp32_library, "library", Counted)
        made = plain(problem, op, args)
        monkeypatch.setattr(fp32_library, "library", lambda: served)
        is_definition = op is getattr(problem.package, problem.op).definition
        assert is_definition or problem.op in calls, "the definition served it"
        return made

    monkeypatch.setattr(step_cases.Problem, "run", run)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("widths", [(1,), (8, 6, 4), (1, 1, 1, 1, 1)], ids=str)
def test_begin_tree(widths) -> None:
    for batch in (1, 3):
        step_cases.agree(grow_cases.beginning(batch, len(widths) + 2, widths, 40, "cpu"), step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 5, 1), (2, 3, 5, 8), (2, 3, 300, 6), (3, 2, 64, 16), (1, 6, 4096, 33), (1, 3, 40_000, 5)],
    ids=str,
)
@pytest.mark.parametrize("exponential", [True, False], ids=["exponential", "greedy"])
def test_expand_nodes(shape, exponential) -> None:
    for ties, temperature in ((True, None), (False, 0.7)):
        problem = grow_cases.expansion(*shape, SINGLE, exponential, "cpu", temperature, ties)
        step_cases.agree(problem, step)


def test_half_logits_take_the_definition() -> None:
    step_cases.agree(grow_cases.expansion(2, 3, 300, 6, HALF, True, "cpu"), step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "shape, first, before",
    [
        ((1, 1, 1, 1), 3, 5),
        ((3, 6, 4, 4), 3, 5),
        ((2, 5, 45, 33), 3, 64),
        ((2, 8, 6, 6), 50, 5),
        ((2, 8, 6, 6), 60, 1),
        ((1, 20, 8, 64), 200, 130),
        ((1, 1, 3, 3), 1021, 129),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "live"])
def test_place_nodes(shape, first, before, fixed) -> None:
    for ties, last in ((False, False), (True, False), (False, True)):
        problem = grow_cases.placement(*shape, "cpu", fixed, ties, last, first=first, before=before)
        step_cases.agree(problem, step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("options", [{}, {"fixed": 0.5}, {"fixed": 1.0}, {"both": 0.7}], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_traverse_tree(seed, options) -> None:
    torch.manual_seed(seed)
    nodes, vocab = (1, 2, 5, 9, 17, 33)[seed % 6], (3, 7, 50, 300, 4200)[seed % 5]
    likeness = acceptance_cases.LIKENESS[seed % 6]
    problem = acceptance_cases.traversal(2, nodes, vocab, "cpu", *likeness, seed % 2 == 1, seed, **options)
    step_cases.agree(problem, step)
    if nodes > 1:
        problem.args = (*problem.args[:-1], 1)  # deeper nodes are not read
        step_cases.agree(problem, step)


@pytest.mark.usefixtures("compiled_only")
def test_probs_that_are_nan_emit_token_0() -> None:
    problem = acceptance_cases.traversal(2, 5, 50, "cpu", *acceptance_cases.LIKENESS[0])
    problem.args[2].fill_(torch.nan)
    step_cases.agree(problem, step)
    assert problem.run(step.traverse_tree)[2].tolist() == [0, 0]


@pytest.mark.usefixtures("compiled_only")
def test_accept_greedy() -> None:
    for seed, nodes in enumerate((1, 2, 9, 33)):
        step_cases.agree(acceptance_cases.greedy(3, nodes, 4, "cpu", seed), step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2000, 64, 160), (2, 3, 70, 24, 8), (3, 2, 150, 16, 33), (1, 1, 64, 16, 64), (1, 2, 5, 16, 1)],
    ids=str,
)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_select_chunks(shape, group) -> None:
    batch, heads, *rest = shape
    for integers, variances in ((False, False), (True, False), (False, True)):
        problem = step_cases.selection(
            batch, heads, group, *rest, SINGLE, "cpu", integers, variances=variances
        )
        step_cases.agree(problem, step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan], ids=str)
def test_selection_from_equal_or_non_finite_scores(value) -> None:
    step_cases.agree(step_cases.even_scores(value, "cpu"), step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    ("shape", "ring"),
    [((1, 1, 2, 20, 1, 16), 7), ((2, 3, 2, 60, 9, 24), 0), ((2, 3, 2, 60, 9, (24, 10)), 60)],
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_move_kv(shape, ring, dtype) -> None:
    made = step_cases.move_in_ring(*shape, dtype, "cpu", ring=ring) if ring else None
    step_cases.agree(made or step_cases.move(*shape, dtype, "cpu"), step)


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("page", [4, 16])
def test_moves_in_pages(page) -> None:
    step_cases.agree(step_cases.in_pages(step_cases.move(2, 3, 2, 64, 20, (24, 10), HALF, "cpu"), page), step)


@pytest.mark.usefixtures("compiled_only")
def test_moves_beyond_the_cache_do_nothing() -> None:
    step_cases.agree(step_cases.beyond_the_cache("cpu"), step)
