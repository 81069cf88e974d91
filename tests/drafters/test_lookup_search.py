"""Prompt lookup on the device is a search through the committed text."""

import pytest
import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.prompt_lookup import PromptLookup
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

BATCH, CPU = 5, torch.device("cpu")


def naive_lookup(text: list[int], context: list[int], length: int, ngram: int) -> list[int]:
    """What followed the latest earlier place of the longest suffix."""
    for n in range(min(ngram, len(context)), 0, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if text[at - n : at] == context[-n:]:
                return text[at : at + length]
    return []


def propose(lookup: PromptLookup, texts: list[list[int]], ahead: list[list[int]]) -> TokenTree:
    """Trees behind these texts, and provisional tokens that level 1 has gathered behind them."""
    state = SequenceState(BATCH, 60, 4, 1, 0, CPU)
    # What stands behind the newest token is left over from other passes, and not to be found.
    state.tokens.random_(4)
    for b, (text, more) in enumerate(zip(texts, ahead, strict=True)):
        state.tokens[b, : len(text) + len(more)] = torch.tensor([*text, *more])
        state.length[b], state.chain[b] = len(text) - 1, len(more)
    tree = TokenTree.of(device_tree_shape(parse_shape(lookup.tree)), BATCH, 0, CPU)
    lookup.bind(state)
    lookup.propose(state, tree, None)  # type: ignore[arg-type] # it draws nothing
    return tree


@pytest.mark.parametrize(("length", "ngram"), [(1, 1), (4, 3), (8, 2)])
def test_it_finds_the_latest_place_of_the_longest_suffix(
    length: int, ngram: int, generator: torch.Generator
) -> None:
    def some(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(4, (count,), generator=generator).tolist()

    found = missing = 0
    for _ in range(40):
        texts, ahead = [some(1, 40) for _ in range(BATCH)], [some(0, 4) for _ in range(BATCH)]
        tree = propose(PromptLookup(length, ngram), texts, ahead)
        for b in range(BATCH):
            expected = naive_lookup(texts[b], [*texts[b], *ahead[b]], length, ngram)
            assert tree.tokens[b, 0] == [*texts[b], *ahead[b]][-1]
            assert tree.tokens[b, 1:].tolist() == expected + [-1] * (length - len(expected))
            found, missing = found + bool(expected), missing + (not expected)
    assert found > 50
    assert missing > 3


def test_a_text_that_repeats_nothing_gets_no_proposal() -> None:
    tree = propose(PromptLookup(4), [[0, 1, 2]] * BATCH, [[]] * BATCH)
    assert tree.tokens.tolist() == [[2, -1, -1, -1, -1]] * BATCH
