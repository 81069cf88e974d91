"""A short training of heads for the small target in the package, and the files that it saves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from scripts.train_pair.heads.__main__ import main
from scripts.train_pair.heads.evaluate import states
from scripts.train_pair.heads.networks import EagleHead, MedusaHeads, restore, save
from triforce_tree.drafters.heads.eagle_layer import EagleLayer, attend, rotated
from triforce_tree.drafters.heads.files import read_weights, settings
from triforce_tree.drafters.heads.names import MEDUSA
from triforce_tree.loading.checkpoints import PAIR


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_short_training_saves_heads_and_figures(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains two steps on a tiny text; ``--resume`` continues from the saved state."""
    monkeypatch.setattr(
        "scripts.train_pair.heads.__main__.pydoc_text", lambda: "What a statement does. " * 60
    )
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    np.save(data / "docs.npy", np.random.default_rng(0).integers(1, 4096, 2000).astype(np.uint16))
    words = [
        "--kind", kind, "--data", str(data), "--out", str(out), "--steps", "2", "--device", "cpu",
        "--contexts", "96", "--tokens", "96", "--segments", "1", "--segment", "64", "--depths", "2",
        "--evaluate", "80", "--window", "40", "--windows", "1", "--new", "12", "--log-every", "1",
    ]  # fmt: skip
    main(words)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert rows[-1] == json.loads((out / "training.json").read_text())
    assert rows[-1]["steps"] == 2
    assert rows[-1]["bytes"] < 6 << 20
    assert all(0 < x < 1 for x in [*rows[-1][f"{kind}_overlap_80"], rows[-1]["draft_overlap_80"]])
    main([*words, "--resume"])
    started = json.loads(capsys.readouterr().out.splitlines()[0])
    assert started["resumed"]


@torch.no_grad()
def test_saved_medusa_heads_are_those_that_were_trained(target: LlamaForCausalLM, tmp_path: Path) -> None:
    heads = MedusaHeads(target, 2, 2)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn_like(parameter).bfloat16() / 16)
    save(heads, tmp_path)
    weights = read_weights(tmp_path, MEDUSA)
    x = torch.randn(1, 3, target.config.hidden_size)
    made = x
    for layer in range(2):
        linear = (
            made @ weights[f"1.{layer}.linear.weight"].float().T + weights[f"1.{layer}.linear.bias"].float()
        )
        made = made + torch.nn.functional.silu(linear)
    torch.testing.assert_close(heads(torch.zeros(1, 3), [x])[1], made)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 9])
def test_the_unrolled_eagle_head_is_the_drafters(
    target: LlamaForCausalLM, window: int | None, tmp_path: Path
) -> None:
    """Training unrolls the head over the depths of a tree; the outputs equal those of the drafter's layer."""
    sinks, depths, at = 2, 3, 20
    head = EagleHead(target, depths, 64, sinks)
    for parameter in head.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    save(head, tmp_path)
    assert restore(head, tmp_path)
    weights = read_weights(tmp_path, ("model.safetensors",))
    layer = EagleLayer(
        weights, settings(tmp_path), tmp_path, target.get_input_embeddings(), target.lm_head,
        target.config.hidden_size, target.config.vocab_size, torch.device("cpu"), torch.float32,
    )  # fmt: skip
    tokens = torch.arange(40)[None] * 7 % 4096
    found = states(target, tokens, head.features)
    hidden = [found[i] for i in head.features]
    made = head(tokens, hidden, window, slice(at, at + 1))
    keep = (
        torch.arange(at + 1)
        if window is None
        else torch.tensor([*range(sinks), *range(at - window + 1, at + 1)])
    )
    x = layer.fuse([states[:, keep] for states in hidden])
    following = tokens[:, keep + 1]
    cos, sin = layer.angles(60, torch.device("cpu"))
    for depth in range(depths):
        q, k, v = layer.project(following, x)
        positions = torch.arange(x.shape[1])[None]
        q, k = (rotated(part, cos[positions], sin[positions]) for part in (q, k))
        out = attend(q[:, :, -1:], k, v, torch.ones(1, 1, x.shape[1], dtype=torch.bool), layer.scale)
        last = layer.finish(x[:, -1:], out)
        expected, logits = layer.logits(last), target.lm_head(made[depth])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        x = torch.cat([x, last], 1)
        following = torch.cat([following, tokens[:, at + 2 + depth, None]], 1)
