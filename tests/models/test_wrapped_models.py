"""Models that other libraries have wrapped or hooked, and torch modes around a call."""

from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import triforce_tree
from tests.support.models.api_cases import (
    EXPECTED,
    PROMPT,
    SMALL,
    SMALL_LOOKUP,
    TARGET,
    characters,
    new,
    text_of,
)
from tests.support.models.families import greedy, perturbed, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.models.model_copy import shallow_copy

NEW = 10
DRAFT = perturbed(TARGET, 0.1)


def decoded(engine: Engine) -> list[int]:
    return new(engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False))


def small(target: object, draft: object = None, **options) -> Engine:
    settings = SMALL if draft is not None else SMALL_LOOKUP
    return triforce_tree.load(target, draft, levels=3, **load_arguments({**settings, **options}))  # type: ignore[arg-type]


def test_compiled_models_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("was compiled")

    compiled = torch.compile(tiny("llama-gqa"), backend=never)
    assert decoded(small(compiled, torch.compile(DRAFT, backend=never))) == EXPECTED[:NEW]
    method, inner, in_place = (tiny("llama-gqa") for _ in range(3))
    method.forward = torch.compile(method.forward, backend=never)
    inner.model = torch.compile(inner.model, backend=never)
    in_place.compile(backend=never)
    for model in (method, inner, in_place):
        assert decoded(small(model)) == EXPECTED[:NEW]


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # with a model on meta
def test_a_model_that_accelerate_has_offloaded_is_gathered() -> None:
    model = cpu_offload(tiny("llama-gqa"))
    assert decoded(small(model)) == EXPECTED[:NEW]
    run = triforce_tree.custom_generate(levels=1)
    with pytest.raises(ValueError, match=r"is offloaded by accelerate, but .* use triforce_tree\.load"):
        model.generate(torch.tensor([PROMPT]), custom_generate=run, max_new_tokens=3)


@pytest.mark.parametrize("odd", [nn.Linear(2, 2), 5, ["path"]])
def test_an_object_that_is_not_a_model_is_refused(odd: object) -> None:
    with pytest.raises(TypeError, match=r"the target is of type \w+; give a transformers model, a hub id"):
        small(odd)


def test_hooks_of_accelerate_run() -> None:
    seen: list[str] = []

    class Note(ModelHook):
        def pre_forward(self, module: nn.Module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    model = tiny("llama-gqa")
    for layer in model.model.layers:
        add_hook_to_module(layer, Note())
        add_hook_to_module(layer.self_attn, Note())
    assert decoded(small(model)) == EXPECTED[:NEW]
    assert {"LlamaDecoderLayer", "LlamaAttention"} <= set(seen)


def test_a_layer_that_bypasses_our_attention_is_an_error() -> None:
    model = tiny("llama-gqa")
    engine = small(model)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, before=attention.forward, **kwargs: before(*args, **kwargs)
    with pytest.raises(RuntimeError, match="1 of 2 layers of LlamaForCausalLM did not attend through"):
        decoded(engine)
    with pytest.raises(ValueError, match="1 of its 2 layers"):
        small(model)


def test_a_shallow_copy_shares_only_tensors() -> None:
    model = tiny("llama-gqa")
    model.model.layers[0].extra = partial(model.model.norm.forward)
    shallow = shallow_copy(model)
    for copied, original in zip(shallow.modules(), model.modules(), strict=True):
        assert type(copied) is type(original)
        assert copied is not original
    assert all(a is b for a, b in zip(shallow.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(shallow.buffers(), model.buffers(), strict=True))
    assert shallow.config is shallow.model.config is shallow.model.layers[0].self_attn.config
    assert shallow.config is not model.config
    assert shallow.model.layers[0].extra.func.__self__ is shallow.model.norm
    shallow.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    shallow.model.layers[1].mlp = nn.Identity()
    shallow.train()
    assert greedy(model, PROMPT, NEW) == EXPECTED[:NEW]
    assert not model.training


def test_torch_modes_around_a_call() -> None:
    with torch.inference_mode():
        engine = small(TARGET, DRAFT)
        assert decoded(engine) == EXPECTED[:NEW]
    # The next call writes to buffers of the first one.
    assert decoded(engine) == EXPECTED[:NEW]
    with torch.autocast("cpu", torch.bfloat16):
        assert decoded(small(TARGET, DRAFT)) == EXPECTED[:NEW]
        assert torch.is_autocast_enabled("cpu")
    with torch.enable_grad():
        out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert torch.is_grad_enabled()
    assert new(out) == EXPECTED[:NEW]


def test_a_tokenizer_may_be_a_folder(tmp_path: Path) -> None:
    characters().save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path)):
        out = small(TARGET, tokenizer=source).generate(text_of(PROMPT), max_new_tokens=NEW, do_sample=False)
        assert out.text == text_of(EXPECTED[:NEW])
    run = triforce_tree.custom_generate(tokenizer=tmp_path, stop_strings=text_of(EXPECTED[:2]), levels=2)
    ids = torch.tensor([PROMPT])
    cut = TARGET.generate(ids, custom_generate=run, max_new_tokens=NEW, do_sample=False)
    assert cut[0, len(PROMPT) :].tolist() == EXPECTED[:2]
