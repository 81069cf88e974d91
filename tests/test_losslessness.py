"""The output law is the target's, exactly: by enumeration of every draw, not by statistics.

Models are tables (``tables``), so the only thing tested is the algorithm: acceptance, residuals,
trees, catching up, committing. A seeded chi-square on transformers models closes the file.
"""

import itertools
from collections import Counter

import pytest
import torch
from enumeration import chi_square_p, exact_law, outcomes, summed, total_variation
from families import perturbed, prompt_of, tiny
from tables import (
    MakeDrafter,
    TableDecoding,
    TableModel,
    autoregressive,
    hierarchical,
    lookup,
    model,
)
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triforce_tree import sampling
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoder import Ending
from triforce_tree.hf_model import HFModel
from triforce_tree.hierarchy import Hierarchy
from triforce_tree.sampling import TokenLaw
from triforce_tree.token_tree import Context, TokenTree, chain
from triforce_tree.verify.acceptance import accept_sampling
from triforce_tree.verify.verifier import Verdict, Verifier

NOISE = 1e-6
TIGHT = {"budget": 8, "chunk": 2, "recent": 4, "sinks": 2, "window": 4}

DRAFTERS = {
    "autoregressive": autoregressive(),
    "prompt lookup": lookup(2),
    "chain": model("chain:2"),
    "static": model("static:0;1;0.0"),
    "sequoia": model("sequoia:3x2"),
    "best-first": model("best-first:2,2"),
    "three siblings": model("static:2"),
    "hierarchical, alone": hierarchical(autoregressive(), gamma=2, leaves=True),
    "hierarchical, lookup": hierarchical(lookup(1), gamma=1, leaves=True),
    "hierarchical, chain": hierarchical(model("chain:1"), gamma=2, leaves=False),
    "hierarchical, tree": hierarchical(model("static:0;1"), gamma=1, leaves=False),
}
# More levels than a vocabulary of 3 can afford: with 2 tokens a runner-up is the other one.
DEEP_DRAFTERS = {
    "chain": model("chain:2"),
    "chain, longer than needed": model("chain:4"),
    "best-first": model("best-first:2,2"),
    "gamma beyond the text": hierarchical(model("chain:1"), gamma=3, leaves=True),
    "chain below leaves": hierarchical(model("chain:2"), gamma=2, leaves=True),
    "tree below leaves": hierarchical(model("best-first:2,2"), gamma=1, leaves=True),
    "lookup below leaves": hierarchical(lookup(2), gamma=3, leaves=True),
    "two hierarchies": hierarchical(
        hierarchical(model("chain:1"), gamma=1, leaves=True, seed=13), gamma=2, leaves=True
    ),
    "two hierarchies, no leaves": hierarchical(
        hierarchical(model("chain:1"), gamma=1, leaves=False, seed=13), gamma=1, leaves=False
    ),
}
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


# --- acceptance of hand-made trees: whatever the tree, if its tokens were drawn as it says ---


def laws_of(rows: int, vocab_size: int = 3, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return (1.5 * logits).softmax(-1)


def law_after(tree_of, target: TableModel, length: int) -> float:
    """Distance from the target's law of the first ``length`` tokens after one acceptance.

    ``tree_of(random)`` makes a tree; shorter outputs are continued by the target itself.
    """

    def law(path: tuple[int, ...]) -> torch.Tensor:
        return target.logits(path).softmax(-1)

    def run(random):
        tree = tree_of(random)
        paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
        accepted = accept_sampling(tree, torch.stack([law(path) for path in paths]), random)
        new = [*(tree.tokens[i] for i in accepted.path[1:]), accepted.next_token]
        while len(new) < length:
            new.append(random.choose(law((0, *new))))
        return new[:length]

    expected = {
        tokens: float(torch.tensor([law((0, *tokens[:i]))[t] for i, t in enumerate(tokens)]).double().prod())
        for tokens in itertools.product(range(target.vocab_size), repeat=length)
    }
    return total_variation(exact_law(run), expected)


def test_a_chain_is_accepted_losslessly() -> None:
    q = laws_of(2)

    def tree(random):
        return chain([0, *(random.choose(row) for row in q)], q)

    assert law_after(tree, TableModel(3, seed=1), length=3) < NOISE


def test_siblings_drawn_without_replacement_are_accepted_losslessly() -> None:
    q = laws_of(2)

    def tree(random):
        [siblings] = random.choose_distinct(q[:1], [3])
        below = [random.choose(q[1]) for _ in siblings]
        return TokenTree([0, *siblings, *below], [-1, 0, 0, 0, 1, 2, 3], q, {0: 0, 1: 1, 2: 1, 3: 1})

    assert law_after(tree, TableModel(3, seed=1), length=2) < NOISE


@pytest.mark.parametrize("tokens", [[0, 1], [0, 1, 2], [0, 2, 0, 1]])
def test_deterministic_siblings_are_accepted_losslessly(tokens: list[int]) -> None:
    """Fixed tokens under the root, and one below the first of them."""
    tree = TokenTree([*tokens, 1], [-1, *[0] * (len(tokens) - 1), 1])
    assert law_after(lambda random: tree, TableModel(3, seed=1), length=3) < NOISE


def test_a_draft_law_that_equals_the_targets_is_always_accepted() -> None:
    target = TableModel(3, seed=1)
    q = target.logits((0,)).softmax(-1)[None]

    def accepted(random):
        return accept_sampling(chain([0, random.choose(q[0])], q), q.repeat(2, 1), random).path

    assert {tuple(path) for path, _ in outcomes(accepted)} == {(0, 1)}


def test_disjoint_supports_are_lossless() -> None:
    """A draft that proposes only what the target never says: all residual."""
    p = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    q = torch.tensor([[1.0, 0.0, 0.0]])

    def run(random):
        accepted = accept_sampling(chain([1, random.choose(q[0])], q), p, random)
        return (len(accepted.path), accepted.next_token)

    assert exact_law(run) == {(1, 1): 0.25, (1, 2): 0.75}


# --- honesty: the tree's tokens follow the laws that it reports ---


@pytest.mark.parametrize("name", [*DRAFTERS, "two hierarchies", "tree below leaves"])
def test_every_drafter_is_honest(name: str) -> None:
    """Given where a node stands, its children have the reported law, drawn without replacement.

    The law of (first child, second child, ...) at every node, over all the ways in which the
    drafter may grow its tree, against the product of the reported law and its remainders.
    """
    case = TableDecoding(vocab_size=3 if name in DRAFTERS else 2, new_tokens=1)
    make = {**DEEP_DRAFTERS, **DRAFTERS}[name]
    reported: dict[tuple, torch.Tensor] = {}

    def proposal(random) -> TokenTree:
        drafter = case.decoder(make, random).drafter
        context = Context(list(case.prompt))
        drafter.prefill(context)
        return drafter.propose(context)

    def families():
        for tree, chance in outcomes(proposal):
            for node, children in enumerate(tree.children):
                if not children:
                    continue
                drawn = tuple(tree.tokens[c] for c in children)
                place = (
                    tuple(tree.tokens[i] for i in tree.path(node)),
                    ranks(tree, node),
                    len(drawn),
                )
                law = tree.law(node)
                if law is None:
                    assert reported.setdefault((place, drawn), law) is None
                    yield (place, drawn), chance
                    continue
                known = reported.setdefault(place, law)
                assert torch.allclose(known, law, atol=1e-6), "one place, one law"
                yield (place, drawn), chance

    masses = summed(families())
    assert masses or name == "autoregressive"
    for place in {place for place, _ in masses}:
        drawn = {key: mass for (where, key), mass in masses.items() if where == place}
        total = sum(drawn.values())
        share = {key: mass / total for key, mass in drawn.items()}
        if place in reported:
            expected = exact_law(
                lambda random, place=place: random.choose_distinct(reported[place][None], [place[2]])[0]
            )
            assert total_variation(share, expected) < NOISE, place
        else:
            assert len(share) == 1, "without a law the tokens are a function of the context"


def ranks(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Sibling ranks along the path to a node."""
    path = tree.path(node)
    return tuple(tree.children[parent].index(child) for parent, child in itertools.pairwise(path))


# --- a wrong residual is found out ---


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


def test_siblings_drawn_with_replacement_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The i-th sibling must be judged by the law without the earlier ones."""
    monkeypatch.setattr(sampling, "without", lambda law, token: law)
    q = laws_of(1)

    def tree(random):
        return TokenTree([0, *(random.choose(q[0]) for _ in range(2))], [-1, 0, 0], q, {0: 0})

    assert law_after(tree, TableModel(3, seed=1), length=1) < NOISE, "consistent, if wasteful"
    monkeypatch.undo()
    assert law_after(tree, TableModel(3, seed=1), length=1) > 0.01


# --- real models ---


@pytest.mark.parametrize("refresh", [0, 1, 2])
@pytest.mark.parametrize(("tree", "leaves", "vocabulary"), [("chain:1", False, 3), ("chain:2", True, 2)])
def test_the_exact_law_of_the_whole_engine(
    refresh: int, tree: str, leaves: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers models and all three caches, every draw enumerated; the budget overflows.

    The middle level's law must not depend on the tokens that it judges, not even by way of the
    chunks that their queries would select.
    """
    target = tiny("llama", vocab_size=vocabulary, initializer_range=0.3)
    draft = tiny("llama", seed=3, vocab_size=vocabulary, num_hidden_layers=1)
    config = HierarchyConfig.from_options(
        **TIGHT, levels=3, gamma=1, tree=tree, leaves=leaves, refresh=refresh
    )
    hierarchy, law = Hierarchy(HFModel(target), HFModel(draft), config), TokenLaw()
    prompt = prompt_of(41, vocabulary)

    def run(random) -> list[int]:
        monkeypatch.setattr(Hierarchy, "_random", lambda self, seed, level: random)
        decoder = hierarchy.decoder(law, 0, len(prompt), 2, frozenset())
        blocks = decoder.decode(decoder.prefill(prompt), Ending(2))
        return [token for block in blocks for token in block]

    expected = exact_two_token_law(target, law, prompt)
    with hierarchy.active():
        assert total_variation(exact_law(run), expected) < NOISE


CHOICES, SAMPLES = 4, 600


@pytest.mark.slow
def test_the_whole_engine_on_transformers_models_by_chi_square() -> None:
    """Two tokens of a vocabulary of 50, top-k 4: 16 outcomes; the prompt exceeds the budget."""
    target = tiny("llama", vocab_size=50)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(CHOICES)])
    law = TokenLaw(processors)
    prompt = torch.randint(50, (41,)).tolist()
    config = HierarchyConfig.from_options(
        levels=3, gamma=2, tree="best-first:2,1", budget=24, chunk=4, recent=8, sinks=2, window=8
    )
    hierarchy = Hierarchy(HFModel(target), HFModel(perturbed(target, 0.1)), config)
    expected = exact_two_token_law(target, law, prompt)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with hierarchy.active():
        for seed in range(SAMPLES):
            decoder = hierarchy.decoder(law, seed, len(prompt), 2, frozenset())
            blocks = decoder.decode(decoder.prefill(prompt), Ending(2))
            counts[tuple(token for block in blocks for token in block)] += 1
            accepted += decoder.levels[-1].accepted
    assert accepted > SAMPLES / 4
    assert chi_square_p(counts, expected) > 1e-3


@torch.no_grad()
def exact_two_token_law(target, law: TokenLaw, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The target's law of two more tokens, from plain forwards, in float64."""

    def next_law(tokens: list[int]) -> torch.Tensor:
        logits = target(torch.tensor([tokens])).logits[0, -1:]
        return law.scores(logits, lambda: [tokens])[0].double().softmax(-1)

    first = next_law(prompt)
    result = {}
    for a in first.nonzero().flatten().tolist():
        second = next_law([*prompt, a])
        for b in second.nonzero().flatten().tolist():
            result[a, b] = float(first[a] * second[b])
    return result
