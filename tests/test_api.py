"""``generate`` behaves as transformers users expect, and refuses by name what it does not do."""

import itertools
import string

import pytest
import torch
from families import greedy, perturbed, prompt_of, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TextStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import triforce_tree
from triforce_tree import Engine

SMALL = {
    "gamma": 3,
    "tree": "best-first:3,2",
    "budget": 24,
    "chunk": 4,
    "recent": 8,
    "sinks": 2,
    "window": 6,
}
PROMPT = prompt_of(41)
TARGET = tiny("llama-gqa")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return triforce_tree.load(TARGET, perturbed(TARGET, 0.1), tokenizer=characters(), levels=3, **SMALL)


CHARACTERS = string.ascii_letters + string.digits + " ."


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of 64 characters."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def new(out: GenerateDecoderOnlyOutput, prompt: list[int] = PROMPT) -> list[int]:
    assert out.sequences[0, : len(prompt)].tolist() == prompt
    return out.sequences[0, len(prompt) :].tolist()


def ours(engine: Engine, **kwargs) -> list[int]:
    return new(engine.generate(PROMPT, **kwargs))


EXPECTED = greedy(TARGET, PROMPT, 40)


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_all_forms_of_a_prompt(engine: Engine) -> None:
    for inputs in (
        PROMPT,
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        tuple(PROMPT),
        text_of(PROMPT),
    ):
        assert new(engine.generate(inputs, max_new_tokens=9, do_sample=False)) == EXPECTED[:9]


def test_the_output_has_transformers_shape_and_the_levels(engine: Engine) -> None:
    out = engine.generate(PROMPT, max_new_tokens=20, do_sample=False)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences.shape == (1, len(PROMPT) + 20)
    assert out.sequences.dtype == torch.int64
    assert out.finish_reason == "length"
    assert out.new_tokens == 20
    assert out.text == text_of(EXPECTED[:20])
    assert out.prefill_seconds > 0
    assert out.decode_seconds > 0
    assert [level.name for level in out.levels] == ["draft", "retrieval", "target"]
    target = out.levels[-1]
    assert 20 <= target.emitted <= target.forwards * (SMALL["gamma"] + 4)
    assert 0 < target.acceptance_rate <= 1


def test_a_streamer_sees_the_prompt_and_every_token_once(engine: Engine, capsys) -> None:
    streamer = Collect()
    engine.generate(PROMPT, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert streamer.parts[0] == PROMPT
    assert [t for part in streamer.parts[1:] for t in part] == EXPECTED[:20]
    assert len(streamer.parts) > 3, "as blocks are settled"
    assert streamer.ended == 1
    engine.generate(
        PROMPT,
        max_new_tokens=5,
        do_sample=False,
        streamer=TextStreamer(characters(), skip_prompt=True),
    )
    assert capsys.readouterr().out.strip() == text_of(EXPECTED[:5]).strip()


def test_end_tokens(engine: Engine) -> None:
    stop = EXPECTED[11]
    cut = EXPECTED[: EXPECTED.index(stop) + 1]
    for eos in (stop, [stop, 999_999]):
        out = engine.generate(PROMPT, max_new_tokens=40, do_sample=False, eos_token_id=eos)
        assert new(out) == cut
        assert out.finish_reason == "eos"
    least = len(cut) + 2
    kwargs = {"eos_token_id": stop, "min_new_tokens": least}
    assert ours(engine, max_new_tokens=40, do_sample=False, **kwargs) == greedy(TARGET, PROMPT, 40, **kwargs)


def test_stop_strings_cut_at_the_token_that_completes_them(engine: Engine) -> None:
    wanted = text_of(EXPECTED[7:9])
    pairs = list(itertools.pairwise(EXPECTED))
    cut = EXPECTED[: pairs.index((EXPECTED[7], EXPECTED[8])) + 2]
    for kwargs in (
        {"stop_strings": [wanted]},
        {"generation_config": GenerationConfig(stop_strings=[wanted])},
    ):
        out = engine.generate(PROMPT, max_new_tokens=40, do_sample=False, **kwargs)
        assert new(out) == cut
        assert out.finish_reason == "stop"


class AfterTokens(StoppingCriteria):
    """Ends a text of ``length`` tokens; fails if it is not asked at every length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_stopping_criteria_see_every_length(engine: Engine) -> None:
    criterion = AfterTokens(len(PROMPT) + 6)
    out = engine.generate(
        PROMPT,
        max_new_tokens=40,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert new(out) == EXPECTED[:6]
    assert criterion.asked == list(range(len(PROMPT) + 1, len(PROMPT) + 7))


GREEDY_OPTIONS = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"suppress_tokens": EXPECTED[:3]},
    {"bad_words_ids": [[EXPECTED[0]], EXPECTED[2:4]]},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
    {"max_length": len(PROMPT) + 8, "max_new_tokens": None},
]


@pytest.mark.parametrize("options", GREEDY_OPTIONS, ids=lambda options: "+".join(options))
def test_options_act_as_in_transformers(engine: Engine, options: dict) -> None:
    options = {"max_new_tokens": 25, **options}
    expected = TARGET.generate(torch.tensor([PROMPT]), do_sample=False, **options)[0, len(PROMPT) :].tolist()
    assert ours(engine, do_sample=False, **options) == expected
    assert expected != EXPECTED[: len(expected)] or "max_length" in options, "the option does something"


def test_a_generation_config_and_keywords_over_it(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.7)
    expected = greedy(TARGET, PROMPT, 9, repetition_penalty=1.7)
    assert ours(engine, generation_config=config) == expected[:7]
    assert ours(engine, generation_config=config, max_new_tokens=9) == expected
    assert config.max_new_tokens == 7, "the user's object is left alone"


def test_own_logits_processors(engine: Engine) -> None:
    banned = SuppressTokensLogitsProcessor(EXPECTED[:2], device="cpu")
    out = ours(engine, max_new_tokens=20, do_sample=False, logits_processor=LogitsProcessorList([banned]))
    assert out == greedy(TARGET, PROMPT, 20, suppress_tokens=EXPECTED[:2])


def test_same_seed_same_tokens(engine: Engine) -> None:
    sample = {"max_new_tokens": 20, "do_sample": True, "temperature": 2.0}
    assert ours(engine, seed=5, **sample) == ours(engine, seed=5, **sample) != ours(engine, seed=6, **sample)


def test_without_a_seed_torchs_own_decides(engine: Engine) -> None:
    def after(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return ours(engine, max_new_tokens=20, do_sample=True, temperature=2.0)

    assert after(1) == after(1) != after(2)
    torch.manual_seed(1)
    first, second = (ours(engine, max_new_tokens=20, temperature=2.0) for _ in range(2))
    assert first != second, "every call draws anew"


def test_temperature_says_whether_to_sample(engine: Engine) -> None:
    assert ours(engine, temperature=0, max_new_tokens=10) == EXPECTED[:10]
    assert ours(engine, temperature=0.0, max_new_tokens=10) == EXPECTED[:10]
    assert ours(engine, temperature=3.0, seed=1, max_new_tokens=10) != EXPECTED[:10]
    assert ours(engine, temperature=1e-4, top_k=0, seed=1, max_new_tokens=10) == EXPECTED[:10]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_law_of_one_token_is_greedy(engine: Engine, narrow: dict) -> None:
    assert ours(engine, do_sample=True, seed=3, max_new_tokens=15, **narrow) == EXPECTED[:15]


def test_padding_is_left_out_and_batches_run_row_by_row(engine: Engine) -> None:
    other = prompt_of(30)
    width = len(PROMPT)
    ids = torch.tensor([PROMPT, [0] * (width - 30) + other])
    mask = torch.tensor([[1] * width, [0] * (width - 30) + [1] * 30])
    stop = EXPECTED[4]
    out = engine.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=stop)
    first = [*PROMPT, *EXPECTED[: EXPECTED.index(stop) + 1]]
    second = [*other, *greedy(TARGET, other, 12, eos_token_id=stop, pad_token_id=0)]
    if stop in second[30:]:
        second = second[: 30 + second[30:].index(stop) + 1]
    longest = max(len(first), len(second))
    assert out.sequences.shape == (2, longest)
    for row, tokens in zip(out.sequences.tolist(), (first, second), strict=True):
        assert row[: len(tokens)] == tokens
    assert out.new_tokens == len(first) + len(second) - width - 30


def test_rows_of_a_sampled_batch_draw_apart(engine: Engine) -> None:
    out = engine.generate(torch.tensor([PROMPT] * 2), max_new_tokens=20, temperature=2.0, seed=1)
    assert out.sequences[0].tolist() != out.sequences[1].tolist()


UNSUPPORTED = {
    "num_beams": 2,
    "num_return_sequences": 3,
    "output_scores": True,
    "output_attentions": True,
    "penalty_alpha": 0.6,
    "guidance_scale": 2.0,
    "use_cache": False,
    "prompt_lookup_num_tokens": 4,
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_options_are_refused_by_name(engine: Engine, name: str) -> None:
    extra = {"do_sample": True} if name == "num_return_sequences" else {}
    with pytest.raises(ValueError, match=name):
        engine.generate(PROMPT, max_new_tokens=3, **{name: UNSUPPORTED[name]}, **extra)


def test_a_streamer_follows_one_row(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"streamer.*2"):
        engine.generate(torch.tensor([PROMPT] * 2), streamer=Collect(), max_new_tokens=3)


# --- through transformers' own generate ---


def through_transformers(draft=None, hook: dict | None = None, **kwargs):
    run = triforce_tree.custom_generate(draft or perturbed(TARGET, 0.1), levels=3, **SMALL, **(hook or {}))
    return TARGET.generate(torch.tensor([PROMPT]), custom_generate=run, **kwargs)


def test_custom_generate_gives_the_same_tokens() -> None:
    out = through_transformers(do_sample=False, max_new_tokens=20)
    assert out[0].tolist() == [*PROMPT, *EXPECTED[:20]]
    rich = through_transformers(do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
    assert rich.sequences.tolist() == out.tolist()
    assert rich.levels[-1].emitted >= 20
    assert TARGET.config._attn_implementation == "sdpa"


def test_custom_generate_carries_what_transformers_drops() -> None:
    streamer, wanted = Collect(), text_of(EXPECTED[5:6])
    out = through_transformers(
        hook={"streamer": streamer, "tokenizer": characters(), "stop_strings": wanted},
        do_sample=False,
        max_new_tokens=20,
    )
    cut = EXPECTED[: EXPECTED.index(EXPECTED[5]) + 1]
    assert out[0, len(PROMPT) :].tolist() == cut
    assert [t for part in streamer.parts[1:] for t in part] == cut


def test_custom_generate_honours_seeds_and_options() -> None:
    sample = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 15}
    a, b, c = (through_transformers(hook={"seed": seed}, **sample)[0].tolist() for seed in (1, 1, 2))
    assert a == b != c
    penalised = through_transformers(do_sample=False, max_new_tokens=15, repetition_penalty=1.7)
    assert penalised[0, len(PROMPT) :].tolist() == greedy(TARGET, PROMPT, 15, repetition_penalty=1.7)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2, "do_sample": False},
        {"num_return_sequences": 2, "do_sample": True},
        {"output_logits": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_custom_generate_refuses_what_it_cannot_do(options: dict) -> None:
    with pytest.raises(ValueError, match=r"rows|output_logits"):
        through_transformers(max_new_tokens=3, **options)


def test_custom_generate_needs_a_tokenizer_for_stop_strings() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        through_transformers(hook={"stop_strings": "x"}, max_new_tokens=3)


def test_one_call_does_it_all() -> None:
    draft = perturbed(TARGET, 0.1)
    out = triforce_tree.generate(PROMPT, TARGET, draft, levels=3, max_new_tokens=9, do_sample=False, **SMALL)
    assert new(out) == EXPECTED[:9]


def test_other_options_on_the_same_models(engine: Engine) -> None:
    other = engine.with_options(levels=1, gamma=5)
    out = other.generate(PROMPT, max_new_tokens=9, do_sample=False)
    assert new(out) == EXPECTED[:9]
    assert [level.name for level in out.levels] == ["target"]
    assert engine.hierarchy.config.gamma == SMALL["gamma"]
    with pytest.raises(ValueError, match="unknown option 'gama'"):
        engine.with_options(gama=3)


def test_progress_counts_the_prompt(engine: Engine) -> None:
    fed: list[int] = []
    engine.with_options(prefill_chunk=16).generate(PROMPT, max_new_tokens=2, progress=fed.append)
    assert fed == [16, 16, 8]


def test_auto_takes_three_levels_for_long_prompts() -> None:
    auto = triforce_tree.load(TARGET, **SMALL)
    assert len(auto.generate(prompt_of(48), max_new_tokens=2).levels) == 3
    assert len(auto.generate(prompt_of(47), max_new_tokens=2).levels) == 2


def test_custom_generate_leaves_padding_out() -> None:
    padded = torch.tensor([[0, 0, 0, *PROMPT]])
    mask = torch.tensor([[0, 0, 0, *[1] * len(PROMPT)]])
    run = triforce_tree.custom_generate(levels=3, **SMALL)
    out = TARGET.generate(
        padded, attention_mask=mask, custom_generate=run, do_sample=False, max_new_tokens=15
    )
    assert out[0].tolist() == [*padded[0].tolist(), *EXPECTED[:15]]


def test_inputs_beside_token_ids_are_refused_by_name() -> None:
    run = triforce_tree.custom_generate(levels=2, **SMALL)
    with pytest.raises(ValueError, match="inputs_embeds"):
        TARGET.generate(inputs_embeds=torch.randn(1, 5, 32), custom_generate=run, max_new_tokens=3)
