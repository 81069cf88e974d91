"""EAGLE-3 heads: their distributions against a plain forward, their cache, formats, and errors."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import triforce_tree
from tests.support.distributions.drafted_nodes import compare_nodes
from tests.support.distributions.head_folders import eagle_folder
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.config import load_arguments
from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.eagle_layer import EagleLayer
from triforce_tree.drafters.registry import trained_drafter
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind

LAYERS = 3
TARGET = tiny("llama-gqa", num_hidden_layers=LAYERS)
PROMPTS = [prompt_of(length) for length in (41, 60)]
NEW = 16
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
# The retrieval cache holds the whole text, so that its hidden states equal those of plain forwards.
WHOLE = {"gamma": 5, "budget": 256, "chunk": 32, "recent": 64}


class Plain:
    """A reference implementation of the head in a folder. It computes one path without a KV cache.

    Args:
        inputs: the indices of the target's hidden states that the head reads.
    """

    def __init__(self, folder: Path, inputs: tuple[int, ...]) -> None:
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
        self.masked = weights.get("mask_hidden")
        config = json.loads((folder / "config.json").read_text())
        self.has = {name: config.get(name, False) for name in SWITCHES}
        self.inputs = inputs
        layer = config.get("transformer_layer_config", config)
        self.layers = layer.get("num_hidden_layers", 1)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(layer | {"model_type": "llama"}))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weights[name], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}_proj.weight"].T
        bias = self.weights.get(f"{name}_proj.bias")
        return out if bias is None else out + bias

    def heads(self, x: Tensor, name: str) -> Tensor:
        own = self.linear(x, name).view(1, len(x), -1, 8)
        gain = f"{name}_norm.weight"
        return (self.norm(own, gain) if gain in self.weights else own).transpose(1, 2)

    def computed(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """Returns the output ``[T, H]`` of a layer, whose attention reads x ``[T, width]``."""
        q, k, v = (self.heads(x, f"{name}self_attn.{part}") for part in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, torch.arange(len(x))[None]))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = residual + self.linear(out.transpose(1, 2).flatten(2)[0], f"{name}self_attn.o")
        x = self.norm(hidden, f"{name}post_attention_layernorm.weight")
        gated = nn.functional.silu(self.linear(x, f"{name}mlp.gate")) * self.linear(x, f"{name}mlp.up")
        return hidden + self.linear(gated, f"{name}mlp.down")

    def layer(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the last of T pairs, ``[T, H]`` each, feeds back and what the last matrix reads."""
        normed = self.norm(hidden, "midlayer.hidden_norm.weight")
        both = torch.cat([self.norm(embedded, "midlayer.input_layernorm.weight"), normed], -1)
        hidden = self.computed("midlayer.", both, normed if self.has["norm_before_residual"] else hidden)
        for n in range(1, self.layers):
            x = self.norm(hidden, f"layers.{n}.input_layernorm.weight")
            hidden = self.computed(f"layers.{n}.", x, hidden)
        normed = self.norm(hidden[-1:], "norm.weight")
        return (normed if self.has["norm_output"] else hidden[-1:]), normed[0]

    def fused(self, states: list[Tensor]) -> Tensor:
        if self.has["fc_norm"]:
            states = [self.norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.has["norm_before_fc"]:
            joined = self.norm(joined, "input_norm.weight")
        return joined @ self.weights["fc.weight"].T

    def logits(self, tokens: list[int], path: list[int], sinks: int, window: int) -> Tensor:
        """Returns the logits ``[V]`` of the token after ``tokens`` and ``path``."""
        states = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        table = self.weights.get("embed_tokens.weight", TARGET.get_input_embeddings().weight)
        hidden = self.fused([states[j][0] for j in self.inputs])
        embedded = table[torch.tensor(tokens[1:])]
        if len(hidden) > sinks + window:
            hidden, embedded = (torch.cat([x[:sinks], x[len(x) - window :]]) for x in (hidden, embedded))
        out, normed = self.layer(embedded, hidden)
        for token in path:
            if self.masked is not None:
                # The drafted tokens are not read.
                token, out = MASK, self.fused([*self.masked.view(1, -1).chunk(len(self.inputs), -1)])
            hidden, embedded = torch.cat([hidden, out]), torch.cat([embedded, table[token][None]])
            out, normed = self.layer(embedded, hidden)
        if "d2t" not in self.weights:
            return TARGET.lm_head(normed)
        own = normed @ self.weights["lm_head.weight"].T
        ids = self.weights["d2t"] + torch.arange(len(own))
        return torch.full((TARGET.config.vocab_size,), -torch.inf).scatter(0, ids, own)


MASK = 5
SWITCHES = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
CASES = {
    "shared vocabulary": (2, {}, "best-first:3,2,2", 2, 200),
    "draft vocabulary": (2, {"draft_vocabulary": 40, "inputs": (1, 1, 2)}, "static:0;1;0.0;0.1;1.0", 2, 200),
    "window": (2, {"draft_vocabulary": 40, "embeddings": True}, "best-first:2,2,1", 2, 9),
    "no sinks": (2, {}, "chain:3", 0, 7),
    "levels": (3, {"draft_vocabulary": 40}, "best-first:2,2", 2, 9),
    "EAGLE-3.1": (2, {"fc_norm": True, "norm_output": True}, "best-first:2,2,1", 2, 9),
    "speculators": (
        2, {"speculators": True, "norm_before_residual": True, "draft_vocabulary": 40},
        "best-first:3,2,2", 2, 200,
    ),
    "speculators, one norm": (
        3, {"speculators": True, "norm_before_fc": True, "norm_output": True}, "chain:3", 2, 9,
    ),
    "Qwen3 layer": (2, {"model_type": "qwen3"}, "best-first:2,2,1", 2, 200),
    "biases": (
        2,
        {"attention_bias": True, "extra": {
            f"midlayer.self_attn.{x}_proj.bias": (16 if x in "kv" else 32,) for x in "qkvo"
        }},
        "chain:3", 2, 200,
    ),
    "two states": (2, {"inputs": (1, 2)}, "chain:3", 2, 200),
    "YaRN": (
        2,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        "chain:3", 2, 200,
    ),
    "P-EAGLE": (2, {"ptd_token_id": MASK, "parallel_drafting": True}, "best-first:3,2,2", 2, 9),
    "P-EAGLE, speculators": (
        3,
        {
            "speculators": True, "ptd_token_id": MASK, "para_num": 3, "down_sample_ratio": 0.7,
            "norm_before_residual": True, "norm_before_fc": True, "draft_vocabulary": 40,
        },
        "best-first:3,2,2", 2, 9,
    ),
    "P-EAGLE, Qwen3 layer": (
        2, {"pard_token": MASK, "mask_token_id": MASK, "model_type": "qwen3", "fc_norm": True},
        "chain:3", 0, 7,
    ),
    "P-EAGLE, three layers": (
        3,
        {"ptd_token_id": MASK, "num_hidden_layers": 3, "norm_before_residual": True, "norm_output": True},
        "best-first:3,2,2", 2, 200,
    ),
    "P-EAGLE, speculators, two layers": (
        2,
        {"speculators": True, "ptd_token_id": MASK, "num_hidden_layers": 2, "model_type": "qwen3"},
        "best-first:2,2", 0, 200,
    ),
    "levels, gamma": (3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "chain:2", 3, 200),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_children_follow_the_head(name: str, tmp_path: Path) -> None:
    """Distributions at every node equal the reference's, and the generated text is the target's own."""
    levels, how, tree_name, sinks, window = CASES[name]
    folder = eagle_folder(tmp_path, TARGET, **how)  # type: ignore[arg-type]
    plain = Plain(folder, how.get("inputs", (1, 2, 2)))  # type: ignore[attr-defined]
    drafter = trained_drafter(folder, {"tree": tree_name, "sinks": sinks, "window": window})
    assert isinstance(drafter, Eagle3)
    trees = compare_nodes(drafter, lambda tokens, path: plain.logits(tokens, path, sinks, window))
    tail = levels == 3
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, **load_arguments({**WHOLE, "rounds": 2, "tail_tree": tail})
    )
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [row[-NEW:] for row in out.sequences.tolist()] == EXPECTED
    assert out.levels[0].name == ("p-eagle" if plain.masked is not None else "eagle3")
    assert len(trees) > 4


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "P-EAGLE, speculators, two layers"])
def test_passes_without_the_drafter_leave_no_gap(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hidden states of tokens from plain decoding enter the head's KV cache too."""
    plan = iter([PassKind(2, 1) if drafts else PLAIN for drafts in [1, 0, 0, 0, 0, 1, 1, 0] * 20])
    monkeypatch.setattr(PassPolicy, "choose", lambda *_: next(plan))
    test_children_follow_the_head(name, tmp_path)


def test_published_formats(tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path, TARGET, 40, pickled=True)
    engine = triforce_tree.load(
        TARGET, drafter=folder, tree="chain:3", levels=2, advanced={"window": 32, "sinks": 1}
    )
    drafter = engine._hierarchy.own_drafter
    assert isinstance(drafter, Eagle3)
    assert (drafter.window, drafter.sinks, drafter.tree) == (32, 1, "chain:3")
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == [*PROMPTS[0], *EXPECTED[0]]


@pytest.mark.parametrize(("layers", "features"), [(32, (1, 15, 28)), (28, (1, 13, 24))])
def test_layers_of_heads_that_name_none(layers: int, features: tuple[int, ...], tmp_path: Path) -> None:
    """If the configuration lists no layers, the head reads those of the published implementation."""
    assert Eagle3(eagle_folder(tmp_path, TARGET, eagle_config=None))._feature_layers(layers) == features


UNKNOWN: dict[str, tuple[dict[str, object], str]] = {
    "a norm without its field": (
        {"extra": {"fc_norm.0.weight": (32,)}},
        r"have 1 tensors that belong to no supported layout \(fc_norm.0.weight\)",
    ),
    "a second layer": (
        {"extra": {"layers.1.mlp.up_proj.weight": (24, 32)}}, r"no supported layout \(layers.1.mlp.up_proj"
    ),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2 in .* is not supported"),
    "more layers than parallel drafting names": (
        {"ptd_token_id": 5, "extra": {"layers.1.mlp.up_proj.weight": (24, 32)}}, "no supported layout"
    ),
    "a mask token that is no number": ({"ptd_token_id": "5"}, "ptd_token_id='5' in .* must be one integer"),
    "two mask tokens": (
        {"ptd_token_id": 5, "pard_token": 6}, "ptd_token_id=5, pard_token=6 in .* must be one integer"
    ),
    "a mask token outside": ({"ptd_token_id": 999}, "the mask token 999 .* not in the target's vocabulary"),
    "no mask token": (
        {"speculators_model_type": "peagle"}, "has no mask token .* and holds no P-EAGLE head"
    ),
    "parallel drafting by a tensor": (
        {"extra": {"mask_hidden": (1, 96)}}, r"no supported layout \(mask_hidden\)"
    ),
    "MLA": ({"extra": {"midlayer.self_attn.kv_a_proj_with_mqa.weight": (8, 32)}}, "latent attention"),
    "another family": ({"model_type": "kimi_k2"}, "is of the family 'kimi_k2'; supported are layers of"),
    "an unknown field": ({"residual_scale": 0.5}, "has the field residual_scale=0.5, which is not known"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' in .* is not supported"),
    "a norm that lacks": ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
    "a short window": (
        {"sliding_window": 100, "layer_types": ["sliding_attention"]},
        "attends to the newest 100 tokens, fewer than sinks=4, window=512 .* set window to at most 91",
    ),
    "another target": ({"target_hidden_size": 64}, "for a target of hidden size 64, and this one has 32"),
    "an unknown inner field": ({"eagle_config": {"use_lstm": True}}, "has the field use_lstm=True, which is"),
    "a norm of its own": (
        {"eagle_config": {"use_mtp_layernorm": True}}, "has the field use_mtp_layernorm=True, which is not"
    ),
    "a switch that is no switch": ({"norm_output": "false"}, "norm_output='false' in .* is not supported"),
    "a part of another form": ({"eagle_config": [1, 2]}, r"eagle_config=\[1, 2\] in .* must be an object"),
    "names of another form": ({"architectures": 5}, "architectures=5 in .* must be a list of names"),
    "a layer of another kind": (
        {"layer_types": ["linear_attention"]}, r"layer_types=\['linear_attention'\] in .* is not supported"
    ),
    "layers of another form": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 2}}, "layer_ids=2 in .* is not supported"
    ),
    "no KV heads": ({"num_key_value_heads": 0}, "num_key_value_heads=0 in .* must be an integer from 1"),
    "rotation by a word": ({"rope_theta": "x"}, "cannot be used"),
    "no rotation": ({"rope_theta": 0}, "give no finite frequencies"),
    "epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan in .* must be a positive number"),
    "no inner states": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_would_not_be_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    how, message = UNKNOWN[name]
    folder = eagle_folder(tmp_path, TARGET, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        triforce_tree.load(TARGET, drafter=folder)


def test_trees_are_as_deep_as_a_head_drafts_in_parallel(tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path, TARGET, ptd_token_id=MASK, para_num=2, num_hidden_layers=2)
    engine = triforce_tree.load(TARGET, drafter=folder, levels=2, advanced={"window": 8})
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == [*PROMPTS[0], *EXPECTED[0]]
    with pytest.raises(ValueError, match=r"the tree has 3 depths, and the head in .* predicts 2 tokens"):
        triforce_tree.load(TARGET, drafter=folder, tree="chain:3")
    with pytest.raises(ValueError, match="holds a P-EAGLE head, which drafts all depths in one forward"):
        Eagle3(folder)


def test_no_field_is_passed_over_where_it_stands(tmp_path: Path) -> None:
    """Fields of the layer and of the head may stand in any part, and parts must not contradict each other."""
    folder = eagle_folder(tmp_path, TARGET, speculators=True)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["norm_output"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert Eagle3(folder).format.norm_output
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"has rms_norm_eps=0.5 and rms_norm_eps=1e-05; which one holds"):
        Eagle3(folder)


def _without_normed_residual(
    layer: EagleLayer, hidden: Tensor, attended: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    other = copy.copy(layer)
    other.format = replace(layer.format, norm_before_residual=False)
    return FINISH(other, hidden, attended, number)


def _without_feature_norms(layer: EagleLayer, states: list[Tensor]) -> Tensor:
    return nn.functional.linear(torch.cat(states, -1), layer.fc)


FINISH = EagleLayer.finish
PLANTED = {
    "residual": ("EagleLayer.finish", _without_normed_residual),
    "norms of features": ("EagleLayer.fuse", _without_feature_norms),
    "rotation": ("rotated", lambda q, k, cos, sin: (q, k)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_head_that_computes_something_else_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test compares the network with the reference when it is loaded."""
    folder = eagle_folder(tmp_path, TARGET, 40, norm_before_residual=True, fc_norm=True)
    where, wrong = PLANTED[name]
    monkeypatch.setattr(f"triforce_tree.drafters.heads.eagle_layer.{where}", wrong)
    with pytest.raises(RuntimeError, match="differ from those of the plain reference by"):
        triforce_tree.load(TARGET, drafter=folder)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path / "head", TARGET, 40)
    wide, more = tiny("llama-gqa", num_hidden_layers=3, hidden_size=48), tiny("llama-gqa", vocab_size=48)
    for target, what in (
        (wide, r"fc.weight in .* is \[32, 96\], and for this target it must be \[32, 144\]"),
        (more, r"d2t in .* does not map 40 draft tokens to different ones of the target's 48"),
        (
            tiny("llama-gqa", num_hidden_layers=1),
            r"inputs of layers \[1, 2, 2\], and must read some of 1 to 1",
        ),
    ):
        with pytest.raises(ValueError, match=what):
            triforce_tree.load(target, drafter=folder)
    rope = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match=r"rope_type='dynamic' in .* is not supported"):
        triforce_tree.load(TARGET, drafter=eagle_folder(tmp_path / "rope", TARGET, rope_scaling=rope))
    with pytest.raises(ValueError, match="sinks=4 and window=2 must be"):
        Eagle3(folder, window=2)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json with a hidden_size"):
        Eagle3(folder)
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_text('{"hidden_size": 32}')
    torch.save({"fc.weight": torch.zeros(32, 64)}, older / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no EAGLE-3 head: it has no fc and midlayer"):
        triforce_tree.load(TARGET, drafter=older)
