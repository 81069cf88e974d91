"""Further distillation of the embedded draft: what it is trained on, and what is saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from triforce_tree.loading.checkpoints import PAIR, load_tokenizer


def saved(path: Path, **kinds: Any) -> Path:
    np.savez(path, **{kind: np.asarray(tokens, dtype=np.uint16) for kind, tokens in kinds.items()})
    return path


def test_texts_become_tokens_by_kind_without_held_out_ones(script: Any, tmp_path: Path) -> None:
    text = script("train_pair.kinds.text")
    folder = tmp_path / "usr" / "games"
    folder.mkdir(parents=True)
    held = "No one who had ever seen Catherine in her infancy would have supposed her a heroine."
    own = [f"A fortune of some length, number {'x' * i} of a row, that is not in any test." for i in range(9)]
    (folder / "sayings").write_text("\n%\n".join([*own, held]))
    (folder / "sayings.dat").write_bytes(b"\0index")
    source = text.KindSource("prose", "public domain", "sayings", ("usr/games/say*",))
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "A page of a manual, written anew. " * 12}))
    more = [f"manuals={tmp_path / 'more.jsonl'}"]
    counts = text.prepare(tmp_path / "kinds.npz", tmp_path, [held], 1.0, [source], more)
    tokens, others = (np.load(tmp_path / "kinds.npz")[kind] for kind in ("prose", "manuals"))
    assert counts == {"prose": len(tokens), "manuals": len(others)}
    assert load_tokenizer(PAIR / "target").decode(tokens) == "\n\n".join(own) + "<|endoftext|>"
    assert json.loads((tmp_path / "kinds.json").read_text())["contaminated_paragraphs"] == 1
    with pytest.raises(ValueError, match="no text was found"):
        text.prepare(tmp_path / "none.npz", tmp_path / "usr", [], 1.0, [source])


def test_slices_come_in_their_shares(script: Any, tmp_path: Path) -> None:
    mixture = script("train_pair.kinds.mixture")
    texts = saved(tmp_path / "a.npz", prose=[1] * 50, code=[2] * 9, tables=[9] * 50)
    written = saved(tmp_path / "b.npz", prose=[3] * 20)
    device, shares = torch.device("cpu"), {"prose": 0.6, "code": 0.4}
    both = mixture.Mixture([texts, written], 0.5, device, 0, shares)
    assert both.tokens == 79
    drawn = both(1000, 12)
    assert drawn.shape == (1000, 12)
    assert (drawn == drawn[:, :1]).all(), "a slice is of one kind and one file"
    counts = torch.bincount(drawn[:, 0], minlength=4) / 1000
    # Of 0.3 + 0.2 + 0.3: written code is missing.
    assert torch.allclose(counts, torch.tensor([0.0, 0.375, 0.25, 0.375]), atol=0.06)
    with pytest.raises(ValueError, match="none of prose, code"):
        mixture.Mixture([saved(tmp_path / "c.npz", tables=[1])], 0.5, device, 0, shares)


def test_the_target_writes_behind_prompts(script: Any, tmp_path: Path) -> None:
    tokens = torch.randint(1, 4096, (300,)).tolist()
    data, out = saved(tmp_path / "kinds.npz", prose=tokens), tmp_path / "written.npz"
    words = ["--data", str(data), "--out", str(out), "--minutes", "0", "--rows", "3", "--prompt", "8"]
    script("train_pair.kinds.samples").main([*words, "--new", "5"])
    rows = np.load(out)["prose"].reshape(3, 14)
    ring = [*tokens, *tokens]
    starts = [[ring[i : i + 8] for i in range(300)].index(row[:8].tolist()) for row in rows]
    assert len(starts) == 3
    assert (rows[:, -1] == 0).all()
    assert (rows[:, :-1] > 0).all()


def test_a_further_distilled_draft_is_averaged_with_the_one_before(script: Any, tmp_path: Path) -> None:
    ids = load_tokenizer(PAIR / "target")(
        "It was a truth, or so we were told, and no one asked. " * 80
    ).input_ids
    data, out = saved(tmp_path / "kinds.npz", prose=ids), tmp_path / "out"
    words = ["--data", str(data), "--out", str(out), "--steps", "3", "--tokens", "1032", "--length", "1032"]
    script("train_pair.kinds.__main__").main([*words, "--warm-up", "1"])
    assert LlamaForCausalLM.from_pretrained(out / "draft").config.hidden_size == 256
    weights = [
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
        for folder in (PAIR / "draft", out / "draft", out / "mean")
    ]
    assert torch.allclose(weights[2], (weights[0] + weights[1]) / 2, atol=2e-3)
    assert not torch.equal(weights[1], weights[2])


def test_a_new_draft_learns_the_overlap_of_two_temperatures(script: Any, tmp_path: Path) -> None:
    ids = load_tokenizer(PAIR / "target")("All of this had been said before, and nobody heard it. " * 80)
    data, out = saved(tmp_path / "kinds.npz", prose=ids.input_ids), tmp_path / "out"
    words = ["--data", str(data), "--out", str(out), "--steps", "8", "--tokens", "1032", "--length", "1032"]
    size = ["--hidden", "128", "--mlp", "256", "--temperatures", "1", "0.6", "--log-every", "1"]
    script("train_pair.kinds.__main__").main([*words, *size, "--warm-up", "1"])
    config = LlamaForCausalLM.from_pretrained(out / "draft").config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (128, 2, 256)
    assert not (out / "mean").exists()
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0] - 0.3


def test_overlaps_are_means_over_temperatures(script: Any) -> None:
    compare = script("train_pair.distill").compare
    torch.manual_seed(1)
    q, p = torch.randn(5, 16), torch.randn(5, 16)
    entropy, overlap = compare(q, torch.eye(16), p, torch.eye(16), (1.0, 0.6))
    expected = torch.stack(
        [torch.minimum((q / t).softmax(-1), (p / t).softmax(-1)).sum(-1) for t in (1.0, 0.6)]
    )
    assert torch.allclose(overlap, expected.mean(0), atol=1e-6)
    assert torch.allclose(entropy, -(p.softmax(-1) * q.log_softmax(-1)).sum(-1), atol=1e-5)
