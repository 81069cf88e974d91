"""Attention on the CPU by option: in Python and on the command line."""

import json
from typing import Any

import pytest

from tests.support.models.families import CAPPED
from tests.support.models.offloaded_engine import NEW, PROMPT, engine, expected
from tests.support.models.tiny_pair import TinyPair
from triforce_tree import load
from triforce_tree.cli.console import memory_table
from triforce_tree.cli.entry import main
from triforce_tree.decoding import hierarchy
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.cpu import offload_attention
from triforce_tree.planning.memory_map import HostRate

pytestmark = pytest.mark.usefixtures("small_pieces")


RATE = HostRate(((1, 60e9), (48, 20e9)))


def _with_kernel(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Our kernel is available, or not; torch's attention, of any shape and dtype, computes in its place."""
    monkeypatch.setattr(offload_attention, "native", lambda *_: native)
    monkeypatch.setattr(offload_attention, "kernel", lambda *_: None)


def _attending(
    monkeypatch: pytest.MonkeyPatch, native: bool, options: dict[str, Any]
) -> tuple[dict[str, Any], DecodingProgram]:
    """The plan and the program, after a generation that emitted the target's own tokens."""
    monkeypatch.setattr(hierarchy, "host_rate", lambda *_: RATE)
    _with_kernel(monkeypatch, native)
    own = engine(**options)
    out = own.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPT) :].tolist() == expected()
    assert out.memory is not None
    [program] = own._hierarchy._offloaded
    assert program.cache.backend.transfers
    return out.memory, program


@pytest.mark.parametrize(
    ("options", "native"),
    [({"host_attention": True}, False), ({"host_attention": "auto"}, True), ({}, True)],
    ids=str,
)
def test_the_cpu_attends_where_it_is_wanted_or_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], native: bool
) -> None:
    memory, program = _attending(monkeypatch, native, options)
    assert memory["split"]["host_share"] > 0
    assert program.cache.backend.cache.attention is not None
    assert program.cache.backend.cache.attention.bytes > 0
    # A pass copies less by the CPU's share of the slots in host memory.
    share = memory["split"]["host_share"]
    resident = program.cache.backend.cache.host.resident_bytes
    slot = program.target.layers * program.cache.backend.cache.host.slot_bytes
    tokens = -(-resident // slot) + 1000
    on_host = tokens * slot - resident
    assert program.transferred_bytes(tokens) == pytest.approx((1 - share) * on_host, abs=1)
    plain_share = memory["split"]["plain_host_share"]
    assert program.transferred_bytes(tokens, plain=True) == pytest.approx((1 - plain_share) * on_host, abs=1)


@pytest.mark.parametrize(
    ("options", "native"),
    [({"host_attention": False}, True), ({"host_attention": "auto"}, False), ({}, False)],
    ids=str,
)
def test_elsewhere_all_slots_are_streamed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], native: bool
) -> None:
    memory, program = _attending(monkeypatch, native, options)
    assert memory["cpu_gbps"] is None
    assert program.cache.backend.cache.attention is None


@pytest.mark.parametrize(
    ("flags", "native", "attends"),
    [
        (["--advanced", "host_attention=true"], False, True),
        (["--advanced", "host_attention=false"], True, False),
        ([], True, True),
    ],
    ids=str,
)
def test_the_command_has_both_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: TinyPair, prompt: str,
    flags: list[str], native: bool, attends: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(hierarchy, "host_rate", lambda *_: RATE)
    _with_kernel(monkeypatch, native)
    words = ["generate", prompt, *pair.options, "--max-new-tokens", "2", "--levels", "1", "--json"]
    assert main([*words, "--offload", *flags]) == 0
    memory = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]
    assert (memory["cpu_gbps"] is not None) == attends


def test_a_cpu_that_is_too_slow_gets_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "host_rate", lambda *_: HostRate(((1, 1.0), (48, 1.0))))
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
    own = load(CAPPED["gemma2"](), offload=True, levels=1)
    plan = own.memory_plan(len(PROMPT), NEW)
    assert plan is not None
    assert plan.offload is not None
    assert plan.cpu is None
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM caps its attention scores"):
        own.with_options(advanced={"host_attention": True}).memory_plan(len(PROMPT), NEW)
