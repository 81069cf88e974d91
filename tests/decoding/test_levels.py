"""Tests what level 1 sees, and how many of its tokens level 2 accepts."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.support.models.families import prompt_of
from tests.support.models.program_cases import (
    COVERED,
    EVERYTHING,
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    SMALL,
    decoded,
    draft_of,
    exact,
    finished,
    model,
    program_of,
    reference,
    references,
    sequences_of,
)
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kernels import step
from triforce_tree.kernels.attention.plan import AttentionParams
from triforce_tree.models.hf_model import HFModel
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.verifier import Acceptance, Verifier

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_is_the_target_is_always_accepted(to_probs: ProbsFromLogits) -> None:
    """This holds while its window covers the sequence; sampled, up to rounding."""
    target = model("llama-gqa")
    program = program_of(target, target, 2, 3, tree="chain:3", window=200)
    # Whole passes: no token is cut off.
    new, loop = decoded(program, PROMPTS, [32, 24, 16], to_probs)
    assert not to_probs.greedy or new == references(new=[32, 24, 16])
    assert loop.levels[-1].acceptance_rate == 1.0
    assert loop.levels[-1].mean_accepted_length == 4.0


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("runner_ups", [True, False])
def test_a_budget_that_holds_the_context_makes_level_1_as_good_as_level_2(
    runner_ups: bool, to_probs: ProbsFromLogits
) -> None:
    """Every token of a chain is accepted, whatever the draft is."""
    target = model("llama-gqa")
    program = program_of(
        target, draft_of("llama-gqa"), 3, 3, **{**EVERYTHING, "window": 6}, runner_ups=runner_ups
    )
    new, loop = decoded(program, COVERED, [20] * 3, to_probs)
    assert not to_probs.greedy or new == [reference(target, prompt, 20) for prompt in COVERED]
    full, retrieval = loop.levels[-1], loop.levels[1]
    assert full.accepted == full.proposed > 30
    assert 0 < retrieval.accepted < retrieval.proposed


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_caches_that_hold_everything_make_all_levels_equal(to_probs: ProbsFromLogits) -> None:
    target = model("llama-gqa")
    program = program_of(target, target, 3, 3, **EVERYTHING, tree="chain:3", gamma=8)
    _, loop = decoded(program, COVERED, [18] * 3, to_probs)
    assert [level.acceptance_rate for level in loop.levels[1:]] == [1.0, 1.0]
    assert loop.levels[-1].mean_accepted_length == 9.0


def test_more_retrieved_chunks_are_more_like_the_whole_context() -> None:
    rates = [exact(3, budget=budget).levels[-1].acceptance_rate or 0.0 for budget in (12, 24, 40)]
    assert rates[0] + 0.1 < rates[1] < rates[2] - 0.1


def test_retrieved_chunks_are_those_that_the_root_attends_to_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """One refresh selects them per sequence, layer and KV head, from the full cache's own keys."""
    choices: list[tuple[torch.Tensor, torch.Tensor, float]] = []
    select = step.select_chunks

    def recorded(q: torch.Tensor, means: torch.Tensor, limit: torch.Tensor, *rest: object) -> None:
        choices.append((q.clone(), limit.clone(), float(rest[2])))
        select(q, means, limit, *rest)

    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    decoded(program, PROMPTS, NEW)
    monkeypatch.setattr(step, "select_chunks", recorded)
    program.state.active.fill_(1)
    generator = torch.Generator()
    for stage in ("draft", "retrieval_refresh"):
        program.run(stage, generator)
    assert len(choices) == 2
    for layer, (q, limit, scale) in enumerate(choices):
        keys, _ = program.store.layers[layer].kv
        for b in range(3):
            candidates = int(limit[b])
            assert candidates == (int(program.state.length[b]) - 8) // 4 > 4
            means = keys[b, :, : candidates * 4].unflatten(1, (candidates, 4)).mean(2)  # [H, C, D]
            scores = q[b].unflatten(0, (2, 2)) @ means.transpose(1, 2) * scale  # [H, G, C]
            interest = scores.log_softmax(-1).amax(1)
            interest[:, 0] = torch.inf
            expected = interest.topk(4).indices.sort(-1).values
            page = program.retrieval.retrieved[0].table[layer, b] - b * program.store.groups[0].pages_apart
            assert page[:, :4].tolist() == expected.tolist()
            recent = page[:, 4:].tolist()
            assert recent == [list(range(candidates, candidates + len(recent[0])))] * 2


@torch.no_grad()
def test_level_1_sees_the_retrieved_chunks_and_the_recent_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's logits in every round, against KV slots picked one by one from the full cache."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3, gamma=9, rounds=4, refresh=2)
    view, seen = program.retrieval, []
    apart = program.store.groups[0].pages_apart

    def picked(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: AttentionParams
    ) -> torch.Tensor:
        keys, values = program.store.layers[layer].kv
        out = torch.empty(3, 1, 4, 8)
        for b in range(3):
            at, first = int(view.at[b]), 4 * int(view.boundary[b])
            for head in range(4):
                pages = view.retrieved[0].table[layer, b, head // 2, : view.slots] - b * apart
                places = [4 * page + i for page in pages.tolist() for i in range(4)] + [*range(first, at)]
                assert len(set(places)) == len(places)
                theirs = torch.cat([keys[b, head // 2, places], k[b, head // 2]])
                weights = (theirs @ q[b, head, 0] * how.scale).softmax(0)
                out[b, 0, head] = weights @ torch.cat([values[b, head // 2, places], v[b, head // 2]])
        return out

    accept = Verifier.accept

    def checked(self: Verifier, tree: TokenTree, root: torch.Tensor) -> tuple[Acceptance, torch.Tensor]:
        result, scores = accept(self, tree, root)
        if tree is program.stage("draft").tree:
            logits = program.full(tree.tokens[:, :1], root[:, None], picked)
            torch.testing.assert_close(scores[:, 0], logits[:, 0], atol=2e-5, rtol=1e-4)
            seen.append(view.refreshing)
        return result, scores

    monkeypatch.setattr(Verifier, "accept", checked)
    decoded(program, PROMPTS, NEW)
    assert seen[:8] == [True, False] * 4


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("runner_ups", [True, False])
def test_a_right_draft_lengthens_passes_by_the_tree_behind_the_chain(
    runner_ups: bool, to_probs: ProbsFromLogits
) -> None:
    """Draft, level 1 and target agree: a pass commits the chain, the tree's depth, and the target's token."""
    target = model("llama-gqa")
    options = {**EVERYTHING, "gamma": 4, "rounds": 1, "tree": "chain:3", "runner_ups": runner_ups}
    program = program_of(target, target, 3, 3, **options, tail_tree=True)
    _, loop = decoded(program, COVERED, [16] * 3, to_probs)
    assert sum(loop.passes.values()) == 2
    passed = loop.levels[-1]
    assert (passed.forwards, passed.proposed, passed.accepted) == (6, 42, 42)
    assert loop.levels[0].emitted == 6 * 2 * 3, "a tree of three tokens a round, and one behind the chain"


@pytest.mark.parametrize("levels", [2, 3])
def test_plain_passes_between_leave_no_trace(levels: int) -> None:
    """The draft, the retrieval view and its means first process what they did not see."""
    target = model("llama-gqa")
    program = program_of(target, target, levels, 3, **EVERYTHING, tree="chain:3", runner_ups=False)
    prompts = COVERED
    loop = DecodingLoop.over(program, GREEDY, 0)
    wanted = iter([1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1] * 3)
    loop.policy.choose = lambda *_: PassKind(levels, 1) if next(wanted) else PLAIN
    assert finished(loop, prompts, [24] * 3) == [reference(target, prompt, 24) for prompt in prompts]
    assert loop.levels[1].acceptance_rate == 1.0
    assert loop.levels[-1].accepted == loop.levels[-1].proposed > 0


SWITCHING = [PassKind(3, 2), PassKind(2, 1), PLAIN, PLAIN, PassKind(2, 1), PassKind(3, 1)]


def switched(
    program: DecodingProgram, to_probs: ProbsFromLogits, seed: int = 0
) -> tuple[list[list[int]], DecodingLoop]:
    """The new tokens of ``PROMPTS`` where passes of all kinds take turns, and the loop."""
    loop = DecodingLoop.over(program, to_probs, seed)
    kinds = cycle(SWITCHING)
    loop.policy.choose = lambda *_: next(kinds)
    return finished(loop, PROMPTS, NEW), loop


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_levels_may_change_with_every_pass(family: str) -> None:
    program = program_of(model(family), draft_of(family), 3, 3, rounds=None)
    assert program.two_levels
    new, loop = switched(program, GREEDY)
    assert new == references(family)
    assert len(loop.passes) == 4
    draft, retrieval, full = loop.levels
    assert 0 < retrieval.forwards < draft.forwards / program.shapes[0].depth
    assert 0 < retrieval.accepted < retrieval.proposed
    assert 0 < full.accepted < full.proposed
    assert sum(loop.passes.values()) * 3 >= full.forwards > 0
    drawn = [switched(program, SAMPLED, 4)[0] for _ in range(2)]
    assert drawn[0] == drawn[1]


@torch.no_grad()
def test_a_pass_of_three_levels_selects_among_chunks_of_all_passes() -> None:
    """The other passes leave the chunk means: they are caught up with, after a rewind as well."""
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3, rounds=None)
    _, loop = switched(program, GREEDY)
    kinds = cycle([PLAIN, PLAIN, PassKind(2, 1)])
    loop.policy.choose = lambda *_: next(kinds)
    longer = [[*prompt, *prompt_of(8)] for prompt in PROMPTS]
    begun = sequences_of(longer, [30] * 3)
    loop.begin(begun)
    for _ in range(12):
        loop.step()
    sequences = [sequence.tokens for sequence in begun]
    program.retrieval.retrieved[0].means[..., 12:, :] = torch.nan
    means = program.cache.means
    means._known = [min(48, tokens) for tokens in means._known]
    program.rewind([sequence[:-3] for sequence in sequences])
    program.cache.means.catch_up()
    fresh = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    fresh.prefill([sequence[:-3] for sequence in sequences])
    for b, sequence in enumerate(sequences):
        chunks = (len(sequence) - 4) // 4
        got, expected = (c.retrieval.retrieved[0].means[:, b, :, :chunks] for c in (program, fresh))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"levels": 3, "rounds": None}, {"rounds": 2}], ids=str)
def test_a_number_of_levels_or_rounds_that_was_given_is_kept(options: dict[str, Any]) -> None:
    config = HierarchyConfig.from_options(**{**SMALL, **options})
    drafter = TreeDrafter(HFModel(draft_of("llama-gqa")), config)
    program = DecodingProgram(HFModel(model("llama-gqa")), drafter, config, 1, 150, 3)
    assert not program.two_levels
    program.prepare(GREEDY)
    assert "target_tree" not in program.stage_names
    chosen = replace(program.config, levels="auto", rounds=None)
    assert not program.serves(chosen), "it lacks the stage"


@torch.no_grad()
@pytest.mark.parametrize("switching", [False, True])
def test_the_full_cache_holds_the_targets_own_keys_and_values(switching: bool) -> None:
    """After many passes the committed KV slots are those of a prefill."""
    target = model("llama-gqa")
    program = program_of(target, draft_of("llama-gqa"), 3, 3, rounds=None if switching else 2)
    new, _ = switched(program, GREEDY) if switching else decoded(program, PROMPTS, NEW)
    program.cache.means.catch_up()
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, new, strict=True)]
    fresh = program_of(target, draft_of("llama-gqa"), 3, 3)
    fresh.prefill(sequences)
    for b, sequence in enumerate(sequences):
        slots = len(sequence) - 1
        for got, expected in zip(program.store.kv, fresh.store.kv, strict=True):
            torch.testing.assert_close(got[:, b, :, :slots], expected[:, b, :, :slots], atol=2e-5, rtol=1e-4)
        chunks = (slots - 8) // 4
        got, expected = (c.retrieval.retrieved[0].means[:, b, :, :chunks] for c in (program, fresh))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
