"""Decoding with an offloaded cache off the GPU: the target's own tokens, the same bits wherever slots are.

The device holds far less than the sequences, pieces are smaller still, and memory holds NaN until it is
written. There are no streams here: the order of copies and computation is tested by ``test_races.py``.
"""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.support.models.families import CAPPED, greedy, prompt_of
from tests.support.models.offloaded_cases import NEW, PIECE, PROMPTS, logits_of, model, program_of, references
from tests.support.models.program_cases import SMALL, decoded, sequences_of
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import DecodingLoop
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.offload import offloaded_prefill, pinned
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.kv.offload.layerwise_prefill import HostStates, ReservedStates
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

pytestmark = pytest.mark.usefixtures("poisoned_empty")

SAMPLED = ProbsFromLogits.at(0.8)
# Three sequences of up to 208 slots: the last layer's take 20 pieces, and one of the first layer is resident.
_LAST = 3 * 208 * PIECE // 32 + 3 * PIECE
SPLITS = {
    "host": Offload(0, PIECE, 2),
    "mixed": Offload(5 * PIECE, PIECE, 2),
    "device": Offload(1 << 24, PIECE, 2),
    "last layer": Offload(_LAST, PIECE, 2, last_resident=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_greedy_tokens_are_the_targets(levels: int, split: str):
    program = program_of(levels, 3, split=SPLITS[split])
    new, loop = decoded(program, PROMPTS, NEW)
    assert new == references(PROMPTS, NEW)
    if levels == 3:
        assert loop.levels[-1].mean_accepted_length > 1.2


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "qwen3", "gpt-neox", "olmo2", "mixtral", "phi3"])
def test_families(family: str):
    program = program_of(3, 1, family)
    assert decoded(program, PROMPTS[:1], NEW[:1])[0] == references(PROMPTS[:1], NEW[:1], family)


@pytest.mark.parametrize("family", CAPPED)
def test_capped_scores_and_sinks_are_counted_once(family: str):
    target = CAPPED[family]()
    config = HierarchyConfig.from_options(**SMALL)
    program = DecodingProgram(HFModel(target), None, config, 1, 200, 1, Offload(0, PIECE, 2))
    expected = greedy(target, PROMPTS[0], 30, attention_mask=torch.ones(1, len(PROMPTS[0])))
    assert decoded(program, PROMPTS[:1], [30])[0] == [expected]


@pytest.mark.parametrize(
    "options",
    [{"chunk": 8}, {"chunk": 3}, {"refresh": 1}, {"refresh": 2}, {"runner_ups": False}, {"tail_tree": True}],
)
def test_settings_of_the_retrieval(options: dict[str, object]):
    program = program_of(3, 2, **options)
    assert decoded(program, PROMPTS[:2], NEW[:2])[0] == references(PROMPTS[:2], NEW[:2])


@pytest.mark.parametrize("variance", [False, True], ids=["means", "variances too"])
def test_long_sequences_are_evicted_many_times(variance: bool):
    program = program_of(3, 1, max_seq_len=400, key_variance=variance)
    assert decoded(program, PROMPTS[:1], [150])[0] == references(PROMPTS[:1], [150])
    assert program.cache.backend.transfers
    assert program.cache.backend.cache.host.base[0] >= 83 + 150 - 1 - 8 - 16 - 5
    means = program.cache.backend.cache.means
    assert means is not None
    host, chunk = program.cache.backend.cache.host, program.cache.backend.cache.chunk
    for layer in range(host.layers):
        keys = host.heads.split(host.read(layer, 0, 0, host.base[0]))[0].unflatten(0, (-1, chunk))
        kept = keys.mean(1)
        if variance:
            kept = torch.cat([kept, keys.var(1, unbiased=False)], -1)
        torch.testing.assert_close(means[layer, 0, :, : kept.shape[0]], kept.transpose(0, 1))


def test_gathered_chunks_are_copies_of_the_host_stores():
    program = program_of(3, 2, max_seq_len=400, budget=40)
    decoded(program, PROMPTS[:2], [80, 80])
    assert program.retrieval is not None
    assert program.cache.backend.transfers
    view, cache = program.retrieval, program.cache.backend.cache
    chunk = view.chunk
    for layer in range(2):
        for b in range(2):
            kv = cache.host.heads.split(cache.host.read(layer, b, 0, cache.host.base[b]))
            for head in range(2):
                for slot, number in enumerate(view._slot_chunks[layer, b, head].tolist()):
                    for gathered, source in zip(cache.store.kv, kv, strict=True):
                        copied = gathered[layer, b, head, slot * chunk : (slot + 1) * chunk]
                        assert torch.equal(copied, source[number * chunk : (number + 1) * chunk, head])


def test_where_slots_are_changes_no_bit():
    (first, on_device), *others = [logits_of(split) for split in SPLITS.values()]
    for logits, _ in others:
        assert torch.equal(logits, first)
    for buffers in (3, 7):
        assert torch.equal(logits_of(Offload(0, PIECE, buffers))[0], first)
    torch.testing.assert_close(first, on_device, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("levels", "length", "on_host", "where"),
    [(3, 150, True, "reserved"), (1, 600, True, "host"), (1, 600, False, "device")],
)
def test_a_resident_last_layer_needs_no_memory_for_prefill(
    levels: int, length: int, on_host: bool, where: str, monkeypatch: pytest.MonkeyPatch
):
    """Keys and values are computed in its memory; hidden states in the retrieval's where they fit."""
    used = []
    for name, kind in (("host", HostStates), ("reserved", ReservedStates)):

        def note(*args: object, name: str = name, kind: type = kind):
            used.append(name)
            return kind(*args)

        monkeypatch.setattr(offloaded_prefill, kind.__name__, note)
    slots = (length + 50) // 16 * 16
    split = Offload(slots * PIECE // 32 + PIECE, PIECE, 2, states_on_host=on_host, last_resident=True)
    program = program_of(levels, max_seq_len=slots, split=split)
    cache = program.cache.backend.cache
    assert cache is not None
    assert cache.host.resident_slots == [32, slots]
    assert cache.store.memory.numel() == sum(part.numel() for part in cache.store.kv)
    prompt = prompt_of(length)
    assert decoded(program, [prompt], [20])[0] == references([prompt], [20])
    assert (used or ["device"]) == [where]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [1, 3])
def test_rewinding_is_as_good_as_a_new_prefill(levels: int):
    program = program_of(levels, 2, max_seq_len=300)
    [first, second], _ = decoded(program, PROMPTS[:2], [35, 35])
    for kept in (0, 1, 25, 20):
        beginnings = [[*PROMPTS[0], *first[:kept]], [*PROMPTS[1], *second[:kept]]]
        new, _ = decoded(program, beginnings, [35 - kept, 35 - kept], again=True)
        assert new == [first[kept:], second[kept:]]
    again = decoded(program, PROMPTS[:2], [30, 30], SAMPLED, seed=3, again=True)[0]
    fresh = program_of(levels, 2, max_seq_len=300)
    assert again == decoded(fresh, PROMPTS[:2], [30, 30], SAMPLED, seed=3)[0]


def test_a_rewind_beyond_the_cache_is_refused():
    program = program_of(1)
    decoded(program, PROMPTS[:1], [4])
    with pytest.raises(ValueError, match="prefill it first"):
        program.rewind([PROMPTS[1]])


def test_plain_sampling_draws_what_the_cache_on_the_device_draws():
    config = HierarchyConfig.from_options(**SMALL)
    on_device = DecodingProgram(HFModel(model("llama-gqa")), None, config, 2, 200, 1)
    expected = decoded(on_device, PROMPTS[:2], NEW[:2], SAMPLED, seed=5)[0]
    assert decoded(program_of(1, 2), PROMPTS[:2], NEW[:2], SAMPLED, seed=5)[0] == expected


@pytest.mark.slow
def test_sampled_tokens_follow_the_targets_distribution():
    stats = pytest.importorskip("scipy.stats")
    prompt, batch, to_probs = PROMPTS[0], 10, SAMPLED
    draws, prompts = 50 * batch, [prompt] * batch
    program = program_of(3, batch)
    program.prepare(to_probs)
    program.prefill(prompts)
    seen: dict[int, list[int]] = {1: [], 2: []}
    for seed in range(draws // batch):
        loop = DecodingLoop.over(program, to_probs, seed)
        loop.begin(sequences_of(prompts, [3] * batch), cached=True)
        for _, tokens in loop.step():
            seen[1].append(tokens[0])
            seen[2] += tokens[1:2]
    with torch.no_grad():
        logits = model("llama-gqa")(torch.tensor([prompt])).logits[0, -1]
    p = (logits.double() / 0.8).softmax(-1)
    counts = torch.bincount(torch.tensor(seen[1]), minlength=p.shape[0])
    rare = p * draws < 5
    observed = [*counts[~rare].tolist(), int(counts[rare].sum())]
    wanted = [*(p[~rare] * draws).tolist(), float(p[rare].sum() * draws)]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3
    assert len(seen[2]) > draws // 4


def test_memory_that_is_short_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinned, "available", lambda: (1 << 20, "the test"))
    taken: list[int] = []
    monkeypatch.setattr(HostMemory, "take", lambda self, shape, dtype: taken.append(1))
    with pytest.raises(
        HostMemoryError, match=r"needs .* GiB of host memory .* the test leaves 0.0 GiB; shorten"
    ):
        program_of(1)
    assert not taken


def test_a_refused_block_frees_the_others(monkeypatch: pytest.MonkeyPatch):
    blocks: list[weakref.ref[Tensor]] = []
    take = HostMemory.take

    def second_fails(self: HostMemory, shape, dtype) -> Tensor:
        if len(blocks) == 1:
            raise HostMemoryError("no more")
        block = take(self, shape, dtype)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(HostMemory, "take", second_fails)
    with pytest.raises(HostMemoryError, match="no more") as caught:
        program_of(1)
    del caught
    gc.collect()
    assert blocks[0]() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("levels", [1, 3])
def test_an_interrupted_prefill_frees_the_memory(levels: int, error: type[BaseException]):
    program = program_of(levels)
    assert program.cache.backend.transfers
    block = weakref.ref(program.cache.backend.cache.host.on_host[0][0])
    forwards = [layer.forward for layer in model("llama-gqa").model.layers]
    left = 2

    def progress(tokens: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error("stop")

    with pytest.raises(error):
        program.prefill(PROMPTS[:1], progress)
    assert program.cache.closed
    gc.collect()
    assert block() is None
    assert program.cache.backend.cache.host.memory.bytes == 0
    assert [layer.forward for layer in model("llama-gqa").model.layers] == forwards
    assert decoded(program_of(levels), PROMPTS[:1], NEW[:1])[0] == references(PROMPTS[:1], NEW[:1])


def test_a_fault_in_a_copy_is_raised_and_the_next_generation_is_right(monkeypatch: pytest.MonkeyPatch):
    program = program_of(1)
    assert program.cache.backend.transfers
    ring = program.cache.backend.cache.host.ring
    expected, _ = decoded(program, PROMPTS[:1], [10])
    issue, left = ring._issue, 5

    def failing() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("the copy failed")
        issue()

    monkeypatch.setattr(ring, "_issue", failing)
    with pytest.raises(RuntimeError, match="the copy failed"):
        decoded(program, PROMPTS[:1], [10], again=True)
    monkeypatch.undo()
    assert decoded(program, PROMPTS[:1], [10], again=True)[0] == expected


def test_progress_of_prefill_counts_every_token_once():
    program, reported = program_of(1), []
    program.prefill(PROMPTS[1:2], reported.append)
    assert sum(reported) == len(PROMPTS[1]) - 1
    assert min(reported) > 0


@pytest.mark.slow
def test_hundreds_of_passes_take_no_more_memory():
    program = program_of(1, max_seq_len=600)
    assert program.cache.backend.transfers
    before = program.cache.backend.cache.host.memory.bytes
    assert len(decoded(program, PROMPTS[:1], [400])[0][0]) == 400
    assert program.cache.backend.cache.host.memory.bytes == before


def test_a_split_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="buffers 2"):
        Offload(0, 1, 1)
