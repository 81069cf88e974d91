"""Tests chunk means after kept keys and values, which equal those of a new text."""

from typing import Any

import pytest
import torch
from torch import Tensor

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny, without_tree
from tests.support.models.program_cases import SMALL
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.offload.offloaded_cache import OffloadedCache
from triforce_tree.kv.tree_attention_view import PagedRetrievalView

PROMPT, QUESTION = prompt_of(700), prompt_of(21)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}


def engine(**options: Any) -> Engine:
    target = tiny("llama-gqa")
    own = {**SMALL, "levels": 3, "window": 40, **options}
    return triforce_tree.load(target, perturbed(target, 0.05), **load_arguments(own))


def chunk_means(made: Engine, length: int) -> list[Tensor]:
    """Returns the means of all whole chunks."""
    cache = made._hierarchy.last_program.cache
    if cache.backend.transfers:
        found, length = [cache.backend.cache.means], cache.backend.cache.host.base[0]
    else:
        found = [one.means for one in cache.retrieval.retrieved if one is not None]
    return [means[:, 0, :, : length // SMALL["chunk"]] for means in found]


@pytest.mark.parametrize(
    "options", [{}, {"kv_bits": 8}, {"key_variance": True}, {"offload": True}], ids=lambda o: str([*o])
)
def test_chunk_means_before_kept_tokens_stay(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, poisoned_empty: None
) -> None:
    """Only later ones are computed, and all have the bits of a cold prefill."""
    computed: list[int] = []
    update, store = PagedRetrievalView.update_chunk_means, OffloadedCache.store_means

    def updated(self: PagedRetrievalView, first: Tensor, count: int) -> None:
        computed.append(int(first))
        update(self, first, count)

    def stored(self: OffloadedCache, layer: int, b: int, start: int, kv: Tensor) -> None:
        computed.append(start // SMALL["chunk"])
        store(self, layer, b, start, kv)

    monkeypatch.setattr(PagedRetrievalView, "update_chunk_means", updated)
    monkeypatch.setattr(OffloadedCache, "store_means", stored)
    warm = engine(**options)
    warm.generate(PROMPT, **GREEDY)
    prompt = [*PROMPT[:650], *QUESTION]
    for asked in (prompt, [*prompt, *QUESTION]):
        computed.clear()
        out = warm.generate(asked, **GREEDY)
        assert out.reused_tokens >= 640
        # An offloaded cache's window has none, so that some before the kept tokens are missing.
        assert min(computed) >= (560 if "offload" in options else 640) // SMALL["chunk"]
        cold = engine(**options, prefix_cache=False)
        same = cold.generate(asked, **GREEDY)
        assert out.sequences.tolist() == same.sequences.tolist()
        for ours, theirs in zip(chunk_means(warm, len(asked)), chunk_means(cold, len(asked)), strict=True):
            assert torch.equal(ours, theirs)
            assert not ours.isnan().any()


def test_suffix_matching_goes_on_from_the_last_text() -> None:
    """Whether a prompt begins with the last text or not, the tokens are those of a new engine."""
    own = triforce_tree.load(tiny("llama-gqa"), **load_arguments(without_tree({**SMALL, "levels": 3})))
    cold = own.with_options(advanced={"prefix_cache": False})
    session = own.session(PROMPT)
    session.generate(**GREEDY)
    for question, trimmed in ((QUESTION, False), (QUESTION[:1], False), (None, False), (QUESTION, True)):
        if trimmed:
            session.trim(len(PROMPT) + 3)
        asked = [*session.tokens, *(question or [])]
        out = session.generate(question, **GREEDY)
        assert out.sequences.tolist() == cold.generate(asked, **GREEDY).sequences.tolist()


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 4097, 9999, 10_000])
def test_common_prefixes(at: int) -> None:
    text = list(range(10_000))
    other = [*text[:at], -1, *text[at + 1 :]] if at < len(text) else [*text, 5]
    assert common_prefix(text, other) == common_prefix(other, text) == at
    assert common_prefix(text, other[:7]) == min(at, 7)
    assert common_prefix([], text) == 0
