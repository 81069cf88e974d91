"""What each drafter proposes. Honesty, the contract they share, stands in ``test_honesty``."""

import random

import pytest
from tables import TableDecoding, TableModel, autoregressive, hierarchical, lookup, model
from triforce_tree.drafters import PromptLookupDrafter

from triforce_tree.sampling import Random
from triforce_tree.token_tree import Context, TokenTree

GREEDY = TableDecoding(vocab_size=5, new_tokens=1, greedy=True)


def proposal(make, case: TableDecoding = GREEDY) -> TokenTree:
    drafter = case.decoder(make, Random(0)).drafter
    context = Context(list(case.prompt))
    drafter.prefill(context)
    return drafter.propose(context)


def test_autoregressive_proposes_nothing() -> None:
    assert proposal(autoregressive()).tokens == [1]


def test_a_greedy_model_proposes_its_best_tokens_in_order() -> None:
    tree = proposal(model("static:2;0.1;0.1.0"))
    table = TableModel(5, seed=11)
    assert len(tree) == 1 + 3 + 2 + 1
    assert tree.laws is None, "declared deterministic"
    for node, children in enumerate(tree.children):
        path = [*GREEDY.prompt, *(tree.tokens[i] for i in tree.path(node)[1:])]
        best = table.logits(path).topk(max(1, len(children))).indices.tolist()
        assert [tree.tokens[c] for c in children] == best[: len(children)]


def test_a_sampling_model_reports_the_law_of_every_node_it_expands() -> None:
    case = TableDecoding(vocab_size=5, new_tokens=1)
    tree, table = proposal(model("best-first:3,3,2"), case), TableModel(5, seed=11)
    assert tree.depth == 3
    for node, children in enumerate(tree.children):
        if children:
            path = [*case.prompt, *(tree.tokens[i] for i in tree.path(node)[1:])]
            assert tree.law(node).allclose(table.logits(path).softmax(-1))
            assert len({tree.tokens[c] for c in children}) == len(children)


@pytest.mark.parametrize("gamma", [1, 2, 7])
def test_a_hierarchy_gathers_at_least_gamma_tokens(gamma: int) -> None:
    """With a perfect draft every verification brings 3 tokens; each depth gets one leaf."""
    perfect = hierarchical(model("chain:2", seed=12), gamma, leaves=True, seed=12)
    tree, table = proposal(perfect), TableModel(5, seed=12)
    gathered = -(-gamma // 3) * 3
    assert tree.depth == gathered
    assert len(tree) == 1 + 2 * gathered
    path = list(GREEDY.prompt)
    for node in range(gathered):
        best, second = table.logits(path).topk(2).indices.tolist()
        assert [tree.tokens[c] for c in tree.children[node]] == [best, second]
        path.append(best)
    plain = proposal(hierarchical(model("chain:2", seed=12), gamma, leaves=False, seed=12))
    assert len(plain) == 1 + gathered


def test_nothing_is_gathered_after_an_end_token() -> None:
    free = proposal(hierarchical(model("chain:1"), gamma=9, leaves=False))
    stop = frozenset({free.tokens[3]})
    stopped = proposal(hierarchical(model("chain:1"), gamma=9, leaves=False, stop_tokens=stop))
    assert list(stopped.tokens) == list(free.tokens[: len(stopped)])
    assert stop & set(stopped.tokens[1:])
    assert len(stopped) < len(free)


def naive_lookup(text: list[int], context: list[int], length: int, ngram: int) -> list[int]:
    """The latest earlier place of the longest suffix, by search through the committed text."""
    for n in range(min(ngram, len(context)), 0, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == context[-n:]:
                return text[at : at + length]
    return []


@pytest.mark.parametrize(("length", "ngram"), [(1, 1), (4, 3), (8, 2)])
def test_prompt_lookup_is_a_search_through_the_text(length: int, ngram: int) -> None:
    drafter = PromptLookupDrafter(length, ngram)
    text = [random.randrange(4) for _ in range(5)]
    drafter.prefill(Context(text))
    for _ in range(80):
        ahead = [random.randrange(4) for _ in range(random.randint(0, 3))]
        tree = drafter.propose(Context(text).plus(ahead))
        assert list(tree.tokens[1:]) == naive_lookup(text, [*text, *ahead], length, ngram)
        assert tree.tokens[0] == [*text, *ahead][-1]
        text = [*text, *(random.randrange(4) for _ in range(random.randint(1, 3)))]
        drafter.commit(Context(text))


def test_lookup_without_a_match_proposes_nothing() -> None:
    assert proposal(lookup(4), TableDecoding(5, 1, prompt=(0, 1, 2), greedy=True)).tokens == [2]
