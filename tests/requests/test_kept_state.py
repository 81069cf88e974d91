"""Processors and criteria that keep state, or look at other sequences: called as by ``model.generate``."""

import json
import logging
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

import triforce_tree
from tests.support.models.api_cases import Collect
from tests.support.models.families import perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.requests.output import GenerateOutput

V, NEW = 40, 12
TARGET = tiny("llama-gqa", vocab_size=V)
SMALL = {"gamma": 3, "tree": "best-first:3,2", "budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6}
ONE = [prompt_of(41, V)]
TWO = [prompt_of(41, V), prompt_of(30, V)[::-1]]


@cache
def engine(levels: int) -> Engine:
    return triforce_tree.load(TARGET, perturbed(TARGET, 0.1), levels=levels, **load_arguments(SMALL))


def expected(prompts: list[list[int]], **options: Any) -> Any:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return TARGET.generate(ids, attention_mask=mask, **options)


def moved(scores: Tensor, by: int) -> Tensor:
    """Scores that prefer another token for each number."""
    return scores.roll(by, -1)


class Counter(LogitsProcessor):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return moved(scores, self.calls)


class NewestTokens(LogitsProcessor):
    """Reads the newest token of each row in every call but the first, as processors of grammars do."""

    def __init__(self) -> None:
        self.states: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.states:
            self.states = [0] * len(input_ids)
        else:
            assert len(self.states) == len(input_ids)
            self.states = [s + t for s, t in zip(self.states, input_ids[:, -1].tolist(), strict=True)]
        scores = scores.clone()
        for row, state in zip(scores, self.states, strict=True):
            row[(state + torch.arange(5)) % V] = -torch.inf
        return scores


class Temperature(TemperatureLogitsWarper):
    """A class of transformers that gets state by inheritance."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.temperature += 0.5
        return moved(super().__call__(input_ids, scores), int(self.temperature))


class Draws(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return moved(scores, int(torch.randint(V, ())) + random.randrange(2) + np.random.randint(2))  # noqa: NPY002


def closure() -> Callable[..., Tensor]:
    calls = 0

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return moved(scores, calls)

    return process


KEEPING: dict[str, Callable[[], Any]] = {
    "counter": Counter,
    "newest tokens": NewestTokens,
    "derived": lambda: Temperature(1.0),
    "draws": Draws,
    "closure": closure,
    "method": lambda: Counter().__call__,
}


class Recorded:
    """Calls a processor or criterion, and keeps what each call got."""

    def __init__(self, given: Any) -> None:
        self.given, self.calls = given, list[tuple[Tensor, Any]]()

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        kept = scores.clone() if isinstance(scores, Tensor) else scores
        self.calls.append((input_ids.clone(), kept))
        return self.given(input_ids, scores)


def assert_same_calls(ours: Recorded, theirs: Recorded) -> None:
    assert len(ours.calls) == len(theirs.calls)
    for (ids, scores), (their_ids, their_scores) in zip(ours.calls, theirs.calls, strict=True):
        assert ids.tolist() == their_ids.tolist()
        torch.testing.assert_close(scores, their_scores, rtol=1e-4, atol=1e-4)


def was_drafted(out: GenerateOutput) -> bool:
    return len(out.levels or []) > 1


def reseeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "prompts", "levels"),
    [
        *((name, TWO, 2) for name in KEEPING),
        *(("newest tokens", prompts, levels) for prompts in (ONE, TWO) for levels in (1, 3)),
    ],
)
def test_text_and_calls_are_those_of_transformers(name: str, prompts: list[list[int]], levels: int) -> None:
    options: dict[str, Any] = {
        "do_sample": False, "max_new_tokens": NEW, "eos_token_id": [5, 17, 30], "pad_token_id": 0
    }  # fmt: skip
    reseeded()
    theirs = Recorded(KEEPING[name]())
    wanted = expected(prompts, logits_processor=[theirs], **options)
    reseeded()
    ours = Recorded(KEEPING[name]())
    out = engine(levels).generate(prompts, logits_processor=[ours], **options)
    assert out.sequences.tolist() == wanted.tolist()
    assert_same_calls(ours, theirs)


@pytest.mark.parametrize("name", KEEPING)
def test_a_warning_names_what_may_keep_state(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "triforce_tree"):
        out = engine(2).generate(ONE, logits_processor=[KEEPING[name]()], do_sample=False, max_new_tokens=NEW)
    assert not was_drafted(out)
    [record] = caplog.records
    assert re.search("nothing is drafted, .* may keep state; give it .* keeps_state", record.getMessage())


def plain_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    return moved(scores, 1) - 0.1 * torch.arange(V) * (input_ids[:, -1:] % 3)


plain_function.keeps_state = False


class Declared(Counter):
    """Counts something that does not change its answers."""

    keeps_state = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return moved(scores, 3)


def allowed_tokens(row: int, sent: Tensor) -> list[int]:
    """Depends on the number of the sequence and on its newest token."""
    return [token for token in range(V) if (token + row + int(sent[-1])) % 3]


allowed_tokens.keeps_state = False

STATELESS: dict[str, dict[str, Any]] = {
    "function": {"logits_processor": [plain_function]},
    "object": {"logits_processor": [Declared()]},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed_tokens},
}


@pytest.mark.parametrize("prompts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("name", STATELESS)
def test_what_keeps_none_is_drafted_for(name: str, prompts: list[list[int]]) -> None:
    options: dict[str, Any] = {**STATELESS[name], "do_sample": False, "max_new_tokens": NEW}
    out = engine(2).generate(prompts, pad_token_id=0, **options)
    assert was_drafted(out)
    assert out.sequences.tolist() == expected(prompts, pad_token_id=0, **options).tolist()


def test_samples_are_drafted_for_by_a_function_that_keeps_none() -> None:
    options: dict[str, Any] = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": NEW}
    out = engine(2).generate(ONE, prefix_allowed_tokens_fn=allowed_tokens, **options)
    assert was_drafted(out)
    for before, new in out.sequences[:, len(ONE[0]) - 1 :].unfold(1, 2, 1).flatten(0, 1).tolist():
        assert new in allowed_tokens(0, torch.tensor([before]))


class Stops(StoppingCriteria):
    """Ends each row by a list of its own and, if there are any, by its scores."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen = self.seen or [set() for _ in input_ids]
        for seen, row in zip(self.seen, input_ids, strict=True):
            seen.add(int(row[-1]))
        ends = torch.tensor([len(seen) > 4 for seen in self.seen])
        return ends if scores is None else ends | (scores[-1].amax(-1) > 6)


@pytest.mark.parametrize("asked", [{}, {"output_scores": True, "return_dict_in_generate": True}], ids=len)
@pytest.mark.parametrize("prompts", [ONE, TWO], ids=["one", "two"])
def test_criteria_get_what_they_get_in_transformers(prompts: list[list[int]], asked: dict[str, Any]) -> None:
    options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": 1, "pad_token_id": 0, **asked}
    theirs, ours = Recorded(Stops()), Recorded(Stops())
    wanted = expected(prompts, stopping_criteria=[theirs], **options)
    out = engine(3).generate(prompts, stopping_criteria=[ours], **options)
    sequences = wanted.sequences if asked else wanted
    assert out.sequences.tolist() == sequences.tolist()
    assert sequences.shape[1] < len(ONE[0]) + 20, "the criterion ends the text"
    assert_same_calls(ours, theirs)


def test_a_criterion_of_one_sequence_is_asked_within_accepted_blocks() -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    theirs, ours = Recorded(Stops()), Recorded(Stops())
    wanted = expected(ONE, stopping_criteria=[theirs], **options)
    out = engine(2).generate(ONE, stopping_criteria=[ours], **options)
    assert was_drafted(out)
    assert out.sequences.tolist() == wanted.tolist()
    # Only those who ask for scores get them.
    assert [ids.tolist() for ids, _ in ours.calls] == [ids.tolist() for ids, _ in theirs.calls]


def test_draws_are_those_of_torch() -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "max_new_tokens": NEW}
    torch.manual_seed(3)
    wanted = expected(TWO, logits_processor=[Counter()], **options)
    torch.manual_seed(3)
    out = engine(2).generate(TWO, logits_processor=[Counter()], logprobs=True, **options)
    assert out.sequences[:, -NEW:].tolist() == wanted[:, -NEW:].tolist()
    assert out.logprobs is not None
    assert out.logprobs.shape == (2, NEW)
    same = [engine(2).generate(TWO, logits_processor=[Counter()], seed=5, **options) for _ in range(2)]
    assert same[0].sequences.tolist() == same[1].sequences.tolist()


def test_several_samples_streams_and_sessions() -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": NEW}
    torch.manual_seed(3)
    theirs = Recorded(NewestTokens())
    wanted = expected(ONE, logits_processor=[theirs], num_return_sequences=3, **options)
    torch.manual_seed(3)
    ours = Recorded(NewestTokens())
    out = engine(2).generate(ONE, logits_processor=[ours], num_return_sequences=3, **options)
    assert out.sequences.tolist() == wanted.tolist()
    assert_same_calls(ours, theirs)

    options = {"do_sample": False, "max_new_tokens": NEW}
    streamer = Collect()
    out = engine(2).generate(ONE, logits_processor=[Counter()], streamer=streamer, **options)
    assert [token for part in streamer.parts[1:] for token in part] == out.sequences[0, -NEW:].tolist()
    assert streamer.ended == 1
    session, both = engine(2).session(), Counter()
    first = session.generate(ONE[0], logits_processor=[both], **options)
    second = session.generate([3, 4, 5], logits_processor=[both], **options)
    assert second.reused_tokens == len(ONE[0]) + NEW - 1
    again = Counter()
    assert first.sequences.tolist() == expected(ONE, logits_processor=[again], **options).tolist()
    text = [*first.sequences[0].tolist(), 3, 4, 5]
    assert second.sequences.tolist() == expected([text], logits_processor=[again], **options).tolist()


def test_through_transformers() -> None:
    hook = triforce_tree.custom_generate(perturbed(TARGET, 0.1), levels=2, **load_arguments(SMALL))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    made = expected(ONE, logits_processor=[Counter()], custom_generate=hook, **options)
    assert made.tolist() == expected(ONE, logits_processor=[Counter()], **options).tolist()


@pytest.mark.parametrize(
    "config",
    [WatermarkingConfig(), SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7, 11])],
    ids=["green list", "SynthID"],
)
@pytest.mark.parametrize("prompts", [ONE, TWO], ids=["one", "two"])
def test_watermarks(config: Any, prompts: list[list[int]]) -> None:
    options = {"watermarking_config": config, "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    out = engine(2).generate(prompts, **options)
    assert out.sequences[:, -NEW:].tolist() == expected(prompts, **options)[:, -NEW:].tolist()


def test_a_pass_that_is_repeated_calls_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = DecodingProgram.run, []

    def failing(self: DecodingProgram, *args: Any) -> None:
        run(self, *args)
        count.append(1)
        if len(count) in (1, 4):
            raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(DecodingProgram, "run", failing)
    made = triforce_tree.load(TARGET, perturbed(TARGET, 0.1), levels=2, offload=True, **load_arguments(SMALL))
    ours, theirs, criteria = Recorded(Counter()), Recorded(Counter()), [Recorded(Stops()) for _ in range(2)]
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    prompts = [prompt_of(90, V)]
    out = made.generate(prompts, logits_processor=[ours], stopping_criteria=[criteria[0]], **options)
    wanted = expected(prompts, logits_processor=[theirs], stopping_criteria=[criteria[1]], **options)
    assert out.sequences.tolist() == wanted.tolist()
    assert_same_calls(ours, theirs)
    assert_same_calls(*criteria)


def test_sequences_that_cannot_be_decoded_together_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Counter may keep state.* 2 sequences .* max_batch=1; leave it out"
    ):
        engine(2).generate(TWO, logits_processor=[Counter()], max_batch=1, max_new_tokens=3)
    tree = engine(2).tree(ONE[0])
    leaves = tree.fork(tree.root, 2)
    with pytest.raises(ValueError, match="2 leaves cannot be generated in one call: Counter may keep state"):
        tree.generate(leaves, logits_processor=[Counter()], do_sample=False, max_new_tokens=3)
    [branch] = tree.generate(leaves[0], logits_processor=[Counter()], do_sample=False, max_new_tokens=NEW)
    wanted = expected(ONE, logits_processor=[Counter()], do_sample=False, max_new_tokens=NEW)
    assert branch.tokens == wanted[0, -NEW:].tolist()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("levels", ["auto", 1, 2, 3])
def test_json_by_the_processor_of_xgrammar(levels: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    processor = pytest.importorskip("xgrammar.contrib.hf").LogitsProcessor
    made = triforce_tree.load(levels=levels, dtype="float32")
    tokenizer, model = made.tokenizer, made.target.model
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    prompts = ["Once upon a time there was a boy. As JSON: ", "The old man: "]
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(map(len, rows))
    for batch in (rows[:1], rows):
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
        out = made.generate(batch, logits_processor=[processor(grammar)], **options)
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        wanted = model.generate(ids, attention_mask=mask, logits_processor=[processor(grammar)], **options)
        new = wanted.shape[1] - width
        assert out.sequences[:, -new:].tolist() == wanted[:, -new:].tolist()
        for text in [out.text] if isinstance(out.text, str) else out.text or ():
            assert json.loads(text).keys() == {"name", "age"}
