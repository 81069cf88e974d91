"""The corpus of the embedded pair: what is held out, what is repeated, what is left of a document."""

import json
from pathlib import Path
from typing import Any

LINE = "The quick brown fox number {} jumps over the lazy dog while its owner looks on and laughs."


def test_held_out_and_repeated_paragraphs_are_dropped(script: Any, tmp_path: Path) -> None:
    corpus = script("train_pair.corpus")
    topics = tmp_path / "topics.py"
    held_out = "An assignment statement evaluates the expression list and assigns the one resulting object."
    topics.write_text(f"topics = {{'assignment': {held_out!r}}}")
    own = [f"{LINE} {'And word' + 'x' * i} {'more ' * i}." for i in range(6)]
    texts = ["\n\n".join([*own, f"Here: {held_out}"]), "\n\n".join(own), "\n\n".join([*own, held_out] * 20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    corpus.gather([f"docs={tmp_path / 'texts.jsonl'}"], [topics], tmp_path / "out", cap=1.0)
    [line] = (tmp_path / "out" / "docs.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "\n\n".join(own)
    report = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert report["contaminated_paragraphs"] == 21
    assert report["repeated_paragraphs"] == 6 + 20 * 6
    assert report["sources"][0]["documents"] == 1


def test_packages_give_docstrings_and_sources(script: Any) -> None:
    corpus = script("train_pair.corpus")
    docs, code = (list(corpus.documents(f"{kind}:json")) for kind in ("docstrings", "code"))
    assert any("JSONEncoder" in text for text in docs)
    assert any("class JSONEncoder(object):" in text for text in code)
    assert not corpus.english("中文" * 200)
    assert corpus.english(LINE * 5)
