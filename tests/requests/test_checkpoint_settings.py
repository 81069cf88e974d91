"""Settings of a checkpoint's generation_config hold where the caller gives none."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, RepetitionPenaltyLogitsProcessor

import triforce_tree
from tests.support.models.api_cases import EXPECTED, PROMPT, SMALL_LOOKUP, characters, new, text_of
from tests.support.models.families import greedy, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.requests.notices import cost_of_processors

NEW = 15
WHOLE = torch.ones(1, len(PROMPT), dtype=torch.int64)


def from_folder(settings: dict[str, Any], folder: Path, **options: Any) -> Engine:
    tiny("llama-gqa").save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return triforce_tree.load(folder, levels=2, **load_arguments({**SMALL_LOOKUP, **options}))


def from_object(settings: dict[str, Any], folder: Path, **options: Any) -> Engine:
    model = tiny("llama-gqa")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return triforce_tree.load(model, levels=2, **load_arguments({**SMALL_LOOKUP, **options}))


SOURCES = pytest.mark.parametrize("source", [from_folder, from_object])


def transformers_own(engine: Engine, **options: Any) -> list[int]:
    target: Any = engine.target.model
    prompt, mask = (part.to(target.device) for part in (torch.tensor([PROMPT]), WHOLE))
    out = target.generate(prompt, attention_mask=mask, max_new_tokens=NEW, **options)
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


@SOURCES
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": [EXPECTED[9], EXPECTED[6]], "pad_token_id": 60},
        {"min_new_tokens": 8, "eos_token_id": EXPECTED[6], "pad_token_id": 60},
        {"suppress_tokens": EXPECTED[:2]},
        {"bad_words_ids": [EXPECTED[1:3]]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_greedy(source: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    engine = source(settings, tmp_path)
    made = new(engine.generate(PROMPT, max_new_tokens=NEW))
    assert made == transformers_own(engine) != EXPECTED[:NEW]


@SOURCES
@pytest.mark.parametrize(
    "narrow",
    [{"temperature": 1e-4, "top_k": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}],
    ids=lambda narrow: next(iter(narrow)),
)
def test_sampling(source: Any, narrow: dict[str, Any], tmp_path: Path) -> None:
    """Each of these alone leaves one token, and without it the text is another."""
    settings = {"do_sample": True, "temperature": 5.0}
    engine = source({**settings, **narrow}, tmp_path)
    assert new(engine.generate(PROMPT, max_new_tokens=NEW, seed=1)) == EXPECTED[:NEW]
    wide = source({**settings, **dict.fromkeys(narrow)}, tmp_path)
    assert new(wide.generate(PROMPT, max_new_tokens=NEW, seed=1)) != EXPECTED[:NEW]


@SOURCES
def test_what_the_caller_gives_takes_precedence(source: Any, tmp_path: Path) -> None:
    engine = source({"do_sample": True, "temperature": 5.0, "max_new_tokens": 4}, tmp_path)
    assert new(engine.generate(PROMPT, max_new_tokens=NEW, temperature=0)) == EXPECTED[:NEW]
    assert len(new(engine.generate(PROMPT))) == 4


@SOURCES
def test_stop_strings(source: Any, tmp_path: Path) -> None:
    engine = source({"stop_strings": [text_of(EXPECTED[2:4])]}, tmp_path, tokenizer=characters())
    out = engine.generate(PROMPT, max_new_tokens=NEW)
    assert (new(out), out.finish_reason) == (EXPECTED[:4], "stop")
    assert engine.target.model.generation_config.stop_strings, "the model is not changed"


@SOURCES
@pytest.mark.parametrize(
    "setting",
    [
        {"cache_implementation": "static"},
        {"early_stopping": True},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_early_exit": 1},
        {"output_hidden_states": True},
    ],
)
def test_settings_that_do_not_change_the_text(source: Any, setting: dict[str, Any], tmp_path: Path) -> None:
    engine = source(setting, tmp_path)
    assert new(engine.generate(PROMPT, max_new_tokens=NEW)) == EXPECTED[:NEW]
    [name] = setting
    with pytest.raises(
        ValueError, match=f"{name}=.* (is not supported by triforce_tree|is read with num_beams)"
    ):
        engine.generate(PROMPT, max_new_tokens=NEW, **setting)


@SOURCES
def test_the_cache_is_our_own(source: Any, tmp_path: Path) -> None:
    engine = source({"use_cache": False}, tmp_path)
    assert new(engine.generate(PROMPT, max_new_tokens=NEW)) == EXPECTED[:NEW]
    assert new(engine.generate(PROMPT, max_new_tokens=NEW, use_cache=False)) == EXPECTED[:NEW]
    model = engine.target.model
    model.config.use_cache = False
    assert new(triforce_tree.load(model, levels=1).generate(PROMPT, max_new_tokens=NEW)) == EXPECTED[:NEW]


@SOURCES
@pytest.mark.parametrize("setting", [{"num_beams": 3}, {"penalty_alpha": 0.6}, {"guidance_scale": 2.0}])
def test_others_are_refused_with_what_to_change(source: Any, setting: dict[str, Any], tmp_path: Path) -> None:
    engine = source(setting, tmp_path)
    [(name, value)] = setting.items()
    with pytest.raises(
        ValueError, match=rf"{name}={value} in the checkpoint.* set model.generation_config.{name} = None"
    ):
        engine.generate(PROMPT, max_new_tokens=NEW)
    setattr(engine.target.model.generation_config, name, None)
    assert new(engine.generate(PROMPT, max_new_tokens=NEW)) == EXPECTED[:NEW]


class Own(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - input_ids.shape[1]


def test_what_a_setting_costs_is_named() -> None:
    config = GenerationConfig(repetition_penalty=1.1)
    penalty, own = RepetitionPenaltyLogitsProcessor(1.1), Own()
    said = cost_of_processors([penalty], config, 1, on_gpu=True)
    assert said is not None
    assert said.startswith("repetition_penalty=1.1 reads the tokens so far: drafting and acceptance are")
    assert "one by one" not in said
    said = cost_of_processors([penalty, own], config, 3, on_gpu=True)
    assert said is not None
    assert said.startswith("repetition_penalty=1.1, Own read the tokens so far: ")
    assert "instead of CUDA graphs and the 3 sequences of the batch are decoded one by one" in said
    assert cost_of_processors([penalty], config, 1, on_gpu=False) is None
    assert cost_of_processors([], config, 3, on_gpu=True) is None


def test_every_option_that_is_carried_out_on_the_host_is_named_by_its_own_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' processors are found by their class names, and a batch says that it decodes them one by
    one.
    """
    options: dict[str, Any] = {
        "no_repeat_ngram_size": 3, "forced_bos_token_id": 3,
        "forced_eos_token_id": 4, "exponential_decay_length_penalty": (3, 1.1), "begin_suppress_tokens": [9],
        "top_h": 0.5, "prefix_allowed_tokens_fn": lambda row, sent: [1, 2],
    }  # fmt: skip
    engine = from_object({}, tmp_path)
    for name, value in options.items():
        with caplog.at_level(logging.WARNING, "triforce_tree"):
            engine.generate(
                [PROMPT, PROMPT[3:]],
                max_new_tokens=20, do_sample=True, eos_token_id=63, pad_token_id=0, **{name: value},
            )  # fmt: skip
        [record] = caplog.records
        assert name in record.getMessage().split(" the tokens so far")[0]
        caplog.clear()


def test_the_cost_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = from_object({"no_repeat_ngram_size": 3}, tmp_path)
    with caplog.at_level(logging.WARNING, "triforce_tree"):
        engine.generate(PROMPT, max_new_tokens=3)
        assert not caplog.records, "a single sequence on the CPU costs nothing more"
        for _ in range(2):
            engine.generate([PROMPT, PROMPT[3:]], max_new_tokens=3)
            engine.with_options(levels=1).generate([PROMPT, PROMPT[3:]], max_new_tokens=3)
    [record] = caplog.records
    assert "no_repeat_ngram_size=3 reads the tokens so far: the 2 sequences" in record.getMessage()


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "mixtral"])
def test_a_configuration_that_asks_for_tuples(family: str, tmp_path: Path) -> None:
    """With it transformers' own layers fail."""
    expected = greedy(tiny(family), PROMPT, NEW)
    model = tiny(family)
    model.config.return_dict = False
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "return_dict": False}))
    for source in (model, tmp_path):
        engine = triforce_tree.load(source, model, levels=2, **load_arguments({"tree": "chain:3"}))
        assert new(engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)) == expected
        engine.generate(PROMPT, max_new_tokens=2, num_beams=2)
    assert model.config.return_dict is False


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_a_model_without_generation_config_is_refused(options: dict[str, Any]) -> None:
    model = tiny("llama-gqa")
    engine = triforce_tree.load(model, model)
    model.generation_config = None
    with pytest.raises(
        ValueError, match=r"^the generation_config of LlamaForCausalLM is None[^\n]* set model\."
    ):
        engine.generate(PROMPT, max_new_tokens=NEW, **options)
    model.generation_config = GenerationConfig(eos_token_id=EXPECTED[3])
    assert new(engine.generate(PROMPT, max_new_tokens=NEW)) == EXPECTED[:4]
