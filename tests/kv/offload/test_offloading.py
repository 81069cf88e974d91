"""Offloading by option: ``load(..., offload=)``, limits of memory, and ``--offload``."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models.families import greedy
from tests.support.models.offloaded_engine import NEW, PROMPT, engine, expected, models
from tests.support.models.program_cases import SMALL
from tests.support.models.tiny_pair import TinyPair
from triforce_tree import load
from triforce_tree.cli.entry import main
from triforce_tree.config import load_arguments
from triforce_tree.decoding import hierarchy
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.engine import Engine
from triforce_tree.kernels.exchange import link
from triforce_tree.kernels.exchange.link import Link
from triforce_tree.kv.offload import pinned
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.planning import machine, memory_plan
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan

pytestmark = pytest.mark.usefixtures("small_pieces")


def test_greedy_tokens_are_the_targets() -> None:
    allocated: list[int] = []
    out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=False, pinned=allocated.append)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert out.memory is not None
    assert out.memory["offloaded"]
    assert out.memory["levels"] == 3
    assert sum(allocated) > 0


def test_a_slower_link_carries_every_byte_and_changes_no_token() -> None:
    with link.limited(Link(torch.device("cpu"), 1e12)) as slow:
        own = engine(host_attention=False)
        out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    program = own._hierarchy.last_program
    assert program is not None
    streamed = program.cache.backend.cache.host.ring.bytes
    # Beside the pieces of passes: the prompt on its way to the host, and chunks.
    assert slow.carried[0] > streamed > 0


def test_the_next_generation_reuses_the_memory() -> None:
    own, allocated = engine(), []
    for seed in (1, 2):
        before = len(allocated)
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False, seed=seed, pinned=allocated.append)
    assert len(allocated) == before


def test_one_offloaded_cache_at_a_time() -> None:
    own = engine()
    alone = own.with_options(levels=1)
    for each in (own, alone, own):
        out = each.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert out.sequences[0, len(PROMPT) :].tolist() == expected()[:8]
        assert len(own._hierarchy._offloaded) == 1
        assert each._hierarchy.last_program is not None
        assert each._hierarchy.last_program is own._hierarchy._offloaded[0]


def test_the_plan_is_known_before_generation() -> None:
    own = engine(gpu_memory="2GiB")
    plan = own.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert plan.machine.device == 2 << 30
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.memory == plan.as_dict()
    assert engine(offload=False).memory_plan(len(PROMPT), NEW) is None


def test_a_spare_length_for_later_generations_is_given_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, planned = memory_plan.plan, []

    def plan(*args: Any) -> MemoryPlan:
        workload = args[-1]
        planned.append(workload.new)
        if workload.new > NEW:
            raise DoesNotFitError("no room for more")
        return decide(*args)

    monkeypatch.setattr(memory_plan, "plan", plan)
    own = engine(host_attention=False)
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert planned == [1024 - len(PROMPT), NEW]
    assert own._hierarchy.last_program is not None
    assert own._hierarchy.last_program.max_seq_len == len(PROMPT) + NEW
    # A second generation of this length needs no new plan.
    own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert len(planned) == 2


def lengths_of_buffers(own: Engine, *prompts: list[int]) -> list[int]:
    """Returns the most tokens of a sequence in the buffers after each of these requests."""
    held = []
    for prompt in prompts:
        own.generate(prompt, max_new_tokens=4, do_sample=False)
        assert own.last_program is not None
        held.append(own.last_program.max_seq_len)
    return held


def test_memory_that_a_text_outgrows_has_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "_MAX_SEQ_LEN_STEP", 64)
    assert lengths_of_buffers(engine(), PROMPT, 2 * PROMPT, 3 * PROMPT) == [192, 512, 512]
    assert lengths_of_buffers(engine(), 2 * PROMPT) == [320], "a first text may be the only one"


@pytest.mark.parametrize("fits", [False, True])
def test_room_for_more_changes_no_setting(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for longer texts is not taken where it would have other settings."""
    decide = memory_plan.plan

    def plan(*args: Any) -> MemoryPlan:
        if args[-1].max_seq_len <= 320:
            return decide(*args)
        if not fits:
            raise DoesNotFitError("no room for more")
        return replace(decide(*args), offload=None)

    monkeypatch.setattr(hierarchy, "_MAX_SEQ_LEN_STEP", 64)
    monkeypatch.setattr(memory_plan, "plan", plan)
    assert lengths_of_buffers(engine(host_attention=False), PROMPT, 2 * PROMPT) == [192, 320]


def test_plans_keep_to_the_users_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available", lambda: (64 << 30, "the test"))
    monkeypatch.setattr(pinned, "available", lambda: (64 << 30, "the test"))
    plan = engine(host_memory="3GiB").memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert (plan.machine.host, plan.machine.host_limit) == (3 << 30, "host_memory")
    long = 1 << 20
    with pytest.raises(
        DoesNotFitError, match=r'host_memory leaves 0.0 GiB; allow more host memory \(host_memory="1GiB"\)'
    ):
        engine(host_memory="1MiB", gpu_memory="1GiB").memory_plan(long, NEW)


def test_auto_offloads_nothing_that_fits() -> None:
    own = engine(offload="auto")
    out = own.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert out.memory is not None
    assert not out.memory["offloaded"]
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()[:8]


def test_a_short_prompt_has_no_chunks_to_retrieve() -> None:
    """With two levels it is offloaded like any other; a retrieval would see all of it anyway."""
    expected = greedy(models()[0], PROMPT[:2], 8, attention_mask=torch.ones(1, 2))
    for options, on_host in (({}, True), ({"levels": 3}, False)):
        out = engine(**options).generate(PROMPT[:2], max_new_tokens=8, do_sample=False)
        assert out.sequences[0, 2:].tolist() == expected
        assert (out.memory is not None) is on_host


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(ValueError, match=r'gpu_memory has 0.1 GiB; allow more .*\(gpu_memory="1GiB"\)'):
        engine(gpu_memory="100MiB").generate(PROMPT, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_prompt_lookup_drafts_for_an_offloaded_cache(levels: int) -> None:
    prompt = [*PROMPT[:100], *PROMPT[20:70]]
    small = {name: value for name, value in SMALL.items() if name != "tree"}
    own = load(models()[0], **load_arguments({**small, "offload": True, "levels": levels}))
    out = own.generate(prompt, max_new_tokens=16, do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == greedy(models()[0], prompt, 16)
    assert out.memory is not None
    assert out.memory["offloaded"]


def test_hidden_states_on_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = hierarchy.DecodingProgram

    def with_states_on_host(*args: Any, **kept: Any) -> DecodingProgram:
        *others, split, pinned = args
        assert isinstance(split, Offload)
        return make(*others, replace(split, states_on_host=True), pinned, **kept)

    monkeypatch.setattr(hierarchy, "DecodingProgram", with_states_on_host)
    for chunk in (16, 75, 1024):
        out = engine(prefill_chunk=chunk).generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(PROMPT) :].tolist() == expected()


def test_the_command_shows_the_plan(capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str) -> None:
    words = ["generate", prompt, *pair.options, "--max-new-tokens", "20", "--json", "--compare"]
    small = ["--budget", "64", "--advanced", "recent=16", "--levels", "3"]
    code = main([*words, *small, "--offload", "--advanced", "host_attention=true", "--gpu-memory", "2GiB"])
    out, err = capsys.readouterr()
    assert code == 0
    assert "memory map" in err
    assert "device: resident KV" in err
    assert "of the KV slots on the host (" in " ".join(err.split())
    result = json.loads(out.splitlines()[-1])
    assert result["identical"] is True
    assert result["memory"]["offloaded"] is True
