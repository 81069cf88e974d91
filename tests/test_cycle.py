"""The device-resident cycle, off the GPU: greedy text is the target's own for all texts, trees and levels.

A batch of three texts of different lengths, caches far smaller than the texts, memory that holds NaN until
it is written.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from cycle_cases import GREEDY, cycle_of, decoded
from families import VOCABULARY, build, greedy, perturbed, prompt_of, tiny
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.decoder import CycleDecoder
from triforce_tree.cycle.growth import Tree
from triforce_tree.cycle.laws import DeviceLaw
from triforce_tree.cycle.stages import Verifier
from triforce_tree.decoder import Ending
from triforce_tree.kernels import step
from triforce_tree.sampling import TokenLaw
from triforce_tree.tree_search import parse_shape

pytestmark = pytest.mark.usefixtures("poisoned_empty")

PROMPTS = [prompt_of(length) for length in (61, 43, 90)]
NEW = [22, 17, 12]
SAMPLED = TokenLaw.at(0.8)
# Caches that hold every text of up to 127 tokens: chunk 0, one more and the recent window, and the draft's.
EVERYTHING = {"budget": 96, "chunk": 32, "recent": 32, "window": 200}
COVERED = [prompt_of(length) for length in (98, 101, 100)]

model = cache(tiny)


@cache
def draft_of(family: str) -> PreTrainedModel:
    return perturbed(model(family), 0.05)


@cache
def _reference(family: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    return reference(model(family), list(prompt), new_tokens)


def reference(target: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    return greedy(target, prompt, new_tokens, attention_mask=torch.ones(1, len(prompt)))


def references(family: str = "llama-gqa", new: list[int] = NEW) -> list[list[int]]:
    return [_reference(family, tuple(p), n) for p, n in zip(PROMPTS, new, strict=False)]


def exact(
    levels: int, family: str = "llama-gqa", draft: PreTrainedModel | None = None, **options: object
) -> CycleDecoder:
    """Check greedy equality of the batch; the decoder, for its statistics."""
    cycle = cycle_of(model(family), draft or draft_of(family), levels, len(PROMPTS), **options)
    new, decoder = decoded(cycle, PROMPTS, NEW)
    assert new == references(family)
    assert decoder.finish_reasons == ["length"] * len(PROMPTS)
    for level in decoder.levels[1:]:
        assert 0 < level.accepted < level.proposed, level
    return decoder


# --- greedy text is the target's own ---


@pytest.mark.parametrize(
    "tree", ["best-first:4,3,2", "best-first:5", "chain:3", "sequoia:8x3", "static:0;0.1;1"]
)
@pytest.mark.parametrize("levels, leaves", [(2, None), (3, True), (3, False)])
def test_every_tree(levels: int, leaves: bool | None, tree: str) -> None:
    exact(levels, tree=tree, leaves=leaves)


def test_one_level() -> None:
    cycle = cycle_of(model("llama-gqa"), None, 1, len(PROMPTS))
    new, decoder = decoded(cycle, PROMPTS, NEW)
    assert new == references()
    assert decoder.levels[0].forwards == sum(NEW)


@pytest.mark.parametrize("gamma, rounds", [(1, 4), (9, 3), (9, 7), (3, None)])
@pytest.mark.parametrize("leaves", [True, False])
def test_every_gamma_and_count_of_rounds(gamma: int, rounds: int | None, leaves: bool) -> None:
    """Chains that end before gamma, at it, and in rounds that no longer add to them."""
    exact(3, gamma=gamma, rounds=rounds, leaves=leaves)


@pytest.mark.parametrize("refresh", [0, 1, 3])
def test_every_refresh(refresh: int) -> None:
    exact(3, refresh=refresh, rounds=5, gamma=8)


@pytest.mark.parametrize(
    "options", [{"budget": 12, "recent": 4}, {"budget": 8, "chunk": 1, "recent": 1}], ids=str
)
def test_the_smallest_retrieval_caches(options: dict[str, int]) -> None:
    exact(3, rounds=4, gamma=9, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_middle_level_of_few_bits(bits: int) -> None:
    exact(3, middle_bits=bits)


FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
OWN: dict[str, Callable[[], PreTrainedModel]] = {
    # Softcapped scores and sinks, without the windows that these families have elsewhere.
    "gemma2-full": lambda: tiny("gemma2", query_pre_attn_scalar=8, **FULL),
    "gpt-oss-full": lambda: build(
        "GptOssConfig",
        "GptOssForCausalLM",
        **FULL,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=None,
    ),
}
WITHOUT_WINDOWS = [
    "llama",
    "llama-mqa",
    "llama-yarn",
    "llama3-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "gpt-neox",
    "mixtral",
]


@pytest.mark.parametrize("family", [*WITHOUT_WINDOWS, *OWN])
def test_families(family: str) -> None:
    target = OWN[family]() if family in OWN else model(family)
    draft = perturbed(target, 0.05)
    expected = [reference(target, prompt, 14) for prompt in PROMPTS[:2]]
    for levels in (1, 2, 3):
        cycle = cycle_of(target, draft, levels, 2, window=200, budget=40)
        new, decoder = decoded(cycle, PROMPTS[:2], [14, 14])
        assert new == expected, levels
        assert all(level.accepted for level in decoder.levels[1:]), levels


@pytest.mark.parametrize("levels", [2, 3])
def test_a_stranger_as_draft(levels: int) -> None:
    """It is hardly ever right, so nearly every tree is refused whole."""
    stranger = tiny("qwen2", seed=5, num_hidden_layers=1)
    cycle = cycle_of(model("llama-gqa"), stranger, levels, len(PROMPTS))
    assert decoded(cycle, PROMPTS, NEW)[0] == references()


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("length", [1, 2, 4, 6, 20])
def test_short_prompts(levels: int, length: int) -> None:
    """Shorter than what a draft is fed again, or than the retrieval budget: exact, or refused in words."""
    target = model("llama-gqa")
    cycle = cycle_of(target, draft_of("llama-gqa"), levels)
    refusal = ""
    try:
        new, _ = decoded(cycle, [prompt_of(length)], [40])
    except ValueError as error:
        refusal = str(error)
    assert "prompt" in refusal or (not refusal and new == [reference(target, prompt_of(length), 40)]), refusal


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_batch_gives_each_text_what_it_gets_alone(levels: int) -> None:
    together, _ = decoded(cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3), PROMPTS, NEW)
    one = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels)
    for prompt, new, text in zip(PROMPTS, NEW, together, strict=True):
        assert decoded(one, [prompt], [new])[0] == [text]


# --- levels that do what they are for ---


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_is_the_target_is_always_accepted(law: TokenLaw) -> None:
    """As long as its window covers the text; sampled, but for rounding."""
    target = model("llama-gqa")
    cycle = cycle_of(target, target, 2, 3, tree="chain:3", window=200)
    new, decoder = decoded(cycle, PROMPTS, [31, 23, 16], law)
    assert not law.greedy or new == references(new=[31, 23, 16])
    assert decoder.levels[-1].acceptance_rate == 1.0
    assert decoder.levels[-1].mean_accepted_length == 4.0


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_budget_that_holds_the_context_makes_level_1_as_good_as_level_2(
    leaves: bool, law: TokenLaw
) -> None:
    """Whatever the draft: every token of a chain is accepted."""
    target = model("llama-gqa")
    cycle = cycle_of(target, draft_of("llama-gqa"), 3, 3, **{**EVERYTHING, "window": 6}, leaves=leaves)
    new, decoder = decoded(cycle, COVERED, [20] * 3, law)
    assert not law.greedy or new == [reference(target, prompt, 20) for prompt in COVERED]
    full, middle = decoder.levels[-1], decoder.levels[1]
    assert full.accepted == full.proposed > 30
    assert 0 < middle.accepted < middle.proposed


@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_caches_that_hold_everything_make_all_levels_equal(law: TokenLaw) -> None:
    target = model("llama-gqa")
    cycle = cycle_of(target, target, 3, 3, **EVERYTHING, tree="chain:3", gamma=8)
    _, decoder = decoded(cycle, COVERED, [16] * 3, law)
    assert [level.acceptance_rate for level in decoder.levels[1:]] == [1.0, 1.0]
    assert decoder.levels[-1].mean_accepted_length == 9.0


def test_more_retrieved_chunks_are_more_like_the_whole_context() -> None:
    rates = [exact(3, budget=budget).levels[-1].acceptance_rate or 0.0 for budget in (12, 24, 40)]
    assert rates[0] + 0.1 < rates[1] < rates[2] - 0.1


def test_the_chosen_chunks_are_those_that_the_root_attends_to_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per sequence, layer and KV head, from the full cache's own keys, in the middle of a text."""
    choices: list[tuple[torch.Tensor, torch.Tensor, float]] = []
    select = step.select_chunks

    def noted(q: torch.Tensor, means: torch.Tensor, limit: torch.Tensor, *rest: object) -> None:
        choices.append((q.clone(), limit.clone(), float(rest[2])))
        select(q, means, limit, *rest)

    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    decoded(cycle, PROMPTS, NEW)
    monkeypatch.setattr(step, "select_chunks", noted)
    cycle.texts.active.fill_(1)
    generator = torch.Generator()
    for stage in ("grow", "choose"):
        cycle.run(stage, generator)
    assert len(choices) == 2
    for layer, (q, limit, scale) in enumerate(choices):
        keys, _ = cycle.store.layer(layer)
        for b in range(3):
            candidates = int(limit[b])
            assert candidates == (int(cycle.texts.length[b]) - 8) // 4 > 4
            means = keys[b, :, : candidates * 4].unflatten(1, (candidates, 4)).mean(2)  # [H, C, D]
            scores = q[b].unflatten(0, (2, 2)) @ means.transpose(1, 2) * scale  # [H, G, C]
            interest = scores.log_softmax(-1).amax(1)
            interest[:, 0] = torch.inf
            expected = interest.topk(4).indices.sort(-1).values
            page = cycle.rows.table[layer, b] - b * cycle.store.pages_apart
            assert page[:, :4].tolist() == expected.tolist()
            recent = page[:, 4:].tolist()
            assert recent == [list(range(candidates, candidates + len(recent[0])))] * 2


@torch.no_grad()
def test_level_1_sees_the_chosen_chunks_and_the_recent_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's logits in every round, against rows picked one by one from the full cache."""
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3, gamma=9, rounds=4, refresh=2)
    rows, seen = cycle.rows, []

    def picked(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: object) -> torch.Tensor:
        keys, values = cycle.store.layer(layer)
        out = torch.empty(3, 1, 4, 8)
        for b in range(3):
            at, first = int(rows.at[b]), 4 * int(rows.boundary[b])
            for head in range(4):
                pages = rows.table[layer, b, head // 2, : rows.slots] - b * cycle.store.pages_apart
                places = [4 * page + i for page in pages.tolist() for i in range(4)] + [*range(first, at)]
                assert len(set(places)) == len(places)
                theirs = torch.cat([keys[b, head // 2, places], k[b, head // 2]])
                weights = (theirs @ q[b, head, 0] * how[0]).softmax(0)
                out[b, 0, head] = weights @ torch.cat([values[b, head // 2, places], v[b, head // 2]])
        return out

    judge = Verifier.judge

    def checked(self: Verifier, tree: Tree, depth: int, root: torch.Tensor, *rest: object) -> object:
        result = judge(self, tree, depth, root, *rest)
        if rest[0] is rows:
            logits = cycle.full(tree.tokens[:, :1], root[:, None], picked)
            torch.testing.assert_close(result[3][:, 0], logits[:, 0], atol=2e-5, rtol=1e-4)
            seen.append(rows.choosing)
        return result

    monkeypatch.setattr(Verifier, "judge", checked)
    decoded(cycle, PROMPTS, NEW)
    assert seen[:8] == [True, False] * 4


@pytest.mark.parametrize("levels", [2, 3])
def test_texts_that_outgrow_the_drafts_window_many_times(levels: int) -> None:
    """110 tokens over windows of 6 to 12."""
    target, prompts = model("llama-gqa"), [prompt_of(44), prompt_of(59)]
    cycle = cycle_of(target, target, levels, 2, room=250)
    new, decoder = decoded(cycle, prompts, [110, 60])
    assert new == [reference(target, prompt, n) for prompt, n in zip(prompts, [110, 60], strict=True)]
    assert all(level.accepted for level in decoder.levels[1:])


@pytest.mark.parametrize("levels", [2, 3])
def test_plain_passes_between_leave_no_trace(levels: int) -> None:
    """What the draft, the retrieval view and its means did not see is caught up with."""
    target = model("llama-gqa")
    cycle = cycle_of(target, target, levels, 3, **EVERYTHING, tree="chain:3", leaves=False)
    prompts = COVERED
    decoder = CycleDecoder(cycle, GREEDY, 0)
    decoder.prefill(prompts)
    wanted = iter([1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1] * 3)
    decoder.pace.rounds = lambda: next(wanted)
    new: list[list[int]] = [[] for _ in prompts]
    for blocks in decoder.decode(prompts, [Ending(24)] * 3):
        for text, block in zip(new, blocks, strict=True):
            text += block
    assert new == [reference(target, prompt, 24) for prompt in prompts]
    assert decoder.levels[1].acceptance_rate == 1.0
    assert decoder.levels[-1].accepted == decoder.levels[-1].proposed > 0


# --- one cycle, many texts ---


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rewinding_gives_the_same_tokens_again(levels: int, law: TokenLaw) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    first, _ = decoded(cycle, PROMPTS, NEW, law)
    assert decoded(cycle, PROMPTS, NEW, law, again=True)[0] == first
    longer = [[*prompt, *new[:9]] for prompt, new in zip(PROMPTS, first, strict=True)]
    rest, _ = decoded(cycle, longer, [new - 9 for new in NEW], law, again=True)
    if law.greedy:
        assert rest == [new[9:] for new in first]


def test_a_chain_longer_than_the_recent_window_is_the_same_after_rewinding() -> None:
    """Chunks of the chain itself become candidates; what their places held before must not matter."""
    cycle = cycle_of(
        model("llama-gqa"), draft_of("llama-gqa"), 3, 3, gamma=12, rounds=8, budget=6, recent=1, chunk=1
    )
    for seed in (0, 8):
        first, _ = decoded(cycle, PROMPTS, [14] * 3, SAMPLED, seed)
        assert decoded(cycle, PROMPTS, [14] * 3, SAMPLED, seed, again=True)[0] == first


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_laws_take_turns_on_one_cycle(levels: int) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    other = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    hot = TokenLaw.at(1.7)
    few = TokenLaw(LogitsProcessorList([TemperatureLogitsWarper(1.7), TopKLogitsWarper(3)]))
    drawn = [decoded(other, PROMPTS, NEW, law, seed=3)[0] for law in (SAMPLED, hot, few)]
    assert decoded(cycle, PROMPTS, NEW)[0] == references()
    for law, expected in zip((SAMPLED, hot, few), drawn, strict=True):
        assert decoded(cycle, PROMPTS, NEW, law, seed=3)[0] == expected
        assert decoded(cycle, PROMPTS, NEW, again=True)[0] == references()
    assert len({str(tokens) for tokens in drawn}) == 3


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_shorter_texts_after_longer_ones(levels: int) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    decoded(cycle, [prompt_of(120)] * 3, [30] * 3)
    assert decoded(cycle, PROMPTS, NEW)[0] == references()


def test_laws_with_equal_keys_differ_in_their_temperature_alone() -> None:
    def key(*processors: object) -> object:
        return DeviceLaw.key(TokenLaw(LogitsProcessorList(processors)))

    warm, hot, top = TemperatureLogitsWarper(0.7), TemperatureLogitsWarper(1.4), TopKLogitsWarper(5)
    assert key(warm) == key(hot) == key()
    assert key(warm, top) == key(hot, top) == key(top)
    assert key(top) != key(TopKLogitsWarper(6))
    assert key(top, warm) != key(top, hot), "a temperature that does not lead"
    many = [[token for token in range(5, 1500) if token != spared] for spared in (700, 701)]
    assert key(SuppressTokensLogitsProcessor(many[0])) != key(SuppressTokensLogitsProcessor(many[1]))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_same_seed_same_tokens(levels: int) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    first, again, other = (decoded(cycle, PROMPTS, NEW, SAMPLED, seed)[0] for seed in (7, 7, 8))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))
    alike = decoded(cycle, [PROMPTS[0]] * 3, [20] * 3, SAMPLED, 7)[0]
    assert len({tuple(tokens) for tokens in alike}) == 3, "sequences of a batch draw apart"


def test_a_repeatable_decoder_goes_by_no_clock() -> None:
    """Whatever its passes take: rounds, and so the drawn text, depend on the seed alone."""
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1, gamma=8, rounds=None)
    texts = []
    for slow in (1e-6, 10.0):
        decoder = CycleDecoder(cycle, SAMPLED, 5, repeatable=True)
        decoder.prefill(PROMPTS[:1])
        text: list[int] = []
        for fresh in decoder.decode(PROMPTS[:1], [Ending(24)]):
            text += fresh[0]
            decoder.pace.timed({"grow": slow, "choose": slow, "full": 1.0}, 1)
        texts.append(text)
    assert texts[0] == texts[1]


# --- endings ---


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_an_end_token_cuts_the_block_that_holds_it(levels: int) -> None:
    target = model("llama-gqa")
    cycle = cycle_of(target, target, levels, 3, **EVERYTHING, tree="chain:3")
    texts = [reference(target, prompt, 20) for prompt in COVERED]
    stops = [text[place] for text, place in zip(texts, (11, 1, 7), strict=True)]
    endings = [Ending(20, frozenset({stop})) for stop in stops]
    new, decoder = decoded(cycle, COVERED, endings)
    assert new == [text[: text.index(stop) + 1] for text, stop in zip(texts, stops, strict=True)]
    assert decoder.finish_reasons == ["eos"] * 3
    if levels > 1:
        assert decoder.levels[-1].emitted > sum(map(len, new)), "it stood inside a block"


def test_stop_criteria_hear_every_token_of_their_own_text() -> None:
    heard: list[list[list[int]]] = [[], [], []]

    def stop(b: int) -> Callable[[list[int]], bool]:
        def ask(tokens: list[int]) -> bool:
            heard[b].append(list(tokens))
            return len(tokens) == len(PROMPTS[b]) + 5 + b

        return ask

    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3)
    new, decoder = decoded(cycle, PROMPTS, [Ending(n, stop=stop(b)) for b, n in enumerate(NEW)])
    assert decoder.finish_reasons == ["stop"] * 3
    for b, text in enumerate(references()):
        assert new[b] == text[: 5 + b]
        assert heard[b] == [[*PROMPTS[b], *text[: n + 1]] for n in range(5 + b)]


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_texts_that_have_ended_stay_as_they_are(levels: int) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    decoder = CycleDecoder(cycle, GREEDY, 0)
    decoder.prefill(PROMPTS)
    new: list[list[int]] = [[], [], []]
    frozen = None
    passes = 0
    for blocks in decoder.decode(PROMPTS, [Ending(40), Ending(3), Ending(40)]):
        for text, block in zip(new, blocks, strict=True):
            text += block
        if decoder.finish_reasons[1] is None:
            continue
        length = int(cycle.texts.length[1])
        state = (cycle.texts.tokens[1, : length + 1], cycle.store.kv[:, :, 1, :, :length])
        if frozen is None:
            frozen = [length, *(t.clone() for t in state)]
            continue
        passes += 1
        assert blocks[1] == []
        assert length == frozen[0]
        for now, before in zip(state, frozen[1:], strict=True):
            assert torch.equal(now, before)
    assert passes > 5
    assert new == [_reference("llama-gqa", tuple(p), n) for p, n in zip(PROMPTS, (40, 3, 40), strict=True)]


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("tree", ["chain:1", "best-first:4,3,2"])
def test_texts_may_fill_the_room_exactly(levels: int, tree: str) -> None:
    """The last ends far earlier than the others, whose passes go on beside it."""
    target = model("llama-gqa")
    cycle = cycle_of(target, target, levels, 3, room=90, window=200, tree=tree, rounds=3)
    prompts = [PROMPTS[0][:60], PROMPTS[1], PROMPTS[2][:89]]
    texts, _ = decoded(cycle, prompts, [30, 47, 1])
    assert [len(p) + len(t) for p, t in zip(prompts, texts, strict=True)] == [90, 90, 90]
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == reference(target, prompt, len(text))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_statistics_add_up(levels: int) -> None:
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3)
    new, decoder = decoded(cycle, PROMPTS, NEW)
    target = decoder.levels[-1]
    grown = sum(int(end) + 1 - len(p) for end, p in zip(cycle.texts.length, PROMPTS, strict=True))
    assert target.emitted == grown == target.accepted + target.forwards
    assert 0 <= target.emitted - sum(map(len, new)) <= 3 * 5
    names = ["draft", "target"] if levels == 2 else ["draft", "retrieval", "target"]
    assert [level.name for level in decoder.levels] == (["target"] if levels == 1 else names)
    for level in decoder.levels:
        assert level.accepted <= level.proposed
        assert level.seconds > 0
    for level in decoder.levels[1:]:
        assert level.emitted == level.accepted + level.forwards
    if levels == 3:
        draft, middle = decoder.levels[:2]
        assert middle.forwards == 2 * target.forwards
        assert target.proposed <= middle.emitted
        assert middle.proposed == 3 * middle.forwards == draft.forwards
    assert decoder.prefill_seconds > 0
    assert decoder.decode_seconds > 0


def test_prefill_reports_every_token_fed() -> None:
    heard: list[int] = []
    decoder = CycleDecoder(cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 3), GREEDY, 0)
    decoder.prefill(PROMPTS, heard.append)
    assert sum(heard) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert max(heard) == 16


# --- errors ---


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nan_logits_are_refused(levels: int, law: TokenLaw) -> None:
    target = tiny("llama-gqa")
    cycle = cycle_of(target, draft_of("llama-gqa"), levels, 3)
    weight = target.lm_head.weight[5].clone()
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match=r"NaN logits.*dtype=torch\.float32"):
        decoded(cycle, PROMPTS, NEW, law)
    with torch.no_grad():
        target.lm_head.weight[5] = weight
    assert decoded(cycle, PROMPTS, NEW)[0] == references(), "and it is fit for use again"


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_returns_nan_is_refused_or_harmless(levels: int, law: TokenLaw) -> None:
    draft = tiny("llama-gqa", seed=3)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    cycle = cycle_of(model("llama-gqa"), draft, levels, 3)
    refusal = ""
    try:
        new, _ = decoded(cycle, PROMPTS, NEW, law)
    except ValueError as error:
        refusal = str(error)
    assert "NaN" in refusal or not law.greedy or new == references(), refusal


@pytest.mark.parametrize("levels", [2, 3])
def test_several_levels_need_a_draft_and_a_tree_of_fixed_size(levels: int) -> None:
    class Live:
        def expands(self, ranks: tuple[int, ...]) -> bool:
            return not ranks

        def branch(self, ranks: object, values: object, laws: torch.Tensor) -> list[int]:
            return [1]

    for draft, tree in ((None, "chain:2"), (draft_of("llama-gqa"), Live())):
        with pytest.raises(ValueError, match="draft model and a tree of fixed size"):
            cycle_of(model("llama-gqa"), draft, levels, tree=tree)


def test_trees_of_up_to_64_rows() -> None:
    """Root, nodes and the tokens fed again share a word of 64 bits."""
    exact(2, tree="best-first:30,29")
    with pytest.raises(ValueError, match="too large"):
        cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 2, tree="best-first:30,30")


@pytest.mark.parametrize("tree", ["best-first:6,2", "static:0.0;0.1;0.2;0.3;0.4;1", "static:0;1;2;3;4;5"])
@pytest.mark.parametrize("law", [GREEDY, TokenLaw()], ids=["greedy", "sampled"])
def test_more_siblings_than_tokens(tree: str, law: TokenLaw) -> None:
    """A vocabulary of 4: places that no draw can fill stay empty."""
    target = tiny("llama", vocab_size=4)
    cycle = cycle_of(target, perturbed(target, 0.5), 2, 2, tree=tree)
    prompts = [prompt_of(40, 4), prompt_of(33, 4)]
    decoder = CycleDecoder(cycle, law, 0)
    decoder.prefill(prompts)
    grow = cycle._program.stages["grow"]
    cycle.run("grow", decoder._generator)
    for tokens, parents in zip(grow.tree.tokens.tolist(), grow.tree.parents.tolist(), strict=True):
        children: dict[int, list[int]] = {}
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            if token >= 0:
                children.setdefault(parent, []).append(token)
        assert all(len(family) == len(set(family)) for family in children.values()), children
    if law.greedy:
        assert decoded(cycle, prompts, [20, 20])[0] == [reference(target, p, 20) for p in prompts]


# --- the shape of trees ---


@pytest.mark.parametrize("tree", ["best-first:4,3,2", "chain:3", "sequoia:9x3", "static:0;0.1;1"])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_have_the_places_that_the_shape_asks_for(tree: str, law: TokenLaw) -> None:
    """Children of each node as ``tree_search`` counts them from the tree's own laws; words are ancestors."""
    cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 2, 3, tree=tree)
    decoder = CycleDecoder(cycle, law, 0)
    decoder.prefill(PROMPTS)
    cycle.run("grow", decoder._generator)
    grown, shape = cycle._program.stages["grow"].tree, parse_shape(tree)
    for b in range(3):
        tokens, parents, words = (t[b].tolist() for t in (grown.tokens, grown.parents, grown.words))
        laws, depths = grown.laws[b], grown.depths.tolist()
        ranks: list[tuple[int, ...]] = [()]
        values = [1.0]
        for node in range(1, len(tokens)):
            parent = parents[node]
            rank = parents[:node].count(parent)
            ranks.append((*ranks[parent], rank))
            values.append(values[parent] * float(laws[parent, tokens[node]]))
            assert depths[node] == depths[parent] + 1
            assert words[node] == words[parent] | 1 << node
            if law.greedy:
                assert tokens[node] == int(laws[parent].topk(rank + 1).indices[rank])
        for depth in range(max(depths)):
            nodes = [n for n, d in enumerate(depths) if d == depth]
            counts = shape.branch([ranks[n] for n in nodes], [values[n] for n in nodes], laws[nodes])
            assert counts == [parents.count(n) for n in nodes]


@torch.no_grad()
@pytest.mark.parametrize("levels", [2, 3])
def test_draft_laws_are_those_of_the_window(levels: int) -> None:
    """While windows are renewed: laws of a tree against plain forwards over sinks, window and a path."""
    draft = draft_of("llama-gqa")
    cycle = cycle_of(model("llama-gqa"), draft, levels, 2, tree="best-first:4,3,2", budget=40)
    growth, prompts = cycle.growth, [prompt_of(61), prompt_of(72)]
    grow, trees, dropped = growth.grow, 0, set()

    def checked(tokens: torch.Tensor, end: torch.Tensor, *rest: object) -> Tree:
        nonlocal trees
        tree = grow(tokens, end, *rest)
        trees += 1
        for b in range(2):
            text = tokens[b, : int(end[b]) + 1].tolist()
            out = int(growth.dropped[b])
            dropped.add((b, out))
            seen = [*text[:2], *text[2 + out :]]
            assert 2 + 6 <= len(seen) <= growth.store.rows - growth.nodes + 1
            for node in (0, 1 + trees % 4, 5 + trees % 3):
                path: list[int] = []
                above = node
                while above > 0:
                    path.insert(0, int(tree.tokens[b, above]))
                    above = int(tree.parents[b, above])
                logits = draft(torch.tensor([[*seen, *path]]), use_cache=False).logits[0, -1]
                expected = (logits / 0.8).softmax(-1)
                torch.testing.assert_close(tree.laws[b, node], expected, atol=2e-5, rtol=1e-4)
        return tree

    growth.grow = checked
    decoded(cycle, prompts, [70, 70], SAMPLED)
    assert len(dropped) >= 6, "windows were renewed several times"


@torch.no_grad()
def test_the_full_cache_holds_the_targets_own_rows() -> None:
    """After many passes of three levels: rows of a settled text are those of a fresh prefill."""
    target = model("llama-gqa")
    cycle = cycle_of(target, draft_of("llama-gqa"), 3, 3)
    new, _ = decoded(cycle, PROMPTS, NEW)
    texts = [[*prompt, *text] for prompt, text in zip(PROMPTS, new, strict=True)]
    fresh = cycle_of(target, draft_of("llama-gqa"), 3, 3)
    fresh.prefill(texts)
    for b, text in enumerate(texts):
        rows = len(text) - 1
        got, expected = (c.store.kv[:, :, b, :, :rows] for c in (cycle, fresh))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        chunks = (rows - 8) // 4
        got, expected = (c.rows.means[:, b, :, :chunks] for c in (cycle, fresh))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_the_users_model_is_untouched() -> None:
    target, draft = tiny("llama-gqa"), tiny("llama-gqa", seed=1)
    target.train()
    before = [m.config._attn_implementation for m in (target, draft)]
    weights = {name: weight.clone() for name, weight in target.named_parameters()}
    cycle = cycle_of(target, draft, 3)
    decoded(cycle, PROMPTS[:1], [8])
    assert [m.config._attn_implementation for m in (target, draft)] == before
    assert target.training
    assert all(torch.equal(weight, weights[name]) for name, weight in target.named_parameters())
    shared = {weight.data_ptr() for weight in target.parameters()}
    assert {weight.data_ptr() for weight in cycle.full.model.parameters()} == shared
    assert reference(target.eval(), PROMPTS[0], 4) == references()[0][:4]


def test_windows_of_attention_are_refused() -> None:
    target = tiny("mistral-window")
    with pytest.raises(NotImplementedError, match="sliding windows"):
        decoded(cycle_of(target, None, 1), PROMPTS[:1], [4])


def test_a_cycle_is_prepared_once_for_each_kind_of_law() -> None:
    cycle: Cycle = cycle_of(model("llama-gqa"), draft_of("llama-gqa"), 3, 1)
    for temperature in (0.5, 0.8, 0.5):
        law = TokenLaw.at(temperature)
        cycle.prepare(law)
        assert float(cycle._program.law.temperature) == pytest.approx(temperature)
    cycle.prepare(GREEDY)
    assert len(cycle._programs) == 2
