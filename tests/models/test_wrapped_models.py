"""Models that other libraries have wrapped or hooked, and modes of torch around a call."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from api_cases import EXPECTED, PROMPT, SMALL, TARGET, characters, new, text_of
from families import greedy, perturbed, tiny
from torch import nn

import triforce_tree
from triforce_tree import Engine
from triforce_tree.models.model_copy import shallow_copy

NEW = 10
DRAFT = perturbed(TARGET, 0.1)


def text(engine: Engine) -> list[int]:
    return new(engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False))


def small(target: object, draft: object = None, **options) -> Engine:
    return triforce_tree.load(target, draft, levels=3, **{**SMALL, **options})  # type: ignore[arg-type]


def test_compiled_models_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("was compiled")

    whole = torch.compile(tiny("llama-gqa"), backend=never)
    assert text(small(whole, torch.compile(DRAFT, backend=never))) == EXPECTED[:NEW]
    method, inner, in_place = (tiny("llama-gqa") for _ in range(3))
    method.forward = torch.compile(method.forward, backend=never)
    inner.model = torch.compile(inner.model, backend=never)
    in_place.compile(backend=never)
    for model in (method, inner, in_place):
        assert text(small(model)) == EXPECTED[:NEW]


def test_peft_models_are_refused_with_what_to_do() -> None:
    class PeftModel(nn.Module): ...

    class PeftModelForCausalLM(PeftModel): ...

    for models in ((PeftModelForCausalLM(), None), (TARGET, PeftModelForCausalLM())):
        with pytest.raises(TypeError, match=r"PeftModelForCausalLM of peft; .*merge_and_unload\(\)"):
            small(*models)
    with pytest.raises(TypeError, match="the draft is a PeftModelForCausalLM"):
        triforce_tree.custom_generate(PeftModelForCausalLM())  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [nn.Linear(2, 2), 5, ["path"]])
def test_what_is_no_model_is_said_to_be_none(odd: object) -> None:
    with pytest.raises(TypeError, match=r"the target is of type \w+; give a transformers model, a hub id"):
        small(odd)


def test_hooks_of_accelerate_stay_at_work() -> None:
    seen: list[str] = []

    class Note(ModelHook):
        def pre_forward(self, module: nn.Module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    model = tiny("llama-gqa")
    for layer in model.model.layers:
        add_hook_to_module(layer, Note())
        add_hook_to_module(layer.self_attn, Note())
    assert text(small(model)) == EXPECTED[:NEW]
    assert {"LlamaDecoderLayer", "LlamaAttention"} <= set(seen)


def test_what_is_done_to_a_model_after_load_counts() -> None:
    model = tiny("llama-gqa")
    engine = small(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)
    hooked = greedy(model, PROMPT, NEW)
    assert text(engine) == hooked != EXPECTED[:NEW]
    model.lm_head = nn.Linear(32, 64, bias=False)
    assert text(engine) == greedy(model, PROMPT, NEW) != hooked


def test_a_forward_past_our_attention_is_an_error_not_another_text() -> None:
    model = tiny("llama-gqa")
    engine = small(model)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda *args, before=attention.forward, **kwargs: before(*args, **kwargs)
    with pytest.raises(RuntimeError, match="1 of 2 layers of LlamaForCausalLM did not attend through"):
        text(engine)
    with pytest.raises(ValueError, match="1 of its 2 layers"):
        small(model)


def test_a_copy_shares_tensors_and_nothing_else() -> None:
    model = tiny("llama-gqa")
    model.model.layers[0].extra = partial(model.model.norm.forward)
    own = shallow_copy(model)
    for mine, theirs in zip(own.modules(), model.modules(), strict=True):
        assert type(mine) is type(theirs)
        assert mine is not theirs
    assert all(a is b for a, b in zip(own.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(own.buffers(), model.buffers(), strict=True))
    assert own.config is own.model.config is own.model.layers[0].self_attn.config
    assert own.config is not model.config
    assert own.model.layers[0].extra.func.__self__ is own.model.norm
    own.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    own.model.layers[1].mlp = nn.Identity()
    own.train()
    assert greedy(model, PROMPT, NEW) == EXPECTED[:NEW]
    assert not model.training


def test_modes_of_torch_around_a_call() -> None:
    with torch.inference_mode():
        engine = small(TARGET, DRAFT)
        assert text(engine) == EXPECTED[:NEW]
    # Buffers of the first call serve the next one, which writes to them.
    assert text(engine) == EXPECTED[:NEW]
    with torch.autocast("cpu", torch.bfloat16):
        assert text(small(TARGET, DRAFT)) == EXPECTED[:NEW]
        assert torch.is_autocast_enabled("cpu")
    with torch.enable_grad():
        out = engine.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        assert torch.is_grad_enabled()
    assert new(out) == EXPECTED[:NEW]


def test_tokenizers_may_be_named(tmp_path: Path) -> None:
    characters().save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path)):
        out = small(TARGET, tokenizer=source).generate(text_of(PROMPT), max_new_tokens=NEW, do_sample=False)
        assert out.text == text_of(EXPECTED[:NEW])
    run = triforce_tree.custom_generate(tokenizer=tmp_path, stop_strings=text_of(EXPECTED[:2]), levels=2)
    ids = torch.tensor([PROMPT])
    cut = TARGET.generate(ids, custom_generate=run, max_new_tokens=NEW, do_sample=False)
    assert cut[0, len(PROMPT) :].tolist() == EXPECTED[:2]


@pytest.mark.parametrize("odd", ["./nowhere", 5, {"a": 1}])
def test_a_tokenizer_that_is_none_fails_early(odd: object) -> None:
    with pytest.raises(
        (OSError, TypeError), match=r"^(no such folder: './nowhere'|the tokenizer is of type)[^\n]*$"
    ):
        small(TARGET, tokenizer=odd)


def test_a_draft_may_be_shared_by_engines_in_threads() -> None:
    engines = [small(TARGET, DRAFT), small(tiny("llama-gqa"), DRAFT)]
    texts: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: texts.update({n: text(engines[n])})) for n in range(len(engines))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == dict.fromkeys(range(2), EXPECTED[:NEW])
