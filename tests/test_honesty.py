"""Every drafter is honest: the tokens of its trees follow the laws that it reports, by enumeration."""

import itertools

import pytest
import torch
from enumeration import NOISE, exact_law, outcomes, summed, total_variation
from tables import DEEP_DRAFTERS, DRAFTERS, TableDecoding

from triforce_tree.token_tree import Context, TokenTree


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
