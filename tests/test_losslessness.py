"""The law of decoded text is the target's, exactly: by enumeration of every draw, not by statistics.

Models are tables (``tables``), so the only thing tested is the algorithm: acceptance, residuals,
trees, catching up, committing. Errors put in on purpose are found out.
"""

import pytest
from enumeration import NOISE, exact_law, summed, total_variation
from tables import DEEP_DRAFTERS, DRAFTERS, MakeDrafter, TableDecoding, hierarchical, lookup, model
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from triforce_tree.verify.verifier import Verdict, Verifier

from triforce_tree import sampling
from triforce_tree.cycle.endings import Ending
from triforce_tree.token_tree import Context, TokenTree

WARPERS = {
    "temperature": (TemperatureLogitsWarper(0.6),),
    "top_k": (TopKLogitsWarper(2),),
    "top_p": (TopPLogitsWarper(0.95),),
    "all": (TemperatureLogitsWarper(1.5), TopKLogitsWarper(3), TopPLogitsWarper(0.9)),
    "penalty": (RepetitionPenaltyLogitsProcessor(1.7), TopKLogitsWarper(2)),
}


def distance(case: TableDecoding, make: MakeDrafter) -> float:
    """Total variation between the enumerated law of the output and the target's."""
    law = exact_law(lambda random: case.run(make, random))
    return total_variation(law, case.target_law())


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_tokens_of_a_vocabulary_of_three(name: str) -> None:
    assert distance(TableDecoding(vocab_size=3, new_tokens=2), DRAFTERS[name]) < NOISE


@pytest.mark.parametrize("name", DEEP_DRAFTERS)
def test_three_tokens_of_a_vocabulary_of_two(name: str) -> None:
    assert distance(TableDecoding(vocab_size=2, new_tokens=3), DEEP_DRAFTERS[name]) < NOISE


@pytest.mark.parametrize("name", ["chain", "best-first", "hierarchical, alone", "prompt lookup"])
def test_first_token_of_a_vocabulary_of_four(name: str) -> None:
    assert distance(TableDecoding(vocab_size=4, new_tokens=1), DRAFTERS[name]) < NOISE


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize(
    "make",
    [model("best-first:2,1"), lookup(2), hierarchical(model("static:0;1"), gamma=1, leaves=False)],
    ids=["tree", "lookup", "hierarchy"],
)
def test_under_logits_processors(make: MakeDrafter, warpers: str) -> None:
    """Truncated laws have zeros: residuals vanish, siblings run out. Penalties differ by path."""
    new_tokens = 1 if warpers == "all" else 2
    case = TableDecoding(4 if warpers == "all" else 3, new_tokens, warpers=WARPERS[warpers])
    assert distance(case, make) < NOISE


@pytest.mark.parametrize("name", [*DRAFTERS, *DEEP_DRAFTERS])
def test_greedy_output_is_the_targets_choice_alone(name: str) -> None:
    case = TableDecoding(vocab_size=5, new_tokens=12, greedy=True)
    law = exact_law(lambda random: case.run({**DEEP_DRAFTERS, **DRAFTERS}[name], random))
    assert law == case.target_law()


def test_stop_tokens_cut_the_law_and_nothing_else() -> None:
    """With an end token the law is the target's cut there, though levels drafted beyond it."""
    case, stop = TableDecoding(vocab_size=3, new_tokens=2), frozenset({2})
    ending = Ending(case.new_tokens, stop)
    make = hierarchical(model("chain:1"), gamma=2, leaves=False, stop_tokens=stop)
    law = exact_law(lambda random: case.run(make, random, ending))
    cut = summed(
        (tokens[:1] if tokens[0] in stop else tokens, chance) for tokens, chance in case.target_law().items()
    )
    assert total_variation(law, cut) < NOISE


def test_sampling_the_verifiers_own_law_after_a_refusal_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of TriForce's public code, p in place of norm(max(p - q, 0)), at every level."""
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    for name in ("chain", "best-first", "hierarchical, chain"):
        assert distance(TableDecoding(vocab_size=3, new_tokens=1), DRAFTERS[name]) > 0.01, name


def test_a_wrong_residual_in_the_middle_level_alone_is_found_out() -> None:
    """Its chain then no longer follows the laws it reports, which no level above can repair."""

    class Wrong(Verifier):
        def verify(self, context: Context, tree: TokenTree) -> Verdict:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampling, "residual", lambda p, q: p)
                return super().verify(context, tree)

    case = TableDecoding(vocab_size=3, new_tokens=1)
    assert distance(case, hierarchical(model("chain:1"), 2, leaves=False, verifier=Wrong)) > 0.01
    assert distance(case, hierarchical(model("chain:1"), 2, leaves=False)) < NOISE
