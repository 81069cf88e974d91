"""The proof must pass on a right engine and fail on a wrong one."""

import copy
from collections import Counter

import pytest
import torch
from families import prompt_of, tiny
from tiny_pair import TinyPair, prompt
from triforce_tree.drafters import HierarchicalDrafter

from triforce_tree import Engine, check, hierarchy, sampling
from triforce_tree.config import HierarchyConfig
from triforce_tree.length_rope import LengthRope
from triforce_tree.sampling import TokenLaw
from triforce_tree.token_tree import chain


@pytest.fixture(scope="module")
def engine(pair: TinyPair) -> Engine:
    return pair.load(budget=64, recent=32, tree="best-first:3,2")


@pytest.mark.parametrize("levels", [2, 3])
def test_greedy_is_the_targets_own(engine: Engine, levels: int) -> None:
    result = check.greedy(engine, prompt(engine, 203), 40, levels)
    assert result.passed
    assert result.compared == 40
    assert result.ties == 0
    assert 0 < result.noise < 1e-3


@pytest.mark.parametrize("length", [1, 10, 203])
def test_logits_are_those_of_one_forward(engine: Engine, length: int) -> None:
    result = check.forward(engine.with_options(prefill_chunk=64), prompt(engine, length))
    assert result.passed
    assert result.rows == min(length, 16)
    assert 0 < result.error < 1e-5


def test_a_wrong_rotation_is_found_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LengthRope, "of", classmethod(lambda cls, model: None))
    monkeypatch.setattr(hierarchy, "compare_at_load", lambda target: None)
    wrong = Engine(tiny("phi3-longrope"), config=HierarchyConfig(prefill_chunk=16))
    assert check.forward(wrong, prompt_of(60)).passed
    result = check.forward(wrong, prompt_of(150))
    assert not result.passed
    assert result.error > 0.1


def test_sampling_laws_pass(engine: Engine) -> None:
    results = check.sampling_laws(engine, [prompt(engine, 41), prompt(engine, 150)], 150)
    assert [r.level for r in results] == ["retrieval", "target"]
    assert all(r.passed for r in results)
    assert all(r.bins > 10 for r in results)


def test_the_residual_of_the_public_code_is_found_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a refusal it samples from p itself, instead of what p has left over q.
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    # So few draws find it in three of four seeds; twice as many in all that were tried.
    results = check.sampling_laws(engine, [prompt(engine, 41), prompt(engine, 150)], 400, seed=2)
    assert not all(r.passed for r in results)


def test_chi_square_merges_rare_tokens() -> None:
    law = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    exact = Counter({token: round(200 * float(p)) for token, p in enumerate(law)})
    statistic, freedom = check.chi_square(exact, law)
    assert statistic == pytest.approx(0, abs=1e-6)
    assert freedom == 4  # the two rarest share a bin
    shifted = Counter({0: 60, 1: 100, 2: 20, 3: 10, 4: 6, 5: 4})
    assert check.p_value(*check.chi_square(shifted, law)) < 1e-4


@pytest.mark.parametrize(
    "statistic, freedom, expected",
    [(3.8415, 1, 0.05), (18.307, 10, 0.05), (0.0, 3, 1.0), (9.0, 0, 1.0)],
)
def test_p_value(statistic: float, freedom: int, expected: float) -> None:
    assert check.p_value(statistic, freedom) == pytest.approx(expected, abs=1e-4)


def test_p_values_of_true_draws_are_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(3)
    law = torch.softmax(2 * torch.randn(50, generator=generator), 0)
    values = []
    for _ in range(300):
        draws = torch.multinomial(law, 200, replacement=True, generator=generator).tolist()
        values.append(check.p_value(*check.chi_square(Counter(draws), law)))
    assert 0.4 < sum(values) / 300 < 0.6
    assert 0.02 < sum(v < 0.1 for v in values) / 300 < 0.18


def test_no_law_depends_on_the_draws_it_judges(engine: Engine) -> None:
    # Level 1 may choose its chunks by whatever it likes, but not by the tokens of the tree at hand:
    # the law at the root would know what was drawn from there, and the drafter be dishonest.
    sharp = sharpened(engine)
    tokens = prompt(engine, 300)
    hierarchy = sharp.with_options(levels=3, budget=48, recent=16, chunk=8).hierarchy
    law = TokenLaw()
    with hierarchy.active():
        decoder = hierarchy.decoder(law, 0, len(tokens), 64, frozenset())
        context = decoder.prefill(tokens)
        assert isinstance(decoder.drafter, HierarchicalDrafter)
        level = decoder.drafter.verifier.level
        at_root = [
            law(level.forward_tree(context, chain([context[-1], *drawn])), list)[0]
            for drawn in ([], [7, 8, 9], [100, 200, 300], [50] * 6)
        ]
    for other in at_root[1:]:
        torch.testing.assert_close(other, at_root[0], atol=1e-6, rtol=1e-3)


def sharpened(engine: Engine) -> Engine:
    """The same models with attention that looks at few tokens, so that selection matters."""
    target = copy.deepcopy(engine.hierarchy.target.model)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "q_proj" in name or "o_proj" in name:
                weight *= 5
    draft = engine.hierarchy.draft
    assert draft is not None
    return Engine(target, draft.model, engine.tokenizer)


def test_contexts_of_the_sampling_test_are_uncertain(engine: Engine) -> None:
    tokens = prompt(engine, 200)
    chosen = check.uncertain_contexts(engine, tokens, 3)
    assert len(chosen) == 3
    assert all(tokens[: len(c)] == c for c in chosen)
    assert all(100 < len(c) <= 200 for c in chosen)
