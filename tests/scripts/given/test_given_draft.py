"""Distillation of a draft for a given target: its texts, its losses, and what is saved."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.models.families import relative_error
from triforce_tree.loading.checkpoints import PAIR, load_model, load_tokenizer

TARGET = str(PAIR / "target")
LENGTH = 1032
WORDS = ["--hidden", "64", "--layers", "1", "--head-dim", "32", "--mlp", "64", "--length", str(LENGTH)]


@pytest.fixture
def data(script: Any, tmp_path: Path) -> Path:
    """Returns the shortest token file that a slice fits into: every batch is the same."""
    text, sources = script("train_pair.text"), ["code=code:json", "code=docstrings:email"]
    made = text.prepare(load_tokenizer(TARGET), tmp_path / "data", sources, [], 1.0, LENGTH / 1e6)
    assert made == {"code": LENGTH}
    return tmp_path / "data"


def test_text_files_of_a_folder_are_read(script: Any, tmp_path: Path) -> None:
    corpus = script("train_pair.corpus")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "README.md").write_text("readme")
    (tmp_path / "pkg" / "guide.txt.gz").write_bytes(gzip.compress(b"a guide"))
    (tmp_path / "pkg" / "copyright").write_text("a licence")
    (tmp_path / "pkg" / "changelog.Debian.gz").write_bytes(gzip.compress(b"changes"))
    (tmp_path / "pkg" / "broken.txt.gz").write_bytes(b"\x1f\x8b no gzip")
    (tmp_path / "pkg" / "binary").write_bytes(b"a\0b")
    (tmp_path / "pkg" / "picture.png").write_bytes(b"abc")
    assert list(corpus.documents(f"files:{tmp_path}")) == ["readme", "a guide"]


def test_a_token_file_is_bounded_and_begins_with_whole_documents(data: Path) -> None:
    tokens = np.load(data / "tokens.npz")["code"]
    assert (tokens.dtype, len(tokens)) == (np.uint16, LENGTH)
    tokenizer = load_tokenizer(data)
    assert tokenizer is not None
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["tokens"] == {"code": LENGTH}
    assert len(manifest["sources"]) == 2
    assert "def " in tokenizer.decode(tokens) or "(self" in tokenizer.decode(tokens)


def distillation(script: Any, data: Path, out: Path) -> Any:
    given, run = script("train_pair.given.__main__"), script("train_pair.run")
    args = given.arguments(
        ["--target", TARGET, "--data", str(data), "--out", str(out), "--tokens", str(LENGTH), *WORDS]
    )
    torch.manual_seed(0)
    target = load_model(TARGET, "cpu", torch.float32).requires_grad_(False)
    config = given.draft_config(target.config, args.hidden, args.layers, args.head_dim, args.mlp)
    draft = given.new_model(config, torch.device("cpu"))
    given.begin_embedding(draft, target)
    tokens = torch.from_numpy(np.load(data / "tokens.npz")["code"].astype(np.int64))
    return given.Distillation(args, run.Run(args), target, draft, lambda *_: tokens[None])


def test_the_loss_falls_and_the_overlap_rises(script: Any, data: Path, tmp_path: Path) -> None:
    made = distillation(script, data, tmp_path / "out")
    optimizer = script("train_pair.optim").PairOptimizer(made.draft, 0.02, 5e-3, 0.0)
    losses, overlaps = [], []
    for _ in range(4):
        loss, figures = made.losses(0.0)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
        overlaps.append(float(figures["overlap"]))
    assert losses[-1] < losses[0] - 0.5
    assert overlaps[-1] > 1.2 * overlaps[0] > 0


def test_logits_by_parts_have_the_same_losses_and_gradients(script: Any, data: Path, tmp_path: Path) -> None:
    made, found = distillation(script, data, tmp_path / "out"), []
    student, teacher = torch.randn(50, 64), torch.randn(50, made.target.config.hidden_size)
    for made.most in (50, 7):
        x = student.clone().requires_grad_()
        entropy, overlap = made.compared(x, teacher)
        (entropy.sum() - overlap.sum()).backward()
        found.append((entropy.detach(), overlap.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert relative_error(other, one) < 1e-4


def test_the_embedding_keeps_the_targets_products(script: Any) -> None:
    given = script("train_pair.given.__main__")
    target = load_model(TARGET, "cpu", torch.float32)
    size = target.config.hidden_size
    draft = given.new_model(given.draft_config(target.config, size, 1, 64, 64), torch.device("cpu"))
    given.begin_embedding(draft, target)
    weighed = (target.lm_head.weight * target.model.norm.weight)[:300]
    own = draft.model.embed_tokens.weight[:300]
    products = [x @ x.mT for x in (weighed.detach(), own.detach())]
    scale = products[1].norm() / products[0].norm()
    assert torch.allclose(products[1], products[0] * scale, atol=1e-3 * float(products[1].abs().max()))


def test_a_short_training_saves_a_draft_that_the_engine_takes(
    script: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = script("train_pair.given.__main__"), tmp_path / "out"
    monkeypatch.setattr(script("train_pair.given.overlaps"), "NEW", 12)
    monkeypatch.setattr(given, "pydoc_text", lambda: "What a statement does, and what it may not. " * 60)
    words = ["--target", TARGET, "--data", str(data), "--out", str(out), "--minutes", "0.01", *WORDS]
    more = ["--tokens", str(LENGTH), "--evaluate", "320", "--budget", "264", "--windows", "1"]
    found = given.main([*words, *more])
    assert 0 < found["draft_overlap"] < 1
    assert 0 < found["retrieval_overlap"] <= 1
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[0]["tokens"] == LENGTH
    assert log[-1]["draft_overlap"] == found["draft_overlap"]
    draft = LlamaForCausalLM.from_pretrained(out / "draft")
    assert (draft.config.vocab_size, draft.config.hidden_size) == (4096, 64)


def test_what_cannot_be_distilled_is_said(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = script("train_pair.given.__main__")
    with pytest.raises(ValueError, match="--head-dim 48"):
        given.draft_config(None, 64, 1, 48, 64)
    with pytest.raises(SystemExit):
        given.arguments(["--target", TARGET, "--data", "d", "--out", "o", "--length", "100"])
    assert "less than a segment" in capsys.readouterr().err
