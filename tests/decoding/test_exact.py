"""Bit-exact mode on the CPU: greedy text is that of plain decoding with it, where any difference shows.

The tokens of the targets come in pairs whose logits differ by rounding alone: each weight of one row of the
head is at most a unit in the last place from the other's.
"""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.recurrent_families import recurrent
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.kernels.attention.exact.attention import ExactAttention
from triforce_tree.kernels.cpu.fp32 import exact as fp32_exact
from triforce_tree.kernels.cpu.fp32 import library
from triforce_tree.models.exact.host import use_exact_modules
from triforce_tree.models.model_copy import shallow_copy
from triforce_tree.models.supported import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="needs a processor with AVX2, and a C compiler"),
    pytest.mark.usefixtures("poisoned_empty"),
]
SMALL = {"gamma": 5, "budget": 24, "chunk": 4, "recent": 8, "sinks": 2, "window": 6, "prefill_chunk": 64}
PROMPTS, NEW = [prompt_of(30), prompt_of(58)], 36
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def paired(family: str, dtype: torch.dtype, noise: float = 0.0) -> PreTrainedModel:
    """A tiny model whose tokens come in pairs with almost the same row of the head."""
    model = copy.deepcopy(perturbed(tiny(family), noise) if noise else tiny(family)).to(dtype)
    weight = model.lm_head.weight.data
    half = len(weight) // 2
    # To a unit above or below in a quarter of the places; a bit pattern one higher is the next number.
    bits = weight[:half].view(torch.int32 if dtype == torch.float32 else torch.int16)
    generator = torch.Generator().manual_seed(3)
    steps = (torch.rand(bits.shape, generator=generator) < 0.25).to(bits.dtype)
    signs = 1 - 2 * (torch.rand(bits.shape, generator=generator) < 0.5).to(bits.dtype)
    weight[half:] = (bits + steps * signs).view(dtype)
    return model


def engine(family: str, dtype: torch.dtype, levels: int, **options: object) -> Engine:
    draft = paired(family, dtype, 0.05) if levels > 1 else None
    return triforce_tree.load(
        paired(family, dtype), draft, levels=levels, exact=True, **load_arguments({**SMALL, **options})
    )


def greedy(of: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [of.generate(torch.tensor([p]), max_new_tokens=NEW).sequences[0].tolist() for p in prompts]


@cache
def plain(family: str, dtype: torch.dtype) -> list[list[int]]:
    return greedy(engine(family, dtype, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "levels, options",
    [
        (2, {"tree": "best-first:4,3,2"}),
        (2, {"tree": "chain:4"}),
        (3, {"tree": "best-first:3,2", "runner_ups": True}),
        (3, {"tree": "best-first:3,2", "runner_ups": True, "tail_tree": True}),
    ],
    ids=str,
)
def test_text_is_that_of_plain_decoding(dtype: torch.dtype, levels: int, options: dict[str, object]) -> None:
    assert greedy(engine("llama-gqa", dtype, levels, **options)) == plain("llama-gqa", dtype)


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "gpt-neox", "phi3"])
def test_families(family: str) -> None:
    if not hasattr(tiny(family), "lm_head"):
        pytest.skip("its head has another name")
    found = greedy(engine(family, torch.bfloat16, 3, tree="best-first:3,2", runner_ups=True))
    assert found == plain(family, torch.bfloat16)


def test_a_batch() -> None:
    of = engine("llama-gqa", torch.float16, 2, tree="best-first:3,2")
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    out = of.generate(ids, attention_mask=mask, max_new_tokens=NEW).sequences
    found = [row[width - len(p) :].tolist() for row, p in zip(out, PROMPTS, strict=True)]
    assert found == plain("llama-gqa", torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_are_near_enough(dtype: torch.dtype) -> None:
    """Logits of a pair are within a few units in the last place: other bits would choose another token."""
    model = paired("llama-gqa", dtype)
    logits = model(torch.tensor([PROMPTS[0]])).logits[0].float()
    first, second = logits[:, :32], logits[:, 32:]
    near = (first - second).abs() <= 8 * torch.finfo(dtype).eps * first.abs()
    assert near.float().mean() > 0.5
    chosen = {token // 32 for text in plain("llama-gqa", dtype) for token in text[58:]}
    assert chosen == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama-gqa", "gpt-neox"])
def test_modules_by_rows(family: str, dtype: torch.dtype) -> None:
    """Every module that is called with hidden states: the same bits for one row, and for 3 or 100."""
    model = use_exact_modules(shallow_copy(tiny(family).to(dtype).eval()))
    checked = 0
    for module in model.modules():
        size = getattr(module, "in_features", None) or (
            module.weight.shape[0] if "Norm" in type(module).__name__ else 64 if not module._modules else None
        )
        if size is None or "forward" not in vars(module) or "Rotary" in type(module).__name__:
            continue
        x = torch.randn(1, 100, size, dtype=dtype)
        with torch.no_grad():
            whole = module(x)
            for rows in (slice(0, 1), slice(41, 44), slice(99, 100)):
                assert torch.equal(module(x[:, rows]), whole[:, rows]), type(module)
        checked += 1
    assert checked > 10


def test_a_model_whose_rows_depend_on_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fp32_exact.attention

    def by_count(request: ExactAttention) -> Tensor:
        return own(request) * (1 + 2**-20 * (request.tokens > 1))

    monkeypatch.setattr(fp32_exact, "attention", by_count)
    with pytest.raises(
        UnsupportedModelError, match="computed alone differ in their last bits from those among"
    ):
        greedy(engine("llama-gqa", torch.float32, 2, tree="chain:3"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_bits": 8}, "exact=True does not work with kv_bits=8"),
        ({"offload": True}, "exact=True does not work with an offloaded cache"),
        ({"context_parallel": 2}, "exact=True does not work with context_parallel=2"),
        ({"exact": 1}, "exact=1 must be True or False"),
    ],
)
def test_settings_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HierarchyConfig.from_options(**{"exact": True, **options})


@pytest.mark.parametrize(
    "family, reason", [("gemma2", "capped"), ("mixtral", "has experts"), ("falcon-h1", "recurrent")]
)
def test_models_that_are_refused(family: str, reason: str) -> None:
    model = recurrent(family) if reason == "recurrent" else tiny(family)
    with pytest.raises(UnsupportedModelError, match=f"exact=True does not serve .*{reason}"):
        triforce_tree.load(model, levels=1, exact=True)


def test_trees_that_are_refused() -> None:
    with pytest.raises(ValueError, match="exact=True verifies at most 64 tokens in a line, not 70"):
        greedy(engine("llama-gqa", torch.float32, 2, tree="chain:70"))
    with pytest.raises(ValueError, match="exact=True is not supported by a tree"):
        engine("llama-gqa", torch.float32, 1).generate(torch.tensor([PROMPTS[0]]), num_beams=2)
