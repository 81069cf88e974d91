"""A draft model with another padded size of the vocabulary or another tokenizer."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

from tests.support.distributions.enumeration import NOISE
from tests.support.distributions.generation_cases import CASES
from tests.support.models.program_cases import (
    GREEDY,
    NEW,
    PROMPTS,
    SAMPLED,
    SMALL,
    decoded,
    draft_of,
    model,
    references,
)
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.token_map import MappedModel, TokenMap
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")
V = 64


class Fixed:
    """A model that returns fixed logits, and stores the token ids of its calls."""

    capturable = True
    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self.model: Any = None
        self.logits = logits

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Any, last: int = 0, states: Any = None
    ) -> Tensor:
        self.tokens = tokens
        return self.logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probs_are_the_drafts_own_renormalised_over_shared_tokens(dtype: torch.dtype) -> None:
    ids = TokenMap(torch.tensor([3, 0, 0, 2]), torch.tensor([3, 0, -1, 2]))
    own = Fixed(torch.randn(2, 3, 5).mul(4).to(dtype))
    probs = MappedModel(own, ids)(torch.tensor([[0, 2], [3, 1]]), torch.zeros(2, 2), None).softmax(-1)
    assert own.tokens.tolist() == [[3, 0], [2, 0]]
    before = own.logits.float().softmax(-1)
    expected = torch.stack([before[..., 3], before[..., 0], torch.zeros(2, 3), before[..., 2]], -1)
    torch.testing.assert_close(probs, expected / expected.sum(-1, keepdim=True))
    assert not probs[..., 2].any()


def with_rows(model: PreTrainedModel, rows: list[int]) -> PreTrainedModel:
    """Returns the model with these rows of its embeddings and head, in this order; -1 means a random row."""
    config = copy.deepcopy(model.config)
    config.vocab_size = len(rows)
    other = type(model)(config)
    weights = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        random = torch.randn(1, weights[name].shape[1])
        weights[name] = torch.cat([weights[name], random])[rows]
    other.load_state_dict(weights)
    return other.float().eval()


def program(draft: PreTrainedModel, levels: int, ids: TokenMap | None) -> DecodingProgram:
    config = HierarchyConfig.from_options(**SMALL)
    drafter = TreeDrafter(HFModel(draft), config, ids)
    return DecodingProgram(HFModel(model("llama-gqa")), drafter, config, len(PROMPTS), 150, levels)


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("size", [40, 100])
def test_greedy_text_is_the_targets_under_drafts_of_other_sizes(size: int, levels: int) -> None:
    """Prompts and new tokens have ids that the smaller vocabulary of the draft lacks."""
    assert max(max(new) for new in references()) >= 40
    draft = with_rows(draft_of("llama-gqa"), [*range(min(V, size)), *[-1] * (size - V)])
    new, loop = decoded(program(draft, levels, TokenMap.padded(V, size)), PROMPTS, NEW)
    assert new == references()
    assert all(level.accepted for level in loop.levels[1:])


def statistics(loop: DecodingLoop) -> list[tuple[int, int, int]]:
    return [(level.forwards, level.proposed, level.accepted) for level in loop.levels]


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_padding_is_accepted_as_one_without(to_probs: ProbsFromLogits) -> None:
    """Ids beyond the target's vocabulary get no probability, although their logits are large."""
    draft = draft_of("llama-gqa")
    padded = with_rows(draft, [*range(V), *[-1] * V])
    with torch.no_grad():
        padded.lm_head.weight[V:] *= 10
    own, before = decoded(program(draft, 3, None), PROMPTS, NEW, to_probs)
    new, after = decoded(program(padded, 3, TokenMap.padded(V, 2 * V)), PROMPTS, NEW, to_probs)
    assert new == own
    assert statistics(after) == statistics(before)


@pytest.mark.parametrize("to_probs", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_of_permuted_tokens_is_accepted_as_the_original(to_probs: ProbsFromLogits) -> None:
    draft, order = draft_of("llama-gqa"), torch.randperm(V, generator=torch.Generator().manual_seed(3))
    ids = order.argsort()
    own, before = decoded(program(draft, 3, None), PROMPTS, NEW, to_probs)
    permuted = with_rows(draft, order.tolist())
    new, after = decoded(program(permuted, 3, TokenMap(ids, ids)), PROMPTS, NEW, to_probs)
    assert new == own
    assert statistics(after) == statistics(before)
    assert after.levels[1].accepted
    _, confused = decoded(program(permuted, 3, None), PROMPTS, NEW, to_probs)
    assert confused.levels[1].accepted < after.levels[1].accepted


def test_a_draft_all_of_whose_tokens_are_forbidden_reports_a_distribution() -> None:
    """The distribution is not NaN: allowed tokens that the draft lacks are proposed."""
    draft = with_rows(draft_of("llama-gqa"), [*range(V // 2)])
    forbidden = LogitsProcessorList([SuppressTokensLogitsProcessor([*range(V // 2)])])
    made = program(draft, 2, TokenMap.padded(V, V // 2))
    decoded(made, PROMPTS, [3] * 3, ProbsFromLogits(forbidden))
    probs = made.stage("draft").tree.probs
    assert not probs[..., : V // 2].any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(probs.shape[:2]))


def test_the_operators_decide_as_their_definitions() -> None:
    for name in ("narrower draft, best-first", "other tokens, runner-ups"):
        case = CASES[name]
        assert case.distance(case.generations(operators=True)) < NOISE
