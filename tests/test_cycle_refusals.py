"""What the device cycle refuses in words: NaN logits, and settings that it cannot carry out."""

import pytest
import torch
from cycle_cases import GREEDY, NEW, PROMPTS, SAMPLED, cycle_of, decoded, draft_of, model, references
from families import tiny

from triforce_tree.sampling import TokenLaw

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nan_logits_are_refused(levels: int, law: TokenLaw) -> None:
    target = tiny("llama-gqa")
    cycle = cycle_of(target, draft_of("llama-gqa"), levels, 3)
    weight = target.lm_head.weight[5].clone()
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match=r"NaN logits.*dtype=torch\.float32"):
        decoded(cycle, PROMPTS, NEW, law)
    with torch.no_grad():
        target.lm_head.weight[5] = weight
    assert decoded(cycle, PROMPTS, NEW)[0] == references(), "and it is fit for use again"


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("law", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_that_returns_nan_is_refused_or_harmless(levels: int, law: TokenLaw) -> None:
    draft = tiny("llama-gqa", seed=3)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    cycle = cycle_of(model("llama-gqa"), draft, levels, 3)
    refusal = ""
    try:
        new, _ = decoded(cycle, PROMPTS, NEW, law)
    except ValueError as error:
        refusal = str(error)
    assert "NaN" in refusal or not law.greedy or new == references(), refusal


@pytest.mark.parametrize("levels", [2, 3])
def test_several_levels_need_a_draft_and_a_tree_of_fixed_size(levels: int) -> None:
    class Live:
        def expands(self, ranks: tuple[int, ...]) -> bool:
            return not ranks

        def branch(self, ranks: object, values: object, laws: torch.Tensor) -> list[int]:
            return [1]

    for draft, tree in ((None, "chain:2"), (draft_of("llama-gqa"), Live())):
        with pytest.raises(ValueError, match="draft model and a tree of fixed size"):
            cycle_of(model("llama-gqa"), draft, levels, tree=tree)
