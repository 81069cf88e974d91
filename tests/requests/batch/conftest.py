from typing import Any

import pytest

from triforce_tree.kv import backend
from triforce_tree.kv.pool import size


@pytest.fixture(autouse=True)
def _prefixes_of_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are stored once that are too short to be worth it in larger models. A page is half a chunk of
    a prefill, and two chunks of a retrieval.
    """
    monkeypatch.setattr(size, "LEAST", 16)
    monkeypatch.setattr(size, "LEAST_SPARED", 1)
    monkeypatch.setattr(size, "MOST_PAGE", 8)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prefill that were computed; rows without a sequence have none."""
    prefill, counts = backend.prefill, []

    def counted(model: Any, cache: Any, tokens: list[int], *how: Any) -> None:
        counts.append(len(tokens) - how[2])
        prefill(model, cache, tokens, *how)

    monkeypatch.setattr(backend, "prefill", counted)
    return counts
