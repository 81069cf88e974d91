"""The operators of suffix matching: definitions against naive searches, kernels against definitions."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernels import step_cases, suffix_cases, triton_ops
from tests.support.kernels.triton_ops import DEVICE, runs_kernels
from triforce_tree.kernels import suffix
from triforce_tree.kernels.suffix.ngrams import KEPT, PRIOR_TOKENS


@pytest.fixture
def ops() -> SimpleNamespace:
    """The Triton implementations of the operators, by name."""
    return triton_ops.suffix_kernels()


def by_search(tokens: list[int], committed: int, length: int) -> tuple[int, list[int]]:
    """Agreeing tokens, and ``length`` tokens after the match, by a naive search."""
    best, longest = (0, -1), max(suffix_cases.LENGTHS)
    for n in suffix_cases.LENGTHS:
        for at in reversed(range(n - 1, committed)):
            if n <= len(tokens) and tokens[at + 1 - n : at + 1] == tokens[-n:]:
                agreed = n
                while agreed < min(longest, at + 1) and tokens[at - agreed] == tokens[-1 - agreed]:
                    agreed += 1
                best = max(best, (agreed, at))
                break
    agreed, at = best
    text = list(tokens)
    while agreed and len(text) < len(tokens) + length:
        text.append(text[at + 1 + len(text) - len(tokens)])
    return agreed, text[len(tokens) :]


@pytest.mark.parametrize("seed", range(6))
def test_proposals_equal_a_naive_search(seed: int) -> None:
    """The match, the tokens after it and the number of proposals are equal for each sequence."""
    batch, most, length = 60, 60, 8
    problem = suffix_cases.matching(batch, most, "cpu", length, 2 + seed, seed, entries=1 << 16)
    old, last, counts, _, tokens, *_, committed, end, least = problem.args
    chain, made_last, made_counts = problem.expected()
    lengths = set()
    for b in range(batch):
        sequence = tokens[b, : int(end[b]) + 1].tolist()
        agreed, following = by_search(sequence, int(committed[b]), length)
        lengths.add(agreed)
        # What of the last proposal followed; the first token that did not is judged too.
        before, kind = last[b].tolist()
        judged = [x == y for x, y in zip(old[b].tolist(), sequence[before + 1 :], strict=False) if x >= 0]
        right = judged.index(False) if False in judged else len(judged)
        wrong = int(False in judged)
        expected = counts[b].clone()
        if before >= 0 and judged:
            expected[kind] = KEPT * expected[kind] + torch.tensor([right, right + wrong])
        torch.testing.assert_close(made_counts[b], expected)
        if not agreed:
            assert (made_last[b].tolist(), chain[b].tolist()) == ([-1, 0], [-1] * length)
            continue
        kind = sum(n <= agreed for n in suffix_cases.LENGTHS) - 1
        assert made_last[b].tolist() == [len(sequence) - 1, kind]
        followed, seen = made_counts[b, kind].tolist()
        acceptance = followed + PRIOR_TOKENS * suffix_cases.EXPECTED[kind]
        acceptance /= seen + PRIOR_TOKENS
        count = max(1, sum(acceptance**j >= least for j in range(1, length + 1)))
        assert chain[b].tolist() == following[:count] + [-1] * (length - count)
    assert lengths > {0, max(suffix_cases.LENGTHS)}


def test_a_loop_is_proposed_past_the_end_of_the_text() -> None:
    table, tokens, lengths, factors = suffix_cases.buffers([[5, 1, 2, 1, 2, 1, 2]], 64, "cpu")
    until = torch.tensor([6])
    suffix.index_ngrams(table, tokens, lengths, factors, torch.tensor([0]), until, 9)
    chain, last, counts = torch.full((1, 7), -1), torch.tensor([[-1, 0]]), torch.zeros(1, 5, 2)
    certain = torch.ones(5)
    suffix.match_suffix(chain, last, counts, table, tokens, lengths, factors, certain, until, until, 0.5)
    assert chain.tolist() == [[1, 2, 1, 2, 1, 2, 1]]


def test_an_index_does_not_depend_on_the_order_and_size_of_its_updates() -> None:
    table, tokens, lengths, factors = suffix_cases.buffers(suffix_cases.texts(3, 50, 3, 1), 32, "cpu")
    end = torch.tensor([50, 50, 50])
    whole, parts = table.clone(), table.clone()
    suffix.index_ngrams(whole, tokens, lengths, factors, torch.zeros_like(end), end, 50)
    for first in (30, 0, 20, 10, 40):
        suffix.index_ngrams(parts, tokens, lengths, factors, torch.full_like(end, first), end, 12)
    assert torch.equal(whole, parts)
    assert (whole >= 0).any()


@runs_kernels
@pytest.mark.parametrize("seed", range(4))
def test_index_ngrams(seed: int, ops: SimpleNamespace) -> None:
    step_cases.agree(suffix_cases.indexing(2, 60, DEVICE, (64, 4096)[seed % 2], seed, (0, 7)[seed // 2]), ops)


@runs_kernels
@pytest.mark.parametrize("seed", range(4))
def test_match_suffix(seed: int, ops: SimpleNamespace) -> None:
    length = (1, 5, 8, 15)[seed]
    step_cases.agree(suffix_cases.matching(6, 50, DEVICE, length, 2 + seed, seed, (64, 4096)[seed % 2]), ops)


@runs_kernels
def test_the_operators_as_torch_sees_them(ops: SimpleNamespace) -> None:
    problems = [
        suffix_cases.indexing(2, 20, DEVICE),
        suffix_cases.matching(2, 20, DEVICE),
    ]
    assert sorted(problem.op for problem in problems) == sorted(suffix.__all__)
    for problem in problems:
        operator = getattr(suffix, problem.op)
        assert signature(operator.definition) == signature(getattr(ops, problem.op))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator.overload, problem.copied(), test_utils=checks)
