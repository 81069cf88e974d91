"""Block drafters: their distributions against plain forwards, their cache, formats, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, LlamaConfig
from transformers.cache_utils import DFlashCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import triforce_tree
from tests.support.distributions.block_folders import block_folder, muse_folder
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.blocks.drafter import BlockDrafter
from triforce_tree.drafters.blocks.network import BlockNetwork
from triforce_tree.drafters.heads.attention import rotated
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

TARGET = tiny("llama-gqa", num_hidden_layers=3)
PROMPTS = [prompt_of(length) for length in (41, 60)]
NEW = 16
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
# The retrieval cache holds the whole text, so that its hidden states equal those of plain forwards.
WHOLE = {"gamma": 5, "budget": 256, "chunk": 32, "recent": 64}


def fused_inputs(tokens: list[int], layers: list[int]) -> list[Tensor]:
    """Returns the outputs of layers of the target, ``[1, C, H]`` each, for all tokens but the last."""
    states = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    return [states[i + 1] for i in layers]


def slots_of(config: dict[str, Any], newest: int) -> Tensor:
    fields = config | config.get("dflash_config", {})
    ids = torch.tensor([newest] + [fields["mask_token_id"]] * (fields["block_size"] - 1))
    return TARGET.get_input_embeddings()(ids)


def plain(folder: Path, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Computes logits ``[T, V]`` of all slots of a block, without a cache, as z-lab's reference does.

    Context between the first ``sinks`` and the newest ``window`` positions is removed, and what follows it
    moves there.
    """
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    fields = config | config["dflash_config"]
    context = torch.cat(fused_inputs(tokens, fields["target_layer_ids"]), -1)[0] @ weights["fc.weight"].T
    context = F.rms_norm(context, context.shape[-1:], weights["hidden_norm.weight"], 1e-5)
    if len(context) > sinks + window:
        context = torch.cat([context[:sinks], context[len(context) - window :]])
    hidden = slots_of(config, tokens[-1])
    count, slots = len(context), len(hidden)
    positions = torch.arange(count + slots)
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(config | {"model_type": "llama"}))
    kinds = fields.get("layer_types", ["full_attention"] * 2)
    for i in range(2):

        def norm(x: Tensor, name: str, i: int = i) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weights[f"layers.{i}.{name}.weight"], 1e-5)

        def linear(x: Tensor, name: str, i: int = i) -> Tensor:
            name = f"layers.{i}.{name}_proj"
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        x = norm(hidden, "input_layernorm")
        both = torch.cat([context, x])
        q = norm(linear(x, "self_attn.q").view(slots, -1, 8), "self_attn.q_norm")
        k = norm(linear(both, "self_attn.k").view(count + slots, -1, 8), "self_attn.k_norm")
        v = linear(both, "self_attn.v").view(count + slots, -1, 8)
        cos, sin = rotary(both, positions[None])
        q, _ = apply_rotary_pos_emb(q[None], q[None], cos[:, count:], sin[:, count:], 2)
        _, k = apply_rotary_pos_emb(k[None], k[None], cos, sin, 2)
        mask = torch.ones(slots, count + slots, dtype=torch.bool)
        sliding = kinds[i] == "sliding_attention"
        for slot in range(slots):
            if fields.get("causal_head", fields.get("is_causal", sliding)):
                mask[slot, count + slot + 1 :] = False
            if sliding:
                mask[slot, : count + slot + 1 - fields["sliding_window"]] = False
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v[None].transpose(1, 2), mask, enable_gqa=True
        )
        hidden = hidden + linear(out.transpose(1, 2).flatten(2)[0], "self_attn.o")
        x = norm(hidden, "post_attention_layernorm")
        hidden = hidden + linear(F.silu(linear(x, "mlp.gate")) * linear(x, "mlp.up"), "mlp.down")
    return TARGET.lm_head(F.rms_norm(hidden, hidden.shape[-1:], weights["norm.weight"], 1e-5))


def transformers_own(folder: Path, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Computes the same with transformers' class."""
    config = json.loads((folder / "config.json").read_text())
    model = AutoModel.from_pretrained(folder, attn_implementation="eager")
    states = torch.cat(fused_inputs(tokens, config["target_layer_ids"]), -1)
    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(states.shape[1])
    out = model(noise_embeds=slots_of(config, tokens[-1])[None], context_hidden_states=states, cache=cache)
    return TARGET.lm_head(out.last_hidden_state[0])


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[int, dict[str, Any], str, int | None, int | None]] = {
    "best-first": (2, {}, "best-first:3,2,2", 2, 200),
    "static": (2, {"inputs": (0, 1, 1)}, "static:0;1;0.0;0.1;1.0", 2, 200),
    "window": (2, {}, "chain:3", 2, 9),
    "no sinks": (2, {}, "chain:3", 0, 7),
    "levels": (3, {}, "best-first:2,2", 2, 9),
    "levels, gamma": (3, {"rope_scaling": YARN}, "chain:2", 3, 200),
    "causal": (2, {"dflash": {"causal_head": True}}, "best-first:3,2,2", 2, 200),
    "causal, levels": (3, {"dflash": {"causal_head": True}}, "chain:3", 2, 9),
    "all layers with windows": (2, ALL_SLIDING, "chain:3", None, None),
    "windows, not causal": (2, {**ALL_SLIDING, "is_causal": False}, "chain:3", None, None),
    "some layers with windows": (2, {**MIXED, "use_sliding_window": True}, "chain:3", 2, 200),
    "biases": (2, {"attention_bias": True}, "chain:2", 2, 200),
    "a block of two": (2, {"block": 2, "inputs": (1,)}, "best-first:3", 2, 200),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_children_follow_the_block(name: str, tmp_path: Path) -> None:
    """Distributions at all nodes equal the reference's, and the generated text is the target's own."""
    levels, how, tree, sinks, window = CASES[name]
    drafter = BlockDrafter(block_folder(tmp_path, TARGET, **how), tree, sinks, window)
    compare(drafter, levels, plain)


@torch.no_grad()
@pytest.mark.parametrize("how", [
    {}, {"sliding_window": 60}, {"layer_types": ["full_attention"] * 2},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
])  # fmt: skip
def test_children_follow_transformers_own_class(how: dict[str, Any], tmp_path: Path) -> None:
    drafter = BlockDrafter(muse_folder(tmp_path, TARGET, **how), "best-first:3,2,2")
    compare(drafter, 2, transformers_own)


def compare(drafter: BlockDrafter, levels: int, reference: Any) -> None:
    trees, propose = 0, drafter.propose

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        trees += 1
        for b in range(state.batch):
            logits = reference(drafter.folder, state.sequence(b), drafter.sinks, drafter.window)
            first = drafter.format.first_slot
            for node, depth in enumerate(tree.depths.tolist()[: tree.probs.shape[1]]):
                expected = logits[first + depth].softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, rtol=2e-3, atol=1e-4)
                children = [i for i, parent in enumerate(tree.parents[b].tolist()) if parent == node]
                assert tree.tokens[b, children].tolist() == expected.topk(len(children)).indices.tolist()

    drafter.propose = checked  # type: ignore[method-assign]
    options = load_arguments({**WHOLE, "rounds": 2, "tail_tree": levels == 3})
    engine = triforce_tree.load(TARGET, drafter=drafter, levels=levels, **options)
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [row[-NEW:] for row in out.sequences.tolist()] == EXPECTED
    assert out.levels[0].name == "block"
    assert trees > 4


@torch.no_grad()
@pytest.mark.parametrize("name", ["window", "all layers with windows"])
def test_passes_without_the_drafter_leave_no_gap(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hidden states of tokens from plain decoding enter the cache too."""
    plan = iter([PassKind(2, 1) if drafts else PLAIN for drafts in [1, 0, 0, 0, 0, 1, 1, 0] * 20])
    monkeypatch.setattr(PassPolicy, "choose", lambda *_: next(plan))
    test_children_follow_the_block(name, tmp_path)


def test_options_and_defaults(tmp_path: Path) -> None:
    folder = block_folder(tmp_path / "full", TARGET, block=7)
    engine = triforce_tree.load(
        TARGET, drafter=folder, tree="chain:3", levels=2, advanced={"window": 32, "sinks": 1}
    )
    drafter = engine._hierarchy.own_drafter
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.window, drafter.sinks, drafter.shapes) == (32, 1, ("chain:3",))
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == [*PROMPTS[0], *EXPECTED[0]]
    plain_options = BlockDrafter(folder)
    assert plain_options.shapes == ("best-first:8,8,8,7,6,5", "chain:6", "chain:4")
    assert plain_options.feature_window == (4, 2048)
    sliding = BlockDrafter(block_folder(tmp_path / "sliding", TARGET, **ALL_SLIDING))
    assert sliding.feature_window == (0, 9)
    deep = block_folder(tmp_path / "deep", TARGET, block=16)
    assert sum(BlockDrafter(deep)._growths[0].shape.widths) == 62


def test_layers_of_drafters_that_name_none(tmp_path: Path) -> None:
    """If the configuration lists no layers, the drafter reads those of the published implementation."""
    folder = block_folder(tmp_path, TARGET)
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["target_layer_ids"]
    for layers, deep, expected in ((5, 36, (1, 9, 17, 25, 33)), (1, 28, (14,)), (2, 8, (1, 5))):
        config |= {"num_target_layers": deep, "num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        assert BlockDrafter(folder).format.inputs == expected


# More tensors, or changes of the configuration.
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor": ({"extra": {"layers.0.sink_bias": (4,)}}, r"no supported layout \(layers.0.sink_bias\)"),
    "a third layer": ({"extra": {"layers.2.mlp.up_proj.weight": (24, 32)}}, r"layout \(layers.2.mlp"),
    "a bias": ({"extra": {"layers.0.self_attn.q_proj.bias": (32,)}}, r"\(layers.0.self_attn.q_proj.bias"),
    "missing tensors": ({"attention_bias": True}, "lack layers.0.self_attn.q_proj.bias"),
    "an unknown field": ({"dflash": {"use_swa": True}}, "has the field use_swa=True, which is not known"),
    "an outer field": ({"residual_scale": 0.5}, "has the field residual_scale=0.5, which is not known"),
    "Domino": ({"dflash": {"projector_type": "domino"}}, "projector_type='domino' in .* is not supported"),
    "MLA": ({"dflash": {"attention_mode": "mla"}}, "attention_mode='mla' in .* is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' in .* is not supported"),
    "rotation": ({"is_neox_style": False}, "is_neox_style=False in .* is not supported"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' .* not supp"),
    "two block sizes": ({"dflash": {"block_size": 8}}, "has block_size=4 and block_size=8; which one"),
    "causality": ({"is_causal": True, "dflash": {"causal_head": False}}, "contradict each other"),
    "a window without size": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None and"),
    "a window switched off": ({**ALL_SLIDING, "use_sliding_window": False}, "use_sliding_window=False give"),
    "kinds of layers": ({"layer_types": ["full_attention"]}, "must name 2 layers of full_attention"),
    "the embeddings": ({"dflash": {"target_layer_ids": [-1, 1]}}, r"target_layer_ids=\[-1, 1\] in .* must"),
    "the last layer": ({"dflash": {"target_layer_ids": [0, 2]}}, r"of layers \[0, 2\], and must read some"),
    "another target": ({"dflash": {"target_hidden_size": 64}}, "trained for a target of 64, and this one"),
    "mask token": ({"dflash": {"mask_token_id": 64}}, "mask_token_id=64 in .* is not in the target's"),
    "no mask token": ({"dflash": {"mask_token_id": None}}, "mask_token_id=None in .* must be at least"),
    "no head_dim": ({"head_dim": None}, "lacks head_dim; give the whole folder"),
    "no rope": ({"rope_theta": None}, "lacks rope_theta; give the whole folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_would_not_be_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    how, message = UNKNOWN[name]
    folder = block_folder(tmp_path, TARGET, extra=how.get("extra"))
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] |= how.get("dflash", {})
    config |= {field: value for field, value in how.items() if field not in ("extra", "dflash")}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        triforce_tree.load(TARGET, drafter=folder)


def test_drafters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = block_folder(tmp_path / "block", TARGET)
    with pytest.raises(ValueError, match="has hidden size 32 and was trained for a target of 32, and this"):
        triforce_tree.load(tiny("llama-gqa", num_hidden_layers=3, hidden_size=48), drafter=folder)
    scaled = tiny("gemma3", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match="scaled or normalised after the lookup"):
        triforce_tree.load(scaled, drafter=folder)
    with pytest.raises(ValueError, match=r"the tree has 4 depths, and the block of .* predicts 3 tokens"):
        BlockDrafter(folder, "chain:4")
    with pytest.raises(ValueError, match="sinks=4 and window=2 must be"):
        BlockDrafter(folder, window=2)
    sliding = block_folder(tmp_path / "sliding", TARGET, **ALL_SLIDING)
    for given in ({"sinks": 1}, {"window": 10}):
        with pytest.raises(
            ValueError, match=r"attend to at most 9 positions, so that sinks=.*set window to at"
        ):
            BlockDrafter(sliding, **given)  # type: ignore[arg-type]
    torch.save({}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"has a mask_embedding.pt, which replaces the embedding"):
        BlockDrafter(folder)


PLANTED = {
    "norms": ("network.BlockAttention.keys_values", lambda self, x: (
        self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
    )),
    "fusion": ("network.BlockNetwork.fuse", lambda self, states: self.fc(torch.cat(list(states), -1))),
    "mask": ("drafter._near", lambda causal, window, slots, positions: (
        slots[:, :, None] >= positions[:, None]
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_drafter_that_computes_something_else_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test compares the network with the reference when it is loaded."""
    where, wrong = PLANTED[name]
    monkeypatch.setattr(f"triforce_tree.drafters.blocks.{where}", wrong)
    with pytest.raises(RuntimeError, match="differ from those of the plain reference by"):
        triforce_tree.load(TARGET, drafter=block_folder(tmp_path, TARGET))


def test_a_network_can_be_trained_and_saved(tmp_path: Path) -> None:
    """The parameters have the names of a checkpoint, and all of them receive gradients."""
    folder = block_folder(tmp_path, TARGET)
    drafter = BlockDrafter(folder)
    network = BlockNetwork(drafter.format, 32)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    states = [torch.randn(1, 5, 32) for _ in range(2)]
    positions = torch.arange(9)[None]
    cos, sin = network.angles(positions[:, :5])
    fused = network.fuse(states)

    def seen(i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = network.context(i, fused)
        return (
            torch.cat([rotated(k, cos, sin), keys], 2),
            torch.cat([v, values], 2),
            torch.ones(1, 4, 9, dtype=torch.bool),
        )

    network(torch.randn(1, 4, 32), positions[:, 5:], seen).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
