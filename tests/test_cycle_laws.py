"""Sampled text of the device cycle follows the target's law: chi-square over batches of equal prompts.

A thousand and more copies of one prompt are decoded side by side with draws of their own, and the joint law
of their first three tokens is compared with the target's, computed from plain forwards. Draft and target are
strangers, and the retrieval cache is a small part of the prompt. Faults that are planted must be found.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cycle_cases import (
    append_rows,
    attention,
    cycle_of,
    decoded,
    move_rows,
    prefill_alike,
    share_windows,
    use_batched_ops,
)
from enumeration import chi_square_p
from families import prompt_of, tiny
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triforce_tree.cycle.cycle import Cycle
from triforce_tree.cycle.growth import Growth, Tree
from triforce_tree.cycle.laws import DeviceLaw, Noise
from triforce_tree.cycle.rows import RetrievalRows
from triforce_tree.cycle.texts import Texts
from triforce_tree.kernels import planned, step, step_reference
from triforce_tree.kernels.plan import Heads, plan_trees
from triforce_tree.sampling import TokenLaw
from triforce_tree.stats import LevelStats

VOCABULARY, TOKENS, BATCH = 5, 3, 1500
PROMPT = prompt_of(41, VOCABULARY)
SOUND, FAULTY = 1e-4, 1e-6

Warpers = tuple[object, ...]
PLAIN: Warpers = (TemperatureLogitsWarper(1.0),)
LAWS: dict[str, Warpers] = {
    "cold": (TemperatureLogitsWarper(0.6),),
    "warm": PLAIN,
    "hot": (TemperatureLogitsWarper(1.5),),
    "top-k": (TemperatureLogitsWarper(1.3), TopKLogitsWarper(3)),
    "top-p": (TopPLogitsWarper(0.85),),
}
# levels, options
CYCLES: dict[str, tuple[int, dict[str, object]]] = {
    "plain": (1, {}),
    "chain": (2, {"tree": "chain:2"}),
    "siblings": (2, {"tree": "static:0;1;2;0.0;0.1;1.0"}),
    "live tree": (2, {"tree": "best-first:3,2"}),
    "hierarchy": (3, {"tree": "best-first:3,2", "leaves": False}),
    "hierarchy, leaves": (3, {"tree": "best-first:3,2", "leaves": True}),
    "hierarchy, chain": (3, {"tree": "chain:1", "leaves": True}),
    "hierarchy, deep": (3, {"tree": "chain:2", "leaves": False}),
    "hierarchy, refresh 0": (3, {"tree": "chain:1", "leaves": True, "refresh": 0, "rounds": 3}),
}
SMALL = {"gamma": 3, "rounds": 2, "budget": 8, "chunk": 2, "recent": 4, "sinks": 1, "window": 8}


@cache
def target() -> PreTrainedModel:
    return _stranger(seed=0)


@cache
def _stranger(seed: int) -> PreTrainedModel:
    return tiny(
        "llama",
        seed,
        vocab_size=VOCABULARY,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )


def token_law(warpers: Warpers) -> TokenLaw:
    return TokenLaw(LogitsProcessorList(warpers))


@cache
def prepared(name: str) -> Cycle:
    """A cycle that holds the prompt's rows, for all tests of its kind."""
    levels, options = CYCLES[name]
    cycle = cycle_of(target(), _stranger(3), levels, BATCH, room=64, **{**SMALL, **options})
    with pytest.MonkeyPatch.context() as patch:
        use_batched_ops(patch)
        prefill_alike(cycle, PROMPT, patch)
    return cycle


@cache
@torch.no_grad()
def _logits(prompt: tuple[int, ...]) -> list[Tensor]:
    """``[V^n, V]`` for n = 0, 1, 2 tokens after the prompt."""
    result = []
    for n in range(TOKENS):
        more = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * n).view(-1, n) if n else torch.empty(1, 0)
        texts = torch.cat([torch.tensor(prompt).expand(VOCABULARY**n, -1), more.long()], 1)
        result.append(target()(texts, use_cache=False).logits[:, -1])
    return result


def exact_law(warpers: Warpers, prompt: tuple[int, ...] = tuple(PROMPT)) -> dict[tuple[int, ...], float]:
    """The target's joint law of the next ``TOKENS`` tokens."""
    law = token_law(warpers)
    joint = torch.ones(1, dtype=torch.float64)
    for logits in _logits(prompt):
        joint = (joint[:, None] * law.scores(logits, list).double().softmax(-1)).flatten()
    places = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * TOKENS).tolist()
    return {tuple(tokens): chance for tokens, chance in zip(places, joint.tolist(), strict=True) if chance}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ops for large batches of equal prompts."""
    use_batched_ops(monkeypatch)
    share_windows(monkeypatch)
    return monkeypatch


def sampled(name: str, warpers: Warpers = PLAIN, seed: int = 0) -> tuple[float, list[LevelStats]]:
    """p-value of one batch's joint law of ``TOKENS`` tokens, 0 if something impossible came; statistics."""
    cycle = prepared(name)
    texts, decoder = decoded(cycle, [PROMPT] * BATCH, [TOKENS] * BATCH, token_law(warpers), seed, again=True)
    counts = Counter(tuple(text) for text in texts)
    law = exact_law(warpers)
    return 0.0 if counts.keys() - law.keys() else chi_square_p(counts, law), decoder.levels


# --- the law ---


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.usefixtures("many")
def test_three_tokens_follow_the_targets_law(name: str) -> None:
    """By levels that are strangers to each other: else it would prove little."""
    chance, levels = sampled(name)
    assert chance > SOUND
    for level in levels[1:]:
        assert 0.2 < level.acceptance_rate < 0.8, level


@pytest.mark.parametrize(
    "name, law",
    [(name, law) for name in ("live tree", "hierarchy, leaves") for law in LAWS if law != "warm"],
)
@pytest.mark.usefixtures("many")
def test_under_processors(name: str, law: str) -> None:
    assert sampled(name, LAWS[law])[0] > SOUND


@pytest.mark.usefixtures("many")
def test_a_budget_beyond_the_prompt_changes_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """What level 1 sees holds no row twice, and none of the nodes that it judges; or it is refused."""
    prompt = prompt_of(9, VOCABULARY)
    options = {**SMALL, "budget": 16, "tree": "chain:2", "leaves": False}
    refused = False
    try:
        cycle = cycle_of(target(), _stranger(3), 3, BATCH, room=64, **options)
        prefill_alike(cycle, prompt, monkeypatch)
        texts, _ = decoded(cycle, [prompt] * BATCH, [TOKENS] * BATCH, token_law(PLAIN), again=True)
    except ValueError:
        refused = True
    assert refused or chi_square_p(Counter(map(tuple, texts)), exact_law(PLAIN, tuple(prompt))) > SOUND


@pytest.mark.usefixtures("many")
def test_a_runner_up_is_another_token_than_the_chains() -> None:
    cycle = prepared("hierarchy, leaves")
    cycle.prepare(token_law(PLAIN))
    cycle.rewind([PROMPT] * BATCH)
    generator = torch.Generator().manual_seed(0)
    for stage in ("grow", "choose", "grow", "middle"):
        cycle.run(stage, generator)
    texts = cycle.texts
    places = torch.arange(texts.reach)
    chain = texts.tokens.gather(1, texts.length[:, None] + 1 + places)
    leaves, there = texts.leaves[:, : texts.reach], places < texts.chain[:, None]
    assert (leaves != chain)[there].all()
    assert (leaves >= 0)[there].all(), "all five tokens are possible"
    assert texts.chain.unique().numel() > 1


# --- planted faults are found ---

Fault = Callable[[pytest.MonkeyPatch], None]
TREE_LAWS = 4  # the most of a draft's tree here; a chain of gamma = 3 has more


def accepting(change: Callable[..., tuple[Tensor, ...]], levels: str = "all") -> Fault:
    """Acceptance with a fault, at all levels or only where drafts are "trees" or the "chain" of level 1."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = step.accept_tree

        def faulty(*args: Tensor) -> tuple[Tensor, ...]:
            here = "chain" if args[3].shape[1] > TREE_LAWS else "trees"
            return change(sound, *args) if levels in ("all", here) else sound(*args)

        patch.setattr(step, "accept_tree", faulty)

    return plant


def always(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """The first child is accepted whatever the laws say."""
    first = torch.zeros_like(uniforms)
    for node in range(tokens.shape[1]):
        elder = (parents[:, :node] == parents[:, node, None]).any(1)
        first[:, node] = torch.where(elder, uniforms[:, node], 0.0)
    return sound(tokens, parents, p, q, q_rows, first, race, depth)


def no_residual(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """TriForce's public code: after a refusal the token is drawn from p."""
    path, count, _ = sound(tokens, parents, p, q, q_rows, uniforms, race, depth)
    node = path.gather(1, count[:, None] - 1)
    law = p.gather(1, node[..., None].expand(-1, 1, p.shape[2]))[:, 0]
    return path, count, (law / race).argmax(-1)


def one_uniform(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """One uniform for the decisions at all nodes."""
    return sound(tokens, parents, p, q, q_rows, uniforms[:, :1].expand_as(uniforms), race, depth)


def wrong_rows(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Children are judged by the draft law of the node before theirs."""
    return sound(tokens, parents, p, q, (q_rows - 1).clamp_min(0), uniforms, race, depth)


def wrong_target_rows(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Every node has the target's law of the one before it."""
    return sound(tokens, parents, p.roll(1, 1), q, q_rows, uniforms, race, depth)


def with_replacement(sound, tokens, parents, p, q, q_rows, uniforms, race, depth):
    """Refused siblings stay in the law that the later ones are judged by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_fill", lambda law, *_: law)
        return sound(tokens, parents, p, q, q_rows, uniforms, race, depth)


def stale_noise(patch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn once and used for every pass."""
    draw, drawn = Noise.draw, set()

    def once(self: Noise, generator: torch.Generator) -> None:
        if id(self) not in drawn:
            drawn.add(id(self))
            draw(self, generator)

    patch.setattr(Noise, "draw", once)


def best_runner_up(patch: pytest.MonkeyPatch) -> None:
    """Leaves are the most probable other token, though judged as drawn."""
    sound = step.second_choice
    patch.setattr(step, "second_choice", lambda laws, chosen, race: sound(laws, chosen, None))


def runner_up_of_the_next(patch: pytest.MonkeyPatch) -> None:
    """Leaves are drawn from the law of the place after theirs."""
    sound = step.second_choice
    patch.setattr(step, "second_choice", lambda laws, chosen, race: sound(laws.roll(-1, 1), chosen, race))


def weak_draws_dropped(patch: pytest.MonkeyPatch) -> None:
    """The draft proposes only what it finds likely: a count that looks at the draws."""
    grow = Growth.grow

    def likely(self: Growth, *args: Any) -> Tree:
        tree = grow(self, *args)
        laws = tree.laws.gather(1, tree.parents[:, 1:, None].expand(-1, -1, VOCABULARY))
        chance = laws.gather(2, tree.tokens[:, 1:, None].clamp_min(0))[..., 0]
        tree.tokens[:, 1:] = torch.where(chance > 0.3, tree.tokens[:, 1:], -1)
        return tree

    patch.setattr(Growth, "grow", likely)


def best_draws(patch: pytest.MonkeyPatch) -> None:
    """The draft's trees hold its most probable tokens, though judged as drawn."""
    grow = Growth.grow

    def certain(self: Growth, tokens: Tensor, end: Tensor, law: DeviceLaw, noise: Noise) -> Tree:
        noise.race.fill_(1)
        return grow(self, tokens, end, law, noise)

    patch.setattr(Growth, "grow", certain)


def chain_laws_late(patch: pytest.MonkeyPatch) -> None:
    """The laws of the chain's tokens are kept one place late."""
    lengthen = Texts.lengthen

    def late(self: Texts, emitted: Tensor, count: Tensor, laws: Tensor | None) -> None:
        lengthen(self, emitted, count, None if laws is None else laws.roll(1, 1))

    patch.setattr(Texts, "lengthen", late)


def other_chunks_than_the_roots(patch: pytest.MonkeyPatch) -> None:
    """Level 1's law depends on the children that it judges, by way of what their queries select."""
    attend = RetrievalRows.__call__

    def by_the_child(self: RetrievalRows, layer: int, q: Tensor, *rest: Any) -> Tensor:
        if self.choosing:
            select = step.select_chunks
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(step, "select_chunks", lambda _, *more: select(q[:, :, 1], *more))
                return attend(self, layer, q, *rest)
        return attend(self, layer, q, *rest)

    patch.setattr(RetrievalRows, "__call__", by_the_child)


LEAVES = "hierarchy, leaves"
FAULTS: dict[str, tuple[str, Fault]] = {
    "always accepted, chain": ("chain", accepting(always)),
    "always accepted by level 1": (LEAVES, accepting(always, "trees")),
    "no residual, siblings": ("siblings", accepting(no_residual)),
    "no residual at level 1": ("hierarchy, chain", accepting(no_residual, "trees")),
    "no residual at level 2": (LEAVES, accepting(no_residual, "chain")),
    "one uniform, chain": ("chain", accepting(one_uniform)),
    "one uniform at level 2": (LEAVES, accepting(one_uniform, "chain")),
    "rows of q at level 2": (LEAVES, accepting(wrong_rows, "chain")),
    "rows of p at level 1": (LEAVES, accepting(wrong_target_rows, "trees")),
    "with replacement": ("siblings", accepting(with_replacement)),
    "stale noise, plain": ("plain", stale_noise),
    "stale noise, hierarchy": ("hierarchy, chain", stale_noise),
    "best runner-up": ("hierarchy, refresh 0", best_runner_up),
    "runner-up of the next": (LEAVES, runner_up_of_the_next),
    "weak draws dropped, hierarchy": (LEAVES, weak_draws_dropped),
    "best draws": ("live tree", best_draws),
    "chain laws late": (LEAVES, chain_laws_late),
    "other chunks": ("hierarchy, chain", other_chunks_than_the_roots),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, many: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    cycle = prepared(name)
    plant(many)
    chance, _ = sampled(name)
    # Stages hold no trace of a fault, for the tests that share the cycle.
    cycle._programs.clear()
    assert chance < FAULTY


# --- the batched stand-ins are the ops ---


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_batched_attention_is_the_planned_one(paged: bool) -> None:
    heads, batch, page = Heads(4, 2, 8), 3, 4
    masks = [torch.ones(5, 7).tril(2).bool()] * batch
    plan = plan_trees(heads, masks, [9, 0, 21], device="cpu", dtype=torch.float32)
    q = torch.randn(batch * 5, 4, 8)
    table = None
    k, v = torch.randn(2, batch, 2, 32, 8)
    if paged:
        k, v = torch.randn(2, 40, 2, page, 8)
        table = torch.randint(40, (batch, 2, 8), dtype=torch.int32)
    expected = planned.run(q, k, v, plan, scale=0.3, table=table)
    torch.testing.assert_close(attention(q, k, v, plan, scale=0.3, table=table), expected)


def test_batched_row_moves_are_the_references() -> None:
    start = torch.tensor([0, 3, 9])
    k, v = torch.randn(2, 3, 2, 5, 4)
    caches = [torch.randn(2, 3, 2, 16, 4)]
    caches.append(caches[0].clone())
    append_rows(*caches[0], k, v, start)
    step_reference.append_rows(*caches[1], k, v, start)
    assert torch.equal(*caches)
    rows = [torch.randn(4, 3, 2, 16, 4)]
    rows.append(rows[0].clone())
    index = torch.tensor([[0, 2, 4, -1], [0, -1, -1, -1], [0, 1, 3, 6]])
    move_rows(rows[0], index, start)
    step_reference.move_rows(rows[1], index, start)
    assert torch.equal(*rows)
