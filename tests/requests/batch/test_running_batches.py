"""A sequence that has ended makes room for a waiting one; each is what it would be alone."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.distributions.block_folders import block
from tests.support.distributions.head_folders import eagle, mtp
from tests.support.models.api_cases import (
    PROMPT,
    SMALL,
    SMALL_LOOKUP,
    TARGET,
    Collect,
    characters,
    small_engine,
)
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.joining import Coming
from tests.support.models.own_drafters import OwnDrafter
from tests.support.models.program_cases import reference
from tests.support.models.recurrent_families import RECURRENT, recurrent
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.base import TokenTree
from triforce_tree.planning import batch_size
from triforce_tree.planning.batch_size import fitting_batch
from triforce_tree.planning.memory_layout import Workload, on_device
from triforce_tree.planning.memory_map import Machine, Sizes
from triforce_tree.requests.batch_pool import BatchPool
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.draws import sequence_seed
from triforce_tree.verify.probs import Sampler

# Short ones follow long ones and the other way around.
PROMPTS = [prompt_of(length) for length in (61, 7, 43, 90, 1, 30, 58)]
NEW = 12
FIXED = {**SMALL, "rounds": 1, "prefill_chunk": 16}


@cache
def model_of(family: str) -> PreTrainedModel:
    return recurrent(family) if family in RECURRENT else tiny(family)


def new_tokens(out: GenerateOutput) -> list[list[int]]:
    width = max(map(len, PROMPTS))
    return [
        row[width : width + count] for row, count in zip(out.sequences.tolist(), out.new_tokens, strict=True)
    ]


def continued(engine: Engine, rows: int, **options: Any) -> list[list[int]]:
    given = {"max_new_tokens": NEW, "do_sample": False, **options}
    out = engine.generate(PROMPTS, max_batch=rows, **given)
    batch = engine.last_program
    assert batch is not None
    assert batch.batch == rows
    return new_tokens(out)


class Next(OwnDrafter):
    """Proposes what another model would, without ``start_one``; ``started`` are the texts it was given."""

    def __init__(self) -> None:
        super().__init__("chain:2", 64)
        self.started: list[list[int]] = []

    def start(self, sequences: Sequence[Sequence[int]]) -> None:
        self.started.append([len(sequence) for sequence in sequences])

    def propose(self, state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        tree.tokens[:, 0] = state.newest
        for depth in range(2):
            self.write_fixed(depth, tree)


DRAFTED: dict[str, Callable[[], Engine]] = {
    "three levels": lambda: triforce_tree.load(
        TARGET, perturbed(TARGET, 0.05), levels=3, **load_arguments(FIXED)
    ),
    "trees behind chains": lambda: triforce_tree.load(
        TARGET, perturbed(TARGET, 0.05), levels=3, **load_arguments({**FIXED, "tail_tree": True})
    ),
    "two levels": lambda: triforce_tree.load(
        TARGET, perturbed(TARGET, 0.05), levels=2, **load_arguments(FIXED)
    ),
    "matching": lambda: triforce_tree.load(TARGET, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})),
    "mtp": lambda: triforce_tree.load(
        TARGET, drafter=mtp(TARGET, "chain:3", 2), levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    ),
    "eagle": lambda: triforce_tree.load(
        TARGET, drafter=eagle(TARGET, "chain:3"), levels=3, **load_arguments({**SMALL_LOOKUP, "rounds": 2})
    ),
    "block": lambda: triforce_tree.load(
        TARGET, drafter=block(TARGET, "chain:3", inputs=(0,)), levels=3,
        **load_arguments({**SMALL_LOOKUP, "rounds": 2}),
    ),
    "plain": lambda: triforce_tree.load(TARGET, levels=1, **load_arguments(SMALL_LOOKUP)),
}  # fmt: skip


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("kind", DRAFTED)
def test_every_sequence_is_its_own_text_and_drafted_as_alone(kind: str) -> None:
    """It takes as many passes as alone, since the drafter keeps nothing of the sequence before."""
    engine = DRAFTED[kind]()
    out = engine.generate(PROMPTS, max_batch=3, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out) == [reference(TARGET, prompt, NEW) for prompt in PROMPTS]
    alone = [engine.generate(prompt, max_new_tokens=NEW, do_sample=False).levels[-1] for prompt in PROMPTS]
    together = out.levels[-1]
    assert together.forwards == sum(level.forwards for level in alone)
    assert together.accepted == sum(level.accepted for level in alone)
    assert (together.accepted > 0) == (kind != "plain")


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "qwen3-next", "lfm2"])
@pytest.mark.parametrize("levels", [1, 2])
def test_windows_and_recurrent_states_begin_anew(family: str, levels: int) -> None:
    target = model_of(family)
    engine = triforce_tree.load(
        target, levels=levels, **load_arguments({**SMALL_LOOKUP, "rounds": 1, "prefill_chunk": 16})
    )
    assert continued(engine, 2) == [reference(target, prompt, NEW) for prompt in PROMPTS]


def test_a_drafter_that_begins_whole_batches_alone_is_given_all_sequences() -> None:
    drafter = Next()
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    )
    assert continued(engine, 2) == [reference(TARGET, prompt, NEW) for prompt in PROMPTS]
    assert [61, 7] in drafter.started
    began = {length for lengths in drafter.started for length in lengths}
    assert {len(prompt) for prompt in PROMPTS} <= began


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_seed_gives_each_sequence_draws_of_its_own(levels: int) -> None:
    """They are those that it has alone with the seed of its number, at any batch index and time."""
    draft = {} if levels == 1 else {"draft": perturbed(TARGET, 0.3)}
    engine = triforce_tree.load(
        TARGET, levels=levels, **load_arguments({**draft, **(FIXED if draft else SMALL_LOOKUP)})
    )
    options = {"do_sample": True, "temperature": 0.9, "max_new_tokens": NEW}
    found = {rows: new_tokens(engine.generate(PROMPTS, max_batch=rows, seed=3, **options)) for rows in (2, 7)}
    alone = [
        engine.generate(prompt, seed=sequence_seed(3, number), **options).sequences[0, len(prompt) :].tolist()
        for number, prompt in enumerate(PROMPTS)
    ]
    assert found == {2: alone, 7: alone}
    assert len({tuple(text) for text in alone}) == len(PROMPTS)


def test_streamers_scores_and_reasons_are_of_their_own_sequence() -> None:
    engine, stop = small_engine(), reference(TARGET, PROMPTS[2], NEW)[4]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    asked = {"output_scores": True, "output_logits": True, "logprobs": True}
    streamers = [Collect() for _ in PROMPTS]
    out = engine.generate(PROMPTS, max_batch=2, streamer=streamers, **options, **asked)
    reasons = set()
    for row, prompt in enumerate(PROMPTS):
        alone = engine.generate(prompt, **options, **asked)
        count = alone.new_tokens
        assert new_tokens(out)[row] == alone.sequences[0, len(prompt) :].tolist()
        assert out.finish_reason[row] == alone.finish_reason
        assert [t for part in streamers[row].parts for t in part][-count:] == new_tokens(out)[row]
        assert streamers[row].ended == 1
        torch.testing.assert_close(out.logprobs[row, :count], alone.logprobs[0])
        torch.testing.assert_close(
            torch.stack(out.scores[:count])[:, row], torch.stack(alone.scores)[:, 0], rtol=1e-4, atol=1e-4
        )
        reasons.add(alone.finish_reason)
    assert reasons == {"eos", "length"}


@pytest.mark.parametrize("mib, rows", [(0, 1), (2**20, len(PROMPTS))])
def test_memory_decides_how_many_are_decoded_together(
    monkeypatch: pytest.MonkeyPatch, mib: int, rows: int
) -> None:
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: mib * 2**20)
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments(SMALL_LOOKUP))
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert new_tokens(out) == [reference(TARGET, prompt, NEW) for prompt in PROMPTS]
    assert engine.last_program.batch == rows


def test_as_many_fit_as_memory_holds() -> None:
    """Some fit, as many as the planned bytes of each say."""
    hierarchy = small_engine()._hierarchy
    how = (hierarchy.target, hierarchy.draft, hierarchy.config)
    sizes = Sizes.of(*how)

    def held(batch: int) -> int:
        machine = Machine(0, 0, 1.0, 1.0)
        plan = on_device(sizes, machine, hierarchy.config, Workload(batch, 5000, 100))
        return plan.peak - sum(plan.device[name] for name in ("weights", "weight slots", "draft"))

    for batch in (2, 5, 9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(batch_size, "free_bytes", lambda device, batch=batch: held(batch) + 192 * 2**20)
            assert fitting_batch(*how, 20, 5000, 100) == batch
            assert fitting_batch(*how, 3, 5000, 100) == min(3, batch)
            assert fitting_batch(*how, 20, 5000, 100, freed=held(4) - held(1)) == batch + 3


def test_what_a_drafter_keeps_of_each_sequence_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = DRAFTED["eagle"]()._hierarchy
    how = (hierarchy.target, None, hierarchy.config)
    own = Sizes.of(*how, hierarchy.own_drafter)
    free = batch_size.bytes_beside_models(own, hierarchy.config, Workload(100, 60, 10)) + 192 * 2**20
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free)
    assert BatchPool(hierarchy, [[0] * 60], 10, 200).batch_size(200, 60, 10) == 100
    assert fitting_batch(*how, 200, 60, 10) > 100


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_a_batch_is_a_whole_number_from_one_on(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_batch=.* must be (at least 1|an integer)"):
        small_engine().generate(PROMPT, max_batch=value)


def short_of_memory(monkeypatch: pytest.MonkeyPatch, engine: Engine, at: int) -> list[int]:
    """Lets memory run out in a chunk of a prefill, by its number; returns the numbers of all chunks."""
    chunk, calls = DecodingProgram.prefill_chunk, list[int]()

    def failing(self: DecodingProgram, *args: Any) -> tuple[int, int]:
        calls.append(len(calls) + 1)
        if calls[-1] == at:
            raise torch.OutOfMemoryError("no more")
        return chunk(self, *args)

    monkeypatch.setattr(DecodingProgram, "prefill_chunk", failing)
    monkeypatch.setattr(type(engine._hierarchy), "shrink", lambda self: self.release() or True)
    return calls


def test_memory_that_runs_out_while_a_sequence_joins_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    calls = short_of_memory(monkeypatch, engine, 2)
    assert continued(engine, 2) == [reference(TARGET, prompt, NEW) for prompt in PROMPTS]
    assert len(calls) > 4


def test_what_was_reused_is_of_the_prefill_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence joins in the row of one that reused its prompt, and memory runs out in its prefill."""
    engine = triforce_tree.load(TARGET, levels=1, **load_arguments({**SMALL_LOOKUP, "prefill_chunk": 16}))
    prompts = [prompt_of(61), prompt_of(43)[::-1]]
    given = {"max_batch": 1, "max_new_tokens": 4, "do_sample": False}
    engine.generate(prompts[:1], **given)
    calls = short_of_memory(monkeypatch, engine, 1)
    assert engine.generate(prompts, **given).reused_tokens == [48, 0]
    assert calls == [1]


def test_a_failed_prefill_of_one_sequence_leaves_nothing_to_reuse() -> None:
    class StopError(Exception):
        pass

    def stop(tokens: int) -> None:
        nonlocal left
        left -= tokens
        if left < 0:
            raise StopError

    engine = triforce_tree.load(TARGET, perturbed(TARGET, 0.05), levels=3, **load_arguments(FIXED))
    left = 61 + 7 + 20
    with pytest.raises(StopError):
        engine.generate(PROMPTS, max_batch=2, max_new_tokens=NEW, do_sample=False, progress=stop)
    out = engine.generate(PROMPTS[:2], max_new_tokens=NEW, do_sample=False)
    assert out.reused_tokens == [0, 0]
    assert new_tokens_of(out, 61) == [reference(TARGET, prompt, NEW) for prompt in PROMPTS[:2]]


def new_tokens_of(out: GenerateOutput, width: int) -> list[list[int]]:
    return [row[width:] for row in out.sequences.tolist()]


class Wary(Coming):
    """Prompts that join where a much longer one would not fit."""

    asked = 0

    def next(self, fits: Fits) -> Joined | None:
        assert not fits([1] * 5000, 1)
        self.asked += 1
        return super().next(fits)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("target", ["llama-gqa", "mistral-window", "qwen3-next"])
def test_prompts_join_a_batch_that_runs(target: str, rows: int, fed: list[int]) -> None:
    """Into rows that sequences have left, or that are added; the running ones keep what is cached."""
    if target == "llama-gqa":
        model, levels = TARGET, 3
        engine = triforce_tree.load(
            model, perturbed(model, 0.05), tokenizer=characters(), levels=3, **load_arguments(FIXED)
        )
    else:
        model, levels = model_of(target), 2
        engine = triforce_tree.load(
            model, tokenizer=characters(), levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
        )
    streamers = [Collect() for _ in PROMPTS[2:]]
    waiting = Wary([Joined(*each) for each in zip(PROMPTS[2:], repeat(NEW), streamers, strict=False)], rows)
    options = {"max_new_tokens": NEW, "do_sample": False, "logprobs": True}
    out = engine.generate(PROMPTS[:2], joining=waiting, **options)
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS), "nothing is prefilled twice"
    texts = [reference(model, prompt, NEW) for prompt in PROMPTS]
    assert new_tokens_of(out, 61) == texts[:2]
    assert sorted(waiting.outputs) == list(range(len(PROMPTS)))
    assert waiting.asked
    assert engine.last_program.batch == (rows or 2)
    for number, prompt in enumerate(PROMPTS):
        own, alone = waiting.outputs[number], engine.generate(prompt, **options)
        assert own.sequences.tolist() == alone.sequences.tolist()
        assert (own.new_tokens, own.finish_reason) == (NEW, "length")
        torch.testing.assert_close(own.logprobs, alone.logprobs, rtol=1e-4, atol=1e-4)
        # Levels that change within a text are where rows were added.
        if levels == 3 and not rows:
            assert own.levels[-1].proposed == alone.levels[-1].proposed
            assert own.levels[-1].accepted == alone.levels[-1].accepted
        assert own.levels[-1].emitted == NEW
        assert own.reused_tokens == 0
    for streamer, prompt, text in zip(streamers, PROMPTS[2:], texts[2:], strict=True):
        assert [t for part in streamer.parts for t in part] == [*prompt, *text]
        assert streamer.ended == 1
