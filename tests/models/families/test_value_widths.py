"""Models whose keys and values differ in width give transformers' own tokens on every path.

Multi-head latent attention in its expanded form (DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM3), and MiMo-V2,
whose layers with a window have other heads and attention sinks.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

import triforce_tree
from tests.support.models.families import SMALL_SETTINGS, greedy, perturbed, prompt_of, small, without_tree
from tests.support.models.offloaded_cases import PIECE
from tests.support.models.program_cases import SMALL, decoded
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.drafters.tree_model import TreeDrafter
from triforce_tree.kernels.attention.plan import Heads
from triforce_tree.kernels.attention.prefill import causal_attention
from triforce_tree.kernels.attention.reference import tree_attention
from triforce_tree.kv.offload.host_store import Offload
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning.memory_map import Sizes

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2": _LATENT | _EXPERTS,
    "DeepseekV3": _LATENT | _EXPERTS,
    "Glm4MoeLite": _LATENT | _EXPERTS,
    "MiniCPM3": _LATENT | {"initializer_range": 0.5},
    "MiMoV2Flash": {
        **_EXPERTS,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}
PROMPTS = [prompt_of(61), prompt_of(40)]
NEW = 14


@cache
def target_of(family: str) -> PreTrainedModel:
    return small(f"{family}Config", f"{family}ForCausalLM", **FAMILIES[family])


@cache
def expected(family: str, prompt: tuple[int, ...]) -> list[int]:
    tokens = greedy(target_of(family), list(prompt), NEW)
    assert len(set(tokens)) > 3, "an output that varies"
    return tokens


def check(family: str, draft: PreTrainedModel | None, prompts: list[list[int]], **options: Any) -> list[int]:
    """Compares with transformers' greedy tokens; returns the accepted tokens of each level."""
    settings = SMALL_SETTINGS if draft is not None else without_tree(SMALL_SETTINGS)
    engine = triforce_tree.load(target_of(family), draft, **load_arguments({**settings, **options}))
    out = engine.generate(prompts, max_new_tokens=NEW, do_sample=False)
    width = max(map(len, prompts))
    assert out.sequences[:, width:].tolist() == [expected(family, tuple(prompt)) for prompt in prompts]
    return [level.accepted for level in out.levels]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_the_targets(family: str) -> None:
    draft = perturbed(target_of(family), 0.05)
    assert min(check(family, draft, PROMPTS, levels=3)[1:]) > 0
    if family in ("MiniCPM3", "MiMoV2Flash"):
        check(family, None, PROMPTS[:1], levels=1)
        assert check(family, draft, PROMPTS[:1], levels=2)[-1] > 0
        check(family, None, PROMPTS[:1], levels=3)


SPLITS = {
    "host": Offload(0, PIECE, 2),
    "some resident": Offload(6 * PIECE, PIECE, 2),
    "half on the CPU": Offload(0, PIECE, 2, host_share=0.5, plain_host_share=0.5),
    "last layer resident": Offload(1 << 20, PIECE, 2, states_on_host=True, last_resident=True),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("family", "split"), [*(("MiniCPM3", split) for split in SPLITS), ("MiMoV2Flash", "half on the CPU")]
)
def test_offloaded_caches(family: str, split: str) -> None:
    """Pieces of rows, gathered chunks, evictions from the window, the CPU's share, layerwise prefill."""
    target, config = HFModel(target_of(family)), HierarchyConfig.from_options(**SMALL)
    drafter = TreeDrafter(HFModel(perturbed(target_of(family), 0.05)), config)
    program = DecodingProgram(target, drafter, config, 2, 260, 3, SPLITS[split])
    prompts = [prompt_of(150), prompt_of(67)]
    found, _ = decoded(program, prompts, [NEW, NEW])
    assert found == [expected(family, tuple(prompt)) for prompt in prompts]
    assert program.cache.backend.transfers
    full = next(shape.heads for shape in target.kv_shapes if shape.window is None)
    assert {kv.shape[1] for layer in program.cache.backend.cache.host.on_host for kv in layer} == {full.row}
    program.cache.close()


def test_streamed_weights() -> None:
    target = small("MiniCPM3Config", "MiniCPM3ForCausalLM", **FAMILIES["MiniCPM3"])
    draft = perturbed(target, 0.05)
    engine = triforce_tree.load(
        target, draft, levels=2, **load_arguments({**SMALL_SETTINGS, "offload_weights": True})
    )
    out = engine.generate([PROMPTS[0]], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == expected("MiniCPM3", tuple(PROMPTS[0]))


def test_shapes_and_bytes_of_keys_and_values() -> None:
    model = HFModel(target_of("MiMoV2Flash"))
    assert [(shape.heads, shape.window) for shape in model.kv_shapes] == [
        (Heads(4, 1, 24, 16), None),
        (Heads(4, 2, 24, 16), 12),
        (Heads(4, 1, 24, 16), None),
    ]
    assert [shape.elements for shape in model.kv_shapes] == [40, 80, 40]
    sizes = Sizes.of(model, None, HierarchyConfig.from_options(levels=1))
    assert (sizes.row, sizes.windowed[0].row, sizes.prefill_row) == (40 * 4, 80 * 4, 24 * 4)


def test_a_compiled_layer_knows_the_width_of_the_values() -> None:
    """The shape that torch.compile works with: o_proj multiplies the values of all heads."""
    with FakeTensorMode():
        q, k, v = torch.empty(2, 4, 5, 24), torch.empty(2, 1, 5, 24), torch.empty(2, 1, 5, 16)
        out = torch.ops.triforce_tree.planned_attend(q, k, v, 1.0, 0, 0.0, None)
    assert out.shape == (2, 5, 4, 16)


@pytest.mark.parametrize("dims", [(24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_prefill_attention(dims: tuple[int, int], window: int | None) -> None:
    heads = Heads(4, 2, *dims)
    q, k = torch.randn(1, 4, 13, heads.dim), torch.randn(1, 2, 31, heads.dim)
    v = torch.randn(1, 2, 31, heads.value_dim)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    first = None if window is None else (torch.arange(18, 31) - window + 1).clamp(0)
    exact, _ = tree_attention(q, k, v, mask, scale=0.3, first=first)
    torch.testing.assert_close(causal_attention(q, k, v, scale=0.3, window=window), exact)
