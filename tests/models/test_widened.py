"""Models in bf16 and fp16 on the CPU: the texts of the same weights in fp32, without copies of them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.models.families import FAMILIES, build, perturbed, prompt_of, tiny
from triforce_tree import Engine
from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.models.few_row import int8_copy
from triforce_tree.models.hf_model import HFModel
from triforce_tree.models.host.widened import widen
from triforce_tree.models.model_copy import shallow_copy

pytestmark = pytest.mark.skipif(library() is None, reason="needs a processor with AVX2, and a C compiler")
DENSE = [family for family in FAMILIES if family != "mixtral"]
# Longer prompts are read in bf16 where the processor multiplies it.
PROMPT = prompt_of(40)


def text_of(model: PreTrainedModel, **options: Any) -> list[int]:
    out = Engine(model).with_options(**options).generate(PROMPT, max_new_tokens=24, temperature=0.0)
    ids: list[int] = out.sequences[0].tolist()
    return ids


@pytest.mark.parametrize("family", DENSE)
def test_texts_are_those_of_fp32(family: str) -> None:
    model = tiny(family).bfloat16()
    expected = text_of(copy.deepcopy(model).float())
    before = model(torch.tensor([PROMPT])).logits
    assert text_of(model) == expected
    assert torch.equal(model(torch.tensor([PROMPT])).logits, before), "the user's model has not changed"


@pytest.mark.parametrize("options", [{"exact": True}, {"levels": 3}, {"levels": 1}], ids=str)
def test_with_options_in_fp16(options: dict[str, Any]) -> None:
    model = tiny("llama-gqa").half()
    assert text_of(model, **options) == text_of(copy.deepcopy(model).float(), **options)


def test_with_a_draft_model() -> None:
    target = tiny("llama-gqa").bfloat16()
    draft = perturbed(tiny("llama-gqa"), 0.05).bfloat16()
    out = Engine(target, draft).generate(PROMPT, max_new_tokens=24, temperature=0.0)
    assert out.sequences[0].tolist() == text_of(copy.deepcopy(target).float())
    assert sum(level.accepted for level in out.levels) > 0


def test_large_weights_are_shared() -> None:
    model = tiny("gemma3", tie_word_embeddings=True).bfloat16()
    widened = widen(shallow_copy(model))
    own = {weight.data_ptr() for weight in model.parameters()}
    copied = [weight for weight in widened.parameters() if weight.data_ptr() not in own]
    assert all(weight.dtype == torch.float32 for weight in copied)
    assert all(weight.dim() == 1 for weight in copied), "norms and biases only"
    assert widened(torch.tensor([PROMPT])).logits.dtype == torch.float32


def test_changes_in_place_and_hooks_are_noticed() -> None:
    model = tiny("llama-gqa").bfloat16()
    engine, changed = Engine(model), copy.deepcopy(model)
    prompt, options = PROMPT, {"max_new_tokens": 24, "temperature": 0.0}
    engine.generate(prompt, **options)

    def check() -> None:
        found = engine.generate(prompt, **options).sequences[0].tolist()
        assert found == text_of(copy.deepcopy(changed).float())

    norms, linears = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "mlp.up_proj")]
    for name in (norms, linears):
        for each in (model, changed):
            with torch.no_grad():
                each.get_parameter(name).mul_(-2)
        check()

    def steer(module: nn.Module, args: object, out: Any) -> Any:
        return (out[0] * 3, *out[1:]) if isinstance(out, tuple) else out * 3

    for each in (model, changed):
        each.model.layers[0].mlp.register_forward_hook(steer)
    check()


def test_many_rows_as_in_bf16() -> None:
    """Rows that bf16 holds exactly: only sums and results are rounded differently."""
    model = tiny("llama").bfloat16()
    widened = widen(shallow_copy(model))
    layer = "model.layers.0.mlp.down_proj"
    x = torch.randn(1, 300, 64).bfloat16()
    out: Tensor = widened.get_submodule(layer)(x.float())
    expected = torch.nn.functional.linear(x.float(), model.get_submodule(layer).weight.float())
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=2e-2)
    assert out.dtype == torch.float32


def test_8_bits_for_level_1() -> None:
    model = tiny("llama-gqa").bfloat16()
    ids = torch.tensor([PROMPT])
    out = widen(int8_copy(model))(ids).logits
    expected = copy.deepcopy(model).float()(ids).logits
    assert out.dtype == torch.float32
    assert (out - expected).norm() < 0.1 * expected.norm()


def test_experts_keep_their_dtype() -> None:
    """Copies of experts in fp32 would double the memory of most of the weights."""
    assert HFModel(tiny("mixtral").bfloat16()).dtype == torch.bfloat16


def test_position_tables_are_copied() -> None:
    model = build("OPTConfig", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32).bfloat16()
    assert text_of(model) == text_of(copy.deepcopy(model).float())


def test_the_users_model_is_not_changed_even_for_a_moment() -> None:
    """Another thread may be generating with it."""

    class Unchanging(dict[str, Any]):
        def __setitem__(self, name: str, value: object) -> None:
            raise AssertionError(f"{name} was replaced")

    model = tiny("llama-gqa").bfloat16()
    embedding: Any = model.get_input_embeddings()
    embedding._parameters = Unchanging(embedding._parameters)
    assert HFModel(model).dtype == torch.float32
