"""Prompt lookup proposes what a naive search finds, and leaves the target's greedy tokens as they are."""

import random

import pytest
import torch
from families import greedy, tiny

import triforce_tree
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.prompt_lookup import PromptLookup
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.probs import DeviceProbs, Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

CPU = torch.device("cpu")
MOST_COMMITTED, MOST_CHAIN = 30, 4


def by_search(committed: list[int], chain: list[int], length: int, ngram: int) -> list[int]:
    """What follows the last occurrence of the longest suffix; only committed tokens are searched."""
    sequence = [*committed, *chain]
    for n in range(min(ngram, len(sequence)), 0, -1):
        for end in range(len(committed) - 1, n - 1, -1):
            if committed[end - n : end] == sequence[-n:]:
                return committed[end : end + length]
    return []


def proposed(
    drafter: PromptLookup, sequences: list[tuple[list[int], list[int]]]
) -> tuple[list[int], list[list[int]]]:
    """Roots and proposals after (committed tokens, provisional chain) of each sequence."""
    batch = len(sequences)
    state = SequenceState(batch, MOST_COMMITTED + MOST_CHAIN + 8, MOST_CHAIN, 4, 0, CPU)
    # Tokens after the end of a sequence are left over from earlier passes.
    state.tokens.random_(3)
    for b, (committed, chain) in enumerate(sequences):
        state.tokens[b, : len(committed) + len(chain)] = torch.tensor([*committed, *chain])
    state.length.copy_(torch.tensor([len(committed) - 1 for committed, _ in sequences]))
    state.chain.copy_(torch.tensor([len(chain) for _, chain in sequences]))
    to_probs = DeviceProbs(ProbsFromLogits(greedy=True), CPU, Noise)
    tree = TokenTree.of(device_tree_shape(parse_shape(drafter.tree)), batch, 0, CPU)
    drafter.bind(state)
    drafter.propose(state, tree, Sampler(to_probs, to_probs.noise(batch, 0, 0)))
    trees = tree.tokens.tolist()
    for tokens in trees:
        used = [token >= 0 for token in tokens]
        assert used == sorted(used, reverse=True), "a chain has no gaps"
    chains = [[token for token in tokens[1:] if token >= 0] for tokens in trees]
    return [tokens[0] for tokens in trees], chains


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_proposals_equal_a_naive_search(length: int, ngram: int, alphabet: int) -> None:
    rng = random.Random(length + 10 * ngram + 100 * alphabet)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(alphabet) for _ in range(rng.randint(least, most))]

    # A ragged batch that includes sequences of a single token, with and without a chain.
    sequences = [([1], []), ([1], [1, 1]), ([1, 0], [1])]
    sequences += [(tokens(1, MOST_COMMITTED), tokens(0, MOST_CHAIN)) for _ in range(150)]
    roots, chains = proposed(PromptLookup(length, ngram), sequences)
    assert roots == [[*committed, *chain][-1] for committed, chain in sequences]
    assert chains == [by_search(committed, chain, length, ngram) for committed, chain in sequences]
    lengths = {len(chain) for chain in chains}
    assert 0 in lengths
    assert max(lengths) >= min(length, 4)
    assert length == 1 or len(lengths) > 2


def test_a_sequence_without_repetition_gets_no_proposal() -> None:
    assert proposed(PromptLookup(4), [([0, 1, 2], []), ([0, 1, 0], [])]) == ([2, 0], [[], [1, 0]])


TARGET = tiny("llama-gqa", vocab_size=16)
SMALL = {"gamma": 5, "lookup": 4, "budget": 24, "chunk": 4, "recent": 8}
PHRASE = [3, 9, 1, 4, 12, 7]


@pytest.mark.parametrize("rounds", [1, 2, None])
@pytest.mark.parametrize("levels", [2, 3])
def test_greedy_tokens_equal_the_targets(levels: int, rounds: int | None) -> None:
    engine = triforce_tree.load(TARGET, drafter="lookup", levels=levels, rounds=rounds, **SMALL)
    prompts = [(PHRASE * 9)[:length] for length in (50, 37, 41)]
    out = engine.generate(prompts, max_new_tokens=40, do_sample=False)
    width = out.sequences.shape[1]
    for prompt, row in zip(prompts, out.sequences.tolist(), strict=True):
        assert row[width - 40 :] == greedy(TARGET, prompt, 40)
    assert out.levels[0].name == "lookup"
    if rounds is not None:
        # The greedy output of so small a model soon repeats itself.
        assert out.levels[-1].accepted > 20
