"""A full KV cache in 8 bits against transformers' own forward over keys and values rounded to 8 bits."""

from functools import cache

import pytest
import torch

import triforce_tree
from tests.support.models.families import greedy, perturbed, prompt_of, tiny, with_rounded_kv
from tests.support.models.program_cases import SMALL, decoded, program_of
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.suffix_matching import SuffixMatching
from triforce_tree.kernels.attention.plan import AttentionParams, Heads
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kernels.step.kv_slots import dequantized, quantized
from triforce_tree.kv import prefill as prefill_module
from triforce_tree.kv import store as store_module
from triforce_tree.kv.prefill import PromptCache
from triforce_tree.kv.store import KVStore
from triforce_tree.models.attention import KVShape
from triforce_tree.models.hf_model import HFModel

pytestmark = pytest.mark.usefixtures("poisoned_empty")

PROMPTS = [prompt_of(33), prompt_of(150)]
NEW = 12
FAMILIES = ("llama-gqa", "qwen3", "gemma2", "gpt-oss", "llama4")


@cache
def expected(family: str) -> list[list[int]]:
    made = with_rounded_kv(tiny(family))
    return [greedy(made, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)
    monkeypatch.setattr(prefill_module, "_BLOCK", 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_level_decodes_the_target_with_that_cache(family: str) -> None:
    """A batch of two; windows, softcap and sinks among the families."""
    target = tiny(family)
    for levels in (1, 2, 3):
        program = program_of(
            target, perturbed(target, 0.05), levels, 2, max_seq_len=180, kv_bits=8, budget=16, window=200
        )
        tokens, decoder = decoded(program, PROMPTS, [NEW, NEW])
        assert tokens == expected(family), levels
        assert all(level.accepted for level in decoder.levels[1:]), levels
        for group in program.store.groups:
            assert {part.dtype for part in (group.k, group.v)} == {torch.int8}
            assert group.scales is not None


def test_the_cache_changes_the_logits() -> None:
    """The other tests compare with another model than the target with a cache of 16 bits."""
    target, ids = tiny("llama-gqa"), torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        own, other = (model(ids).logits for model in (target, with_rounded_kv(target)))
    assert 1e-4 < float((own - other).norm() / own.norm()) < 0.1


@pytest.mark.parametrize("levels", [2, 3])
def test_prompt_lookup(levels: int) -> None:
    config = HierarchyConfig.from_options(**{**SMALL, "kv_bits": 8})
    program = DecodingProgram(HFModel(tiny("llama-gqa")), SuffixMatching(3), config, 2, 180, levels)
    assert decoded(program, PROMPTS, [NEW, NEW])[0] == expected("llama-gqa")


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_a_prompt_do_not_change_the_text(chunk: int) -> None:
    program = program_of(tiny("gemma2"), None, 1, 2, max_seq_len=180, kv_bits=8, prefill_chunk=chunk)
    assert decoded(program, PROMPTS, [NEW, NEW])[0] == expected("gemma2")


@pytest.mark.parametrize("window", [None, 20])
def test_stored_slots_do_not_depend_on_chunks(window: int | None) -> None:
    """Bits of slots and scales; outputs are attention over what is stored."""
    heads, count, dtype = Heads(4, 2, 16, 12), 90, torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, count, dim) for h, dim in ((4, 16), (2, 16), (2, 12)))
    shown = [dequantized(*quantized(t), dtype) for t in (k, v)]
    first = None if window is None else (torch.arange(count) - window + 1).clamp_(0)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    exact, _ = tree_attention(q, *shown, causal, scale=0.25, first=first)
    params = AttentionParams(scale=0.25, window=window, softcap=None, sinks=None)
    stored = []
    for chunk in (1, 7, 64):
        store = KVStore([KVShape(heads, window)], 1, 128, q.device, dtype, scratch=8, bits=8)
        rows = PromptCache(store, 0)
        outs = []
        for start in range(0, count, chunk):
            part = [t[:, :, start : start + chunk] for t in (q, k, v)]
            outs.append(rows.attend(0, *part, params).transpose(1, 2))
            rows.advance(part[0].shape[2])
        torch.testing.assert_close(torch.cat(outs, 2), exact)
        [group] = store.groups
        seen = min(count, group.ring or count)
        slots = torch.arange(count - seen, count) % (group.ring or group.slots)
        stored.append([part[..., slots, :] for part in group.parts])
    for other in stored[1:]:
        for a, b in zip(stored[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_trial_leaves_slots_and_scales_as_they_were() -> None:
    program = program_of(tiny("llama-gqa"), None, 1, 1, kv_bits=8)
    program.prefill([prompt_of(60)])
    [group] = program.store.groups
    before = [part[..., :59, :].clone() for part in group.parts]
    with program.trial(30) as begin:
        begin(False)
        for part in group.parts:
            part[..., 30:33, :] = 1
    for part, old in zip(group.parts, before, strict=True):
        assert torch.equal(part[..., :59, :], old)


def test_refusals() -> None:
    for wrong in (4, True, "8"):
        with pytest.raises(ValueError, match=f"kv_bits={wrong!r} must be 16 or 8"):
            HierarchyConfig.from_options(kv_bits=wrong)
    for option in ({"offload": True}, {"offload_weights": True}):
        with pytest.raises(ValueError, match=r"kv_bits=8 .* on the device; .* has 16; leave out kv_bits"):
            HierarchyConfig.from_options(kv_bits=8, **option)
    engine = triforce_tree.load(
        tiny("llama-gqa"), perturbed(tiny("llama-gqa"), 0.05), kv_bits=8, gpu_memory="600MiB"
    )
    with pytest.raises(ValueError, match=r"kv_bits=8 keeps the cache of .* on the device, with .* GiB"):
        engine.memory_plan(900_000, 100)
