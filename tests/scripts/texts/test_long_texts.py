"""Prompts longer than one text: what comes before it, and what is said where all are too short."""

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.sources import packed
from scripts.benchmarks.sources.registry import Texts
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """Returns two texts of 500 tokens."""
    path, here = tmp_path / "texts.xz", Texts()
    read = {name: here.read(here.first(name)) for name in ("python-topics", "hub-source")}
    packed.write(path, read, dict.fromkeys(read, "free"), load_tokenizer(PAIR / "target"), tokens=500)
    return Texts(path)


def test_a_text_that_is_short_has_others_before_it(script: Any, texts: Texts) -> None:
    made = script("benchmarks.common.long_texts").long_prompts(texts, ["hub-source"], [400, 900])
    short, long = made[400]["hub-source"], made[900]["hub-source"]
    assert (len(short), len(long)) == (400, 900)
    whole = script("benchmarks.common.long_texts").long_prompts(texts, ["documentation", "code"], [500])
    assert short == whole[500]["hub-source"][:400]
    assert long == whole[500]["python-topics"][:400] + whole[500]["hub-source"]


def test_too_few_tokens_are_said_before_anything_is_measured(
    script: Any, texts: Texts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = script("benchmarks.cards.split").main
    with pytest.raises(SystemExit):
        main(["--tiny", "--texts", str(tmp_path / "texts.xz"), "--kinds", "code", "--out", str(tmp_path)])
    assert "have 1,000 tokens, and the prompt 1," in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.xz"]
