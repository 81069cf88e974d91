"""Medusa heads: their distributions, formats and trees, and errors."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import triforce_tree
from tests.support.distributions.head_folders import medusa_folder
from tests.support.models.families import greedy, prompt_of, tiny
from triforce_tree.config import load_arguments
from triforce_tree.drafters.base import TokenTree
from triforce_tree.drafters.heads.medusa import Medusa
from triforce_tree.runtime.sequence_state import SequenceState
from triforce_tree.verify.probs import Sampler

TARGET = tiny("llama-gqa")
PROMPTS = [prompt_of(length) for length in (41, 60)]
NEW = 16
EXPECTED = [greedy(TARGET, prompt, NEW) for prompt in PROMPTS]
# The retrieval cache holds the whole text, so that its hidden states equal those of plain forwards.
WHOLE = {"gamma": 5, "budget": 256, "chunk": 32, "recent": 64}


def reference(folder: Path, hidden: Tensor, head: int, layers: int) -> Tensor:
    """Computes the logits of one head as the paper defines it."""
    weights = load_file(folder / "medusa_lm_head.safetensors")
    for layer in range(layers):
        linear = F.linear(
            hidden, weights[f"{head}.{layer}.linear.weight"], weights[f"{head}.{layer}.linear.bias"]
        )
        hidden = hidden + F.silu(linear)
    last = weights.get(f"{head}.{layers}.weight")
    return TARGET.lm_head(hidden) if last is None else F.linear(hidden, last)


@torch.no_grad()
@pytest.mark.parametrize(("levels", "layers", "tied"), [(2, 1, False), (3, 2, False), (2, 2, True)])
def test_children_follow_the_heads(levels: int, layers: int, tied: bool, tmp_path: Path) -> None:
    """Heads read the state after the final norm at the position before the root; the text is the target's."""
    folder = medusa_folder(tmp_path, TARGET, 3, layers, tied)
    drafter = Medusa(folder, "static:0;0.0;1;0.0.0;1.0")
    trees = 0
    propose = drafter.propose

    def checked(state: SequenceState, tree: TokenTree, sampler: Sampler) -> None:
        nonlocal trees
        propose(state, tree, sampler)
        for b in range(state.batch):
            tokens = state.sequence(b)
            hidden = TARGET.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            for node, depth in enumerate(tree.depths.tolist()[: tree.probs.shape[1]]):
                expected = reference(folder, hidden, depth, layers).softmax(-1)
                torch.testing.assert_close(tree.probs[b, node], expected, rtol=1e-3, atol=1e-5)
                children = [i for i, p in enumerate(tree.parents[b].tolist()) if p == node]
                best = expected.topk(len(children)).indices.tolist()
                assert tree.tokens[b, children].tolist() == best
        trees += 1

    drafter.propose = checked  # type: ignore[method-assign]
    tail = levels == 3
    engine = triforce_tree.load(
        TARGET, drafter=drafter, levels=levels, **load_arguments({**WHOLE, "rounds": 2, "tail_tree": tail})
    )
    out = engine.generate(PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert [row[-NEW:] for row in out.sequences.tolist()] == EXPECTED
    assert out.levels[0].name == "medusa"
    assert trees > 4


@pytest.mark.parametrize("written", [{"pickled": True}, {"prefix": "medusa_head."}, {}])
def test_published_formats(written: dict[str, object], tmp_path: Path) -> None:
    folder = medusa_folder(tmp_path, TARGET, **written)  # type: ignore[arg-type]
    engine = triforce_tree.load(TARGET, drafter=str(folder), tree="static:0.0;1", levels=2)
    drafter = engine._hierarchy.own_drafter
    assert isinstance(drafter, Medusa)
    assert drafter.features == (TARGET.config.num_hidden_layers,)
    plain = Medusa(medusa_folder(tmp_path / "plain", TARGET), "static:0.0;1")
    plain.attach(engine.target)
    hidden = torch.randn(2, TARGET.config.hidden_size)
    torch.testing.assert_close(drafter.logits(hidden), plain.logits(hidden))
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == [*PROMPTS[0], *EXPECTED[0]]


def test_the_last_state_of_llama_4_is_read(tmp_path: Path) -> None:
    """transformers finds no decoder inside this class, whose own output is logits."""
    target = tiny("llama4")
    engine = triforce_tree.load(target, drafter=medusa_folder(tmp_path, target), levels=2)
    out = engine.generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == greedy(target, PROMPTS[0], NEW)


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    folder, name = medusa_folder(tmp_path, TARGET), "0.0.linear.weight"
    weights = load_file(folder / "medusa_lm_head.safetensors")
    for wrong, message in (
        (weights[name].to(torch.int8), "0.0.linear.weight in .* is torch.int8, and must hold floating-point"),
        (weights[name] * torch.nan, "0.0.linear.weight in .* has numbers that are not finite"),
    ):
        save_file({**weights, name: wrong}, folder / "medusa_lm_head.safetensors")
        with pytest.raises(ValueError, match=message):
            triforce_tree.load(TARGET, drafter=folder)
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, folder / "medusa_lm_head.safetensors")
    out = triforce_tree.load(TARGET, drafter=folder).generate(PROMPTS[0], max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == [*PROMPTS[0], *EXPECTED[0]]


def test_no_code_of_a_pickle_is_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"0.0.linear.weight": Harmful()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt cannot be read as weights .*; copy or download"):
        Medusa(tmp_path)
    assert not (tmp_path / "ran").exists()


OTHER = tiny("llama-gqa", hidden_size=48, num_attention_heads=4)
WIDER = tiny("llama-gqa", vocab_size=80)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no trained drafter.*Medusa heads, .*an EAGLE-3 head"):
        triforce_tree.load(TARGET, drafter=tmp_path)
    folder = medusa_folder(tmp_path / "heads", TARGET)
    for target, what in (
        (OTHER, r"0.0.linear.weight in .* is \[32, 32\], and for this target it must be \[48, 48\]"),
        (WIDER, r"0.1.weight in .* is \[64, 32\], and for this target it must be \[80, 32\]"),
    ):
        with pytest.raises(ValueError, match=what):
            triforce_tree.load(target, drafter=folder)
    with pytest.raises(ValueError, match=r"the tree has 4 depths, and .* with 3 Medusa heads predicts 3"):
        triforce_tree.load(TARGET, drafter=folder, tree="chain:4")
    with pytest.raises(ValueError, match="uses no draft model, and one was given"):
        triforce_tree.load(TARGET, TARGET, drafter=folder)
    (folder / "config.json").write_text(json.dumps({"medusa_scale": 0.5}))
    with pytest.raises(ValueError, match=r"has the field medusa_scale=0.5, which is not known"):
        Medusa(folder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    with pytest.raises(ValueError, match=r"medusa_num_heads=5 in .* must be 1 to 3, as its weights are"):
        Medusa(folder)
    (folder / "medusa_lm_head.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        Medusa(folder)
