"""The proof must pass on a right engine and fail on a wrong one."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from families import prompt_of, tiny
from scipy import stats
from tiny_pair import TinyPair, prompt

from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding import assembly
from triforce_tree.eval import check
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import ProbsFromLogits


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
    monkeypatch.setattr(assembly, "compare_at_load", lambda target: None)
    wrong = Engine(tiny("phi3-longrope"), config=HierarchyConfig(prefill_chunk=16))
    assert check.forward(wrong, prompt_of(60)).passed
    result = check.forward(wrong, prompt_of(150))
    assert not result.passed
    assert result.error > 0.1


LAWS = [
    ({}, 2, ["target"]),
    ({}, 3, ["retrieval", "target"]),
    ({"runner_ups": True, "retrieval_weight_bits": 8}, 3, ["retrieval", "target"]),
    ({}, 1, ["target"]),
]


@pytest.mark.parametrize("options, levels, names", LAWS, ids=["2", "3", "3, low bits", "1"])
def test_sampling_laws_pass(engine: Engine, options: dict[str, Any], levels: int, names: list[str]) -> None:
    contexts = [prompt(engine, 41), prompt(engine, 150)]
    results = check.sampling_checks(engine.with_options(**options), contexts, 50, levels)
    assert [(r.level, r.levels) for r in results] == [(name, levels) for name in names]
    assert all(r.passed for r in results)
    assert all(r.bins > 8 for r in results)


@pytest.mark.parametrize("levels", [2, 3])
def test_sampling_laws_pass_without_a_draft(pair: TinyPair, levels: int) -> None:
    alone = Engine(
        pair.load().hierarchy.target.model, config=HierarchyConfig.from_options(budget=64, recent=32)
    )
    text = prompt(pair.load(), 60)
    # A text that says its beginning again, so that there is something to propose.
    results = check.sampling_checks(alone, [[*text, *text[:20]]], 60, levels)
    assert len(results) == levels - 1
    assert all(r.passed for r in results)


def test_the_residual_of_the_public_code_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # A draft that is sure of the target's favourite: refusals are many.
    target = tiny("llama-gqa")
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.get_output_embeddings().weight *= 6
    options = {"tree": "chain:1", "window": 100}
    both = Engine(target, draft, config=HierarchyConfig.from_options(**options))

    # After a refusal it samples from p itself, instead of what p has left over q.
    sound = Noise.accept_tree

    def public(self: Noise, tokens: Any, parents: Any, p: torch.Tensor, *rest: Any) -> Any:
        path, count, _ = sound(self, tokens, parents, p, *rest)
        node = path.gather(1, count[:, None] - 1)[..., None].expand(-1, 1, p.shape[2])
        return path, count, (p.gather(1, node)[:, 0] / self.exponential[:, 0]).argmax(-1)

    monkeypatch.setattr(Noise, "accept_tree", public)
    [result] = check.sampling_checks(both, [prompt_of(61)], 200, 2, temperature=0.5)
    assert not result.passed


def test_nan_logits_are_said_to_be_what_they_are(engine: Engine) -> None:
    target = copy.deepcopy(engine.hierarchy.target.model)
    draft = engine.hierarchy.draft
    assert draft is not None
    broken = Engine(target, draft.model, engine.tokenizer)
    with torch.no_grad():
        target.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(ValueError, match="NaN logits"):
        check.sampling_checks(broken, [prompt(engine, 41)], 2, 2)


def test_it_runs_on_the_buffers_that_generation_uses(engine: Engine) -> None:
    tokens = prompt(engine, 150)
    own = engine.with_options(levels=3)
    with own.program([tokens], 8, ProbsFromLogits.at(1.0), 1.0) as program:
        pass
    own.generate(tokens, do_sample=True, max_new_tokens=8, seed=0)
    with own.program([tokens], 8, None, 1.0) as again:
        assert again is program


def test_chi_square_merges_rare_tokens() -> None:
    to_probs = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    exact = Counter({token: round(200 * float(p)) for token, p in enumerate(to_probs)})
    statistic, freedom = check.chi_square(exact, to_probs)
    assert statistic == pytest.approx(0, abs=1e-6)
    assert freedom == 4  # the two rarest share a bin
    shifted = Counter({0: 60, 1: 100, 2: 20, 3: 10, 4: 6, 5: 4})
    expected = stats.chisquare([10, 10, 20, 100, 60], [10, 10, 20, 60, 100])
    statistic, freedom = check.chi_square(shifted, to_probs)
    assert statistic == pytest.approx(expected.statistic, rel=1e-5)
    assert check.p_value(statistic, freedom) == pytest.approx(expected.pvalue, rel=1e-3)


@pytest.mark.parametrize("statistic, freedom", [(3.8, 1), (18.3, 10), (0.0, 3), (300.0, 90)])
def test_p_value(statistic: float, freedom: int) -> None:
    assert check.p_value(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-6)


def test_nothing_to_test_is_no_failure() -> None:
    assert check.p_value(9.0, 0) == 1.0


def test_p_values_of_true_draws_are_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(3)
    to_probs = torch.softmax(2 * torch.randn(50, generator=generator), 0)
    values = []
    for _ in range(300):
        draws = torch.multinomial(to_probs, 200, replacement=True, generator=generator).tolist()
        values.append(check.p_value(*check.chi_square(Counter(draws), to_probs)))
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_no_law_depends_on_the_draws_it_judges(engine: Engine) -> None:
    # Level 1 may choose its chunks by whatever it likes, but not by the tokens of the tree at hand:
    # the law at the root would know what was drawn from there, and the drafter be dishonest.
    tokens = prompt(engine, 300)
    sharp = sharpened(engine).with_options(levels=3, budget=48, recent=16, chunk=8)
    generator = torch.Generator().manual_seed(0)
    with sharp.program([tokens], 1, ProbsFromLogits.at(2.0), 2.0) as program:
        program.prefill([tokens])
        at_root, drawn = [], set()
        for _ in range(4):
            program.run("draft", generator)
            program.run("retrieval_refresh", generator)
            drawn.add(tuple(program.stage("retrieval_refresh").tree.tokens[0].tolist()))
            at_root.append(program.verdict("retrieval_refresh").scores[0, 0].clone())
            program.state.chain.zero_()
    assert len(drawn) == 4
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
