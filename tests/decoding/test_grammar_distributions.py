"""With a grammar, sequences follow the masked target's distribution exactly: every draw is enumerated."""

from collections.abc import Callable

import pytest
from torch import Tensor

from tests.support.distributions.enumeration import NOISE, summed, total_variation
from tests.support.distributions.generation_cases import BOTH, CASES, Case
from tests.support.distributions.generation_distributions import Generations, target_distribution
from tests.support.distributions.languages import LANGUAGES, Language
from triforce_tree.grammar.matching import Matcher
from triforce_tree.verify.masks import GrammarMasks
from triforce_tree.verify.sampling import ProbsFromLogits

GREEDY = ProbsFromLogits(greedy=True)
# What decodes beside the sequences that are enumerated.
BESIDE = (None, Language(LANGUAGES[3].tokens, ("a",)))


def distance(case: Case, generations: Generations, to_probs: ProbsFromLogits) -> float:
    """Returns the total variation between the generated distribution and the masked target's."""
    [language, *_] = generations.languages
    assert language is not None
    made = generations.distribution(to_probs, case.tokens, case.passes, case.plan)
    masking = language.masking(to_probs, len(case.prompt))
    whole = target_distribution(generations.target, masking, case.prompt, case.tokens)
    return total_variation(made, summed((language.cut(new), chance) for new, chance in whole.items()))


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_that_of_the_masked_target(name: str) -> None:
    case = CASES[name]
    generations = case.generations(languages=[LANGUAGES[case.vocabulary]])
    assert distance(case, generations, case.to_probs) < NOISE


@pytest.mark.parametrize(
    "name", ["plain", "best-first", "runner-ups", "tail, two layers", "eagle, best-first"]
)
def test_the_greedy_text_is_that_of_the_masked_target(name: str) -> None:
    case = CASES[name]
    generations = case.generations(batch=2, languages=[LANGUAGES[case.vocabulary]])
    assert distance(case, generations, GREEDY) < NOISE
    assert generations.runs == 1


@pytest.mark.parametrize(
    "name", ["plain", "best-first", "runner-ups", "drawn, then fixed, 2 levels", "matched tokens"]
)
@pytest.mark.parametrize("batch", [2, 9])
def test_other_grammars_in_the_batch_change_nothing(name: str, batch: int) -> None:
    case = CASES[name]
    generations = case.generations(batch=batch, languages=[LANGUAGES[case.vocabulary], *BESIDE])
    assert distance(case, generations, case.to_probs) < NOISE
    free = case.generations(batch=batch, languages=[None, LANGUAGES[case.vocabulary]])
    assert case.distance(free) < NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_apply_the_masks(name: str) -> None:
    case = CASES[name]
    languages = [LANGUAGES[case.vocabulary]]
    generations = case.generations("cuda", batch=128, operators=True, languages=languages)
    assert distance(case, generations, case.to_probs) < 1e-5


def of_the_parent(rows: Tensor, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
    """The mask of each node is that of its parent."""
    return rows.gather(1, rows.new_tensor(parents).clamp_min(0))


def without_leaves(rows: Tensor, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
    """The bonus token, which follows a path to a leaf, is not masked."""
    for own, of_nodes, above in zip(rows, tokens, parents, strict=True):
        inner = {parent for token, parent in zip(of_nodes[1:], above[1:], strict=True) if token >= 0}
        own[[node for node in range(len(of_nodes)) if node not in inner]] = 0
    return rows


def of_the_root(rows: Tensor, tokens: list[list[int]], parents: list[list[int]]) -> Tensor:
    """All nodes have the mask of the root."""
    return rows[:, :1].expand_as(rows)


FAULTY_CASES = {
    "plain": CASES["plain"],
    "chain": Case(2, 3, 2, None, {"tree": "chain:1", "runner_ups": False}),
    "siblings": CASES["siblings"],
    "live tree": CASES["best-first"],
    "hierarchy": CASES["hierarchy"],
    "runner-ups": Case(3, 3, 2, 1, BOTH),
    "drawn, then fixed": CASES["drawn, then fixed, 2 levels"],
}


DRAFTING = ("chain", "siblings", "live tree", "hierarchy", "runner-ups", "drawn, then fixed")


@pytest.mark.parametrize(
    "fault, names",
    [(of_the_parent, DRAFTING), (of_the_root, DRAFTING), (without_leaves, ("plain", *DRAFTING))],
)
def test_planted_faults_change_the_distribution(
    fault: Callable[[Tensor, list[list[int]], list[list[int]]], Tensor],
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = GrammarMasks.rows

    def faulty(
        self: GrammarMasks, chains: list[list[int]], tokens: list[list[int]], parents: list[list[int]]
    ) -> Tensor:
        return fault(right(self, chains, tokens, parents), tokens, parents)

    # A token that the grammar forbids would end the run.
    monkeypatch.setattr(GrammarMasks, "rows", faulty)
    monkeypatch.setattr(
        Matcher, "accept", lambda self, tokens: [self._matcher.accept_token(t) for t in tokens]
    )
    for name in names:
        case = FAULTY_CASES[name]
        generations = case.generations(languages=[LANGUAGES[3], None])
        assert distance(case, generations, case.to_probs) > 100 * NOISE, name


def test_a_mask_after_the_stop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens after the end of a text are masked as if they followed the token before the end."""
    monkeypatch.setattr(Matcher, "ended", property(lambda self: False, lambda self, ended: None))
    case = CASES["chain, longer than needed"]
    with pytest.raises(RuntimeError, match="terminated"):
        distance(case, case.generations(languages=[LANGUAGES[2]]), case.to_probs)
