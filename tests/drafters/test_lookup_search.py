"""Prompt lookup on the device equals a naive search in the committed tokens."""

import pytest
import torch

from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.prompt_lookup import PromptLookup
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape

BATCH, CPU = 5, torch.device("cpu")


def naive_lookup(committed: list[int], context: list[int], length: int, ngram: int) -> list[int]:
    """What followed the last occurrence of the longest suffix of ``context`` in the committed tokens."""
    for n in range(min(ngram, len(context)), 0, -1):
        for end in range(len(committed) - 1, n - 1, -1):
            if committed[end - n : end] == context[-n:]:
                return committed[end : end + length]
    return []


def propose(lookup: PromptLookup, committed: list[list[int]], chains: list[list[int]]) -> TokenTree:
    """Trees after these committed tokens and the provisional chains that follow them."""
    state = SequenceState(BATCH, 60, 4, 1, 0, CPU)
    # Tokens after the newest one are left over from other passes, and must not be found.
    state.tokens.random_(4)
    for b, (tokens, chain) in enumerate(zip(committed, chains, strict=True)):
        state.tokens[b, : len(tokens) + len(chain)] = torch.tensor([*tokens, *chain])
        state.length[b], state.chain[b] = len(tokens) - 1, len(chain)
    tree = TokenTree.of(device_tree_shape(parse_shape(lookup.tree)), BATCH, 0, CPU)
    lookup.bind(state)
    lookup.propose(state, tree, None)  # type: ignore[arg-type] # it draws no tokens
    return tree


@pytest.mark.parametrize(("length", "ngram"), [(1, 1), (4, 3), (8, 2)])
def test_lookup_finds_the_last_occurrence_of_the_longest_suffix(
    length: int, ngram: int, generator: torch.Generator
) -> None:
    def random_tokens(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(4, (count,), generator=generator).tolist()

    found = missing = 0
    for _ in range(40):
        committed = [random_tokens(1, 40) for _ in range(BATCH)]
        chains = [random_tokens(0, 4) for _ in range(BATCH)]
        tree = propose(PromptLookup(length, ngram), committed, chains)
        for b in range(BATCH):
            context = [*committed[b], *chains[b]]
            expected = naive_lookup(committed[b], context, length, ngram)
            assert tree.tokens[b, 0] == context[-1]
            assert tree.tokens[b, 1:].tolist() == expected + [-1] * (length - len(expected))
            found, missing = found + bool(expected), missing + (not expected)
    assert found > 50
    assert missing > 3


def test_a_sequence_without_repetition_gets_no_proposal() -> None:
    tree = propose(PromptLookup(4), [[0, 1, 2]] * BATCH, [[]] * BATCH)
    assert tree.tokens.tolist() == [[2, -1, -1, -1, -1]] * BATCH
