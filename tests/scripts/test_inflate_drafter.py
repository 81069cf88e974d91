"""Widened drafters: they compute the small one's function beside the inflated target."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import triforce_tree
from tests.support.distributions.block_folders import block_folder
from tests.support.distributions.head_folders import MTP, eagle_folder, medusa_folder
from tests.support.models.families import VOCABULARY, prompt_of, tiny
from triforce_tree.drafters.blocks.format import block_format, canonical
from triforce_tree.drafters.blocks.reference import Reference
from triforce_tree.drafters.heads.attention import attend, rotated
from triforce_tree.drafters.heads.eagle import Eagle3
from triforce_tree.drafters.heads.files import HeadWeights
from triforce_tree.drafters.registry import WEIGHTS, trained_drafter

TARGET = tiny("llama-gqa", num_hidden_layers=3)
SWITCHES = {"fc_norm": True, "norm_output": True}


def folder_of(path: Path, **how: Any) -> Path:
    """Returns a random head whose matrices are exact in bf16."""
    folder = eagle_folder(path, TARGET, inputs=(1, 2, 3), **{**SWITCHES, **how})
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}, file)
    return folder


def accepted(target: Any, folder: Path) -> tuple[list[int], float | None]:
    """Returns a greedy text, and accepted tokens of a pass."""
    advanced = {"sinks": 1, "window": 9, "rounds": 1}
    engine = triforce_tree.load(target, drafter=folder, levels=2, tree="best-first:3,2,2", advanced=advanced)
    out = engine.generate(prompt_of(40), max_new_tokens=40, do_sample=False)
    return out.sequences[0].tolist(), out.levels[1].mean_accepted_length


def attended(head: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns causal attention within the pairs."""
    count = q.shape[2]
    cos, sin = (angle[None] for angle in head.angles(count, torch.device("cpu")))
    mask = torch.ones(1, count, count, dtype=torch.bool).tril()
    return attend(*rotated(q, k, cos, sin), v, mask, scale)


def next_of_both(small: torch.Tensor, wide: torch.Tensor, depth: int) -> torch.Tensor:
    """Compares logits of the small drafter, ``[T, V]``, with those of the wide one, which may have more
    entries. Returns the token ``[1, 1]`` that both propose.
    """
    assert float((wide[:, :VOCABULARY] - small).norm() / small.norm()) < 0.02, depth
    assert bool((wide[:, VOCABULARY:] < -1000).all()), "no other token can be drawn"
    return small[-1:, :].argmax(-1)[None]


@torch.no_grad()
@pytest.mark.parametrize(
    "shape", ["64x5x8/4x16x96-v160", "64x5x4/4x8x96", "40x3x8/2x8x64-v33000"], ids=["all", "own words", "d2t"]
)
@pytest.mark.parametrize(
    "how",
    [{}, {"fc_norm": False, "norm_before_fc": True, "norm_output": False}, {"ptd_token_id": 5}],
    ids=["3.1", "other norms", "P-EAGLE"],
)
def test_a_widened_head_computes_the_small_ones_logits(
    script: Any, tmp_path: Path, shape: str, how: dict[str, Any]
) -> None:
    """Compares three depths, of which each reads the output before, or a mask token."""
    inflate = script("inflate.pair").inflate
    script("inflate.drafter").inflate_drafter(
        folder_of(tmp_path / "small", **how), TARGET, shape, tmp_path / "wide"
    )
    big = inflate(TARGET, shape)
    heads, states = [], []
    ids = torch.tensor([prompt_of(12)])
    for target, name in ((TARGET, "small"), (big, "wide")):
        drafter = trained_drafter(tmp_path / name, {})
        assert isinstance(drafter, Eagle3)
        engine = triforce_tree.load(target, drafter=drafter, levels=2)
        drafter.attach(engine.target)
        hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
        # transformers' last one is after the final norm.
        kept: dict[int, Any] = {}
        hook = target.model.layers[-1].register_forward_hook(
            lambda m, a, out, kept=kept: kept.update(last=out)
        )
        target(ids, use_cache=False)
        hook.remove()
        last = kept["last"][0] if isinstance(kept["last"], tuple) else kept["last"]
        outputs = [*hidden[1 : len(target.model.layers)], last]
        heads.append(drafter.network)
        states.append([outputs[i] for i in drafter.network.inputs])
    xs = [head.fuse(state) for head, state in zip(heads, states, strict=True)]
    tokens = ids
    for depth in range(3):
        logits = []
        for i, head in enumerate(heads):
            fed, normed = head.forward(0, tokens, xs[i], tokens, partial(attended, head), tokens.shape[1])
            logits.append(head.logits(normed)[0])
            xs[i] = torch.cat([xs[i], fed[:, -1:] if head.masked is None else head.masked], 1)
        token = next_of_both(*logits, depth)
        tokens = torch.cat([tokens, torch.full_like(token, how.get("ptd_token_id", int(token)))], 1)


def test_a_widened_head_is_accepted_as_often(script: Any, tmp_path: Path) -> None:
    shape = "64x5x8/4x16x96-v160"
    script("inflate.drafter").inflate_drafter(folder_of(tmp_path / "small"), TARGET, shape, tmp_path / "wide")
    big = script("inflate.pair").inflate(TARGET, shape)
    text, length = accepted(TARGET, tmp_path / "small")
    wide_text, wide_length = accepted(big, tmp_path / "wide")
    assert wide_text == text
    assert wide_length == pytest.approx(length, abs=0.15)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["64x5x8/4x16x96-v160", "64x5x4/4x8x96"], ids=["all", "own words"])
def test_a_widened_block_computes_the_small_ones_logits(script: Any, tmp_path: Path, shape: str) -> None:
    small = block_folder(tmp_path / "small", TARGET, inputs=(0, 1), sliding_window=9, is_causal=False,
                         layer_types=["sliding_attention"] * 2)  # fmt: skip
    file = small / "model.safetensors"
    save_file({name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}, file)
    script("inflate.drafter").inflate_drafter(small, TARGET, shape, tmp_path / "wide")
    big, ids, found = script("inflate.pair").inflate(TARGET, shape), torch.tensor([prompt_of(12)]), []
    for target, name in ((TARGET, "small"), (big, "wide")):
        format = block_format(tmp_path / name)
        weights = HeadWeights(tmp_path / name, WEIGHTS, canonical)
        hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
        slots = torch.tensor([5, *[format.mask_token] * (format.block - 1)])
        states = [hidden[i + 1][0] for i in format.inputs]
        made = Reference(weights, format).hidden(target.get_input_embeddings()(slots), states)
        found.append(target.lm_head(made))
    logits, wide = found
    assert float((wide[:, :VOCABULARY] - logits).norm() / logits.norm()) < 0.03
    assert bool((wide[:, VOCABULARY:] < -1000).all()), "no other token can be drawn"


def mtp_folder(script: Any, path: Path) -> Path:
    """Returns a checkpoint with a random MTP layer as the script writes it, exact in bf16."""
    segments, mtp = script("train_drafters.segments"), script("train_drafters.mtp")
    teacher = script("train_drafters.teacher").Teacher(TARGET)
    layer = mtp.MtpTraining(teacher, 2, segments.Cache(1, 9))
    random = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = (parameter.data + 0.2 * noise).bfloat16().float()
    script("train_drafters.folder").DrafterFolder(path, {"seed": 0}, mtp.FILE).save(layer, 1.0)
    layer.complete(path, None)
    return path


@pytest.mark.skipif(not MTP, reason="this release of transformers reads no MTP layers")
@torch.no_grad()
@pytest.mark.parametrize("shape", ["64x5x8/4x16x96-v160", "64x5x4/4x8x96"], ids=["all", "own words"])
def test_a_widened_mtp_layer_computes_the_small_ones_logits(script: Any, tmp_path: Path, shape: str) -> None:
    """Compares three depths, of which each reads the output before, and the accepted tokens."""
    module, small = script("inflate.drafter"), mtp_folder(script, tmp_path / "small")
    module.inflate_drafter(small, TARGET, shape, tmp_path / "wide")
    big, tokens = script("inflate.pair").inflate(TARGET, shape), torch.tensor([prompt_of(12)])
    layers, states, texts = [], [], []
    for target, name in ((TARGET, "small"), (big, "wide")):
        source = target.config.name_or_path
        with module.mtp_layer(target, tmp_path / name):
            engine: Any = triforce_tree.load(
                target, drafter="mtp", levels=2, tree="best-first:3,2,2",
                advanced={"sinks": 1, "window": 9, "rounds": 1},
            )  # fmt: skip
        assert target.config.name_or_path == source
        out = engine.generate(prompt_of(40), max_new_tokens=40, do_sample=False)
        texts.append((out.sequences[0].tolist(), out.levels[1].mean_accepted_length))
        layers.append(engine._hierarchy.own_drafter.network)
        states.append(target.model(tokens, use_cache=False).last_hidden_state)
    assert texts[1][0] == texts[0][0]
    assert texts[1][1] == pytest.approx(texts[0][1], abs=0.15)
    for depth in range(3):
        count, logits = tokens.shape[1], []
        mask = torch.ones(1, count, count, dtype=torch.bool).tril()
        for i, layer in enumerate(layers):
            fed, normed = layer.forward(
                0, tokens, states[i], torch.arange(1, count + 1)[None],
                lambda q, k, v, scale, mask=mask: attend(q, k, v, mask, scale), count,
            )  # fmt: skip
            logits.append(layer.logits(normed)[0])
            states[i] = torch.cat([states[i], fed[:, -1:]], 1)
        tokens = torch.cat([tokens, next_of_both(*logits, depth)], 1)


def test_what_cannot_be_widened_is_refused(script: Any, tmp_path: Path) -> None:
    widen = script("inflate.drafter").inflate_drafter
    with pytest.raises(ValueError, match="only EAGLE-3 heads, block drafters and MTP layers can be widened"):
        widen(medusa_folder(tmp_path / "medusa", TARGET), TARGET, "64x5x8/4x16x96", tmp_path / "out")
    with pytest.raises(ValueError, match="mlp=16 of the shape is less than the drafter's 24"):
        widen(folder_of(tmp_path / "small"), TARGET, "64x5x8/4x16x16", tmp_path / "out")
    with pytest.raises(ValueError, match="embed_tokens"):
        widen(folder_of(tmp_path / "own", embeddings=True), TARGET, "64x5x8/4x16x96", tmp_path / "out")
