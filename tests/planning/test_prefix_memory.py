"""Memory plans of batches whose sequences begin alike count the common prefix once."""

import pytest

import triforce_tree
from tests.support.models.api_cases import SMALL, TARGET
from tests.support.models.families import perturbed, prompt_of
from tests.support.models.model_sizes import LLAMA_3_1_8B
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.kv.pool import size
from triforce_tree.planning import batch_size
from triforce_tree.planning.memory_layout import Workload, on_device
from triforce_tree.planning.memory_map import GIB, Machine, Sizes
from triforce_tree.planning.memory_plan import plan
from triforce_tree.requests.batch_pool import BatchPool

CONTEXT, PREFIX, NEW = 102_400, 98_304, 256
SCRATCH = 200


def test_a_batch_stays_on_the_device_where_its_prefix_is_stored_once() -> None:
    machine = Machine(80 * GIB, 512 * GIB, 55e9, 4.4e12)
    config = HierarchyConfig.from_options(offload="auto")
    copied = plan(LLAMA_3_1_8B, machine, config, (), Workload(8, CONTEXT, NEW))
    pool = PREFIX + 8 * (CONTEXT - PREFIX + NEW + SCRATCH)
    once = plan(LLAMA_3_1_8B, machine, config, (), Workload(8, CONTEXT, NEW, pool))
    assert copied.offload is not None
    assert once.offload is None
    with_copies = on_device(LLAMA_3_1_8B, machine, once.config, Workload(8, CONTEXT, NEW))
    slot = LLAMA_3_1_8B.row * LLAMA_3_1_8B.full_layers
    assert once.device["KV"] == pool * slot
    spared = with_copies.device["KV"] - once.device["KV"]
    assert spared > 6 * PREFIX * slot
    # A prompt's end is fed over a copy of one layer's slots, with memory for a power of two of positions.
    assert once.device["prefill"] - with_copies.device["prefill"] == 131_072 * LLAMA_3_1_8B.row
    # A pass reads it once, too.
    assert with_copies.pass_seconds - once.pass_seconds == pytest.approx(spared / 4.4e12)


@pytest.mark.parametrize("levels", [1, 3])
def test_planned_bytes_are_those_that_a_program_allocates(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "LEAST_SPARED", 1)
    options = {"levels": levels, "rounds": 1, "prefill_chunk": 16, **SMALL}
    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), **load_arguments(options))
    prompts = [prompt_of(700) + [3] * n for n in (1, 4, 9)]
    engine.generate(prompts, max_new_tokens=4, do_sample=False)
    program, hierarchy = engine.last_program, engine._hierarchy
    assert program is not None
    sizes = Sizes.of(hierarchy.target, hierarchy.draft, hierarchy.config)
    backend = program.cache.backend
    workload = Workload(3, program.max_seq_len - 4, 4, backend.pool_slots)
    planned = on_device(sizes, Machine(0, 0, 1.0, 1.0), hierarchy.config, workload)
    assert 0 < backend.pool_slots < 3 * 700
    # Rounded up to whole chunks.
    assert planned.device["KV"] <= backend.bytes <= planned.device["KV"] + 16 * sizes.row * sizes.layers


def test_more_sequences_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = triforce_tree.load(TARGET, levels=1, advanced={"prefill_chunk": 512})
    hierarchy = engine._hierarchy
    prompts = [[*prompt_of(1800), n] for n in range(9)]
    pool = BatchPool(hierarchy, prompts, 8)
    sizes = Sizes.of(hierarchy.target, None, hierarchy.config)

    def held(batch: int, slots: int) -> int:
        made = on_device(sizes, Machine(0, 0, 1.0, 1.0), hierarchy.config, Workload(batch, 1801, 8, slots))
        return made.peak - made.device["weights"] + 192 * 2**20

    free = held(9, pool.slots)
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free)
    copies = BatchPool(hierarchy, prompts, 8, shares=False).batch_size(9, 1801, 8)
    assert held(copies, 0) <= free < held(copies + 1, 0)
    assert copies < pool.batch_size(9, 1801, 8) == 9
    # Of less memory, for as many as it holds.
    free = held(9, pool.slots) - 1
    assert copies < pool.batch_size(9, 1801, 8) < 9
    assert pool.slots


def test_documents_are_copied_where_more_sequences_fit_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for three copies holds two of four documents, and no sequence behind them."""
    engine = triforce_tree.load(TARGET, levels=1, advanced={"prefill_chunk": 512})
    hierarchy = engine._hierarchy
    prompts = [[*prompt_of(1800)[n:], n, other] for n in range(4) for other in range(2)]
    pool = BatchPool(hierarchy, prompts, 8)
    assert pool.slots
    sizes = Sizes.of(hierarchy.target, None, hierarchy.config)
    made = on_device(sizes, Machine(0, 0, 1.0, 1.0), hierarchy.config, Workload(3, 1802, 8))
    room = made.peak - made.device["weights"] + 192 * 2**20
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: room)
    assert pool.batch_size(8, 1802, 8) == 3
    assert not pool.slots
