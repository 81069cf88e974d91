"""The CPU's share of an offloaded cache: states against the definition, and the target's own tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.models.families import CAPPED, greedy
from tests.support.models.offloaded_cases import NEW, PIECE, PROMPTS, logits_of, program_of, references
from tests.support.models.program_cases import decoded
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.attention.backend import chosen
from triforce_tree.kernels.attention.plan import KV, AttentionParams, Heads, plan_trees
from triforce_tree.kernels.cpu import offload_attention
from triforce_tree.kernels.cpu.offload_attention import attend
from triforce_tree.kv.offload.host_attention import HostAttention
from triforce_tree.kv.offload.host_store import HostStore, Offload
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")

HALF = Offload(0, PIECE, 2, host_share=0.5, plain_host_share=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads",
    [Heads(6, 6, 32), Heads(6, 2, 24), Heads(4, 1, 8), Heads(6, 2, 64, 32), Heads(6, 3, 12, 5)],
    ids=str,
)
@pytest.mark.parametrize("queries", [1, 7])
def test_states_are_those_of_the_definition(
    heads: Heads, queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    counts, scale = (48, 0, 83), 0.31
    q = torch.randn(3, queries, heads.query, heads.dim, generator=generator).to(dtype)
    kv = [torch.randn(n, heads.row, generator=generator).to(dtype) for n in counts]
    # Several calls of several blocks, and a last one of another size.
    monkeypatch.setattr(offload_attention, "BLOCK", 3 * kv[0][0].nbytes)
    attention = HostAttention(heads, torch.device("cpu"), dtype, len(counts))
    for _ in range(2):
        attention.submit(q, kv, scale)
        out, lse = attention.states()
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        for b in (0, 2):
            exact = definition(heads, q[b].float(), kv[b].float(), scale)
            rounded = definition(heads, q[b], kv[b], scale)
            for found, expected, in_dtype in zip((out[b], lse[b]), exact, rounded, strict=True):
                allowed = 2 * float((in_dtype.float() - expected).abs().max()) + 2e-6
                assert float((found.float() - expected).abs().max()) <= allowed
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()
    assert attention.bytes == 2 * (kv[0].nbytes + kv[2].nbytes)
    attention.close()


def definition(heads: Heads, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns what the device computes from the same keys and values."""
    count = q.shape[0]
    plan = plan_trees(heads, [torch.ones(count, 0, dtype=torch.bool)], [kv.shape[0]], device=q.device)
    k, v = (part.transpose(0, 1)[None] for part in heads.split(kv))
    return chosen("auto", q.device).trees(plan, q.dtype).states(q, KV(k, v), AttentionParams(scale))


def test_the_same_input_gives_the_same_bits() -> None:
    q, (k, v) = torch.randn(5, 4, 16), torch.randn(2, 100, 2, 16)
    for a, b in zip(attend(q, k, v), attend(q.clone(), k.clone(), v.clone()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["llama", "llama-gqa"])
@pytest.mark.parametrize("width", [1, 7])
def test_the_share_changes_logits_by_rounding_alone(family: str, width: int) -> None:
    by_share = {}
    for share in (0.0, 0.5, 1.0):
        split = replace(HALF, host_share=share, plain_host_share=share)
        logits, on_device = logits_of(split, width, family)
        torch.testing.assert_close(logits, on_device, rtol=1e-4, atol=1e-4)
        by_share[share] = logits
    assert not torch.equal(by_share[0.0], by_share[0.5])
    assert not torch.equal(by_share[0.5], by_share[1.0])


def test_where_the_other_slots_are_changes_no_bit() -> None:
    first, _ = logits_of(HALF)
    for buffers in (3, 7):
        assert torch.equal(logits_of(replace(HALF, buffers=buffers))[0], first)
    # 144 slots, of which the CPU has the last 80; no, one or two pieces of a layer are resident.
    splits = [
        replace(HALF, resident_bytes=2 * pieces * PIECE, host_share=80 / (144 - 32 * pieces))
        for pieces in (0, 1, 2)
    ]
    whole, *others = (logits_of(split)[0] for split in splits)
    assert all(torch.equal(whole, logits) for logits in others)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.5, 0.5), (0.3, 0.8), (0.5, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_greedy_tokens_are_the_targets(levels: int, shares: tuple[float, float]) -> None:
    split = Offload(3 * PIECE, PIECE, 2, host_share=shares[0], plain_host_share=shares[1])
    program = program_of(levels, 3, split=split)
    assert decoded(program, PROMPTS, NEW)[0] == references(PROMPTS, NEW)
    assert program.cache.backend.transfers
    assert program.cache.backend.cache.attention is not None
    used = shares[1] if levels == 1 else shares[0]
    assert (program.cache.backend.cache.attention.bytes > 0) == (used > 0)


@pytest.mark.parametrize("family", ["llama", "llama-mqa"])
def test_families(family: str) -> None:
    program = program_of(3, 1, family, split=HALF)
    assert decoded(program, PROMPTS[:1], NEW[:1])[0] == references(PROMPTS[:1], NEW[:1], family)


def test_plain_and_verifying_passes_alternate() -> None:
    """Their shares differ, and so do the pieces that they prefetch."""
    split = Offload(0, PIECE, 3, host_share=0.3, plain_host_share=0.9)
    program = program_of(3, 2, split=split)
    program.prepare(ProbsFromLogits(greedy=True))
    program.prefill(PROMPTS[:2])
    new: list[list[int]] = [[], []]
    generator = torch.Generator().manual_seed(0)
    for stage in ("plain", "target", "target", "plain", "plain", "target"):
        if stage == "target":
            assert program.drafter is not None
            sequences = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS[:2], new, strict=True)]
            program.drafter.prepare(sequences, resumed=True)
            program.run("draft", generator)
            program.run("retrieval_refresh", generator)
        program.run(stage, generator)
        report = program.state.pass_results().tolist()
        program.cache.committed([row[4 : 4 + row[0]] for row in report], with_means=program.levels == 3)
        program.state.retrieval_emitted.zero_()
        for tokens, (count, _, _, _, *emitted) in zip(new, report, strict=True):
            tokens += emitted[:count]
    assert new == references(PROMPTS[:2], [len(tokens) for tokens in new])


def test_sinks_are_counted_once() -> None:
    target = CAPPED["gpt-oss"]()
    program = DecodingProgram(HFModel(target), None, HierarchyConfig(), 1, 200, 1, HALF)
    expected = greedy(target, PROMPTS[0], 30, attention_mask=torch.ones(1, len(PROMPTS[0])))
    assert decoded(program, PROMPTS[:1], [30])[0] == [expected]


def test_capped_scores_are_refused() -> None:
    model = HFModel(CAPPED["gemma2"]())
    with pytest.raises(
        ValueError, match=r"Gemma2ForCausalLM caps its attention scores.*leave host_attention"
    ):
        DecodingProgram(model, None, HierarchyConfig(), 1, 200, 1, HALF)


def test_the_same_seed_and_split_give_the_same_draws() -> None:
    to_probs = ProbsFromLogits.at(0.8)
    drawn = [
        decoded(program_of(3, 2, split=HALF), PROMPTS[:2], NEW[:2], to_probs, seed=5)[0] for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_a_fault_is_raised_and_the_next_generation_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(3, split=HALF)
    expected, _ = decoded(program, PROMPTS[:1], [10])
    assert program.cache.backend.transfers
    attention = program.cache.backend.cache.attention
    assert attention is not None
    attend_once, left = attention._attend, 3

    def failing(*args: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("a core failed")
        return attend_once(*args)

    monkeypatch.setattr(attention, "_attend", failing)
    with pytest.raises(RuntimeError, match="a core failed"):
        decoded(program, PROMPTS[:1], [10], again=True)
    monkeypatch.undo()
    assert decoded(program, PROMPTS[:1], [10], again=True)[0] == expected


def test_every_slot_is_attended_to_by_the_cpu_or_streamed_or_resident() -> None:
    store = HostStore(
        2, 2, Heads(4, 2, 8), 208, torch.device("cpu"), torch.float32, 4, Offload(3 * 2 * PIECE, PIECE, 2)
    )
    store.base = [176, 16]
    for share in (0.0, 0.4, 1.0):
        streamed = 0
        for layer in range(2):
            for b in range(2):
                pieces = list(store.pieces(layer, b, share))
                on_cpu = store.cpu_part(layer, b, share)
                assert [p.start for p in pieces[1:]] == [p.stop for p in pieces[:-1]]
                assert sum(p.stop - p.start for p in pieces) + on_cpu.shape[0] == store.base[b]
                assert on_cpu.shape[0] % store.unit == 0
                on_host = max(0, store.base[b] - store.resident_slots[layer])
                assert abs(on_cpu.shape[0] - share * on_host) <= store.unit / 2
                streamed += sum(p.kv.nbytes for p in pieces if not p.resident)
        before = store.ring.bytes
        store.prefetch(share)
        for _ in store._schedule:
            store.ring.acquire()
            store.ring.release()
        assert store.ring.bytes - before <= streamed
        assert sum(kv.nbytes for kv in store._schedule) == streamed
    store.close()


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"host_share=.* must lie between 0 and 1"):
        Offload(host_share=share)
