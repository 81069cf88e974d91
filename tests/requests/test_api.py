"""``generate`` takes every form of prompt and returns what transformers users expect."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from transformers import TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput

import triforce_tree
from tests.support.models.api_cases import (
    EXPECTED,
    PROMPT,
    SMALL,
    TARGET,
    Collect,
    characters,
    new,
    small_engine,
    text_of,
)
from tests.support.models.families import greedy, perturbed, prompt_of
from triforce_tree import Engine
from triforce_tree.config import load_arguments


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def test_all_forms_of_a_prompt(engine: Engine) -> None:
    for inputs in (PROMPT, torch.tensor(PROMPT), torch.tensor([PROMPT]), tuple(PROMPT), text_of(PROMPT)):
        assert new(engine.generate(inputs, max_new_tokens=9, do_sample=False)) == EXPECTED[:9]


def test_the_output_has_transformers_shape_and_the_levels(engine: Engine) -> None:
    out = engine.with_options(advanced={"rounds": 1}).generate(PROMPT, max_new_tokens=20, do_sample=False)
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
    assert target.emitted == 20 <= target.forwards * (SMALL["gamma"] + 4)
    assert 0 < target.acceptance_rate <= 1


def test_a_streamer_sees_the_prompt_and_every_token_once(engine: Engine, capsys) -> None:
    streamer = Collect()
    engine.generate(PROMPT, max_new_tokens=20, do_sample=False, streamer=streamer)
    assert streamer.parts[0] == PROMPT
    assert [t for part in streamer.parts[1:] for t in part] == EXPECTED[:20]
    assert len(streamer.parts) > 3, "one part for each accepted block"
    assert streamer.ended == 1
    engine.generate(
        PROMPT, max_new_tokens=5, do_sample=False, streamer=TextStreamer(characters(), skip_prompt=True)
    )
    assert capsys.readouterr().out.strip() == text_of(EXPECTED[:5]).strip()


def test_one_call_does_it_all() -> None:
    draft = perturbed(TARGET, 0.1)
    out = triforce_tree.generate(
        PROMPT, TARGET, draft, levels=3, max_new_tokens=9, do_sample=False, **load_arguments(SMALL)
    )
    assert new(out) == EXPECTED[:9]


def test_other_options_on_the_same_models(engine: Engine) -> None:
    other = engine.with_options(levels=1, advanced={"gamma": 5})
    out = other.generate(PROMPT, max_new_tokens=9, do_sample=False)
    assert new(out) == EXPECTED[:9]
    assert [level.name for level in out.levels] == ["target"]
    assert engine.config.gamma == SMALL["gamma"]
    with pytest.raises(ValueError, match="unknown option 'gama'"):
        engine.with_options(gama=3)
    with pytest.raises(ValueError, match=r"^'draft' is an option of load\(\.\.\.\) alone"):
        engine.with_options(draft=TARGET)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_engine_that_is_copied_says_what_to_do_instead(
    engine: Engine, copied: Callable[[Engine], object]
) -> None:
    with pytest.raises(TypeError, match=r"neither pickled nor deep-copied; call triforce_tree\.load"):
        copied(engine)


def test_progress_counts_the_prompt(engine: Engine) -> None:
    fed: list[int] = []
    engine.with_options(advanced={"prefill_chunk": 16}).generate(
        PROMPT, max_new_tokens=2, progress=fed.append
    )
    assert fed == [16, 16, 8]


def test_auto_takes_three_levels_for_texts_that_become_long() -> None:
    auto = triforce_tree.load(TARGET, perturbed(TARGET, 0.1), **load_arguments(SMALL))
    assert len(auto.generate(prompt_of(45), max_new_tokens=2).levels) == 2
    for prompt, more in ((46, 2), (10, 38)):
        out = auto.generate(prompt_of(prompt), max_new_tokens=more, do_sample=False)
        assert len(out.levels) == 3
        assert out.sequences[0, prompt:].tolist() == greedy(TARGET, prompt_of(prompt), more)
