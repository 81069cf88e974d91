from typing import Any

import pytest

from triforce_tree.decoding import full_cache
from triforce_tree.kv.shared import choice


@pytest.fixture(autouse=True)
def _prefixes_of_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are stored once that are too short to be worth it in larger models."""
    monkeypatch.setattr(choice, "LEAST", 16)
    monkeypatch.setattr(choice, "LEAST_SPARED", 1)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prefill that were computed; rows without a sequence have none."""
    prefill, counts = full_cache.prefill, []

    def counted(model: Any, store: Any, row: int, tokens: list[int], *how: Any) -> None:
        counts.append(len(tokens) - how[3])
        prefill(model, store, row, tokens, *how)

    monkeypatch.setattr(full_cache, "prefill", counted)
    return counts
