"""Offloading as a user asks for it: ``load(..., offload=)``, ``--offload``, and memory that runs out."""

import gc
import json
import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from families import CAPPED, greedy, perturbed, prompt_of, tiny
from program_cases import SMALL
from tiny_pair import TinyPair
from transformers import PreTrainedModel

from triforce_tree import load
from triforce_tree.cli.console import memory_table
from triforce_tree.cli.entry import main
from triforce_tree.decoding import assembly
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.engine import Engine
from triforce_tree.kernels.cpu import host_rows
from triforce_tree.kv.offload import offloaded_cache, pinned
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.planning import machine, memory_plan
from triforce_tree.planning.memory_map import HostRate
from triforce_tree.planning.memory_plan import DoesNotFitError, MemoryPlan
from triforce_tree.planning.pass_time import FarRows

PROMPT, NEW = prompt_of(150), 40
PIECE = 32 * 128


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama-gqa")
    return target, perturbed(target, 0.05)


@cache
def expected() -> list[int]:
    return greedy(models()[0], PROMPT, NEW, attention_mask=torch.ones(1, len(PROMPT)))


@pytest.fixture(autouse=True)
def _little_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few rows: small pieces, of which some stay on the device."""
    decide = memory_plan.plan
    split: dict[str, Any] = {"resident_bytes": 3 * PIECE, "piece_bytes": PIECE, "buffers": 3}

    def plan(*args: Any) -> MemoryPlan:
        made = decide(*args)
        if made.offload is None:
            return made
        # All rows of so short a text would fit, so that nothing was left to the CPU.
        far = FarRows(1, 0, made.machine.bus, made.machine.host_attention)
        split["host_share"], split["plain_host_share"] = far.share(5), far.share(1)
        return replace(made, offload=replace(made.offload, **split), host={"full rows": 1})

    monkeypatch.setattr(memory_plan, "plan", plan)
    monkeypatch.setattr(offloaded_cache, "LEAVING", 16)


def engine(**options: Any) -> Engine:
    target, draft = models()
    return load(target, draft, profile=False, **{**SMALL, "offload": True, **options})


def test_greedy_text_is_the_targets_own() -> None:
    taken: list[int] = []
    out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=False, pinned=taken.append)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert out.memory is not None
    assert out.memory["offloaded"]
    assert out.memory["levels"] == 3
    assert sum(taken) > 0


def test_the_next_text_takes_no_memory_anew() -> None:
    own, taken = engine(), []
    for seed in (1, 2):
        before = len(taken)
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False, seed=seed, pinned=taken.append)
    assert len(taken) == before


def test_one_offloaded_cache_at_a_time() -> None:
    own = engine()
    alone = own.with_options(levels=1)
    for each in (own, alone, own):
        out = each.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert out.sequences[0, len(PROMPT) :].tolist() == expected()[:8]
        assert len(own.hierarchy._offloaded) == 1
        assert each.hierarchy._program is not None
        assert each.hierarchy._program[1] is own.hierarchy._offloaded[0]


def test_a_batch() -> None:
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    out = engine().generate(ids, max_new_tokens=12, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()[:12]


def test_the_plan_can_be_had_beforehand() -> None:
    own = engine(gpu_memory="2GiB")
    plan = own.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert plan.machine.device == 2 << 30
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.memory == plan.as_dict()
    assert engine(offload=False).memory_plan(len(PROMPT), NEW) is None


def test_room_for_the_next_text_is_given_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, asked = memory_plan.plan, []

    def plan(*args: Any) -> MemoryPlan:
        asked.append(args[-1])
        if args[-1] > NEW:
            raise DoesNotFitError("no room for more")
        return decide(*args)

    monkeypatch.setattr(memory_plan, "plan", plan)
    own = engine(host_attention=False)
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert asked == [1024 - len(PROMPT), NEW]
    assert own.hierarchy._program is not None
    assert own.hierarchy._program[1].max_seq_len == len(PROMPT) + NEW
    # So long a text is written again with what there is.
    own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert len(asked) == 2


def test_no_more_host_memory_is_planned_for_than_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """With two levels it is offloaded like any other; a level 1 of its own would see all of it anyway."""
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
    own = load(models()[0], profile=False, **{**small, "offload": True, "levels": levels})
    out = own.generate(prompt, max_new_tokens=16, do_sample=False)
    assert out.sequences[0, len(prompt) :].tolist() == greedy(models()[0], prompt, 16)
    assert out.memory is not None
    assert out.memory["offloaded"]


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: set[int]) -> None:
    """Let some calls of a method run out of memory."""
    work, calls = getattr(owner, name), 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in times:
            raise torch.OutOfMemoryError("no more")
        return work(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, run)


@pytest.mark.parametrize(
    ("place", "times"),
    [("__init__", {1}), ("prepare", {1, 2}), ("prefill", {1}), ("committed", {3}), ("run", {5, 60})],
)
def test_memory_that_runs_out_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, times: set[int]
) -> None:
    failing(monkeypatch, DecodingProgram, place, times)
    steps: list[int] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            steps.extend(tokens.flatten().tolist())

        def end(self) -> None: ...

    with caplog.at_level(logging.WARNING):
        out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=False, streamer=Streamer())  # type: ignore[arg-type]
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert steps[len(PROMPT) :] == expected()
    said = [r.message for r in caplog.records if "device memory ran out" in r.message]
    assert len(said) == len(times)
    assert "resident rows 0.0 GiB -> 0.0 GiB" in said[0]
    assert out.levels is not None
    assert out.levels[-1].emitted == NEW


def test_memory_that_runs_out_for_good_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DecodingProgram, "prefill", set(range(100)))
    own = engine()
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert not own.hierarchy._offloaded
    monkeypatch.undo()
    failing(monkeypatch, DecodingProgram, "prefill", {1})
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        engine(offload=False).generate(PROMPT, max_new_tokens=NEW, do_sample=False)


def test_sampling_goes_on_with_new_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DecodingProgram, "committed", {2})
    out = engine().generate(PROMPT, max_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=0, seed=3)
    assert out.new_tokens == NEW


@pytest.mark.parametrize("what", ["pinned", "progress"])
def test_an_interrupt_gives_the_memory_back(what: str) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    own = engine()
    with pytest.raises(KeyboardInterrupt):
        own.generate(PROMPT, max_new_tokens=NEW, do_sample=False, **{what: stop})
    assert all(program.closed for program in own.hierarchy._offloaded)
    gc.collect()
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()


def test_states_that_wait_on_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = assembly.DecodingProgram

    def far(*args: Any) -> DecodingProgram:
        *others, split, pinned = args
        assert isinstance(split, Offload)
        return make(*others, replace(split, states_on_host=True), pinned)

    monkeypatch.setattr(assembly, "DecodingProgram", far)
    for feed in (16, 75, 1024):
        out = engine(prefill_chunk=feed).generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, len(PROMPT) :].tolist() == expected()


def test_the_command_shows_the_plan(capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str) -> None:
    words = ["generate", prompt, *pair.options, "--max-new-tokens", "20", "--json", "--compare"]
    small = ["--budget", "64", "--recent", "16", "--levels", "3"]
    code = main([*words, *small, "--offload", "--host-attention", "--gpu-memory", "2GiB"])
    out, err = capsys.readouterr()
    assert code == 0
    assert "memory map" in err
    assert "device: resident rows" in err
    assert "of the KV slots on the host (" in " ".join(err.split())
    result = json.loads(out.splitlines()[-1])
    assert result["identical"] is True
    assert result["memory"]["offloaded"] is True
    assert main([*words, "--gpu-memory", "lots"]) == 2
    assert "'lots' is no size of memory" in capsys.readouterr().err
    assert main([*words, "--host-memory", "48"]) == 2
    assert "host_memory='48' is less than 1 MiB; write 48GiB" in capsys.readouterr().err


RATE = HostRate(((1, 60e9), (48, 20e9)))


def _with_kernel(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Our kernel is there, or not; torch's attention takes its place, for it knows any shape and dtype."""
    monkeypatch.setattr(host_rows, "native", lambda *_: native)
    monkeypatch.setattr(host_rows, "kernel", lambda *_: None)


def _attending(
    monkeypatch: pytest.MonkeyPatch, native: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], DecodingProgram]:
    """The plan that came out and the cycle, after a text that is the target's own."""
    monkeypatch.setattr(assembly, "host_rate", lambda *_: RATE)
    _with_kernel(monkeypatch, native)
    own = engine(**options)
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert out.memory is not None
    [program] = own.hierarchy._offloaded
    assert program.offloaded is not None
    return out.memory, program


@pytest.mark.parametrize(
    ("options", "native"),
    [({"host_attention": True}, False), ({"host_attention": "auto"}, True), ({}, True)],
    ids=str,
)
def test_the_cpu_attends_where_it_is_asked_to_or_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], native: bool
) -> None:
    memory, program = _attending(monkeypatch, native, options)
    assert memory["split"]["host_share"] > 0
    assert program.offloaded.attention is not None
    assert program.offloaded.attention.bytes > 0
    # By its bytes alone, a pass is as much faster as less of it crosses the bus.
    share = memory["split"]["host_share"]
    resident = program.offloaded.host.resident_bytes
    slot = program.target.layers * program.offloaded.host.row_bytes
    tokens = -(-resident // slot) + 1000
    far = tokens * slot - resident
    assert program.transferred_bytes(tokens) == pytest.approx((1 - share) * far, abs=1)
    plain_share = memory["split"]["plain_host_share"]
    assert program.transferred_bytes(tokens, plain=True) == pytest.approx((1 - plain_share) * far, abs=1)


@pytest.mark.parametrize(
    ("options", "native"),
    [({"host_attention": False}, True), ({"host_attention": "auto"}, False), ({}, False)],
    ids=str,
)
def test_elsewhere_all_is_streamed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], native: bool
) -> None:
    memory, program = _attending(monkeypatch, native, options)
    assert memory["cpu_gbps"] is None
    assert program.offloaded.attention is None


@pytest.mark.parametrize(
    ("flags", "native", "attends"),
    [(["--host-attention"], False, True), (["--no-host-attention"], True, False), ([], True, True)],
    ids=str,
)
def test_the_command_has_both_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: TinyPair, prompt: str,
    flags: list[str], native: bool, attends: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(assembly, "host_rate", lambda *_: RATE)
    _with_kernel(monkeypatch, native)
    words = ["generate", prompt, *pair.options, "--max-new-tokens", "2", "--levels", "1", "--json"]
    assert main([*words, "--offload", *flags]) == 0
    memory = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert (memory["cpu_gbps"] is not None) == attends


def test_where_the_cpu_is_too_slow_the_map_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "host_rate", lambda *_: HostRate(((1, 1.0), (48, 1.0))))
    own = engine(host_attention=True)
    plan = own.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert "the CPU attends to 0 % of the KV slots on the host (0.0 GB/s)" in str(memory_table(plan).caption)
    assert "the CPU" not in str(memory_table(engine().memory_plan(len(PROMPT), NEW)).caption)
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()


def test_a_family_that_the_cpu_cannot_attend_for_is_streamed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _with_kernel(monkeypatch, True)
    own = load(CAPPED["gemma2"](), profile=False, offload=True, levels=1)
    plan = own.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert plan.offload is not None
    assert plan.cpu is None
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM caps its attention scores"):
        own.with_options(host_attention=True).memory_plan(len(PROMPT), NEW)
