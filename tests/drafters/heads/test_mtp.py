"""MTP layers of checkpoints: their distributions against a plain forward, how they are found, and errors."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_layers

import triforce_tree
from tests.support.distributions.drafted_nodes import compare_nodes
from tests.support.distributions.head_folders import MTP
from tests.support.models.families import greedy, prompt_of
from tests.support.models.mtp_checkpoints import (
    FAMILIES,
    MULTIMODAL,
    NAMED,
    NUMBERED,
    mtp_checkpoint,
    multimodal_mtp_checkpoint,
    sharded,
)
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import Drafter, TokenTree
from triforce_tree.drafters.heads.pairs import PairDrafter
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

pytestmark = pytest.mark.skipif(not MTP, reason="this release of transformers reads no MTP layers")

PROMPTS = [prompt_of(length) for length in (41, 60)]
NEW = 12
# The retrieval cache holds the whole text, so that its hidden states equal those of plain forwards.
WHOLE = {"gamma": 5, "budget": 256, "chunk": 32, "recent": 64}


class Plain:
    """A reference of the MTP layers in a folder, without a KV cache.

    Each block is the last layer of a model that transformers reads from a checkpoint in which the block's
    tensors stand in that layer's place.
    """

    def __init__(self, folder: Path, target: Any, layers: int) -> None:
        self.target, self.layers = target, []
        weights = load_file(folder / "model.safetensors")
        config = target.config
        for layer in range(layers):
            prefix, names, start = f"model.layers.{2 + layer}.", NUMBERED, ""
            if "mtp.fc.weight" in weights:
                prefix, names, start = f"mtp.layers.{layer}.", NAMED, "mtp."
            block = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
            own = {n: t for n, t in weights.items() if not n.startswith(("mtp.", "model.layers.1."))}
            own = {n: t for n, t in own.items() if not n.startswith(prefix)}
            place = folder / f"block-{layer}"
            place.mkdir()
            (place / "config.json").write_text((folder / "config.json").read_text())
            tensors = {f"model.layers.1.{n}": t for n, t in block.items() if not n.startswith(NUMBERED)}
            save_file(own | tensors, place / "model.safetensors", metadata={"format": "pt"})
            model = hf.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
            norm = type(model.model.layers[1].input_layernorm)
            extras = []
            for name in names:
                weight = (block if names == NUMBERED else weights)[start + f"{name}.weight"]
                module: Any = norm(config.hidden_size, eps=config.rms_norm_eps)
                if weight.dim() == 2:
                    module = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
                module.load_state_dict({"weight": weight})
                extras.append(module)
            joined, enorm, hnorm, last = extras
            self.layers.append((model.model.layers[1], enorm, hnorm, joined, last))
        self.window = config.sliding_window if config.model_type == "mellum" else None

    def outputs(self, layer: int, tokens: Tensor, hidden: Tensor, pairs: Tensor, mask: Tensor) -> Tensor:
        """Returns the outputs ``[T, H]`` of one layer for T pairs."""
        block, enorm, hnorm, joined, norm = self.layers[layer]
        x = joined(torch.cat([enorm(self.target.get_input_embeddings()(tokens)), hnorm(hidden)], -1))[None]
        positions = (pairs + 1)[None]
        kinds = {"layer_type": "sliding_attention"} if self.window else {}
        rotary = self.target.model.rotary_emb(x, position_ids=positions, **kinds)
        minus = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        out = block(x, attention_mask=minus, position_embeddings=rotary, position_ids=positions)
        return norm(out[0])

    def logits(self, tokens: list[int], path: list[int], sinks: int, window: int) -> Tensor:
        """Returns the logits ``[V]`` of the token after ``tokens`` and ``path``."""
        end, text = len(tokens) - 1, torch.tensor([*tokens, *path])
        hidden = self.target.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        deepest = min(len(path), len(self.layers) - 1)
        for layer in range(deepest + 1):
            pairs = torch.arange(layer, min(layer + end, len(text) - 1))
            while True:
                distance = pairs[:, None] - pairs
                mask = (distance >= 0) & ((pairs < sinks) | (pairs >= end - window))
                if self.window:
                    mask &= distance < self.window
                out = self.outputs(layer, text[pairs + 1], hidden[: len(pairs)], pairs, mask)
                if layer < deepest or len(text) - 2 == pairs[-1]:
                    break
                # The last layer is applied again to its own outputs.
                pairs = torch.arange(layer, int(pairs[-1]) + 2)
                hidden = torch.cat([hidden[: len(pairs) - 1], out[-1:]])
            hidden = out
        return self.target.lm_head(hidden[-1])


CASES: dict[str, tuple[str, int, int, str, int, int, dict[str, Any]]] = {
    **{family: (family, 1, 2, "best-first:3,2,2", 2, 200, {}) for family in ("deepseek-v3", "glm4-moe")},
    **{family: (family, 1, 2, "static:0;1;0.0", 2, 9, {}) for family in ("glm4-moe-lite", "mellum")},
    **{family: (family, 1, 2, "chain:3", 2, 9, {}) for family in FAMILIES if family.startswith("qwen")},
    "bailing-hybrid": ("bailing-hybrid", 1, 2, "chain:3", 2, 9, {}),
    "levels": ("glm4-moe", 1, 3, "best-first:2,2", 2, 9, {}),
    "no sinks": ("deepseek-v3", 1, 2, "chain:3", 0, 7, {}),
    "three layers": ("glm4-moe", 3, 2, "best-first:3,2,2", 2, 200, {}),
    "three layers, deeper": ("deepseek-v3", 3, 2, "static:0;1;0.0;0.1;0.0.0;0.0.0.0;0.0.0.0.0", 2, 200, {}),
    "two layers, flat": ("glm4-moe", 2, 3, "static:0;1", 0, 200, {}),
    "YaRN": (
        "deepseek-v3", 1, 2, "chain:2", 2, 200,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_children_follow_the_layers(name: str, tmp_path: Path) -> None:
    """Distributions at every node equal the reference's, and the generated text is the target's own."""
    family, layers, levels, tree_name, sinks, window, settings = CASES[name]
    target = mtp_checkpoint(tmp_path, family, layers, **settings)
    plain = Plain(tmp_path, target, layers)
    engine = triforce_tree.load(
        tmp_path, drafter="mtp", levels=levels, tree=tree_name,
        **load_arguments({**WHOLE, "sinks": sinks, "window": window, "rounds": 2 if levels == 3 else 1}),
    )  # fmt: skip
    drafter = drafter_of(engine)
    assert isinstance(drafter, PairDrafter)
    assert (drafter.name, drafter.network.layers, drafter.window) == ("mtp", layers, window)
    trees = compare_nodes(drafter, lambda tokens, path: plain.logits(tokens, path, sinks, window))
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    expected = [greedy(target, prompt, NEW) for prompt in PROMPTS]
    assert [row[-NEW:] for row in out.sequences.tolist()] == expected
    assert out.levels[0].name == "mtp"
    assert len(trees) > 2


def drafter_of(engine: triforce_tree.Engine) -> Drafter:
    drafter = engine._hierarchy.own_drafter
    assert drafter is not None
    return drafter


@torch.no_grad()
def test_a_chain_is_that_of_transformers(tmp_path: Path) -> None:
    """Three layers draft the three tokens that transformers' own class drafts."""
    target = mtp_checkpoint(tmp_path, "deepseek-v3", 3)
    # transformers finds the layers by the patterns of published sizes.
    patterns: Any = [rf"model\.layers\.{2 + layer}\." for layer in range(3)]
    target._keys_to_ignore_on_load_unexpected = patterns
    own = modeling_layers.MtpModel.from_pretrained(target).eval()
    prompt = PROMPTS[0]
    hidden = target.model(torch.tensor([prompt]), use_cache=False).last_hidden_state
    first = int(target.lm_head(hidden[0, -1]).argmax())
    ids = torch.tensor([[*prompt[1:], first]])
    drafted, _, _ = own(ids, hidden, None, torch.arange(1, len(prompt) + 1)[None], None)
    engine = triforce_tree.load(
        tmp_path, drafter="mtp", levels=2, tree="chain:3", **load_arguments({**WHOLE, "rounds": 1})
    )
    seen: list[list[int]] = []
    drafter = drafter_of(engine)
    propose = drafter.propose

    def noted(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        propose(state, tree, sampler)
        if state.sequence(0) == [*prompt, first]:
            seen.append(tree.tokens[0, 1:].tolist())

    drafter.propose = noted  # type: ignore[method-assign]
    engine.generate([[*prompt, first]], max_new_tokens=4, do_sample=False)
    assert drafted[0].tolist() in seen


def test_layers_are_chosen_where_nothing_else_was_named(tmp_path: Path) -> None:
    target = mtp_checkpoint(tmp_path, "glm4-moe")
    sharded(tmp_path)
    for source in (tmp_path, target):
        engine = triforce_tree.load(source)
        assert drafter_of(engine).name == "mtp"
        out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, -NEW:].tolist() == greedy(target, PROMPTS[0], NEW)
    for how in ({"drafter": "lookup"}, {"levels": 1}):
        assert triforce_tree.load(tmp_path, **how)._hierarchy.own_drafter is None  # type: ignore[arg-type]
    assert triforce_tree.load(target, target)._hierarchy.own_drafter is None


@pytest.mark.parametrize("family", MULTIMODAL)
def test_layers_of_multimodal_targets(family: str, tmp_path: Path) -> None:
    target = multimodal_mtp_checkpoint(tmp_path, family)
    ids = torch.tensor([PROMPTS[0]])
    expected = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    for source in (tmp_path, target):
        engine = triforce_tree.load(source, levels=2)
        drafter = drafter_of(engine)
        assert isinstance(drafter, PairDrafter)
        assert drafter.network.windows == ((None,) if family == "qwen3.5" else (24, 24, None))
        assert torch.equal(engine.generate(ids, max_new_tokens=NEW, do_sample=False).sequences, expected)


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5-moe"])
def test_experts_are_read_alone_and_stacked(family: str, tmp_path: Path) -> None:
    """Checkpoints hold the matrices of each expert, or those of all experts as one tensor."""
    target = mtp_checkpoint(tmp_path, family)
    place = "mtp.layers.0.mlp.experts." if family.startswith("qwen") else "model.layers.2.mlp.experts."
    weights, count = load_file(tmp_path / "model.safetensors"), 8 if family == "glm4-moe" else 4
    parts = {
        name: torch.stack([weights.pop(f"{place}{i}.{name}_proj.weight") for i in range(count)])
        for name in ("gate", "up", "down")
    }
    layers = [network_of(triforce_tree.load(target)).state_dict()]
    weights[f"{place}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
    weights[f"{place}down_proj"] = parts["down"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layers.append(network_of(triforce_tree.load(target)).state_dict())
    assert len(layers[0]) == len(layers[1])
    for name, weight in layers[0].items():
        assert torch.equal(weight, layers[1][name]), name


def test_weights_of_8_bits_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """Each block of a weight has a scale; the last blocks are smaller."""
    target = mtp_checkpoint(tmp_path, "deepseek-v3")
    weights, block = load_file(tmp_path / "model.safetensors"), (20, 12)
    expected = {}
    for name in [n for n in weights if n.startswith("model.layers.2.") and weights[n].dim() == 2]:
        if not name.endswith(("embed_tokens.weight", "head.weight")):
            rows, columns = (-(-size // each) for size, each in zip(weights[name].shape, block, strict=True))
            scales = torch.rand(rows, columns) + 0.5
            packed = weights[name].to(torch.float8_e4m3fn)
            weights[name], weights[f"{name}_scale_inv"] = packed, scales
            expected[name] = torch.empty(packed.shape)
            for i in range(packed.shape[0]):
                for j in range(packed.shape[1]):
                    expected[name][i, j] = float(packed[i, j]) * scales[i // block[0], j // block[1]]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensors that would not be used: .*_scale_inv"):
        triforce_tree.load(target, drafter="mtp")
    target.config.quantization_config = {"quant_method": "fp8", "weight_block_size": list(block)}
    layer: Any = network_of(triforce_tree.load(target, drafter="mtp")).layers
    assert torch.equal(layer[0].eh_proj.weight, expected["model.layers.2.eh_proj.weight"])
    attention = layer[0].mtp_block.self_attn
    assert torch.equal(attention.kv_b_proj.weight, expected["model.layers.2.self_attn.kv_b_proj.weight"])
    experts = layer[0].mtp_block.mlp.experts.down_proj
    assert torch.equal(experts[3], expected["model.layers.2.mlp.experts.3.down_proj.weight"])


def network_of(engine: triforce_tree.Engine) -> torch.nn.Module:
    drafter: Any = drafter_of(engine)
    return drafter.network.model


def test_custom_generate_takes_them(tmp_path: Path) -> None:
    target = mtp_checkpoint(tmp_path, "qwen3.5")
    ids = torch.tensor([PROMPTS[0]])
    expected = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    for how in ({}, {"drafter": "mtp", "tree": "chain:2"}):
        function = triforce_tree.custom_generate(**how)  # type: ignore[arg-type]
        assert torch.equal(
            target.generate(ids, max_new_tokens=NEW, do_sample=False, custom_generate=function), expected
        )


SCALE = {"mtp.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a tensor too many": ("qwen3.5", {"extra": SCALE}, "tensors that would not be used: .*weight_scale_inv"),
    "a head of its own": (
        "glm4-moe", {"extra": {"model.layers.2.shared_head.head.weight": torch.ones(64, 32)}},
        "shared_head.head.weight of .* is no copy of the target's own table",
    ),
    "another shape": (
        "glm4-moe", {"extra": {"model.layers.2.enorm.weight": torch.ones(31)}}, "of other shapes: layers"
    ),
    "a layer too many": ("glm4-moe", {"layers": 2, "num_nextn_predict_layers": 1}, "would not be used"),
    "a layer too few": ("glm4-moe", {"num_nextn_predict_layers": 2}, "lack layers.1"),
    "embeddings of its own": (
        "qwen3.5", {"mtp_use_dedicated_embeddings": True}, "not supported .*mtp_use_dedicated_embeddings"
    ),
    "several layers below mtp": ("qwen3.5", {"layers": 2}, "exactly one is supported"),
    "positions by length": (
        "glm4-moe", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_computed_is_refused_by_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the layers were not asked for, the reason is logged, and matches of earlier text draft."""
    family, how, message = REFUSED[name]
    mtp_checkpoint(tmp_path, family, **how)
    with pytest.raises(ValueError, match=message):
        triforce_tree.load(tmp_path, drafter="mtp")
    with caplog.at_level(logging.WARNING, "triforce_tree"):
        assert triforce_tree.load(tmp_path)._hierarchy.own_drafter is None
    assert "matches of earlier text draft instead" in caplog.text


def test_families_without_a_class_are_refused(tmp_path: Path) -> None:
    mtp_checkpoint(tmp_path, "qwen3.5")
    weights = load_file(tmp_path / "model.safetensors")
    llama = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
    )
    llama.save_pretrained(tmp_path / "llama")
    own = load_file(tmp_path / "llama" / "model.safetensors")
    with pytest.raises(ValueError, match="has no MTP layers; use drafter='lookup'"):
        triforce_tree.load(tmp_path / "llama", drafter="mtp")
    own |= {name: weight for name, weight in weights.items() if name.startswith("mtp.")}
    save_file(own, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="transformers has no class for those of llama"):
        triforce_tree.load(tmp_path / "llama", drafter="mtp")


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = mtp_checkpoint(tmp_path, "qwen3.5")
    with pytest.raises(ValueError, match="drafter='mtp' uses no draft model, and one was given"):
        triforce_tree.load(target, target, drafter="mtp")
    engine = triforce_tree.load(target, drafter="mtp", advanced={"other_trees": "chain:1 lookup:3"})
    assert engine.config.trees == ("chain:2", "chain:1", "lookup:3")
    with pytest.raises(ValueError, match=r"those of the GGUF file .* are not read"):
        triforce_tree.load(tmp_path / "model.gguf", drafter="mtp")


def test_layers_that_compute_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test compares each layer with transformers' own when it is loaded. Layers that nobody asked
    for do not keep the target from being loaded.
    """
    target = mtp_checkpoint(tmp_path, "deepseek-v3")
    monkeypatch.setattr("triforce_tree.drafters.heads.mtp.attend", lambda q, k, v, mask, scale: v)
    with pytest.raises(ValueError, match=r"MTP layer 0 of .* transformers' own forward by"):
        triforce_tree.load(tmp_path, drafter="mtp")
    engine = triforce_tree.load(tmp_path)
    assert "matches of earlier text draft instead" in caplog.text
    out = engine.generate(PROMPTS[:1], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, -NEW:].tolist() == greedy(target, PROMPTS[0], NEW)
