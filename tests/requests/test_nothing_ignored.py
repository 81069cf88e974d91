"""Every argument of transformers' ``generate`` is carried out, has no effect there, or is refused by name."""

import inspect
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, GenerationMixin

import triforce_tree
from tests.support.models.api_cases import EXPECTED, PROMPT, SMALL_LOOKUP, TARGET, Collect, small_engine
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.engine import Engine as OwnEngine
from triforce_tree.models.recurrent.pass_through import CACHE
from triforce_tree.requests import options

IDS = torch.tensor([PROMPT])
# Every option that is not carried out, with a value that would have an effect.
REFUSED_OPTIONS: dict[str, Any] = {
    "assistant_confidence_threshold": 0.7,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "cache_config": {"x": 1},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": ["x"],
    "continuous_batching_config": {"x": 1},
    "decoder_start_token_id": 3,
    "disable_compile": True,
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "force_words_ids": [[1]],
    "guidance_scale": 2.0,
    "is_assistant": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 100,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 8,
    "prompt_lookup_num_tokens": 3,
    "speculation_type": "dflash",
    "target_lookbehind": 3,
    "token_healing": True,
    "use_mtp": True,
}
# Parameters of transformers' generate: our own of the same name, or how they are refused.
HONOURED_PARAMETERS = {
    "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer",
}  # fmt: skip
REFUSED_PARAMETERS: dict[str, Any] = {
    "assistant_model": TARGET,
    "custom_generate": "somebody/something",
    "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": torch.ones_like(IDS),
    "synced_gpus": True,
}
# Further keywords of it.
REFUSED_KEYWORDS: dict[str, Any] = {
    CACHE: DynamicCache(),
    "position_ids": torch.arange(len(PROMPT))[None],
    "inputs_embeds": torch.zeros(1, 3, 32),
    "token_type_ids": torch.zeros_like(IDS),
    "encoder_outputs": (torch.zeros(1),),
    "assistant_tokenizer": "x",
    "tokenizer": "x",
    "trust_remote_code": True,
    "use_model_defaults": False,
    "pixel_values": torch.zeros(1),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine()


def test_every_option_of_transformers_is_classified() -> None:
    every = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    # Of any release that we work with, so the lists may hold more than this one.
    assert every <= options.HONOURED | REFUSED_OPTIONS.keys() | set(options.SEVERAL)
    assert not options.HONOURED & REFUSED_OPTIONS.keys()
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert parameters <= HONOURED_PARAMETERS | REFUSED_PARAMETERS.keys()
    assert inspect.signature(OwnEngine.generate).parameters.keys() >= HONOURED_PARAMETERS


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_options_without_effect_are_refused_by_name(engine: Engine, name: str) -> None:
    if name not in vars(GenerationConfig()):
        pytest.skip("transformers has no such option here")
    with pytest.raises(ValueError, match=rf"{name}") as caught:
        engine.generate(PROMPT, max_new_tokens=3, do_sample=True, **{name: REFUSED_OPTIONS[name]})
    assert ("num_beams" if name in options.OF_BEAMS else "triforce_tree") in str(caught.value)


def test_an_option_that_transformers_may_get_is_refused(engine: Engine) -> None:
    config = GenerationConfig()
    config.brand_new_option = 3
    with pytest.raises(ValueError, match="brand_new_option=3 is not supported"):
        engine.generate(PROMPT, generation_config=config, max_new_tokens=3)


@pytest.mark.parametrize("name", {**REFUSED_PARAMETERS, **REFUSED_KEYWORDS})
def test_other_keywords_are_refused_by_name(engine: Engine, name: str) -> None:
    value = {**REFUSED_PARAMETERS, **REFUSED_KEYWORDS}[name]
    with pytest.raises(ValueError, match=rf"^{name} is no option that triforce_tree supports; [^\n]*$"):
        engine.generate(PROMPT, max_new_tokens=3, **{name: value})


def hooked(**kwargs: Any) -> list[int]:
    run = triforce_tree.custom_generate(levels=2, **load_arguments(SMALL_LOOKUP))
    out = TARGET.generate(IDS, custom_generate=run, max_new_tokens=5, **{"do_sample": False, **kwargs})
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def filled() -> DynamicCache:
    cache = DynamicCache(config=TARGET.config)
    with torch.no_grad():
        TARGET(IDS[:, :7], use_cache=True, **{CACHE: cache})
    return cache


HOOKED: dict[str, tuple[Any, str]] = {
    **{name: (REFUSED_PARAMETERS[name], name) for name in REFUSED_PARAMETERS if name != "custom_generate"},
    "streamer": (Collect(), r"streamer does not reach .*custom_generate\(streamer=\.\.\.\)"),
    CACHE: (filled(), f"{CACHE} holds tokens"),
    "position_ids": (torch.arange(len(PROMPT))[None] + 1, "position_ids other than"),
    "num_beams": (2, "rows"),
    "num_return_sequences": (2, "rows"),
    "output_attentions": (True, "output_attentions"),
    "tokenizer": ("x", "tokenizer"),
}


@pytest.mark.parametrize("name", HOOKED)
def test_nothing_is_ignored_through_transformers(name: str) -> None:
    value, words = HOOKED[name]
    more = {"tokenizer": {"stop_strings": "x"}, "num_return_sequences": {"do_sample": True}}.get(name, {})
    with pytest.raises(ValueError, match=words):
        hooked(**{name: value}, **more)


def test_what_asks_for_nothing_is_fine_through_transformers() -> None:
    own = {CACHE: DynamicCache(), "position_ids": torch.arange(len(PROMPT))[None], "use_cache": False}
    nothing = {"synced_gpus": False, "assistant_model": None, "streamer": None}
    assert hooked(**own, **nothing) == EXPECTED[:5]


def test_a_wrapper_around_the_hook_hides_nothing() -> None:
    run = triforce_tree.custom_generate(levels=2, **load_arguments(SMALL_LOOKUP))

    def wrapped(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return run(model, input_ids, **kwargs)

    with pytest.raises(ValueError, match="synced_gpus does not reach"):
        TARGET.generate(IDS, custom_generate=wrapped, max_new_tokens=5, synced_gpus=True)
