"""Block drafters: their distributions against plain forwards, their cache, formats, and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, LlamaConfig
from transformers.cache_utils import DFlashCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import triforce_tree
from tests.support.distributions.block_folders import (
    DFLASH2,
    block_folder,
    muse_folder,
    spark_folder,
    speculators_folder,
)
from tests.support.models.families import greedy, prompt_of, tiny
from tests.support.models.recurrent_families import recurrent
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.blocks.drafter import BlockDrafter
from triforce_tree.drafters.blocks.network import BlockNetwork
from triforce_tree.drafters.heads.attention import rotated_one
from triforce_tree.models.hf_model import HFModel
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


class Plain:
    """A reference implementation of the drafter in a folder. It computes a block without a cache.

    Context between the first ``sinks`` and the newest ``window`` positions is removed, and what follows it
    moves there.
    """

    def __init__(self, folder: Path, sinks: int, window: int) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config | self.config.get("transformer_layer_config", {})
        self.fields = self.layer | self.config.get("dflash_config", {})
        self.speculators = "speculators_model_type" in self.config
        self.sinks, self.window = sinks, window

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def states(self, tokens: list[int]) -> Tensor:
        """Returns the hidden states ``[C, n H]`` that are fused, at all tokens but the last."""
        states = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        if self.speculators:
            return torch.cat([states[i][0] for i in self.fields["aux_hidden_state_layer_ids"]], -1)
        return torch.cat([states[i + 1][0] for i in self.fields["target_layer_ids"]], -1)

    def slots(self, newest: int) -> Tensor:
        ids = torch.tensor([newest] + [self.fields["mask_token_id"]] * (self.fields["block_size"] - 1))
        table = self.weights.get("embed_tokens.weight", TARGET.get_input_embeddings().weight)
        return table[ids] * self.fields.get("input_embedding_scale", 1.0)

    def hidden(self, tokens: list[int]) -> Tensor:
        """Returns what the language model head reads, ``[T, H]``."""
        context = self.norm(self.linear(self.states(tokens), "fc"), "hidden_norm")
        if len(context) > self.sinks + self.window:
            context = torch.cat([context[: self.sinks], context[len(context) - self.window :]])
        hidden = self.slots(tokens[-1])
        count, slots = len(context), len(hidden)
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(self.layer | {"model_type": "llama"}))
        cos, sin = rotary(context, torch.arange(count + slots)[None])
        kinds = self.fields.get("layer_types", ["full_attention"] * 2)
        for i in range(2):
            own = f"layers.{i}."
            x, after = self.convolved(self.norm(hidden, f"{own}input_layernorm"), f"{own}attention_conv")
            both = torch.cat([context, x])
            q = self.norm(
                self.linear(x, f"{own}self_attn.q_proj").view(slots, -1, 8), f"{own}self_attn.q_norm"
            )
            k = self.linear(both, f"{own}self_attn.k_proj").view(count + slots, -1, 8)
            k = self.norm(k, f"{own}self_attn.k_norm")
            v = self.linear(both, f"{own}self_attn.v_proj").view(count + slots, -1, 8)
            q, _ = apply_rotary_pos_emb(q[None], q[None], cos[:, count:], sin[:, count:], 2)
            _, k = apply_rotary_pos_emb(k[None], k[None], cos, sin, 2)
            mask = torch.ones(slots, count + slots, dtype=torch.bool)
            sliding = kinds[i] == "sliding_attention"
            for slot in range(slots):
                if self.fields.get("causal_head", self.fields.get("is_causal", sliding)):
                    mask[slot, count + slot + 1 :] = False
                if sliding:
                    first = count if self.speculators else count + slot + 1
                    mask[slot, : first - self.fields["sliding_window"]] = False
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v[None].transpose(1, 2), mask, enable_gqa=True
            )
            out = self.linear(out.transpose(1, 2).flatten(2)[0], f"{own}self_attn.o_proj")
            hidden = hidden + after(out)
            x = self.norm(hidden, f"{own}post_attention_layernorm")
            x, after = self.convolved(x, f"{own}mlp_conv")
            gated = F.silu(self.linear(x, f"{own}mlp.gate_proj")) * self.linear(x, f"{own}mlp.up_proj")
            hidden = hidden + after(self.linear(gated, f"{own}mlp.down_proj"))
        return self.norm(hidden, "norm")

    def convolved(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        if f"{name}.base_kernel" not in self.weights:
            return x, lambda y: y
        base = self.weights[f"{name}.base_kernel"]
        added = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, 2, -1)
        added = added.repeat_interleave(self.fields["conv_group_size"], -1)

        def convolve(side: int, y: Tensor) -> Tensor:
            before = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
            return (base[side, 0] + added[:, side, 0]) * y + (base[side, 1] + added[:, side, 1]) * before

        return convolve(0, x), lambda y: convolve(1, y)

    def logits(self, hidden: Tensor, path: list[int]) -> Tensor:
        """Returns the logits ``[V]`` of the token after a path, whose first token is the root."""
        shifted = self.fields.get("sample_from_anchor", "markov_rank" in self.fields)
        hidden = hidden[0 if shifted else 1 :][: len(path)]
        head = self.weights.get("lm_head.weight", TARGET.lm_head.weight)
        base = hidden[-1] @ head.T
        if "candidate_selector.hidden_projection.weight" in self.weights:
            scale, cap = self.fields.get("output_multiplier", 1.0), self.fields.get("final_logit_softcapping")
            unary, ids = base.topk(self.fields["selector_top_k"])
            unary = unary * scale if cap is None else cap * torch.tanh(unary * scale / cap)
            gate = self.linear(hidden[-1], "candidate_selector.hidden_projection")
            before = self.weights["candidate_selector.predecessor_codebook"][path[-1]] * gate
            pairs = self.weights["candidate_selector.successor_codebook"][ids] @ before
            return torch.full_like(base, -torch.inf).scatter(0, ids, unary + pairs)
        if self.fields.get("markov_rank"):
            base = base + self.linear(self.latent(hidden, path), "markov_head.markov_w2")
        if "d2t" not in self.weights:
            return base
        ids = self.weights["d2t"] + torch.arange(len(base))
        return torch.full((TARGET.config.vocab_size,), -torch.inf).scatter(0, ids, base)

    def latent(self, hidden: Tensor, path: list[int]) -> Tensor:
        """Returns what the last matrix of the Markov head reads, ``[r]``."""
        embedded = self.weights["markov_head.markov_w1.weight"][path]
        if self.fields["markov_head_type"] == "vanilla":
            return embedded[-1]
        if self.fields["markov_head_type"] == "gated":
            both = torch.cat([hidden[-1], embedded[-1]])
            return embedded[-1] * torch.sigmoid(self.linear(both, "markov_head.gate_proj"))
        state = torch.zeros(6)
        for slot, e in zip(hidden, embedded, strict=True):
            gate, new, out = self.linear(torch.cat([state, e, slot]), "markov_head.joint_proj").chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
        return torch.tanh(out)


class TransformersOwn(Plain):
    """Computes the same distributions by transformers' class."""

    def __init__(self, folder: Path, sinks: int, window: int) -> None:
        super().__init__(folder, sinks, window)
        self.model = AutoModel.from_pretrained(folder, attn_implementation="eager")

    def hidden(self, tokens: list[int]) -> Tensor:
        states, slots = self.states(tokens)[None], self.slots(tokens[-1])[None]
        cache = DFlashCache(config=self.model.config)
        cache.set_previous_accepted_tokens(states.shape[1])
        return self.model(noise_embeds=slots, context_hidden_states=states, cache=cache).last_hidden_state[0]


MIXED = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True
}  # fmt: skip
ALL_SLIDING = {**MIXED, "layer_types": ["sliding_attention"] * 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
Case = tuple[int, Callable[..., Path], dict[str, Any], str, int | None, int | None]
CASES: dict[str, Case] = {
    "best-first": (2, block_folder, {}, "best-first:3,2,2", 2, 200),
    "static": (2, block_folder, {"inputs": (0, 1, 1)}, "static:0;1;0.0;0.1;1.0", 2, 200),
    "window": (2, block_folder, {}, "chain:3", 2, 9),
    "no sinks": (2, block_folder, {}, "chain:3", 0, 7),
    "levels": (3, block_folder, {}, "best-first:2,2", 2, 9),
    "levels, gamma": (3, block_folder, {"rope_scaling": YARN}, "chain:2", 3, 200),
    "causal": (2, block_folder, {"dflash": {"causal_head": True}}, "best-first:3,2,2", 2, 200),
    "causal, levels": (3, block_folder, {"dflash": {"causal_head": True}}, "chain:3", 2, 9),
    "all layers with windows": (2, block_folder, ALL_SLIDING, "chain:3", None, None),
    "windows, not causal": (2, block_folder, {**ALL_SLIDING, "is_causal": False}, "chain:3", None, None),
    "some layers with windows": (2, block_folder, MIXED, "chain:3", 2, 200),
    "biases": (2, block_folder, {"attention_bias": True}, "chain:2", 2, 200),
    "a block of two": (2, block_folder, {"block": 2, "inputs": (1,)}, "best-first:3", 2, 200),
    "DFlash2": (2, block_folder, {"dflash": DFLASH2, "is_causal": False}, "best-first:3,3,2", 2, 200),
    "DFlash2, windows": (
        3, block_folder, {**ALL_SLIDING, "dflash": DFLASH2 | {"output_multiplier": 0.5}, "is_causal": False},
        "chain:3", None, None,
    ),
    "DFlash2, scaled": (
        2, block_folder,
        {"dflash": DFLASH2 | {"input_embedding_scale": 2.0, "final_logit_softcapping": 3.0}}, "chain:2", 2, 9,
    ),
    "DeepSpec's DFlash": (2, spark_folder, {"kind": None}, "best-first:3,2,2", 2, 200),
    "DSpark": (2, spark_folder, {}, "best-first:3,3,2", 2, 200),
    "DSpark, gated": (3, spark_folder, {"kind": "gated"}, "static:0;1;0.0;0.1;1.0", 2, 9),
    "DSpark, recurrent": (2, spark_folder, {"kind": "rnn"}, "best-first:3,3,3", 2, 200),
    "DSpark, the target's matrices": (2, spark_folder, {"own": False}, "chain:3", 2, 200),
    "DSpark of SpecForge": (
        2, block_folder,
        {
            "architectures": ["DSparkDraftModel"], "markov_rank": 6, "markov_head_type": "vanilla",
            "dflash": {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "vanilla"},
        },
        "best-first:2,2,2,2", 2, 200,
    ),
    "speculators": (2, speculators_folder, {}, "best-first:3,2,2", 2, 200),
    "speculators, windows": (3, speculators_folder, {"layers": ALL_SLIDING}, "chain:3", None, None),
    "speculators, not causal": (
        2, speculators_folder, {"layers": MIXED, "sliding_window_non_causal": True, "is_causal": False},
        "chain:3", 2, 200,
    ),
    "speculators' DSpark": (2, speculators_folder, {"kind": "vanilla"}, "best-first:3,2,2,2", 2, 9),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_children_follow_the_block(name: str, tmp_path: Path) -> None:
    """Distributions at all nodes equal the reference's, and the generated text is the target's own."""
    levels, folder, how, tree, sinks, window = CASES[name]
    compare(BlockDrafter(folder(tmp_path, TARGET, **how), tree, sinks, window), levels, Plain)


@torch.no_grad()
@pytest.mark.parametrize("how", [
    {}, {"sliding_window": 60}, {"layer_types": ["full_attention"] * 2},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
])  # fmt: skip
def test_children_follow_transformers_own_class(how: dict[str, Any], tmp_path: Path) -> None:
    compare(BlockDrafter(muse_folder(tmp_path, TARGET, **how), "best-first:3,2,2"), 2, TransformersOwn)


def compare(drafter: BlockDrafter, levels: int, reference: type[Plain]) -> None:
    trees, propose = 0, drafter.propose
    plain = reference(drafter.folder, drafter.sinks, drafter.window)

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        trees += 1
        for b in range(state.batch):
            tokens, parents = tree.tokens[b].tolist(), tree.parents[b].tolist()
            hidden = plain.hidden(state.sequence(b))
            for node in range(tree.probs.shape[1]):
                path, ancestor = [], node
                while ancestor >= 0:
                    path.insert(0, tokens[ancestor])
                    ancestor = parents[ancestor]
                expected = plain.logits(hidden, path).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, rtol=2e-3, atol=1e-4)
                children = [tokens[i] for i, parent in enumerate(parents) if parent == node]
                assert children == expected.topk(len(children)).indices.tolist()

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
    assert plain_options.shapes == ("best-first:8,8,8,7,6,5", "best-first:2,2,2,2,1,1", "chain:4")
    assert plain_options.feature_window == (4, 2048)
    sliding = BlockDrafter(block_folder(tmp_path / "sliding", TARGET, **ALL_SLIDING))
    assert sliding.feature_window == (0, 9)
    deep = block_folder(tmp_path / "deep", TARGET, block=16)
    assert sum(BlockDrafter(deep)._growths[0].shape.widths) == 62


@pytest.mark.parametrize("levels", [2, 3])
def test_sessions_continue_fork_and_are_saved(levels: int, tmp_path: Path) -> None:
    drafter = BlockDrafter(spark_folder(tmp_path / "drafter", TARGET, kind="rnn"), "chain:2", 2, 9)
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, **load_arguments({**WHOLE, "rounds": 1})
    )
    session = engine.session(PROMPTS[1])
    text = [*PROMPTS[1], 5, 6]
    text += session.generate([5, 6], max_new_tokens=NEW, do_sample=False).sequences[0, -NEW:].tolist()
    assert text[-NEW:] == greedy(TARGET, text[:-NEW], NEW)
    session.save(tmp_path / "session")
    for continued in (session.fork(), engine.load_session(tmp_path / "session")):
        out = continued.generate([9], max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0, -NEW:].tolist() == greedy(TARGET, [*text, 9], NEW)


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder = block_folder(tmp_path, TARGET)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half, index = len(weights) // 2, {}
    for number, names in enumerate((list(weights)[:half], list(weights)[half:])):
        index |= dict.fromkeys(names, f"model-{number}.safetensors")
        save_file({name: weights[name] for name in names}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    drafter = BlockDrafter(folder)
    drafter.attach(HFModel(TARGET))
    assert drafter.network.state_dict().keys() == weights.keys()
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read as weights"):
        BlockDrafter(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        BlockDrafter(folder)


def test_matrices_that_equal_the_targets_are_held_once(tmp_path: Path) -> None:
    held = []
    for own in (False, True):
        drafter = BlockDrafter(spark_folder(tmp_path / str(own), TARGET, own=own))
        drafter.attach(HFModel(TARGET))
        held.append(drafter.weight_bytes)
    assert held[1] - held[0] == 2 * TARGET.lm_head.weight.nbytes


def test_targets_with_recurrent_layers_get_chains(tmp_path: Path) -> None:
    target = recurrent("qwen3-next")
    folder = block_folder(tmp_path, target, inputs=(0,), block=16)
    engine = triforce_tree.load(target, drafter=folder, levels=2)
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert engine.config.trees == ("chain:4", "chain:7", "chain:15", "lookup:31")
    assert out.sequences[0, -NEW:].tolist() == greedy(target, PROMPTS[0], NEW)
    branching = triforce_tree.load(target, drafter=folder, tree="best-first:3,2", levels=2)
    again = branching.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert again.sequences.tolist() == out.sequences.tolist()


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
    "a window without size": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None and use_"),
    "a window switched off": ({**ALL_SLIDING, "use_sliding_window": False}, "use_sliding_window=False give"),
    "kinds of layers": ({"layer_types": ["full_attention", "chunked_attention"]}, "must name layers of full"),
    "too few layers": ({"layer_types": ["full_attention"]}, "cannot be used"),
    "the embeddings": ({"dflash": {"target_layer_ids": [-1, 1]}}, r"target_layer_ids=\[-1, 1\] in .* must"),
    "the last layer": ({"dflash": {"target_layer_ids": [0, 2]}}, r"of layers \[0, 2\], and must read some"),
    "another target": ({"dflash": {"target_hidden_size": 64}}, "trained for a target of 64, and this one"),
    "mask token": ({"dflash": {"mask_token_id": 64}}, "mask_token_id=64 in .* is not in the target's"),
    "no mask token": ({"dflash": {"mask_token_id": None}}, "mask_token_id=None in .* must be 2 to"),
    "no head_dim": ({"head_dim": None}, "lacks head_dim; give the whole folder"),
    "no rope": ({"rope_theta": None}, "lacks rope_theta; give the whole folder"),
    "another architecture": ({"architectures": ["Gemma4DSparkModel"]}, "of the kind Gemma4DSparkModel; supp"),
    "a Markov head of DFlash": ({"markov_rank": 6}, "markov_rank=6 and .* in .* not supported"),
    "a selector of DFlash": ({"dflash": DFLASH2}, "has the field conv_kernel_size=2, which is not known"),
    "no selector": ({"architectures": ["DFlash2DraftModel"]}, "selector_top_k=None in .* must be positive"),
    "tensors of DFlash2": (
        {"architectures": ["DFlash2DraftModel"], "dflash": DFLASH2}, "lack layers.0.attention_conv.base"
    ),
    "a kind of speculators": ({"speculators_model_type": "dflash2"}, "of the kind 'dflash2'; supported are"),
    "another family of layers": (
        {
            "speculators_model_type": "dflash", "transformer_layer_config": {"model_type": "llama"},
            "aux_hidden_state_layer_ids": [1],
        },
        "are of the family 'llama'; supported is 'qwen3'",
    ),
    "the embeddings of speculators": (
        {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [0]},
        r"aux_hidden_state_layer_ids=\[0\] in .* must name decoder layers",
    ),
    "causality by a word": ({"is_causal": "false"}, "is_causal='false' in .* is not supported"),
    "a part of another form": ({"transformer_layer_config": 5}, "layer_config=5 in .* must be an object"),
    "too many layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers=10+ in .* from 1 to 1024"),
    "a long block": ({"block_size": 10**12}, "block_size=10+ and .* must be 2 to 1024"),
    "no list of layers": ({"dflash": {"target_layer_ids": 1}}, "target_layer_ids=1 in .* is not supported"),
    "a draft vocabulary": ({"extra": {"lm_head.weight": (40, 32)}}, "lack d2t"),
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


WITH_HEADS: dict[str, Callable[[Path], Path]] = {
    "Markov": lambda folder: spark_folder(folder, TARGET, kind="gated"),
    "selector": lambda folder: block_folder(folder, TARGET, dflash=DFLASH2),
    "convolution": lambda folder: block_folder(folder, TARGET, dflash=DFLASH2),
}
PLANTED = {
    "Markov": ("conditioned.MarkovHead.forward", lambda self, logits, hidden, tokens, states: (
        logits[:, None] + self.markov_w2(self.markov_w1(tokens)), states
    )),
    "selector": ("conditioned.CandidateSelector.forward", lambda self, logits, hidden, tokens, states: (
        logits[:, None].expand(-1, tokens.shape[1], -1), states
    )),
    "convolution": ("conditioned.GroupedConvolution.convolve", lambda self, side, hidden, added: hidden),
    "norms": ("network.BlockAttention.keys_values", lambda self, x: (
        self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
    )),
    "fusion": ("network.BlockNetwork.fuse", lambda self, states: self.fc(torch.cat(list(states), -1))),
    "mask": ("reference.near", lambda format, layer, slots, positions: (
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
    folder = WITH_HEADS.get(name, lambda path: block_folder(path, TARGET))(tmp_path)
    with pytest.raises(RuntimeError, match="differ from those of the plain reference by"):
        triforce_tree.load(TARGET, drafter=folder)


def test_a_network_can_be_trained_and_saved(tmp_path: Path) -> None:
    """The parameters have the names of a checkpoint, and all of them receive gradients."""
    folder = block_folder(tmp_path, TARGET)
    drafter = BlockDrafter(folder)
    network = BlockNetwork(drafter.format, 32, 64)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    states = [torch.randn(1, 5, 32) for _ in range(2)]
    positions = torch.arange(9)[None]
    k, v = network.context(network.fuse(states))
    k = rotated_one(k, *network.angles(positions[:, :5]))

    def seen(i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.ones(1, 4, 9, dtype=torch.bool)
        return torch.cat([k[i], keys], 2), torch.cat([v[i], values], 2), mask

    network(torch.randn(1, 4, 32), positions[:, 5:], seen).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())
