"""Offloaded caches of models with recurrent layers, whose states stay on the device."""

from functools import cache
from itertools import pairwise

import pytest
import torch

import triforce_tree
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.offloaded_cases import PIECE
from tests.support.models.program_cases import GREEDY, decoded
from tests.support.models.recurrent_families import RECURRENT, Foreknowledge, recurrent
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kv.offload import host_store
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import Machine, Sizes
from triforce_tree.planning.memory_plan import plan

pytestmark = pytest.mark.usefixtures("poisoned_empty")

PROMPTS = [prompt_of(length) for length in (83, 57)]
NEW = 24


@pytest.fixture(autouse=True)
def _small_eviction_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens leave the device window while decoding."""
    monkeypatch.setattr(host_store, "EVICTED_TOGETHER", 8)


model = cache(recurrent)


@cache
def expected(family: str) -> list[list[int]]:
    return [greedy(model(family), prompt, NEW) for prompt in PROMPTS]


def program(
    family: str,
    levels: int,
    drafter: Foreknowledge | None = None,
    split: Offload | None = None,
    batch: int = 2,
) -> DecodingProgram:
    options = {"rounds": 1, "prefill_chunk": 16, "tree": drafter.tree if drafter else "chain:1"}
    config = HierarchyConfig.from_options(**options)
    split = split or Offload(0, PIECE, 2)
    return DecodingProgram(HFModel(model(family)), drafter, config, batch, 150, levels, split)


def drafter_of(family: str) -> Foreknowledge:
    known = [p + e for p, e in zip(PROMPTS, expected(family), strict=True)]
    wrong = [{at for at in range(150) if (at * 7) % every == 0} for every in (3, 4)]
    return Foreknowledge(known, wrong, 4)


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_text_of_every_family(family: str) -> None:
    """Prompts in several chunks; tokens of chains that are rejected, and others that are accepted."""
    used = program(family, 2, drafter_of(family))
    new, decoder = decoded(used, PROMPTS, [NEW] * 2)
    assert new == expected(family)
    assert 0 < decoder.levels[-1].accepted < decoder.levels[-1].proposed
    held, target = used.cache.backend.cache, used.target
    assert held is not None
    assert held.host.base[0] > len(PROMPTS[0]), "no slots were evicted while decoding"
    attends = [shape is not None for shape in target.kv_layers]
    assert [index is not None for index in held.host_layers] == attends
    assert held.host.layers == sum(attends)


@pytest.mark.parametrize("family", ["qwen3-next", "jamba"])
def test_plain_decoding(family: str) -> None:
    assert decoded(program(family, 1), PROMPTS, [NEW, 9])[0] == [expected(family)[0], expected(family)[1][:9]]


def test_where_slots_are_changes_no_token() -> None:
    family = "falcon-h1"  # attention and a recurrence in each layer
    splits = (Offload(5 * PIECE, PIECE, 2), Offload(2 * 192 * 128 * 4, PIECE, 2, last_resident=True))
    for split in splits:
        assert decoded(program(family, 2, drafter_of(family), split), PROMPTS, [NEW] * 2)[0] == expected(
            family
        )


def test_states_are_those_of_a_prefill_by_chunks() -> None:
    """Bit for bit: layer by layer the same chunks go through the same functions."""
    family = "granite-4"
    offloaded = program(family, 1)
    config = HierarchyConfig.from_options(rounds=1, prefill_chunk=16, tree="chain:1")
    on_device = DecodingProgram(HFModel(model(family)), None, config, 2, 150, 1)
    for used in (offloaded, on_device):
        used.prepare(GREEDY)
        used.prefill(PROMPTS)
    assert offloaded.states is not None
    assert on_device.states is not None
    assert offloaded.states.lengths == [82, 56]
    for ours, theirs in zip(offloaded.states.buffers, on_device.states.buffers, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.abs().amax(tuple(range(1, ours.dim()))).min() > 0


def test_a_second_text_begins_with_empty_states() -> None:
    used = program("qwen3.5", 1)
    decoded(used, PROMPTS[::-1], [NEW] * 2)
    assert decoded(used, PROMPTS, [NEW] * 2)[0] == expected("qwen3.5")
    assert decoded(used, PROMPTS, [NEW] * 2, again=True)[0] == expected("qwen3.5")


def test_bytes_that_a_pass_copies_are_those_of_layers_with_attention() -> None:
    used = program("qwen3-next", 1, batch=1)
    assert used.cache.backend.transfers
    assert used.cache.backend.cache.host.layers == 1
    heads = used.target.heads
    assert used.transferred_bytes(64) == 64 * heads.row * 4


@pytest.mark.parametrize("options", [{"offload": True}, {"offload_weights": True}])
@pytest.mark.parametrize("family", ["qwen3.5", "granite-4"])
def test_by_the_engine(family: str, options: dict[str, bool]) -> None:
    target = recurrent(family)
    engine = triforce_tree.load(target, tiny("llama"), **load_arguments({**options, "rounds": 1}))
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == expected(family)[0]
    assert engine.offloads
    assert engine.last_program is not None
    assert engine.last_program.cache.backend.transfers


def test_a_conversation_goes_on_from_its_states() -> None:
    target = model("lfm2")
    session = triforce_tree.load(target, None, offload=True, levels=1).session()
    texts = [PROMPTS[0]]
    session.generate(PROMPTS[0], max_new_tokens=9, do_sample=False)
    for turn in (prompt_of(20), prompt_of(11)):
        texts.append([*session.tokens, *turn])
        session.generate(turn, max_new_tokens=9, do_sample=False)
    for before, after in pairwise([*texts, list(session.tokens)]):
        new = after[len(before) : len(before) + 9]
        assert new == greedy(target, before, 9)


@pytest.mark.parametrize("family", ["jamba", "qwen3.5"])
def test_a_prompt_of_one_token_has_no_states_of_an_earlier_text(family: str) -> None:
    """Nothing is prefilled for it, and the states are cleared nevertheless."""
    engine = triforce_tree.load(model(family), None, offload=True, levels=1)
    engine.generate(PROMPTS[0], max_new_tokens=9, do_sample=False)
    for prompt in ([5], PROMPTS[0][:1], PROMPTS[1][:2]):
        out = engine.generate(prompt, max_new_tokens=9, do_sample=False)
        assert out.sequences[0, len(prompt) :].tolist() == greedy(model(family), prompt, 9)


def test_memory_of_the_states_is_planned() -> None:
    target = HFModel(model("granite-4"))
    config = HierarchyConfig.from_options(offload=True, levels=1, tree="chain:1")
    machine = Machine(2**34, 2**34, 1e10, 1e12)
    made = plan(Sizes.of(target, None, config), machine, config, (), Workload(3, 4096, 64))
    assert made.offload is not None
    assert target.states is not None
    assert made.device["recurrent states"] == 3 * target.states.bytes(4)
