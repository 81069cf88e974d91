"""Sequences with different sampling options in one batch: each follows the distribution of its own."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.distributions.enumeration import NOISE, total_variation
from tests.support.distributions.generation_cases import BOTH, Case
from tests.support.distributions.generation_distributions import target_distribution
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.verify.adjustments import Adjustments
from triforce_tree.verify.paths import NodePaths
from triforce_tree.verify.probs import DeviceProbs
from triforce_tree.verify.sampling import ProbsFromLogits
from triforce_tree.verify.sampling_options import GeneratedTokenPenalties

PROMPT = Case(2, 3, 2).prompt
NEW = len(PROMPT)
COLD, HOT = TemperatureLogitsWarper(0.6), TemperatureLogitsWarper(1.7)


def sampled(*processors: object) -> ProbsFromLogits:
    return ProbsFromLogits(LogitsProcessorList(processors))


OPTIONS = {
    "cold": sampled(COLD),
    "hot": sampled(HOT),
    "top-k": sampled(HOT, TopKLogitsWarper(2)),
    "top-p": sampled(TopPLogitsWarper(0.8)),
    "min-p": sampled(HOT, TopKLogitsWarper(3), MinPLogitsWarper(0.4)),
    "repetition": sampled(RepetitionPenaltyLogitsProcessor(1.8), COLD),
    "frequency": sampled(GeneratedTokenPenalties(NEW, 0.9, 0.0)),
    "presence": sampled(GeneratedTokenPenalties(NEW, -0.2, 1.5), HOT),
    "bias": sampled(SequenceBiasLogitsProcessor({(1,): 1.0, (0, 2): 2.0, (2, 1, 0): -1.5})),
    "bad words": sampled(NoBadWordsLogitsProcessor([[2], [0, 1], [1, 1, 1]])),
    "suppressed": sampled(SuppressTokensLogitsProcessor([0]), COLD),
    "least length": sampled(MinLengthLogitsProcessor(NEW + 2, [0])),
    "all": sampled(
        SequenceBiasLogitsProcessor({(1,): -0.5, (0, 2): 1.0}), RepetitionPenaltyLogitsProcessor(0.7),
        NoBadWordsLogitsProcessor([[1, 1]]), MinLengthLogitsProcessor(NEW + 1, [2]),
        GeneratedTokenPenalties(NEW, 0.5, 0.5), COLD, TopKLogitsWarper(3), TopPLogitsWarper(0.95),
    ),
    "greedy": ProbsFromLogits(greedy=True),
    "greedy, repetition": ProbsFromLogits(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)]), True),
}  # fmt: skip
TREES = {
    "tree": Case(2, 3, 3, None, {"tree": "static:0;1", "runner_ups": False}),
    "hierarchy": Case(3, 3, 2, 1, {"tree": "chain:1", "runner_ups": True, "gamma": 2}),
}


def distance(case: Case, name: str, neighbours: list[str], **how: object) -> float:
    """Returns the distance of the texts with some options from the target's distribution."""
    own = OPTIONS[name]
    generations = case.generations(neighbours=[OPTIONS[each] for each in neighbours], **how)
    made = generations.distribution(own, case.tokens, case.passes, case.plan)
    return total_variation(made, target_distribution(generations.target, own, PROMPT, case.tokens))


def others(name: str) -> list[str]:
    """Returns the options of three neighbours."""
    return [each for each in ("all", "greedy", "hot", "cold") if each != name][:3]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_sequence_follows_its_own_options(name: str, tree: str) -> None:
    assert distance(TREES[tree], name, others(name)) < NOISE


@pytest.mark.parametrize("name", OPTIONS)
def test_one_alone_follows_them_too(name: str) -> None:
    assert distance(TREES["tree"], name, []) < NOISE


@pytest.mark.parametrize("beside", [["cold"], ["greedy"], ["top-p"], ["all"]], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_stages_that_serve_more_options_draw_from_the_same_distribution(name: str, beside: list[str]) -> None:
    """Where making stages takes seconds, a batch of fewer options is decoded by those that exist."""
    case, own = Case(2, 3, 2, None, {"tree": "static:0;1", "runner_ups": False}), OPTIONS[name]
    generations = case.generations(neighbours=[OPTIONS[each] for each in beside])
    program = generations.program
    program.prepare(*OPTIONS.values())
    widest, program.makes_slowly = program.selected, True
    made = generations.distribution(own, case.tokens, case.passes, case.plan)
    assert program.selected is widest
    assert list(program.prepared.values()) == [widest]
    assert total_variation(made, target_distribution(generations.target, own, PROMPT, case.tokens)) < NOISE


def test_stages_of_fewer_options_serve_no_others() -> None:
    case = Case(2, 3, 2, None, {"tree": "chain:1", "runner_ups": False})
    program = case.generations(batch=2).program
    program.makes_slowly = True
    # Each adds an option that those before it do not have.
    for count, name in enumerate(["greedy", "hot", "top-k", "bias", "repetition"], 1):
        program.prepare(OPTIONS[name])
        assert len(program.prepared) == count
    program.prepare(OPTIONS["hot"], OPTIONS["greedy"])
    assert program.selected.to_probs.mixed
    kinds = [stages.to_probs.kind for stages in program.prepared.values()]
    assert len(set(kinds)) == len(kinds)
    program.prepare(OPTIONS["hot"], masked=True)
    assert program.masked


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", OPTIONS)
def test_on_a_gpu(name: str, tree: str) -> None:
    case = TREES[tree]
    generations = case.generations("cuda", neighbours=[OPTIONS[n] for n in others(name)], operators=True)
    made = generations.distribution(OPTIONS[name], case.tokens, case.passes, case.plan)
    expected = target_distribution(generations.target, OPTIONS[name], PROMPT, case.tokens)
    assert total_variation(made, expected) < 1e-5


@pytest.mark.parametrize("name", ["repetition", "bad words", "frequency"])
@pytest.mark.parametrize(
    "case",
    [
        Case(
            3, 3, 3, None, {**BOTH, "gamma": 2, "rounds": None}, plan=(PassKind(3, 1), PassKind(2, 1), PLAIN)
        ),
        Case(3, 3, 3, 1, {"tree": "chain:1", "runner_ups": False, "tail_tree": True, "gamma": 2}, layers=2),
        Case(2, 3, 4, 1, {"tree": "best-first:2,1,1", "runner_ups": False}),
    ],
    ids=["levels change", "tail", "best-first"],
)
def test_what_reads_the_text_in_other_trees(name: str, case: Case) -> None:
    processors = [p for p in OPTIONS[name].processors if not isinstance(p, NoBadWordsLogitsProcessor)]
    if name == "bad words":
        processors = [NoBadWordsLogitsProcessor([[0, 1], [1, 0, 0], [2, 2]])]
    own = ProbsFromLogits(LogitsProcessorList(processors))
    generations = case.generations(neighbours=[OPTIONS["cold"], OPTIONS["greedy"]])
    made = generations.distribution(own, case.tokens, case.passes, case.plan)
    expected = target_distribution(generations.target, own, case.prompt, case.tokens)
    assert total_variation(made, expected) < NOISE


Plant = Callable[[pytest.MonkeyPatch], None]


def neighbours_options(patch: pytest.MonkeyPatch) -> None:
    """A sequence has the options of the one beside it."""
    begin = DeviceProbs.begin

    def beside(self: DeviceProbs, index: int, *given: object) -> None:
        begin(self, (index + 1) % len(self.temperature), *given)

    patch.setattr(DeviceProbs, "begin", beside)


def committed_alone(patch: pytest.MonkeyPatch) -> None:
    """Penalties count committed tokens, and none of the tree."""
    uncommitted = NodePaths.uncommitted

    def nothing(self: NodePaths) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, used = uncommitted(self)
        return tokens, torch.zeros_like(used)

    patch.setattr(NodePaths, "uncommitted", nothing)


def the_parents_path(patch: pytest.MonkeyPatch) -> None:
    """Words are matched with the tokens up to the parent of a node."""
    newest = NodePaths.newest
    patch.setattr(NodePaths, "newest", lambda self, count: newest(self, count + 1)[..., :-1])


def nothing_counted(patch: pytest.MonkeyPatch) -> None:
    """Tokens of earlier passes are forgotten."""
    patch.setattr(Adjustments, "committed", lambda self, new: None)


def drawn_greedy(patch: pytest.MonkeyPatch) -> None:
    """Greedy sequences draw."""
    begin = DeviceProbs.begin

    def drawn(self: DeviceProbs, *given: object) -> None:
        begin(self, *given)
        self.greedy_rows.zero_()
        self._greedy_indices.clear()

    patch.setattr(DeviceProbs, "begin", drawn)


FAULTS: dict[str, tuple[str, Plant]] = {
    "the neighbour's options": ("cold", neighbours_options),
    "the neighbour's penalties": ("repetition", neighbours_options),
    "the neighbour's words": ("bad words", neighbours_options),
    "penalties without the tree": ("frequency", committed_alone),
    "words of the parent": ("bad words", the_parents_path),
    "penalties without earlier passes": ("presence", nothing_counted),
    "greedy sequences draw": ("greedy", drawn_greedy),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = FAULTS[fault]
    plant(monkeypatch)
    case = Case(2, 3, 2, None, {"tree": "chain:1", "runner_ups": False})
    assert distance(case, name, others(name), batch=1) > 100 * NOISE


def test_padding_counts_as_transformers_counts_it() -> None:
    """A batch of two lengths: the options of each sequence are those of its own padding."""
    ignored = torch.tensor([3, 0])
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=ignored),
            MinLengthLogitsProcessor(9, 1),
            GeneratedTokenPenalties(6, 1.0, 0.5),
        ]
    )
    padded, whole = (
        ProbsFromLogits(processors, padding=[0] * count, number=number).options
        for number, count in enumerate((3, 0))
    )
    assert (padded.new_from, padded.repeated_from, padded.least_tokens) == (3, 0, 6)
    assert (whole.new_from, whole.repeated_from, whole.least_tokens) == (6, 0, 9)
    counted = ProbsFromLogits(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]), padding=[7, 7])
    assert counted.options.padding == {7}
    word = ProbsFromLogits(LogitsProcessorList([NoBadWordsLogitsProcessor([[7, 1]])]), padding=[7])
    assert not word.in_stages, "a word that may begin in the padding"
