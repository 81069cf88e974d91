"""``generate`` with --chat, --messages and --system, and the sampling of a checkpoint."""

import io
import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run
from triforce_tree.cli import chat
from triforce_tree.sessions.session import Session

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
QUESTION = "What does the import statement bind?"
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It binds"}]


@pytest.fixture(scope="module")
def folder(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the target with a chat template, and a generation_config that samples."""
    path = tmp_path_factory.mktemp("instruct") / "target"
    shutil.copytree(pair.target, path)
    for name, more in (
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
        ("generation_config.json", {"do_sample": True, "temperature": 0.25, "top_p": 0.5}),
    ):
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return path


@pytest.fixture
def words(pair: TinyPair, folder: Path) -> list[str]:
    own = ["--target", str(folder), "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", "12"]
    return ["generate", *own, "--json"]


@pytest.fixture(scope="module")
def answered(folder: Path) -> Any:
    engine = triforce_tree.load(folder, device="cpu", levels=1)
    return lambda chat: engine.generate(chat, max_new_tokens=12, temperature=0)


def test_a_question(capsys: pytest.CaptureFixture[str], words: list[str], answered: Any) -> None:
    code, out, _ = run(capsys, *words, "--chat", QUESTION, "--temperature", "0")
    expected = answered(TURNS[:1])
    made = last_object(out)
    assert code == 0
    assert (made["text"], made["new_tokens"]) == (expected.text, expected.new_tokens)
    assert made["prompt_tokens"] == expected.sequences.shape[1] - expected.new_tokens


def test_a_question_about_a_document(
    capsys: pytest.CaptureFixture[str], words: list[str], answered: Any, prompt: str
) -> None:
    system = ["--system", "Answer at once."]
    out = run(capsys, *words, prompt, "--chat", QUESTION, *system, "--temperature", "0")[1]
    document = Path(prompt).read_text(encoding="utf-8").rstrip()
    expected = answered(
        [
            {"role": "system", "content": "Answer at once."},
            {"role": "user", "content": f"{document}\n\n{QUESTION}"},
        ]
    )
    made = last_object(out)
    assert made["text"] == expected.text
    assert made["prompt_tokens"] == expected.sequences.shape[1] - expected.new_tokens > 100


def test_messages_from_a_file(
    capsys: pytest.CaptureFixture[str], words: list[str], answered: Any, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(TURNS))
    out = run(capsys, *words, "--messages", str(file), "--temperature", "0")[1]
    assert last_object(out)["text"] == answered(TURNS).text


BAD: dict[str, tuple[list[str], str]] = {
    "a question and messages": (["--chat", "x", "--messages", "FILE"], "not allowed with argument --chat"),
    "a text and messages": (["PROMPT", "--messages", "FILE"], "the prompt was given twice"),
    "no such file": (["--messages", "/nowhere.json"], "/nowhere.json: No such file"),
    "no JSON": (["--messages", "PROMPT"], "no JSON in UTF-8 (Expecting value"),
    "no message": (["--messages", "FILE", "[]"], "holds no list of messages; give one chat"),
    "an object": (["--messages", "FILE", '{"messages": []}'], "holds no list of messages"),
    "several chats": (["--messages", "FILE", json.dumps([TURNS, TURNS])], "give one chat"),
    "no role": (["--messages", "FILE", '[{"content": "x"}]'], "message 0 of a chat has 'content'"),
    "top_p": (["--chat", "x", "--top-p", "1.5"], "top_p=1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], prompt: str, tmp_path: Path, case: str
) -> None:
    given, needed = BAD[case]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(TURNS))
    if given[-1][0] in "[{":
        file.write_text(given[-1])
        given = given[:-1]
    code, out, err = run(
        capsys, *words, *({"FILE": str(file), "PROMPT": prompt}.get(word, word) for word in given)
    )
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1, err
    assert needed in err


def test_a_chat_needs_a_template(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(capsys, "generate", *pair.options, "--chat", "hello")
    assert (code, out) == (2, "")
    assert "this tokenizer has no chat template" in err


def test_sampling_is_the_checkpoints_own(
    capsys: pytest.CaptureFixture[str], words: list[str], pair: TinyPair, prompt: str
) -> None:
    code, out, err = run(capsys, *words, prompt)
    assert code == 0
    assert last_object(out)["sampling"] == {"temperature": 0.25, "top_p": 0.5, "top_k": 0}
    said = " ".join(err.split())
    assert "as the checkpoint's generation_config says: temperature 0.25, top_p 0.5, top_k 0" in said
    out = run(capsys, *words, prompt, "--temperature", "0.7", "--top-k", "9")[1]
    assert last_object(out)["sampling"] == {"temperature": 0.7, "top_p": 0.5, "top_k": 9}
    _, out, err = run(capsys, *words, prompt, "--temperature", "0")
    assert last_object(out)["sampling"] == {"temperature": 0}
    assert "generation_config" not in err
    out = run(capsys, "generate", prompt, *pair.options, "--max-new-tokens", "3", "--json")[1]
    assert last_object(out)["sampling"] == {"temperature": 0}, "a checkpoint that does not sample is greedy"


LINES = (
    "What does the import statement bind?\n\nAnd a name?\n/save {folder}\n/reset\nWhat is it?\n/quit\nmore\n"
)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pair: TinyPair) -> Any:
    """Runs the command ``chat`` with these lines on stdin."""

    def asked(
        target: object, lines: str, *words: str, stdin: type[io.StringIO] = io.StringIO
    ) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", stdin(lines))
        models = ["--target", str(target), "--draft", pair.draft, "--device", "cpu"]
        settings = ["--levels", "1", "--max-new-tokens", "12", "--temperature", "0", "--json"]
        return run(capsys, "chat", *models, *settings, *words)

    return asked


@pytest.mark.parametrize("templated", [True, False])
def test_a_conversation_about_a_document(
    ask: Any, pair: TinyPair, folder: Path, prompt: str, tmp_path: Path, templated: bool
) -> None:
    target = folder if templated else Path(pair.target)
    saved = tmp_path / "saved"
    code, out, err = ask(target, LINES.format(folder=saved), "--file", prompt)
    assert code == 0, err
    made = last_object(out)
    first, second, third = made["turns"]
    assert [turn["new_tokens"] for turn in made["turns"]] == [12, 12, 12]
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] > first["prompt_tokens"]
    assert second["prompt_tokens"] > third["reused_tokens"] > 100, "the document stays"
    document = Path(prompt).read_text(encoding="utf-8").rstrip()
    engine = triforce_tree.load(target, device="cpu", levels=1)
    asked: Any = f"{document}\n\n{QUESTION}\n"
    if templated:
        asked = [{"role": "user", "content": f"{document}\n\n{QUESTION}"}]
    assert first["text"] == engine.generate(asked, max_new_tokens=12, temperature=0).text
    assert first["text"].strip() in out
    assert f"of {second['prompt_tokens']:,} prompt tokens kept" in " ".join(err.split())
    assert ("cut by --max-new-tokens" in err) is (first["finish_reason"] == "length")
    again = last_object(ask(target, "And then?\n", "--load", str(saved))[1])["turns"][0]
    # Of the last answer the template's text may have other tokens than those that were drawn.
    assert again["reused_tokens"] >= second["prompt_tokens"] - 1


def test_at_a_terminal_a_wrong_line_does_not_end_the_conversation(
    ask: Any, pair: TinyPair, tmp_path: Path
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    (tmp_path / "file").touch()
    code, out, err = ask(
        pair.target,
        f"/save {tmp_path}/s\n/x\n/help\nIt binds\n/save {tmp_path}/file/s\n/save {tmp_path}\nAnd\n/quit\n",
        stdin=Terminal,
    )
    assert code == 0
    assert len(last_object(out)["turns"]) == 2
    said = " ".join(err.split())
    unsaved = (
        f"cannot write a session to '{tmp_path}/file/s' (Not a directory); free some space, or give another"
    )
    others = f"'{tmp_path}' holds files of something else; give a new or an empty folder"
    empty = "the session has no tokens yet"
    for message in (empty, "/x is no command", unsaved, others, "commands: /quit, /reset"):
        assert message in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_terminal_a_wrong_line_loses_nothing(ask: Any, pair: TinyPair, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines = f"It binds\n/save {tmp_path}/file/s\n/x\nAnd\n/save {tmp_path}/s\n"
    code, out, err = ask(pair.target, lines)
    assert code == 2
    assert "/x is no command" in err
    assert len(last_object(out)["turns"]) == 2
    assert (tmp_path / "s").is_dir()


def test_a_full_disk_does_not_end_the_conversation(ask: Any, pair: TinyPair, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        code, out, err = ask(pair.target, f"It binds\n/save {tmp_path}/s\nAnd\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert len(last_object(out)["turns"]) == 2
    said = " ".join(err.split())
    assert f"cannot write a session to '{tmp_path}/s' (File too large); free" in said


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


def _no_host_memory() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    "fail, expected, said",
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted; the conversation goes on"),
        (_out_of_memory, 1, "out of memory (CUDA out of memory. Tried to allocate 2 GiB); the conversation"),
        (_no_host_memory, 1, "out of memory (DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["Ctrl-C", "device memory", "host memory"],
)
def test_a_question_that_ends_while_it_is_read(
    ask: Any, pair: TinyPair, monkeypatch: pytest.MonkeyPatch, fail: Any, expected: int, said: str
) -> None:
    """It is as if it had not been asked."""
    bars: list[chat.PrefillBar] = []

    class Failing(chat.PrefillBar):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            bars.append(self)

        def __call__(self, tokens: int) -> None:
            if len(bars) == 2:
                fail()
            super().__call__(tokens)

    whole = last_object(ask(pair.target, "It binds\nAnd then\n")[1])
    monkeypatch.setattr(chat, "PrefillBar", Failing)
    code, out, err = ask(pair.target, "It binds\nWhy\nAnd then\n")
    assert code == expected
    assert " ".join(err.split()).count(said) == 1
    made = last_object(out)
    assert [turn["question"] for turn in made["turns"]] == ["It binds", "And then"]
    assert [turn["text"] for turn in made["turns"]] == [turn["text"] for turn in whole["turns"]]
    assert made["tokens"] == whole["tokens"]


def test_other_errors_end_the_chat(ask: Any, pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Session, "generate", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        ask(pair.target, "It binds\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_at_the_prompt_ends_the_chat_with_its_turns(ask: Any, pair: TinyPair, terminal: bool) -> None:
    class Interrupted(io.StringIO):
        def isatty(self) -> bool:
            return terminal

        def readline(self, size: int | None = -1, /) -> str:
            return super().readline(-1) or self._press()

        def __next__(self) -> str:
            return self.readline()

        def _press(self) -> str:
            raise KeyboardInterrupt

    code, out, err = ask(pair.target, "It binds\n", stdin=Interrupted)
    assert code == 130
    assert [turn["question"] for turn in last_object(out)["turns"]] == ["It binds"]
    assert err.splitlines()[-1].endswith("interrupted")


BAD_CHATS: dict[str, tuple[list[str], str, str]] = {
    "a command": ([], "/nothing\n", "/nothing is no command; there are /quit, /reset, /save FOLDER"),
    "no folder": (["--load", "/nowhere"], "x\n", "no such folder: '/nowhere'; give one that /save wrote"),
    "both": (["--load", "/nowhere", "--system", "x"], "x\n", "--load continues a saved conversation"),
    "no template": (["--system", "x"], "x\n", "--system needs a tokenizer with a chat template"),
}


@pytest.mark.parametrize("case", BAD_CHATS)
def test_bad_chats(ask: Any, pair: TinyPair, case: str) -> None:
    words, lines, message = BAD_CHATS[case]
    code, _, err = ask(pair.target, lines, *words)
    assert code == 2
    assert message in err
