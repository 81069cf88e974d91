"""Prompts that begin alike: what one sequence of a batch has computed is copied to another."""

from collections.abc import Sequence

from triforce_tree.kv.cached_tokens import CachedTokens
from triforce_tree.kv.store import KVStore
from triforce_tree.runtime.features import Features
from triforce_tree.runtime.stats import Progress


def copy_prefix(
    store: KVStore,
    cached: CachedTokens,
    b: int,
    prompt: Sequence[int],
    start: int,
    features: Features | None = None,
    progress: Progress | None = None,
) -> int:
    """Copy keys and values that a prompt begins with from the sequence that holds most of them.

    A prefix that is stored once for several sequences (``kv/shared``) needs no copy.

    Whole chunks of a prefill alone are copied: they are, bit by bit, what the prompt's own prefill would
    compute. What is common after them is computed again, and so is all where layers with a window keep a
    ring, which goes on with its own sequence.

    Args:
        store: all layers.
        cached: which tokens each sequence holds.
        b: where to copy to; it holds the first ``start`` tokens of the prompt already.
        features: hidden states that a drafter reads: those of first positions are copied, too. As it reads
            those of the newest positions, keys and values of these are computed again.
        progress: called with the number of tokens that were copied, if any.

    Returns:
        how many tokens of the prompt sequence b holds now.
    """
    if len(cached.held) == 1:
        return start
    newest = features.history if features is not None else 0
    counts = [cached.common(other, prompt, "chunks", newest) for other in range(len(cached.held))]
    source = max(range(len(counts)), key=counts.__getitem__)
    count = counts[source]
    if count <= start or source == b or any(group.ring for group in store.groups):
        return start
    store.copy_within(source, b, start, count)
    if features is not None:
        features.copy_leading(source, b)
    cached.copied(b, prompt, count, cached.whole[source])
    if progress:
        progress(count - start)
    return count
