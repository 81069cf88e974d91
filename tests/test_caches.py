"""Full and streaming caches against a plain list of rows, under random use."""

import pytest
import torch
from list_cache import DIM, HEADS, LAYERS, HalfRope, ListCache, Row, random_use, rotated

from triforce_tree.caches import FullCache, StreamingCache
from triforce_tree.caches.base import Variant
from triforce_tree.config import StreamingConfig


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("capacity", [0, 7, 512])
def test_full_cache_is_a_list(heads, window, capacity, poisoned_empty) -> None:
    model = ListCache(FullCache(LAYERS, capacity), heads, Variant(DIM**-0.5, window))
    random_use(model, 25, lambda: model.committed)
    assert len(model.committed) > 20


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("sinks", "window"), [(0, 1), (2, 3), (4, 8), (4, 300)])
def test_streaming_cache_is_a_list_of_sinks_and_recent_rows(heads, sinks, window, poisoned_empty) -> None:
    """Positions count what is held: a key turns by its place in the cache, a query by its own."""
    cache = StreamingCache(LAYERS, StreamingConfig(sinks, window), HalfRope())
    model = ListCache(cache, heads)
    held: list[Row] = []

    def seen() -> list[Row]:
        nonlocal held
        held = [*held, *model.committed[seen.known :]]
        seen.known = len(model.committed)
        if len(held) > sinks + 2 * window:
            held = [*held[:sinks], *held[-window:]]
        assert cache.held == len(held)
        return held

    seen.known = 0
    random_use(model, 40, seen, turn=rotated)
    seen()
    assert len(model.committed) > 30
    if window < 100:
        assert len(held) < len(model.committed), "rows have left"


def test_queries_of_kept_rows_are_at_hand() -> None:
    """The full cache keeps the last forward's queries for those rows alone that were kept."""
    model = ListCache(FullCache(LAYERS), (4, 2))
    model.write([-1, 0])
    queries, _ = model.write([1, 1, 2, 3])
    model.keep([0, 1, 3, 5])
    for index in range(LAYERS):
        torch.testing.assert_close(model.cache.queries[index][0], queries[index][:, [1, 3]])
