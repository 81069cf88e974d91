"""Suffix matching as a drafter."""

import random

import pytest
import torch

import triforce_tree
from tests.support.models.families import greedy, tiny
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.trees.device_shapes import device_tree_shape
from triforce_tree.trees.shapes import parse_shape
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.probs import DeviceProbs, Sampler
from triforce_tree.verify.sampling import ProbsFromLogits

CPU = torch.device("cpu")
CAPACITY = 450


class Proposing:
    """Suffix matching over sequences with committed tokens and a provisional chain."""

    def __init__(self, drafter: Drafter, prompts: list[list[int]], vocabulary: int = 0) -> None:
        self.drafter, self.sequences = drafter, [list(prompt) for prompt in prompts]
        batch = len(prompts)
        self.state = SequenceState(batch, CAPACITY, 4, 4, 0, CPU)
        # The buffers have tokens of earlier passes after the end of each sequence.
        self.state.tokens.random_(3)
        to_probs = DeviceProbs([ProbsFromLogits()], batch, 3, CPU, Noise)
        self.tree = TokenTree.of(device_tree_shape(parse_shape(drafter.tree)), batch, vocabulary, CPU)
        nodes = self.tree.probs.shape[1]
        self.sampler = Sampler(to_probs, to_probs.noise(nodes), nodes)
        self.write([[] for _ in prompts])
        drafter.bind(self.state)
        drafter.start(prompts)

    def write(self, chains: list[list[int]]) -> None:
        for b, (sequence, chain) in enumerate(zip(self.sequences, chains, strict=True)):
            row = torch.tensor([*sequence, *chain])
            self.state.tokens[b, : len(row)] = row
            self.state.length[b], self.state.chain[b] = len(sequence) - 1, len(chain)

    def propose(self, chains: list[list[int]] | None = None) -> list[list[int]]:
        """Returns the proposed tokens without unused ones."""
        none: list[list[int]] = [[] for _ in self.sequences]
        self.drafter.prepare(self.sequences, resumed=False)
        # The chain is what level 1 emits in the first round of a pass, so that a second round follows it.
        for each in [none] if chains is None else [none, chains]:
            self.write(each)
            self.drafter.propose(self.state, self.tree, self.sampler)
        chains = chains or none
        roots = [[*sequence, *chain][-1] for sequence, chain in zip(self.sequences, chains, strict=True)]
        assert self.tree.tokens[:, 0].tolist() == roots
        return [[token for token in row if token >= 0] for row in self.tree.tokens[:, 1:].tolist()]

    def commit(self, *tokens: list[int]) -> None:
        for sequence, more in zip(self.sequences, tokens, strict=True):
            sequence += more


def text(count: int, seed: int = 0, least: int = 100) -> list[int]:
    """Returns distinct tokens."""
    return random.Random(seed).sample(range(least, least + 10 * count), count)


def test_a_text_without_repetition_gets_no_proposal() -> None:
    assert Proposing(SuffixMatching(4), [text(50), [5]]).propose() == [[], []]


def test_longer_matches_get_longer_proposals() -> None:
    passage = text(80)
    lengths = []
    for matched in (1, 2, 4, 8, 20, 40, 70):
        prompt = [1, *passage, 2, *passage[80 - 10 - matched : 70]]
        [proposed] = Proposing(SuffixMatching(30), [prompt]).propose()
        assert proposed == [*passage[70:], 2, *prompt[82:]][: len(proposed)]
        lengths.append(len(proposed))
    assert lengths[0] == 0, "a single token is no match"
    assert lengths == sorted(lengths)
    assert lengths[1] >= 1
    assert lengths[4] >= 12
    assert lengths[-1] == 30


def test_the_index_follows_committed_tokens_and_not_the_chain() -> None:
    """Committed tokens are indexed, but tokens of a chain that the target rejected are not."""
    passage = text(40)
    run = Proposing(SuffixMatching(8), [[*text(20, 1, 9000)], text(20, 2, 9000)])
    assert run.propose() == [[], []]
    for first in range(0, 36, 3):
        run.commit(passage[first : first + 3], [])
        run.propose([[7, 8], []])
    # Plain decoding without the drafter has committed more tokens than a pass commits.
    run.commit([1, *text(30, 3, 20_000), 7], passage[:35])
    assert run.propose([[], passage[:4]]) == [[], passage[4 : 4 + len(run.propose([[], passage[:4]])[1])]]
    run.commit([], [])
    # The tokens 7, 8 were never committed.
    assert run.propose([[8], []])[0] == []
    run.commit(passage[:12], [])
    assert run.propose()[0][:5] == passage[12:17]


def test_a_new_start_forgets_the_last_sequences() -> None:
    passage = text(40)
    run = Proposing(SuffixMatching(8), [passage])
    run.sequences = [[1, *passage[5:15]]]
    run.write([[]])
    run.drafter.start(run.sequences)
    assert run.propose() == [[]]


def test_a_sequence_in_the_place_of_another_is_what_the_index_goes_on_from() -> None:
    """This also holds if the next batch, with the earlier text, begins before any proposal."""
    passage = text(60)
    run, fresh = (Proposing(SuffixMatching(8), [passage]) for _ in range(2))
    run.sequences = [text(20, 1)]
    run.write([[]])
    run.drafter.start_one(0, run.sequences)
    run.sequences = [passage]
    run.write([[]])
    run.drafter.start(run.sequences)
    for each in (run, fresh):
        each.commit(passage[20:28])
    assert run.propose() == fresh.propose() == [passage[28:36]]


def test_proposals_that_do_not_follow_become_shorter() -> None:
    """The acceptance of matches by their length is estimated during decoding for each sequence."""
    rng = random.Random(0)
    passage = text(60)
    run = Proposing(SuffixMatching(8), [passage, passage])
    lengths = []
    for _ in range(12):
        start = rng.randrange(40)
        run.commit([rng.randrange(50), *passage[start : start + 8]], [99, *passage[start : start + 8]])
        made = run.propose()
        lengths.append([len(proposed) for proposed in made])
        # In the first sequence all proposed tokens are wrong, in the second all are right.
        run.commit([50 + rng.randrange(40)], made[1])
    assert lengths[0][0] == lengths[0][1] > 4
    assert lengths[-1][0] <= 2
    assert lengths[-1][1] == 8


TARGET = tiny("llama-gqa", vocab_size=16)
SMALL = {"gamma": 5, "budget": 24, "chunk": 4, "recent": 8}
PHRASE = [3, 9, 1, 4, 12, 7]


@pytest.mark.parametrize("rounds", [1, 2, None])
@pytest.mark.parametrize("levels", [2, 3])
def test_greedy_tokens_equal_the_targets(levels: int, rounds: int | None) -> None:
    options = {**SMALL, "levels": levels, "rounds": rounds}
    engine = triforce_tree.load(TARGET, drafter="lookup", **load_arguments(options))
    prompts = [(PHRASE * 9)[:length] for length in (50, 37, 41)]
    out = engine.generate(prompts, max_new_tokens=40, do_sample=False)
    width = out.sequences.shape[1]
    for prompt, row in zip(prompts, out.sequences.tolist(), strict=True):
        assert row[width - 40 :] == greedy(TARGET, prompt, 40)
    assert out.levels[0].name == "lookup"
    if rounds is not None:
        # The greedy output of such a small model soon repeats itself.
        assert out.levels[-1].accepted > 20


def test_many_tokens_are_committed_in_a_pass_where_the_text_copies() -> None:
    passage = text(150)
    run = Proposing(SuffixMatching(15), [[*text(40, 1, 9000), *passage, *passage[:4]]])
    coming, passes = passage[4:], 0
    while coming:
        [proposed] = run.propose()
        same = [a == b for a, b in zip(proposed, coming, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        run.commit(coming[: accepted + 1])
        coming, passes = coming[accepted + 1 :], passes + 1
    assert passes <= len(passage) / 12


def test_a_copy_is_drafted_from_the_first_passes_on() -> None:
    """After the same prompt and half of its answer, the target generates the other half again."""
    prompt = [rng.randrange(16) for rng in [random.Random(3)] for _ in range(70)]
    written = greedy(TARGET, prompt, 60)
    again = [*prompt, *written, *prompt, *written[:30]]
    expected = greedy(TARGET, again, 30)
    engine = triforce_tree.load(TARGET, levels=2)
    out = engine.generate([again], max_new_tokens=30, do_sample=False)
    assert out.sequences[0, len(again) :].tolist() == expected
    assert out.levels[-1].accepted >= 15
    assert engine.config.trees == ("chain:15", "lookup:31")


def test_each_text_of_a_batch_learns_what_followed_its_own_matches() -> None:
    """The texts show it as they grow, whatever was proposed."""
    passage, drafter = text(60), SuffixMatching(8)
    run = Proposing(drafter, [[*passage, 9, *passage[:8]]] * 2)
    run.commit([1, 2, 3], passage[8:11])
    first, second = drafter.match(run.sequences)
    assert first.text.fresh == [(8, 0, True)]
    assert second.text.fresh == [(8, 3, False)]
    assert (first.common, second.common) == (0, 11)


def test_a_request_begins_without_what_an_earlier_one_has_shown() -> None:
    """So that the passes of a request with a seed follow from its own text."""
    passage, drafter = text(60), SuffixMatching(8)
    run = Proposing(drafter, [[*passage, *passage[:9]]])
    run.commit(passage[9:12])
    [before] = drafter.match(run.sequences)
    assert before.text.fresh
    drafter.start(run.sequences)
    [after] = drafter.match(run.sequences)
    assert after[:2] == before[:2]
    assert not after.text.fresh
    assert not any(count.tried for count in after.text.counts)
