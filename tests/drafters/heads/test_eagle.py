"""EAGLE-3 heads: their distributions against a plain forward, their cache, formats, and errors."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import triforce_tree
from tests.support.distributions.head_folders import eagle_folder
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.files import read_weights
from triforce_tree.drafters.heads.names import EAGLE
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PLAIN, PassKind
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

LAYERS = 3
TARGET = tiny("llama-gqa", num_hidden_layers=LAYERS)
PROMPTS = [prompt_of(length) for length in (41, 60)]
NEW = 16
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
# The retrieval cache holds the whole text, so that its hidden states equal those of plain forwards.
WHOLE = {"gamma": 5, "budget": 256, "chunk": 32, "recent": 64}


class Plain:
    """A reference implementation of the head in a folder. It computes one path without a KV cache."""

    def __init__(self, folder: Path, inputs: tuple[int, ...]) -> None:
        self.weights = read_weights(folder, EAGLE)
        self.config = json.loads((folder / "config.json").read_text())
        self.inputs = inputs
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(self.config))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weights[name], 1e-5)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"midlayer.{name}_proj.weight"].T

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Returns the output for the last of T pairs of hidden states ``[T, H]``, positions 0 to T - 1."""
        both = torch.cat(
            [
                self.norm(embedded, "midlayer.input_layernorm.weight"),
                self.norm(hidden, "midlayer.hidden_norm.weight"),
            ],
            -1,
        )
        q, k, v = (
            self.linear(both, f"self_attn.{n}").view(1, len(both), -1, 8).transpose(1, 2) for n in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(both, torch.arange(len(both))[None]))
        out = nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
        hidden = hidden[-1:] + self.linear(out.transpose(1, 2).flatten(1), "self_attn.o")
        x = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gated = nn.functional.silu(self.linear(x, "mlp.gate")) * self.linear(x, "mlp.up")
        return hidden + self.linear(gated, "mlp.down")

    def logits(self, tokens: list[int], path: list[int], sinks: int, window: int) -> Tensor:
        """Returns the logits ``[V]`` of the token after ``tokens`` and ``path``."""
        states = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        table = self.weights.get("embed_tokens.weight", TARGET.get_input_embeddings().weight)
        hidden = torch.cat([states[j][0] for j in self.inputs], -1) @ self.weights["fc.weight"].T
        embedded = table[torch.tensor(tokens[1:])]
        if len(hidden) > sinks + window:
            hidden, embedded = (torch.cat([x[:sinks], x[len(x) - window :]]) for x in (hidden, embedded))
        out = self.layer(embedded, hidden)
        for token in path:
            hidden, embedded = torch.cat([hidden, out]), torch.cat([embedded, table[token][None]])
            out = self.layer(embedded, hidden)
        normed = self.norm(out[0], "norm.weight")
        if "d2t" not in self.weights:
            return TARGET.lm_head(normed)
        own = normed @ self.weights["lm_head.weight"].T
        ids = self.weights["d2t"] + torch.arange(len(own))
        return torch.full((TARGET.config.vocab_size,), -torch.inf).scatter(0, ids, own)


CASES = {
    "shared vocabulary": (2, {}, "best-first:3,2,2", 2, 200),
    "draft vocabulary": (2, {"draft_vocabulary": 40, "inputs": (1, 1, 2)}, "static:0;1;0.0;0.1;1.0", 2, 200),
    "window": (2, {"draft_vocabulary": 40, "embeddings": True}, "best-first:2,2,1", 2, 9),
    "no sinks": (2, {}, "chain:3", 0, 7),
    "levels": (3, {"draft_vocabulary": 40}, "best-first:2,2", 2, 9),
    "levels, gamma": (3, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "chain:2", 3, 200),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_children_follow_the_head(name: str, tmp_path: Path) -> None:
    """Distributions at every node equal the reference's, and the generated text is the target's own."""
    levels, how, tree_name, sinks, window = CASES[name]
    folder = eagle_folder(tmp_path, TARGET, **how)  # type: ignore[arg-type]
    plain = Plain(folder, how.get("inputs", (1, 2, 2)))  # type: ignore[attr-defined]
    drafter = Eagle3(folder, tree_name, sinks, window)
    trees, propose = 0, drafter.propose

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        trees += 1
        count = tree.probs.shape[1]
        for b in range(state.batch):
            tokens = state.sequence(b)
            for node in {0, trees % count, count - 1}:
                path: list[int] = []
                ancestor = node
                while ancestor > 0:
                    path.insert(0, int(tree.tokens[b, ancestor]))
                    ancestor = int(tree.parents[b, ancestor])
                expected = plain.logits(tokens, path, sinks, window).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, rtol=2e-3, atol=1e-4)

    drafter.propose = checked  # type: ignore[method-assign]
    tail = levels == 3
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, **load_arguments({**WHOLE, "rounds": 2, "tail_tree": tail})
    )
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [row[-NEW:] for row in out.sequences.tolist()] == EXPECTED
    assert out.levels[0].name == "eagle3"
    assert trees > 4


@torch.no_grad()
def test_passes_without_the_drafter_leave_no_gap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hidden states of tokens from plain decoding enter the head's KV cache too."""
    plan = iter([PassKind(2, 1) if drafts else PLAIN for drafts in [1, 0, 0, 0, 0, 1, 1, 0] * 20])
    monkeypatch.setattr(PassPolicy, "choose", lambda *_: next(plan))
    test_children_follow_the_head("window", tmp_path)


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


@pytest.mark.parametrize(("layers", "features"), [(32, [1, 15, 28]), (28, [1, 13, 24])])
def test_layers_of_heads_that_name_none(layers: int, features: list[int], tmp_path: Path) -> None:
    """If the configuration lists no layers, the head reads those of the published implementation."""
    assert Eagle3(eagle_folder(tmp_path, TARGET, eagle_config=None))._feature_layers(layers) == features


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = eagle_folder(tmp_path / "head", TARGET, 40)
    wide, more = tiny("llama-gqa", num_hidden_layers=3, hidden_size=48), tiny("llama-gqa", vocab_size=48)
    for target, what in (
        (wide, r"fc.weight in .* is \[32, 96\], and for this target it must be \[32, 144\]"),
        (more, r"d2t in .* does not map 40 draft tokens to different ones of the target's 48"),
        (
            tiny("llama-gqa", num_hidden_layers=1),
            r"inputs of layers \[1, 2, 2\], and must read three of 1 to 1",
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
