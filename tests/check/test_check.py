"""`check` passes on a correct engine and finds planted faults; its statistics are right."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.models.families import prompt_of, tiny
from tests.support.models.tiny_pair import TinyPair, prompt
from triforce_tree import Engine
from triforce_tree.check import goodness_of_fit, own_forward
from triforce_tree.check import losslessness as check
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding import hierarchy
from triforce_tree.loading import rounding
from triforce_tree.loading.rounding import relative_error
from triforce_tree.models.length_rope import LengthRope
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import ProbsFromLogits

stats = pytest.importorskip("scipy.stats")


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
    result = check.forward(engine.with_options(advanced={"prefill_chunk": 64}), prompt(engine, length))
    assert result.passed
    assert result.positions == min(length, 16)
    assert 0 < result.error < 1e-5


def test_a_cache_of_8_bits_is_compared_with_transformers_over_one(engine: Engine) -> None:
    eight, text = engine.with_options(kv_bits=8, advanced={"prefill_chunk": 64}), prompt(engine, 203)
    own = own_forward.last_position_logits(engine, text, 16)
    apart = relative_error(own_forward.last_position_logits(eight, text, 16), own)
    # Rounding may take a value halfway between two steps to either, which is far less than 16 bits for 8.
    assert check.forward(eight, text).error < apart / 10
    assert check.greedy(eight, text, 40, 3).passed


@pytest.mark.parametrize("limit_16", [None, 1e-6], ids=["a fixed limit", "measured noise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_rotation_is_found_in_the_logits(
    dtype: torch.dtype, limit_16: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit_16 is not None:
        # As where rounding changes the choice of experts: no fixed limit would accept the model.
        monkeypatch.setattr(rounding, "_ROUNDING_16", limit_16)
    monkeypatch.setattr(LengthRope, "of", classmethod(lambda cls, model: None))
    monkeypatch.setattr(hierarchy, "compare_at_load", lambda target: None)
    wrong = Engine(tiny("phi3-longrope").to(dtype), config=HierarchyConfig(prefill_chunk=16))
    assert check.forward(wrong, prompt_of(60)).passed
    result = check.forward(wrong, prompt_of(150))
    assert not result.passed
    assert result.error > 0.1


LEVELS = [
    ({}, 2, ["target"]),
    ({}, 3, ["retrieval", "target"]),
    ({"runner_ups": True, "retrieval_weight_bits": 8}, 3, ["retrieval", "target"]),
    ({}, 1, ["target"]),
]


@pytest.mark.parametrize("options, levels, names", LEVELS, ids=["2", "3", "3, low bits", "1"])
def test_sampled_tokens_pass(engine: Engine, options: dict[str, Any], levels: int, names: list[str]) -> None:
    contexts = [prompt(engine, 41), prompt(engine, 150)]
    results = check.sampling_checks(engine.with_options(**load_arguments(options)), contexts, 50, levels)
    assert [(r.level, r.levels) for r in results] == [(name, levels) for name in names]
    assert all(r.passed for r in results)
    assert all(r.bins > 8 for r in results)


@pytest.mark.parametrize("levels", [2, 3])
def test_sampled_tokens_pass_with_prompt_lookup(pair: TinyPair, levels: int) -> None:
    alone = Engine(pair.load().target.model, config=HierarchyConfig.from_options(budget=64, recent=32))
    text = prompt(pair.load(), 60)
    # A text that repeats its beginning, so that there is something to propose.
    results = check.sampling_checks(alone, [[*text, *text[:20]]], 60, levels)
    assert len(results) == levels - 1
    assert all(r.passed for r in results)


def sharp_pair(factor: float, **options: Any) -> Engine:
    """A target and a draft that is surer than it of the same tokens: refusals are many."""
    target = tiny("llama-gqa")
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.get_output_embeddings().weight *= factor
    return Engine(target, draft, config=HierarchyConfig.from_options(window=100, **options))


def test_a_wrong_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    both = sharp_pair(6, tree="chain:1")
    residual_is_the_target(monkeypatch)
    [result] = check.sampling_checks(both, [prompt_of(61)], 200, 2, temperature=0.5)
    assert result.p_value < check.SIGNIFICANCE
    assert result.shift_p_value < check.SIGNIFICANCE


def residual_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: after a refusal the next token is drawn from p itself instead of norm(max(p - q, 0))."""
    sound = Noise.traverse_tree

    def wrong(self: Noise, tokens: Any, parents: Any, p: torch.Tensor, *rest: Any) -> Any:
        path, count, _ = sound(self, tokens, parents, p, *rest)
        node = path.gather(1, count[:, None] - 1)[..., None].expand(-1, 1, p.shape[2])
        return path, count, (p.gather(1, node)[:, 0] / self.exponential[:, 0]).argmax(-1)

    monkeypatch.setattr(Noise, "traverse_tree", wrong)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels", [2, 3])
def test_a_wrong_residual_is_found_with_few_draws(
    monkeypatch: pytest.MonkeyPatch, levels: int, seed: int
) -> None:
    """Too few for a chi-square over all tokens."""
    both = sharp_pair(2, tree="best-first:3,2", budget=40, chunk=4, recent=8)
    residual_is_the_target(monkeypatch)
    results = check.sampling_checks(both, [prompt_of(61)], 40, levels, temperature=0.5, seed=seed)
    assert all(r.p_value > check.SIGNIFICANCE for r in results)
    assert any(r.refused_emitted for r in results)
    assert not all(r.passed for r in results)


def test_an_acceptance_that_is_too_likely_is_found_by_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Noise.traverse_tree

    def eager(self: Noise, *arguments: Any) -> Any:
        self.uniform *= 0.5
        return sound(self, *arguments)

    monkeypatch.setattr(Noise, "traverse_tree", eager)
    both = sharp_pair(3, tree="chain:1")
    [result] = check.sampling_checks(both, [prompt_of(61)], 100, 2, temperature=0.5)
    assert result.shift > 0
    assert result.shift_p_value < check.SIGNIFICANCE


def test_nan_logits_are_reported(engine: Engine) -> None:
    target = copy.deepcopy(engine.target.model)
    draft = engine.draft
    assert draft is not None
    broken = Engine(target, draft.model, engine.tokenizer)
    with torch.no_grad():
        target.get_output_embeddings().weight[5] = torch.nan
    with pytest.raises(ValueError, match="NaN logits"):
        check.sampling_checks(broken, [prompt(engine, 41)], 2, 2)


def test_it_runs_on_the_buffers_that_generation_uses(engine: Engine) -> None:
    tokens = prompt(engine, 150)
    own = engine.with_options(levels=3)
    with own.program([tokens], 8, ProbsFromLogits.at(1.0)) as program:
        pass
    own.generate(tokens, do_sample=True, max_new_tokens=8, seed=0)
    with own.program([tokens], 8, None) as again:
        assert again is program


def test_chi_square_merges_rare_tokens() -> None:
    probs = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    exact = Counter({token: round(200 * float(p)) for token, p in enumerate(probs)})
    statistic, freedom = goodness_of_fit.chi_square(exact, probs)
    assert statistic == pytest.approx(0, abs=1e-6)
    assert freedom == 4  # the two rarest share a bin
    shifted = Counter({0: 60, 1: 100, 2: 20, 3: 10, 4: 6, 5: 4})
    expected = stats.chisquare([10, 10, 20, 100, 60], [10, 10, 20, 60, 100])
    statistic, freedom = goodness_of_fit.chi_square(shifted, probs)
    assert statistic == pytest.approx(expected.statistic, rel=1e-5)
    assert goodness_of_fit.chi_square_p(statistic, freedom) == pytest.approx(expected.pvalue, rel=1e-3)


@pytest.mark.parametrize("statistic, freedom", [(3.8, 1), (18.3, 10), (0.0, 3), (300.0, 90)])
def test_chi_square_p(statistic: float, freedom: int) -> None:
    assert goodness_of_fit.chi_square_p(statistic, freedom) == pytest.approx(
        stats.chi2.sf(statistic, freedom), rel=1e-6
    )


def test_nothing_to_test_is_no_failure() -> None:
    assert goodness_of_fit.chi_square_p(9.0, 0) == 1.0


def test_p_values_of_true_draws_are_spread_evenly() -> None:
    generator = torch.Generator().manual_seed(3)
    probs, draft = torch.softmax(2 * torch.randn(2, 50, generator=generator), 1)
    chi_squares, shifts = [], []
    for _ in range(300):
        draws = Counter(torch.multinomial(probs, 200, replacement=True, generator=generator).tolist())
        chi_squares.append(goodness_of_fit.chi_square_p(*goodness_of_fit.chi_square(draws, probs)))
        shifts.append(goodness_of_fit.shift_p([goodness_of_fit.shift(draws, probs, draft)]))
    assert stats.kstest(chi_squares, "uniform").pvalue > 1e-3
    # A bound: at least as large as a p-value.
    assert stats.kstest(shifts, "uniform", alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize("mass", [1e-5, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("draws", [40, 1600])
def test_the_shift_is_bounded_also_where_a_normal_approximation_fails(mass: float, draws: int) -> None:
    """Exact tails of the binomial: the draft never proposes the token of this mass."""
    probs, draft = torch.tensor([1 - mass, mass]), torch.tensor([1.0, 0.0])
    for count in {1, 2, int(draws * mass) + 5, min(draws, int(2 * draws * mass) + 9)}:
        part = goodness_of_fit.shift(Counter({0: draws - count, 1: count}), probs, draft)
        assert part[0] == pytest.approx((1 - count / draws - (1 - mass)) * draws, abs=1e-4)
        assert part[1] == pytest.approx(draws * mass * (1 - mass), rel=1e-4)
        below, above = stats.binom.cdf(count, draws, mass), stats.binom.sf(count - 1, draws, mass)
        assert goodness_of_fit.shift_p([part]) >= (above if count > draws * mass else below) * (1 - 1e-6)
    assert goodness_of_fit.shift_p([(0.0, 0.0)]) == 1.0


def test_the_shift_of_several_distributions_adds_up() -> None:
    probs, draft = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    part = goodness_of_fit.shift(Counter({0: 70, 1: 30}), probs, draft)
    # Weights 1 and 0.2 by a mean of 0.6.
    assert part == pytest.approx((70 * 0.4 - 30 * 0.4, 100 * 0.16))
    alone, both = goodness_of_fit.shift_p([part]), goodness_of_fit.shift_p([part, part])
    assert check.SIGNIFICANCE < alone < 0.1
    assert both == pytest.approx(alone**2 / 2)


def test_the_retrieval_levels_distribution_does_not_depend_on_the_tree_it_verifies(engine: Engine) -> None:
    # Level 1 may select its chunks by anything but the tokens of the tree: else its distribution at the root
    # would depend on what was drawn from it, and it would be no honest drafter.
    tokens = prompt(engine, 300)
    sharp = sharpened(engine).with_options(levels=3, budget=48, advanced={"recent": 16, "chunk": 8})
    generator = torch.Generator().manual_seed(0)
    with sharp.program([tokens], 1, ProbsFromLogits.at(2.0)) as program:
        program.prefill([tokens])
        at_root, drawn = [], set()
        for _ in range(4):
            program.run("draft", generator)
            program.run("retrieval_refresh", generator)
            drawn.add(tuple(program.stage("retrieval_refresh").tree.tokens[0].tolist()))
            logits = program.verifier("retrieval_refresh").emitted_logits(1)[0, 0]
            at_root.append((logits / 2.0).softmax(-1))
            program.state.chain.zero_()
    assert len(drawn) == 4
    for other in at_root[1:]:
        torch.testing.assert_close(other, at_root[0], atol=1e-6, rtol=1e-3)


def sharpened(engine: Engine) -> Engine:
    """Returns the same models with attention to few tokens, so that the selection matters."""
    target = copy.deepcopy(engine.target.model)
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "q_proj" in name or "o_proj" in name:
                weight *= 5
    draft = engine.draft
    assert draft is not None
    return Engine(target, draft.model, engine.tokenizer)


def test_contexts_of_the_sampling_test_are_uncertain(engine: Engine) -> None:
    tokens = prompt(engine, 200)
    chosen = check.uncertain_contexts(engine, tokens, 3)
    assert len(chosen) == 3
    assert all(tokens[: len(c)] == c for c in chosen)
    assert all(100 < len(c) <= 200 for c in chosen)


@pytest.mark.parametrize("draws, freedom", [(1600, 80), (400, 5), (160, 12)])
def test_what_a_test_would_have_found_is_what_it_finds(draws: int, freedom: int) -> None:
    distance = goodness_of_fit.detectable(draws, freedom, check.SIGNIFICANCE)
    critical = stats.chi2.isf(check.SIGNIFICANCE, freedom)
    power = stats.ncx2.sf(critical, freedom, 4 * draws * distance**2)
    assert power == pytest.approx(0.9, abs=0.02)


def test_more_draws_find_less() -> None:
    distances = [goodness_of_fit.detectable(draws, 20, check.SIGNIFICANCE) for draws in (40, 400, 4000)]
    assert distances == sorted(distances, reverse=True)
    assert goodness_of_fit.detectable(0, 0, check.SIGNIFICANCE) == 1
