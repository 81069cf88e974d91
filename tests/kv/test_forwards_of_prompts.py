"""Forwards of a long prompt have fewer tokens, and a prefill with pauses has the same ones."""

import pytest

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.prefill import forward_end

CHUNK, LENGTH = 4096, 130_001
TEXT = list(range(LENGTH))


def ends(start: int, stop: int) -> list[int]:
    found = []
    while start < stop:
        start = forward_end(start, stop, CHUNK)
        found.append(start)
    return found


def test_forwards_end_at_all_whole_chunks() -> None:
    found = ends(0, LENGTH)
    sizes = [stop - start for start, stop in zip([0, *found], found, strict=False)]
    assert sizes[0] == CHUNK
    assert max(sizes[-20:]) == CHUNK // 2
    assert set(range(CHUNK, LENGTH, CHUNK)) <= set(found)


@pytest.mark.parametrize("pause", [None, 61_440, 63_488])
def test_whole_chunks_are_known_after_pauses(pause: int | None) -> None:
    """A pause between two forwards, within a chunk as well."""
    cached = CachedTokens(1, CHUNK)
    cached.fed(0, TEXT, 0) if pause is None else cached.fed(0, TEXT[: pause + 1], 0)
    if pause is not None:
        cached.fed(0, TEXT, pause)
    assert cached.whole == [(LENGTH - 1) // CHUNK * CHUNK]


def test_a_text_that_is_cut_within_a_chunk_goes_on_by_other_forwards() -> None:
    cached = CachedTokens(1, CHUNK)
    cached.fed(0, TEXT[:20_001], 0)
    cached.keep(0, 10_000)
    cached.fed(0, TEXT, 10_000)
    assert cached.whole == [2 * CHUNK]
    cached.fed(0, TEXT, 2 * CHUNK)
    assert cached.whole == [(LENGTH - 1) // CHUNK * CHUNK]


def test_tokens_after_another_beginning_are_not_whole_chunks() -> None:
    """A prompt that ends within a forward is continued by other forwards than those of a prefill."""
    cached = CachedTokens(1, CHUNK)
    cached.fed(0, TEXT[:5001], 0)
    cached.fed(0, TEXT, 5000)
    assert cached.whole == [CHUNK]
