"""Bits of level 1's weights: "auto" takes 8 where a copy leaves enough (simulated) memory; it is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.model_sizes import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_1_8B, LONG, extra_bytes
from tests.support.models.program_cases import SMALL, draft_of, reference
from triforce_tree import Engine, load
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding import hierarchy, level_one_copy
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import batch_size, device_defaults
from triforce_tree.planning.batch_size import bytes_beside_models
from triforce_tree.planning.device_defaults import gains_from_few_bits, level_one_bits
from triforce_tree.planning.memory_layout import Workload
from triforce_tree.planning.memory_map import GIB, Sizes
from triforce_tree.runtime import distributed

NEW = 12
# Tokens of buffers are rounded up to a multiple of this here.
STEP = 64
# Twice the budget, and one, two and three steps with NEW tokens.
SHORTEST, SHORT, MEDIUM, PROMPT = (prompt_of(length) for length in (20, 50, 100, 180))


@dataclass
class Memory:
    """Simulates the free memory of a device: bytes beside a copy that exists."""

    free: int = 1 << 50


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A machine whose targets gain from few bits, with a reserve of nothing."""
    found = Memory()
    monkeypatch.setattr(device_defaults, "gains_from_few_bits", lambda target: True)
    monkeypatch.setattr(device_defaults, "_LEAST_UNUSED", 0)
    monkeypatch.setattr(hierarchy, "_MAX_SEQ_LEN_STEP", STEP)
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: found.free)
    monkeypatch.setattr(batch_size, "total_bytes", lambda device: 0)
    return found


def engine_of(**options: Any) -> Engine:
    own = {**SMALL, "retrieval_weight_bits": "auto", **options}
    return load(tiny("llama-gqa"), draft_of("llama-gqa"), **load_arguments(own))


def bits(engine: Engine, prompt: list[int], **options: Any) -> int:
    """Bits of level 1 after a request, whose text is the target's own."""
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    out = engine.generate(prompt, **how)
    target = engine.target.model
    assert out.sequences[0, len(prompt) :].tolist() == reference(target, prompt, NEW)
    return program(engine).config.retrieval_weight_bits


def program(engine: Engine) -> DecodingProgram:
    found = engine.last_program
    assert found is not None
    return found


def needed(engine: Engine, tokens: int) -> int:
    """Bytes that a program of so many tokens takes with a copy."""
    hierarchy = engine._hierarchy
    config = replace(hierarchy.config, retrieval_weight_bits=8)
    sizes = Sizes.of(hierarchy.target, hierarchy.draft, config)
    return bytes_beside_models(sizes, config, Workload(1, tokens - NEW, NEW))


@pytest.mark.parametrize(
    "sizes, gib, prompt, expected",
    [
        (LLAMA_2_7B, 140, LONG, 8),
        (LLAMA_2_7B, 80, LONG, 16),
        (LLAMA_2_7B, 80, 32_768, 8),
        (LLAMA_2_7B, 24, 4096, 16),
        (LLAMA_3_1_8B, 140, LONG, 8),
        (LLAMA_3_1_8B, 80, LONG, 8),
        (LLAMA_3_1_8B, 24, 4096, 16),
        (LLAMA_2_13B, 140, LONG, 16),
        (LLAMA_2_13B, 80, 16_384, 8),
    ],
)
def test_the_bits_of_common_models_and_cards(sizes: Sizes, gib: int, prompt: int, expected: int) -> None:
    config, workload = HierarchyConfig(), Workload(1, prompt, 1024)
    free = gib * GIB - sizes.weights - sizes.draft
    assert level_one_bits(sizes, config, workload, free, gib * GIB, 0) == expected
    needs = bytes_beside_models(sizes, replace(config, retrieval_weight_bits=8), workload)
    least = needs + max(4 * GIB, int(0.15 * gib * GIB))
    assert [level_one_bits(sizes, config, workload, least - n, gib * GIB, 0) for n in (0, 1)] == [8, 16]


def test_a_copy_that_exists_counts_as_free_and_stays_with_half_of_the_reserve() -> None:
    config, workload, total = HierarchyConfig(), Workload(1, LONG, 1024), 100 * GIB
    needs = bytes_beside_models(LLAMA_2_7B, replace(config, retrieval_weight_bits=8), workload)
    copied = LLAMA_2_7B.weights // 2

    def found(unused: float, held: int) -> int:
        return level_one_bits(LLAMA_2_7B, config, workload, needs + int(unused * GIB) - held, total, held)

    assert [found(unused, 0) for unused in (15, 14.9)] == [8, 16]
    assert [found(unused, copied) for unused in (14.9, 7.5, 7.4)] == [8, 8, 16]


def test_bits_are_chosen_with_auto_alone(memory: Memory) -> None:
    plain = engine_of(retrieval_weight_bits=16)
    assert bits(plain, SHORT) == 16
    assert plain._hierarchy.level_one.nbytes == 0
    assert bits(plain.with_options(retrieval_weight_bits="auto"), SHORT) == 8
    assert bits(engine_of(kv_bits=8), SHORT) == 8
    for options in ({"gpu_memory": "64GiB"}, {"offload": "auto"}):
        assert bits(engine_of(**options), SHORT) == 16, "a plan decides"


def test_what_gains_from_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def gains(family: str, device: str = "cuda", change: Callable[[HFModel], Any] = id) -> bool:
        made = HFModel(tiny(family).to(torch.bfloat16))
        made.dtype = torch.bfloat16 if device == "cuda" else made.dtype
        change(made)
        with monkeypatch.context() as patched:
            patched.setattr(made, "device", torch.device(device))
            return gains_from_few_bits(made)

    assert not gains("llama-gqa"), "its layers are small"
    assert not gains("llama-gqa", "cpu"), "its layers are small"
    monkeypatch.setattr(device_defaults, "_LEAST_LAYER", 1 << 10)
    monkeypatch.setattr(device_defaults, "_LEAST_LAYER_CPU", 1 << 10)
    assert gains("llama-gqa")
    assert gains("llama-gqa", "cpu") == (library() is not None)
    assert not gains("llama-gqa", change=lambda made: setattr(made, "dtype", torch.float32))
    assert not gains("llama-gqa", change=lambda made: setattr(made.model, "is_quantized", True))
    assert not gains("llama-gqa", change=lambda made: setattr(made, "streamed", SimpleNamespace()))
    assert not gains("mixtral")


def test_one_copy_serves_all_programs_of_an_engine(memory: Memory) -> None:
    engine = engine_of()
    assert bits(engine, SHORT) == 8
    first, model = program(engine), program(engine).retrieval_model
    copied = engine._hierarchy.level_one.nbytes
    assert copied == extra_bytes(model.model) > 0
    assert model is not first.full
    memory.free = 0
    assert bits(engine, SHORT) == 8
    assert program(engine) is first, "what it holds is not missing"
    memory.free = needed(engine, 2 * STEP) - copied
    assert bits(engine, MEDIUM) == 8
    assert program(engine) is not first
    assert program(engine).retrieval_model is model


def test_making_the_copy_is_preparation(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    make, clock = level_one_copy.low_bit_model, SimpleNamespace(now=0.0)

    def slowly(*args: Any) -> Any:
        clock.now += 100.0
        return make(*args)

    monkeypatch.setattr(level_one_copy, "low_bit_model", slowly)
    monkeypatch.setattr(level_one_copy, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    engine, how = engine_of(), {"max_new_tokens": NEW, "do_sample": False}
    made, again, longer = (engine.generate(prompt, **how) for prompt in (SHORT, SHORT, MEDIUM))
    assert 100 <= made.capture_seconds < 150
    assert made.prefill_seconds + made.decode_seconds < 100
    assert again.capture_seconds == made.capture_seconds
    assert longer.capture_seconds < 100


def test_a_prompt_too_long_for_the_copy_frees_it(memory: Memory) -> None:
    engine = engine_of()
    memory.free = needed(engine, 2 * STEP)
    assert bits(engine, MEDIUM) == 8
    memory.free -= engine._hierarchy.level_one.nbytes
    assert bits(engine, PROMPT) == 16
    assert engine._hierarchy.level_one.nbytes == 0
    assert program(engine).retrieval_model is program(engine).full
    last = program(engine)
    assert bits(engine, MEDIUM) == 16
    assert program(engine) is last, "a shorter prompt keeps the program there is"


def test_requests_that_take_turns_keep_their_bits(memory: Memory) -> None:
    engine = engine_of()
    memory.free = needed(engine, 3 * STEP)
    assert bits(engine, SHORT) == 8
    copied = engine._hierarchy.level_one.nbytes
    memory.free -= copied
    for _ in range(2):
        assert [bits(engine, prompt) for prompt in (SHORT, PROMPT)] == [8, 8]
        # Of two levels: the copy waits.
        engine.generate(SHORTEST, max_new_tokens=NEW, do_sample=False)
        assert (program(engine).levels, engine._hierarchy.level_one.nbytes) == (2, copied)


def test_a_given_copy_is_kept_over_programs() -> None:
    engine = engine_of(retrieval_weight_bits=8)
    assert bits(engine, SHORT) == 8
    first, model = program(engine), program(engine).retrieval_model
    engine.generate([SHORT, PROMPT], max_new_tokens=NEW, do_sample=False)
    assert program(engine) is not first
    assert program(engine).retrieval_model is model
    engine.close()
    assert engine._hierarchy.level_one.nbytes == 0


def test_batches_and_given_bits_have_no_copy(memory: Memory) -> None:
    engine = engine_of()
    assert bits(engine, SHORT) == 8
    out = engine.generate([SHORT, MEDIUM], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert program(engine).config.retrieval_weight_bits == 16
    assert engine._hierarchy.level_one.nbytes == 0
    for row, prompt in enumerate((SHORT, MEDIUM)):
        own = reference(engine.target.model, prompt, NEW)
        assert out.sequences[row, len(MEDIUM) :].tolist() == own
    assert bits(engine, SHORT) == 8
    for options in ({"retrieval_weight_bits": 16}, {"gpu_memory": "64GiB"}):
        assert bits(engine.with_options(**options), SHORT) == 16
    four = engine.with_options(retrieval_weight_bits=4)
    memory.free = 0
    assert [bits(four, prompt) for prompt in (SHORT, PROMPT)] == [4, 4]


def test_memory_that_runs_out_making_the_copy_goes_on_without(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(level_one_copy, "low_bit_model", failing)
    engine = engine_of()
    assert [bits(engine, prompt) for prompt in (SHORT, MEDIUM, PROMPT)] == [16, 16, 16]
    assert calls == 1
    assert "retrieval_weight_bits 8 -> 16" in caplog.text
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        bits(engine.with_options(retrieval_weight_bits=8), SHORT)


def test_memory_that_runs_out_while_decoding_frees_the_copy(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, run, runs = engine_of(), DecodingProgram.run, 0

    def failing(self: DecodingProgram, name: str, *generators: torch.Generator) -> None:
        nonlocal runs
        runs += name == "target"
        if name == "target" and self.config.retrieval_weight_bits == 8 and runs > 1:
            raise torch.OutOfMemoryError("no more")
        run(self, name, *generators)

    monkeypatch.setattr(DecodingProgram, "run", failing)
    assert bits(engine, SHORT) == 16
    assert runs > 2
    assert engine._hierarchy.level_one.nbytes == 0
    assert bits(engine, PROMPT) == 16
    assert caplog.text.count("retrieval_weight_bits 8 -> 16") == 1


def test_weights_that_are_trained_have_no_copy(memory: Memory) -> None:
    engine = engine_of()
    assert bits(engine, SHORT) == 8
    layer = engine.target.model.model.layers[0].mlp.up_proj
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.mul_(1.01)
    changed = engine.generate(SHORT, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    assert program(engine).config.retrieval_weight_bits == 16
    assert engine._hierarchy.level_one.nbytes == 0
    plain = engine.with_options(levels=1).generate(SHORT, max_new_tokens=NEW, do_sample=False)
    assert changed.sequences.equal(plain.sequences)


def test_ranks_take_the_most_bits_of_any(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has no room for the copy: the least of -8 here and -16 there."""
    other = -16
    monkeypatch.setattr(distributed, "all_reduce_min", lambda values: [min(*values, other)])
    assert bits(engine_of(), SHORT) == 16
    other = -8
    assert bits(engine_of(), SHORT) == 8
    memory.free = 0
    assert bits(engine_of(), SHORT) == 16


def test_bits_that_are_chosen_with_exact_and_when_sampling(memory: Memory) -> None:
    engine = engine_of(exact=True)
    assert bits(engine, SHORT) == 8
    plain = engine.with_options(levels=1)
    exactly = [e.generate(MEDIUM, max_new_tokens=NEW, do_sample=False).sequences for e in (engine, plain)]
    assert exactly[0].equal(exactly[1])
    assert program(engine).config.retrieval_weight_bits == 8
    # By seed and position: what drafts may not matter.
    with_copy, without = engine_of(), engine_of(retrieval_weight_bits=16)
    drawn = [
        made.generate(SHORT, max_new_tokens=NEW, temperature=0.9, seed=[5]).sequences
        for made in (with_copy, without)
    ]
    assert drawn[0].equal(drawn[1])
    assert program(with_copy).config.retrieval_weight_bits == 8


def test_explanations_name_the_bits_that_were_chosen(memory: Memory) -> None:
    assert engine_of().explain(SHORT, NEW).options["retrieval_weight_bits"] == 8
    memory.free = 0
    assert engine_of().explain(SHORT, NEW).options["retrieval_weight_bits"] == 16


def test_without_a_gpu_nothing_is_copied() -> None:
    target = tiny("llama-gqa")
    options = {**SMALL, "retrieval_weight_bits": "auto"}
    engine = load(target, perturbed(target, 0.05), **load_arguments(options))
    assert bits(engine, SHORT) == 16
    assert engine._hierarchy.level_one.nbytes == 0
