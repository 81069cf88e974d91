"""Windows of a draft after tokens that were committed without a tree."""

from typing import Any

import pytest

from tests.support.models.caught_up import LENGTHS, TEXT, begun, check_windows
from tests.support.models.program_cases import draft_of, model

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_windows_are_those_of_the_text(family: str) -> None:
    check_windows(model(family), draft_of(family), 2e-5, keeps_all=family == "llama-gqa")


@pytest.mark.parametrize("count, forwards", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 8)])
def test_sequences_share_a_forward(count: int, forwards: int) -> None:
    program = begun(model("llama-gqa"), draft_of("llama-gqa"), [40 + b for b in range(8)])
    seen: list[Any] = []
    program.drafter.model.model.register_forward_pre_hook(lambda *given: seen.append(given))
    program.drafter.prepare([TEXT[: 40 + b + count] for b in range(8)], True)
    assert len(seen) == forwards


def test_sequences_without_new_tokens_do_not_pass_through_the_draft() -> None:
    program = begun(model("llama-gqa"), draft_of("llama-gqa"), [before for before, _ in LENGTHS])
    seen: list[Any] = []
    program.drafter.model.model.register_forward_pre_hook(lambda *given: seen.append(given))
    program.drafter.prepare([None] * len(LENGTHS), True)
    assert not seen
