"""Prompts with different options in one call, and prompts that join a batch with options of their own."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.api_cases import SMALL, TARGET, characters
from tests.support.models.families import perturbed, prompt_of
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.requests.joining import Fits, Joined
from triforce_tree.requests.output import GenerateOutput

PROMPTS = [prompt_of(length) for length in (61, 30, 43, 58)]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 12, "logprobs": True},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "frequency_penalty": 0.8},
    {"temperature": 1.3, "min_p": 0.1, "top_k": 0, "max_new_tokens": 10, "bad_words_ids": [[3], [5, 9]]},
    {
        "temperature": 0, "top_k": None, "max_new_tokens": 9, "repetition_penalty": 1.7, "min_new_tokens": 5,
        "eos_token_id": [7, 9, 11], "sequence_bias": {(4,): 2.5},
    },
]  # fmt: skip
SEEDS = [11, 12, 13, 14]


@pytest.fixture(scope="module", params=[1, 2, 3])
def engine(request: pytest.FixtureRequest) -> Engine:
    draft = perturbed(TARGET, 0.05)
    options = load_arguments({**SMALL, "rounds": 1, "prefill_chunk": 16})
    return triforce_tree.load(TARGET, draft, tokenizer=characters(), levels=request.param, **options)


def lists(options: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [each.get(name) for each in options] for name in {n for each in options for n in each}}


def new_tokens(out: GenerateOutput, width: int) -> list[list[int]]:
    counts = out.new_tokens if isinstance(out.new_tokens, list) else [out.new_tokens]
    return [row[width : width + n] for row, n in zip(out.sequences.tolist(), counts, strict=True)]


def alone(engine: Engine) -> list[list[int]]:
    found = []
    for prompt, own, seed in zip(PROMPTS, OPTIONS, SEEDS, strict=True):
        found += new_tokens(engine.generate([prompt], seed=[seed], **own), len(prompt))
    return found


def test_each_prompt_has_the_text_that_it_has_alone(engine: Engine) -> None:
    out = engine.generate(PROMPTS, seed=SEEDS, **lists(OPTIONS))
    assert engine.last_program is not None
    assert engine.last_program.batch == 4
    texts = new_tokens(out, max(map(len, PROMPTS)))
    assert texts == alone(engine)
    assert [len(text) for text in texts[:3]] == [12, 7, 10]
    assert 5 <= len(texts[3]) <= 9
    logprobs = engine.generate([PROMPTS[0]], max_new_tokens=12, do_sample=False, logprobs=True).logprobs
    torch.testing.assert_close(out.logprobs[:1, :12], logprobs, rtol=1e-4, atol=1e-5)
    assert (out.logprobs[1:] == 0).all()


def test_greedy_text_is_that_of_transformers(engine: Engine) -> None:
    """Beside sequences that draw, by the processors of transformers' own generate."""
    model: PreTrainedModel = TARGET
    own = {
        "do_sample": False,
        "max_new_tokens": 12,
        "repetition_penalty": 1.7,
        "bad_words_ids": [[3], [5, 9]],
    }
    own |= {"sequence_bias": {(4,): 2.5, (6, 8): -3.0}, "min_new_tokens": 6, "eos_token_id": [1, 2, 3, 4]}
    others = [{"temperature": 1.0, "max_new_tokens": 12}, {"temperature": 0.3, "max_new_tokens": 12}]
    out = engine.generate([PROMPTS[0], *PROMPTS[1:3]], seed=5, **lists([own, *others]))
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **own)
    count = expected.shape[1] - ids.shape[1]
    assert new_tokens(out, 61)[0] == expected[0, 61:].tolist()
    assert out.new_tokens[0] == count


class Waiting:
    """Prompts that join with their own options."""

    tokens = None

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.outputs = numbers, {}

    def wanted(self, fits: Fits) -> int:
        return 2

    def next(self, fits: Fits) -> Joined | None:
        if not self.numbers:
            return None
        number = self.numbers[0]
        own = {name: value for name, value in OPTIONS[number].items() if name != "max_new_tokens"}
        if not fits(PROMPTS[number], OPTIONS[number]["max_new_tokens"], own):
            return None
        self.numbers.pop(0)
        limit = OPTIONS[number]["max_new_tokens"]
        return Joined(PROMPTS[number], limit, seed=SEEDS[number], options=own)

    def ended(self, number: int, output: GenerateOutput) -> None:
        self.outputs[number] = output


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]])
def test_prompts_join_with_options_of_their_own(engine: Engine, order: list[int]) -> None:
    first, *others = order
    waiting = Waiting(list(others))
    own = {name: [value] for name, value in OPTIONS[first].items()}
    engine.generate([PROMPTS[first]], seed=[SEEDS[first]], max_batch=2, joining=waiting, **own)
    expected = alone(engine)
    for place, number in enumerate(order):
        output = waiting.outputs[place]
        assert new_tokens(output, len(PROMPTS[number])) == [expected[number]]
        assert (output.logprobs is not None) == (number == 0)


def test_prompts_join_with_equal_options(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for the options of one serves the others until the model's own settings change."""
    own, settings = {"do_sample": True, "temperature": 0.9}, TARGET.generation_config

    def text(number: int, **options: Any) -> list[list[int]]:
        out = engine.generate([PROMPTS[number]], seed=[SEEDS[number]], max_new_tokens=9, **own, **options)
        return new_tokens(out, len(PROMPTS[number]))

    expected = [text(0), text(1), text(2, top_k=2), text(3, top_k=2)]
    assert expected[2] != text(2)

    class Alike(Waiting):
        def next(self, fits: Fits) -> Joined | None:
            if not self.numbers:
                return None
            number = self.numbers[0]
            if number == 2:
                monkeypatch.setattr(settings, "top_k", 2)
            options = dict(own)
            if not fits(PROMPTS[number], 9, options):
                return None
            return Joined(PROMPTS[self.numbers.pop(0)], 9, seed=SEEDS[number], options=options)

    waiting = Alike([1, 2, 3])
    engine.generate([PROMPTS[0]], seed=[SEEDS[0]], max_new_tokens=9, max_batch=2, joining=waiting, **own)
    assert [new_tokens(waiting.outputs[n], len(PROMPTS[n])) for n in range(4)] == expected


def test_a_wrong_option_of_one_that_would_join_keeps_it_out(engine: Engine) -> None:
    asked = []

    class Wrong(Waiting):
        def next(self, fits: Fits) -> Joined | None:
            asked.append(fits(PROMPTS[1], 3, {"sequence_bias": {(10**6,): 1.0}, "temperature": -1}))
            return None

    engine.generate([PROMPTS[0]], seed=[1], max_new_tokens=3, do_sample=False, max_batch=2, joining=Wrong([]))
    assert asked
    assert not any(asked)


def test_lists_of_another_length_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="temperature has 2 values for 4 prompts"):
        engine.generate(PROMPTS, max_new_tokens=3, temperature=[0.5, 0.7])
    with pytest.raises(ValueError, match="must lie in"):
        engine.generate(PROMPTS[:2], max_new_tokens=3, temperature=1.0, top_p=[0.5, 1.5])


@pytest.mark.parametrize("padded", [True, False])
def test_penalties_of_a_batch_are_those_of_transformers(engine: Engine, padded: bool) -> None:
    prompts = PROMPTS[:2] if padded else [PROMPTS[0], PROMPTS[0][::-1]]
    own = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.6, "min_new_tokens": 8}
    out = engine.generate(prompts, eos_token_id=list(range(20)), pad_token_id=0, **own)
    assert engine.last_program is not None
    assert engine.last_program.batch == 2
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    expected = TARGET.generate(ids, attention_mask=mask, eos_token_id=list(range(20)), pad_token_id=0, **own)[
        :, width:
    ].tolist()
    for text, other in zip(new_tokens(out, width), expected, strict=True):
        assert text == other[: len(text)]


def test_frequency_and_presence_count_generated_tokens(engine: Engine) -> None:
    """With a presence penalty above all logits no token comes twice, though the prompt has them all."""
    out = engine.generate(
        [list(range(64)) + PROMPTS[0]], max_new_tokens=30, do_sample=False, presence_penalty=99
    )
    [text] = new_tokens(out, 64 + 61)
    assert len(set(text)) == 30
    engine.generate(PROMPTS[0], max_new_tokens=3, do_sample=False, frequency_penalty=-2.0)
    with pytest.raises(ValueError, match="frequency_penalty=101 must lie in"):
        engine.generate(PROMPTS[0], max_new_tokens=3, frequency_penalty=101)


def test_speculation_limits_the_passes() -> None:
    draft = perturbed(TARGET, 0.05)
    options = {**SMALL, "prefill_chunk": 16}
    options.pop("rounds", None)
    made = triforce_tree.load(TARGET, draft, levels=2, **load_arguments(options))
    prompt, common = PROMPTS[0], {"max_new_tokens": 40, "do_sample": False}
    free = made.generate(prompt, **common)
    off = made.generate(prompt, speculation="off", **common)
    short = made.generate(prompt, speculation={"length": 1}, **common)
    assert off.sequences.tolist() == free.sequences.tolist() == short.sequences.tolist()
    assert off.levels[-1].proposed == 0
    assert off.levels[-1].forwards == 40
    for wrong in ("on", {"levels": 4}, {"depth": 2}, {"length": 0}):
        with pytest.raises(ValueError, match=r"speculation|length"):
            made.generate(prompt, speculation=wrong, **common)


@pytest.mark.parametrize("first", [True, False])
def test_scores_of_some_prompts_that_run_one_by_one(engine: Engine, first: bool) -> None:
    options: dict[str, Any] = {"no_repeat_ngram_size": 3, "do_sample": False, "max_new_tokens": [4, 6]}
    names, asked = ("output_logits", "output_scores", "logprobs"), 0 if first else 1
    lists_of_two = {key: [first, not first] for key in names}
    out = engine.generate(PROMPTS[:2], **options, **lists_of_two)
    options["max_new_tokens"] = (4, 6)[asked]
    own = engine.generate(PROMPTS[asked], **options, **dict.fromkeys(names, True))
    count = options["max_new_tokens"]
    torch.testing.assert_close(out.logprobs[asked, :count], own.logprobs[0])
    assert not out.logprobs[1 - asked].any()
    for name in ("logits", "scores"):
        found = torch.stack([row[asked] for row in getattr(out, name)])
        torch.testing.assert_close(found, torch.stack([row[0] for row in getattr(own, name)]))
