"""Texts by kind that drafters are trained on: how they are gathered, drawn and written by a target."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triforce_tree.loading.checkpoints import PAIR, load_tokenizer


def saved(path: Path, **kinds: Any) -> Path:
    np.savez(path, **{kind: np.asarray(tokens, dtype=np.uint16) for kind, tokens in kinds.items()})
    return path


def test_texts_become_tokens_by_kind_without_held_out_ones(script: Any, tmp_path: Path) -> None:
    text, tokenizer = script("train_pair.text"), load_tokenizer(PAIR / "target")
    folder, out = tmp_path / "usr" / "games", tmp_path / "out"
    folder.mkdir(parents=True)
    held = "No one who had ever seen Catherine in her infancy would have supposed her a heroine."
    own = [f"A fortune of some length, number {'x' * i} of a row, that is not in any test." for i in range(9)]
    (folder / "sayings").write_text("\n%\n".join([*own, held]))
    (folder / "sayings.dat").write_bytes(b"\0index")
    source = text.KindSource("prose", "public domain", "sayings", ("usr/games/say*",))
    pages = [f"Page {'i' * n} of a manual, written anew. " * 12 for n in range(1, 4)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    entries = [*source.entries(tmp_path), f"manuals={tmp_path / 'more.jsonl'}"]
    counts = text.prepare(tokenizer, out, entries, [held], 1.0, 1.0)
    tokens, others = (np.load(out / "tokens.npz")[kind] for kind in ("prose", "manuals"))
    assert counts == {"prose": len(tokens), "manuals": len(others)}
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == "\n\n".join(own) + "<|endoftext|>"
    found = sorted(tokenizer.decode(others).split("<|endoftext|>")[:-1])
    assert found == sorted(page.rstrip() for page in pages)
    assert json.loads((out / "manifest.json").read_text())["contaminated_paragraphs"] == 1
    assert text.prepare(tokenizer, out, entries, [held], 1.0, 100 / 1e6) == {"prose": 100, "manuals": 100}
    with pytest.raises(ValueError, match="no text was found"):
        text.prepare(tokenizer, out, source.entries(tmp_path / "usr"), [], 1.0, 1.0)


def test_sources_are_those_installed_or_those_of_packages(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script("train_pair.text")
    installed = text.entries_of(None, installed=True)
    assert {"documentation=docstrings:json", "code=code:json", "manuals=files:/usr/share/doc"} <= {*installed}
    both = text.entries_of(tmp_path, installed=True)
    assert both[: len(installed)] == installed
    debian = both[len(installed) :]
    assert debian
    assert all(f"=files:{tmp_path}/usr/" in entry for entry in debian)
    assert {*debian} < {*text.entries_of(tmp_path, installed=False)}
    text.main(["--packages"])
    assert "fortunes" in capsys.readouterr().out.split()


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


def test_a_token_file_is_bounded_and_begins_with_whole_documents(script: Any, tmp_path: Path) -> None:
    data, sources = tmp_path / "data", ["code=code:json", "code=docstrings:email"]
    made = script("train_pair.text").prepare(load_tokenizer(PAIR / "target"), data, sources, [], 1.0, 1e-3)
    assert made == {"code": 1000}
    tokens = np.load(data / "tokens.npz")["code"]
    assert (tokens.dtype, len(tokens)) == (np.uint16, 1000)
    tokenizer = load_tokenizer(data)
    assert tokenizer is not None
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["tokens"] == {"code": 1000}
    assert len(manifest["sources"]) == 2
    assert "def " in tokenizer.decode(tokens) or "(self" in tokenizer.decode(tokens)
