"""Off the GPU no graph fixes the shape of a forward: empty slots of a tree are left out of it."""

import pytest
import torch

from tests.support.models.families import prompt_of
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    decoded,
    draft_of,
    model,
    program_of,
    references,
)
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.step_model import StepModel
from triforce_tree.trees.device_shapes import DeviceTreeShape
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.fixture
def tokens_of_forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int]]:
    """(the view, tokens of each sequence) of every forward, in their order."""
    seen: list[tuple[object, int]] = []
    call = StepModel.__call__

    def recorded(self: StepModel, tokens: torch.Tensor, positions: torch.Tensor, view, *rest, **more):
        seen.append((view, tokens.shape[1]))
        return call(self, tokens, positions, view, *rest, **more)

    monkeypatch.setattr(StepModel, "__call__", recorded)
    return seen


def forward_whole_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenTree, "used_nodes", property(lambda self: self.nodes))


def test_used_nodes_of_a_batch() -> None:
    tree = TokenTree.of(DeviceTreeShape((2, 2)), 2, 9, torch.device("cpu"))
    assert tree.used_nodes == 1
    tree.tokens[0, 2] = 0
    assert tree.used_nodes == 3
    tree.tokens[1, 4] = 7
    assert tree.used_nodes == tree.nodes == 5
    assert tree.first(5) is tree
    part = tree.first(3)
    assert part.nodes == 3
    assert part.depth == 2
    assert [len(x[0]) for x in (part.tokens, part.parents, part.mask_words, part.probs_rows)] == [3] * 4
    assert part.depths.tolist() == [0, 1, 1]
    part.tokens[1, 1] = 5
    assert tree.tokens[1, 1] == 5


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("levels, runner_ups", [(2, None), (3, True), (3, False)])
def test_output_is_that_of_whole_trees(
    levels: int, runner_ups: bool | None, to_probs: ProbsFromLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains that end long before gamma."""
    options = {"gamma": 9, "rounds": 1, "runner_ups": runner_ups}
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), levels, 3, **options)
    cut, _ = decoded(program, PROMPTS, NEW, to_probs)
    forward_whole_trees(monkeypatch)
    whole, _ = decoded(program, PROMPTS, NEW, to_probs)
    assert cut == whole
    assert not to_probs.greedy or cut == references()


def test_level_2_verifies_only_the_tokens_of_the_chain(tokens_of_forwards: list[tuple[object, int]]) -> None:
    program = program_of(model("llama-gqa"), draft_of("llama-gqa"), 3, gamma=9, rounds=1, runner_ups=False)
    proposed: list[int] = []
    report = program.state.pass_results
    program.state.pass_results = lambda: proposed.append(int(program.state.proposed[0])) or report()
    new, _ = decoded(program, PROMPTS[:1], NEW[:1])
    assert new == references()[:1]
    full = program.stage("target").view
    assert [count for view, count in tokens_of_forwards if view is full] == [n + 1 for n in proposed]
    assert 1 < max(proposed) < 9


@pytest.mark.parametrize("levels", [2, 3])
def test_a_lookup_that_finds_nothing_forwards_the_root_alone(
    levels: int, tokens_of_forwards: list[tuple[object, int]]
) -> None:
    """No token of the prompt occurs twice, so that only new tokens can be found again."""
    target = HFModel(model("llama-gqa"))
    config = HierarchyConfig.from_options(
        levels=levels, tree="chain:5", gamma=4, rounds=1, budget=24, chunk=4, recent=8
    )
    program = DecodingProgram(target, SuffixMatching(5), config, 1, 150, levels)
    vocabulary = sorted({*prompt_of(60)})
    decoded(program, [vocabulary], [3])
    judged = program.stage("target" if levels == 2 else "retrieval_refresh").view
    assert next(count for view, count in tokens_of_forwards if view is judged) == 1
    tokens_of_forwards.clear()
    decoded(program, [[*vocabulary, *vocabulary[:7]]], [3])
    assert next(count for view, count in tokens_of_forwards if view is judged) == 6
