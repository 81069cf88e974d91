"""What tests of sessions share."""

import pytest

from triforce_tree.kv import store
from triforce_tree.kv.offload import backend


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch, poisoned_empty: None) -> None:
    """Buffers of sliding windows, and blocks of files, that short prompts fill."""
    monkeypatch.setattr(store, "RING_PAGE", 8)
    monkeypatch.setattr(backend, "_BLOCK_UNITS", 2)
