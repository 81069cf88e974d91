"""Text on the command line continues the prompt, also where a decoder strips the first space of a text."""

import io
import sys
from pathlib import Path

import pytest

from tests.support.models.scripted import scripted
from tests.support.models.tokenizer_kinds import llama
from tests.support.processes.command_line import last_object, run

PROMPT, ANSWER = "Once upon a", " time there\n  x🎉"
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}Once upon a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("llama"), llama()
    prompt, words = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (PROMPT, PROMPT + ANSWER)
    )
    new = [token for token in dict.fromkeys(words) if token not in prompt]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    scripted(tokenizer, [prompt[-1], *new, end], end).save_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def options(folder: Path) -> list[str]:
    return [
        "--target",
        str(folder),
        "--device",
        "cpu",
        "--temperature",
        "0",
        "--max-new-tokens",
        "40",
        "--json",
    ]


def test_generate(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    code, out, _ = run(capsys, "generate", str(tmp_path / "prompt.txt"), *options(folder))
    assert code == 0
    made = last_object(out)
    assert made["finish_reason"] == "eos"
    assert made["text"].startswith(" time there\n")
    assert made["text"].endswith("🎉"), "the end token is no text"
    assert out.startswith(made["text"] + "\n{")


def test_chat(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\nAnd then?\n"))
    code, out, _ = run(capsys, "chat", *options(folder))
    assert code == 0
    first, second = last_object(out)["turns"]
    assert first["text"].startswith(" time there\n")
    assert second["text"] == first["text"]
    assert out.startswith(first["text"] + "\n" + second["text"] + "\n{")
    extra = second["prompt_tokens"] - first["prompt_tokens"]
    assert extra < 40, "the answer is put back without its end token, which the template adds"
