"""Changes in a model after an engine's first call take effect in every level."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import triforce_tree
from tests.support.distributions.head_folders import eagle
from tests.support.models.api_cases import SMALL, SMALL_LOOKUP, new
from tests.support.models.families import FAMILIES, greedy, perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.config import load_arguments

NEW = 12
FIRST, SECOND = prompt_of(50), prompt_of(41)
SCALE = 1.0


class Steering:
    """A hook with settings of its own, which reads a global number beside them."""

    def __init__(self) -> None:
        self.scale, self.options = 1.0, {"add": [0.0]}

    def method(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return (out * self.scale + self.options["add"][0]) * SCALE


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.3


def model_of() -> Any:
    """A model with a hook from the beginning, whose settings are ``model.steering``."""
    model: Any = tiny("llama-gqa")
    steering = Steering()
    vector = torch.zeros(32)
    model.model.layers[0].mlp.register_forward_hook(steering.method)
    model.model.layers[0].register_forward_hook(lambda m, a, out: out + vector)
    model.steering, model.vector = [steering], [vector]
    return model


Change = Callable[[Any], AbstractContextManager[None]]
CHANGES: dict[str, Change] = {}


def change(name: str) -> Callable[[Callable[[Any], Iterator[None]]], None]:
    """Registers a function of a model that changes it, and undoes that after its ``yield``."""

    def register(function: Callable[[Any], Iterator[None]]) -> None:
        CHANGES[name] = contextmanager(function)

    return register


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """A failure must not change other tests."""
    try:
        yield
    finally:
        undo()


def hook(register: str, function: Callable[..., Any], **options: Any) -> Change:
    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        handle = getattr(model.model.layers[1].mlp, register)(function, **options)
        with undone(handle.remove):
            yield

    return changed


def attribute(path: str, name: str, value: Any) -> Change:
    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        of: Any = model
        for part in path.split(".") if path else ():
            of = getattr(of, part)
        before = getattr(of, name)
        setattr(of, name, value)
        with undone(lambda: setattr(of, name, before)):
            yield

    return changed


CHANGES |= {
    "hook": hook("register_forward_hook", lambda m, a, out: out * 0.2),
    "hook with keywords": hook("register_forward_hook", lambda m, a, k, out: out * 0.2, with_kwargs=True),
    "hook always called": hook("register_forward_hook", lambda m, a, out: out * 0.2, always_call=True),
    "pre-hook": hook("register_forward_pre_hook", lambda m, a: (a[0] * 0.2,)),
    "pre-hook with keywords": hook(
        "register_forward_pre_hook", lambda m, a, k: ((a[0] * 0.2,), k), with_kwargs=True
    ),
    "activation": attribute("model.layers.1.mlp", "act_fn", nn.ReLU()),
    "epsilon": attribute("model.layers.1.input_layernorm", "variance_epsilon", 0.5),
    "scaling": attribute("model.layers.1.self_attn", "scaling", 0.01),
    "module without weights": attribute("model.layers.1", "mlp", nn.Identity()),
    "head": attribute("", "lm_head", nn.Linear(32, 64, bias=False)),
    "buffer": attribute("model.rotary_emb", "inv_freq", torch.full((4,), 0.2)),
    "method of a class": attribute(
        "model.layers.1.mlp.__class__", "forward", lambda m, x: m.down_proj(m.up_proj(x))
    ),
}


@change("hook of all modules")
def _(model: Any) -> Iterator[None]:
    # By its class: copies have other objects.
    handle = register_module_forward_hook(
        lambda m, a, out: out * 0.3 if isinstance(m, modeling_llama.LlamaMLP) else None
    )
    with undone(handle.remove):
        yield


@change("forward of a module")
def _(model: Any) -> Iterator[None]:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.gate_proj(x))
    yield
    del mlp.forward


@change("function of the module that a forward reads")
def _(model: Any) -> Iterator[None]:
    own = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, **more: own(q * 0.2, k, cos, sin, **more)
    with undone(lambda: setattr(modeling_llama, "apply_rotary_pos_emb", own)):
        yield


@change("parametrisation")
def _(model: Any) -> Iterator[None]:
    linear = model.model.layers[1].mlp.up_proj
    parametrize.register_parametrization(linear, "weight", Scaled())
    yield
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)


@change("pruning")
def _(model: Any) -> Iterator[None]:
    linear = model.model.layers[1].mlp.down_proj
    weight = linear.weight.detach().clone()
    prune.l1_unstructured(linear, "weight", amount=0.7)
    yield
    prune.remove(linear, "weight")
    linear.weight = nn.Parameter(weight)


@change("weights in place")
def _(model: Any) -> Iterator[None]:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(0.25)
    yield
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(4.0)


@change("weights, uncounted")
def _(model: Any) -> Iterator[None]:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data *= 0.25
    yield
    weight.detach().numpy()[:] *= 4.0


@change("buffer in place")
def _(model: Any) -> Iterator[None]:
    model.model.rotary_emb.inv_freq.mul_(0.5)
    yield
    model.model.rotary_emb.inv_freq.mul_(2.0)


@change("compiled layer")
def _(model: Any) -> Iterator[None]:
    layers = model.model.layers
    before = layers[1]
    before.mlp.act_fn = nn.Tanh()
    layers[1] = torch.compile(before, backend="eager")
    yield
    before.mlp.act_fn = nn.SiLU()
    layers[1] = before


@change("number of a hook")
def _(model: Any) -> Iterator[None]:
    model.steering[0].scale = 0.2
    yield
    model.steering[0].scale = 1.0


@change("list of a hook")
def _(model: Any) -> Iterator[None]:
    model.steering[0].options["add"][0] = 0.5
    yield
    model.steering[0].options["add"][0] = 0.0


@change("tensor of a hook")
def _(model: Any) -> Iterator[None]:
    model.vector[0].copy_(torch.linspace(-2, 2, 32))
    yield
    model.vector[0].zero_()


@change("global number of a hook")
def _(model: Any) -> Iterator[None]:
    global SCALE
    SCALE = 0.3
    yield
    SCALE = 1.0


def lookup(model: Any) -> Engine:
    return triforce_tree.load(model, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1}))


ENGINES: dict[str, Callable[[PreTrainedModel], Engine]] = {
    "plain": lambda m: triforce_tree.load(m, levels=1, **load_arguments(SMALL_LOOKUP)),
    "lookup": lookup,
    "draft": lambda m: triforce_tree.load(m, DRAFT, levels=2, **load_arguments({**SMALL, "rounds": 1})),
    "retrieval": lambda m: triforce_tree.load(m, DRAFT, levels=3, **load_arguments({**SMALL, "rounds": 2})),
    "8 bits": lambda m: triforce_tree.load(
        m, DRAFT, levels=3, retrieval_weight_bits=8, **load_arguments({**SMALL, "rounds": 2})
    ),
    "EAGLE": lambda m: triforce_tree.load(
        m, drafter=eagle(m, "chain:3"), levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})
    ),
}
DRAFT = perturbed(tiny("llama-gqa"), 0.05)


def text(engine: Engine, prompt: list[int]) -> list[int]:
    return new(engine.generate(prompt, do_sample=False, max_new_tokens=NEW), prompt)


@pytest.mark.parametrize("path", ENGINES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call_takes_effect(name: str, path: str) -> None:
    model = model_of()
    engine = ENGINES[path](model)
    before = text(engine, SECOND)
    assert text(engine, FIRST) == greedy(model, FIRST, NEW)
    with CHANGES[name](model):
        changed = greedy(model, SECOND, NEW)
        assert text(engine, SECOND) == changed != before
        assert text(engine, FIRST) == greedy(model, FIRST, NEW)
    assert text(engine, SECOND) == greedy(model, SECOND, NEW) == before


@pytest.mark.parametrize("name", CHANGES)
def test_in_a_session_a_batch_and_kept_prefixes(name: str) -> None:
    """Everything that was kept of the model before the change is computed again."""
    model = model_of()
    options: Any = {**SMALL, "prefill_chunk": 16, "prefix_cache": "64MiB"}
    engine = triforce_tree.load(model, DRAFT, levels=2, **load_arguments({**options, "rounds": 1}))
    session = engine.session(FIRST, reserve=200)

    def turn() -> None:
        asked = [*session.tokens, *prompt_of(7)]
        out = session.generate(prompt_of(7), do_sample=False, max_new_tokens=NEW)
        assert out.sequences[0, len(asked) :].tolist() == greedy(model, asked, NEW)

    def batch() -> None:
        prompts = [FIRST, [*FIRST[:32], *SECOND], SECOND]
        outs = engine.generate(prompts, do_sample=False, max_new_tokens=NEW)
        for prompt, row in zip(prompts, outs.sequences, strict=True):
            assert row[-NEW:].tolist() == greedy(model, prompt, NEW)

    turn()
    batch()
    turn()
    with CHANGES[name](model):
        turn()
        batch()
        turn()
    turn()
    batch()


STILL = [*FAMILIES, "phi3-longrope", "llama-longrope", "llama-dynamic", "llama4", "gemma4", "gpt-oss"]


@pytest.mark.parametrize("family", STILL)
def test_nothing_is_made_anew_where_nothing_has_changed(family: str) -> None:
    """Writes of forwards, transformers' generate and training are no change."""
    model = tiny(family)
    engine = triforce_tree.load(model, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1}))
    text(engine, SECOND)
    program = engine.last_program
    assert program is not None
    for between in (
        lambda: None,
        lambda: greedy(model, prompt_of(90), 3),
        model.train,
        lambda: model.requires_grad_(False),
        lambda: model.register_full_backward_hook(lambda m, i, o: None),
        model.eval,
    ):
        between()
        text(engine, SECOND)
        assert engine.last_program is program


def test_other_models_of_the_process_are_no_change() -> None:
    """transformers keeps tables of the classes that it has made models of."""
    model = tiny("gemma3")
    engine = triforce_tree.load(model, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1}))
    text(engine, SECOND)
    program = engine.last_program
    other = type("OfAnotherClass", (type(model),), {})(model.config).eval()
    text(triforce_tree.load(other, levels=2, **load_arguments({**SMALL_LOOKUP, "rounds": 1})), SECOND)
    text(engine, SECOND)
    assert engine.last_program is program


def test_hooks_that_change_their_own_state_do_not_make_all_anew_in_each_call() -> None:
    model = model_of()
    seen: list[float] = []
    counts = Steering()
    model.model.norm.register_forward_hook(lambda m, a, out: seen.append(float(out.sum())))

    def counting(module: nn.Module, args: Any, out: Tensor) -> None:
        counts.scale += 1

    model.model.norm.register_forward_hook(counting)
    engine = ENGINES["lookup"](model)
    for _ in range(3):
        text(engine, SECOND)
    program = engine.last_program
    counted = len(seen)
    assert text(engine, SECOND) == greedy(model, SECOND, NEW)
    assert engine.last_program is program
    assert len(seen) > counted
    model.steering[0].scale = 0.2
    assert text(engine, SECOND) == greedy(model, SECOND, NEW)


RESIZED: dict[str, tuple[Callable[[Any], object], str]] = {
    "half": (lambda m: m.half(), "dtype of LlamaForCausalLM is torch.float16, and was torch.float32"),
    "double": (lambda m: m.to(torch.float64), "dtype of LlamaForCausalLM is torch.float64"),
    "elsewhere": (lambda m: m.to("meta"), "device of LlamaForCausalLM is meta, and was cpu"),
    "larger": (lambda m: m.resize_token_embeddings(80), "vocabulary size of LlamaForCausalLM is 80"),
    "smaller": (lambda m: m.resize_token_embeddings(50), "vocabulary size of LlamaForCausalLM is 50"),
    "another head": (
        lambda m: setattr(m, "lm_head", nn.Linear(32, 70)), "70 logits for a vocabulary of 64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("of", ["target", "draft"])
def test_other_sizes_are_refused_with_the_remedy(name: str, of: str) -> None:
    change, words = RESIZED[name]
    target = tiny("llama-gqa")
    draft = perturbed(target, 0.05)
    engine = triforce_tree.load(target, draft, levels=3, **load_arguments({**SMALL, "rounds": 2}))
    session = engine.session(FIRST, reserve=100)
    session.generate(do_sample=False, max_new_tokens=3)
    change(target if of == "target" else draft)
    with pytest.raises(ValueError, match=words):
        text(engine, SECOND)
    with pytest.raises(ValueError, match=words):
        session.generate(do_sample=False, max_new_tokens=3)
    if of == "target" and name == "larger":
        with pytest.raises(ValueError, match=words):
            engine.generate([79], max_new_tokens=1)
    engine.close()
