"""The command line as a person uses it: output, exit codes, bad input, Ctrl-C."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributions.wrong_acceptance import accept_all_proposals
from tests.support.models.tiny_pair import TinyPair
from tests.support.processes.command_line import last_object, run
from triforce_tree import __version__
from triforce_tree.cli import console
from triforce_tree.config import HierarchyConfig


@pytest.mark.parametrize(
    "command",
    [
        ["generate"],
        ["explain"],
        *(["bench", kind] for kind in ("text", "needle", "pg19")),
        ["check"],
        ["demo"],
    ],
)
def test_help_shows_defaults(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert code == 0
    said, defaults = " ".join(out.split()), HierarchyConfig()
    assert f"(default: {defaults.kv_bits})" in said
    # Of what depends on the device, by words.
    said_of = f"{defaults.tree}, on a GPU", "1024 to 32,768 by"
    assert all(f"by default {value}" in said for value in said_of)
    assert "None" not in out


def test_help_imports_no_large_library() -> None:
    program = (
        "import sys; from triforce_tree.cli.entry import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


# Libraries that no text needs, and that take long to import.
NEEDLESS = (
    "aiohttp", "bitsandbytes", "datasets", "gguf", "matplotlib", "pandas", "peft", "pyarrow", "starlette",
    "torchao", "uvicorn", "xgrammar",
)  # fmt: skip


def test_a_command_waits_for_no_needless_library_and_no_garbage_collection(
    pair: TinyPair, prompt: str
) -> None:
    """At the end the process calls the handlers of others, but destroys no objects."""
    argv = ["triforce-tree", "generate", prompt, *pair.options, "--max-new-tokens", "3"]
    program = (
        "import atexit, gc, sys\n"
        f"sys.argv = {argv!r}\n"
        "from triforce_tree.cli.entry import main\n"
        "class Witness:\n"
        "    def __del__(self): print('destroyed')\n"
        "witness, code = Witness(), main()\n"
        "atexit.register(print, 'handled')\n"
        f"print('', sorted(set({NEEDLESS!r}) & sys.modules.keys()))\n"
        "print(gc.isenabled(), gc.get_freeze_count() > len(sys.modules))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [" []", "True True", "handled"]
    assert "leaked" not in done.stderr


def test_an_error_ends_the_process_as_usual() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "triforce_tree", "generate", "--chat", "why?", "--traceback", "--tree", "oak"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: tree='oak'" in done.stderr


def test_public_names_are_listed_before_they_are_loaded() -> None:
    # That they are loaded where they are asked for is seen in all tests that import one of them.
    program = (
        "import sys; import triforce_tree as t\n"
        "print(set(t.__all__) <= set(dir(t)), hasattr(t, 'nothing'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True False False\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1] == f"triforce-tree {__version__}\n"


def test_generate_streams_text_and_ends_with_json(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    code, out, err = run(
        capsys, "generate", prompt, *pair.options, "--max-new-tokens", "30", "--compare", "--json",
        "--levels", "3",
    )  # fmt: skip
    assert code == 0
    text, line = out.rstrip("\n").rsplit("\n", 1)
    result = json.loads(line)
    assert text == result["text"]
    assert result["identical"] is True
    assert result["new_tokens"] <= 30
    assert [level["name"] for level in result["levels"]] == ["draft", "retrieval", "target"]
    assert "what each level did" in err
    assert "tokens identical" in err


def test_the_prompt_may_come_from_stdin(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*pair.options, "--max-new-tokens", "12"]
    from_file = run(capsys, "generate", prompt, *options)
    monkeypatch.setattr("sys.stdin", io.StringIO(Path(prompt).read_text(encoding="utf-8")))
    assert run(capsys, "generate", *options)[:2] == from_file[:2]


def test_sampling_with_a_seed_repeats(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    argv = ["generate", prompt, *pair.options, "--max-new-tokens", "20", "--temperature", "0.9"]
    first, again, other = (run(capsys, *argv, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_stops_and_penalties_are_those_of_python(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str
) -> None:
    argv = ["generate", prompt, *pair.options, "--max-new-tokens", "24", "--levels", "2"]
    whole = run(capsys, *argv)[1].rstrip("\n")
    stop = whole[6:9]
    code, out, _ = run(capsys, *argv, "--stop", "no such words", "--stop", stop, "--dtype", "fp32")
    assert code == 0
    assert stop in out
    assert whole.startswith(out.rstrip("\n"))
    assert len(out) < len(whole)
    penalised = run(capsys, *argv, "--repetition-penalty", "1.8")[1].rstrip("\n")
    text = Path(prompt).read_text(encoding="utf-8")
    expected = pair.load(levels=2).generate(text, max_new_tokens=24, do_sample=False, repetition_penalty=1.8)
    assert penalised == expected.text.rstrip("\n")
    assert penalised != whole


BAD = {
    "no such file": (["generate", "/nowhere.txt"], "/nowhere.txt"),
    "nan temperature": (["generate", "PROMPT", "--temperature", "nan"], "temperature=nan"),
    "top_p": (["generate", "PROMPT", "--top-p", "1.5"], "top_p=1.5"),
    "top_k": (["generate", "PROMPT", "--top-k", "-2"], "top_k=-2"),
    "length penalty alone": (
        ["generate", "PROMPT", "--length-penalty", "2"],
        "--length-penalty is read with --num-beams above 1 alone",
    ),
    "other trees": (
        ["generate", "PROMPT", "--advanced", "other_trees=bush"],
        "other_trees='bush' is no known shape; use chain:4",
    ),
    "nan length penalty": (["generate", "PROMPT", "--length-penalty", "nan"], "nan must be a finite number"),
    "budget": (["generate", "PROMPT", "--budget", "1001"], "budget=1001"),
    "positions": (["generate", "PROMPT", "--max-new-tokens", "5000"], "4096 positions"),
    "mistyped path": (["generate", "PROMPT", "--target", "models/lama"], "no such folder: 'models/lama'"),
    "fraction of a token": (["generate", "PROMPT", "--max-new-tokens", "2.5"], "'2.5' is not a whole number"),
    "equal texts": (["generate", "PROMPT", "--num-return-sequences", "3"], "--temperature above 0, or --num"),
    "long needle": (["bench", "needle", "--lengths", "9", "9999999"], "4096 positions; shorten"),
    "long book": (["bench", "pg19", "--lengths", "200", "9999999"], "4096 positions; shorten"),
    "rows as text": (["bench", "text", "--file", "ROWS"], "rows.jsonl: its suffix is that of a data set"),
    "no data": (["bench", "text", "--dataset", "/nowhere/some.jsonl"], "no such file: '/nowhere/some.jsonl'"),
    "picture": (["bench", "needle", "--plot", "map.xyz"], "'map.xyz' names no image format"),
    "no picture": (["bench", "needle", "--plot", "map"], "'map' names no image format"),
    "unknown option": (["generate", "PROMPT", "--xyz", "9"], "--xyz 9; see triforce-tree generate --help"),
    "long context": (["bench", "text", "--context", "99999999"], "99999999 tokens"),
    "not a file": (["bench", "text", "--out", "/dev/full"], "/dev/full"),
    "short needle": (["bench", "needle", "--lengths", "9"], "length=9"),
    "depth": (["bench", "needle", "--depths", "2"], "between 0"),
    "no network": (["bench", "pg19", "--lengths", "100"], "give a .jsonl, .json, .csv or .parquet file"),
    "no rows": (["bench", "pg19", "--data", "/nowhere.jsonl"], "no such file: '/nowhere.jsonl'"),
    "negative draws": (["check", "--draws", "-1"], "argument --draws: -1 must be at least 0"),
    "demo prompt": (["demo", "--prompt-tokens", "99999999"], "99999999"),
    "demo start": (["demo", "--start", "99999999"], "--start 99999999"),
    "demo without room": (["demo", "--prompt-tokens", "20"], "--prompt-tokens 20 must be more than"),
    "no command": ([], "command"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, tmp_path: Path, case: str
) -> None:
    (rows := tmp_path / "rows.jsonl").touch()
    named = {"PROMPT": prompt, "TARGET": pair.target, "ROWS": str(rows)}
    argv, needed = [named.get(word, word) for word in BAD[case][0]], BAD[case][1]
    more = [] if not argv or "--target" in argv else pair.options[:4]
    code, out, err = run(capsys, *argv, *more)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert needed in err


def test_a_full_disk_is_noticed_before_the_run(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, _, err = run(capsys, "bench", "text", *pair.options, "--out", str(tmp_path / "r.jsonl"))
    assert code == 2
    assert "0.0 MB are free" in err
    assert not (tmp_path / "r.jsonl").exists()


def test_ctrl_c_while_decoding_keeps_the_text(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pieces = console.TextOut.on_finalized_text, list[str]()

    def interrupted(self: console.TextOut, text: str, stream_end: bool = False) -> None:
        write(self, text, stream_end)
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(console.TextOut, "on_finalized_text", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(
        capsys, "generate", prompt, *pair.options, "--max-new-tokens", "500", "--compare", "--json"
    )
    result = last_object(out)
    assert code == 130
    assert result["interrupted"] is True
    assert 0 < result["new_tokens"] < 100
    assert out.startswith(result["text"])
    assert "Ctrl-C" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_during_prefill(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = console.PrefillBar.__call__

    def interrupted(self: console.PrefillBar, tokens: int) -> None:
        signal.raise_signal(signal.SIGINT)
        advance(self, tokens)

    monkeypatch.setattr(console.PrefillBar, "__call__", interrupted)
    code, out, err = run(capsys, "generate", prompt, *pair.options)
    assert code == 130
    assert out == ""
    assert "interrupted" in err


def test_a_second_ctrl_c_ends_at_once() -> None:
    with console.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_check_passes(capsys: pytest.CaptureFixture[str], pair: TinyPair) -> None:
    code, out, err = run(
        capsys, "check", *pair.options, "--lengths", "1", "130", "--new-tokens", "20", "--draws", "40",
        "--contexts", "1", "--context", "33", "--budget", "64", "--advanced", "recent=32",
        "--json",
    )  # fmt: skip
    result = last_object(out)
    assert code == 0
    assert result["passed"] is True
    assert len(result["results"]) == 7
    assert [(r["levels"], r["level"]) for r in result["results"][4:]] == [
        (2, "target"),
        (3, "retrieval"),
        (3, "target"),
    ]
    assert [forward["prompt_tokens"] for forward in result["forwards"]] == [1, 130]
    assert all(forward["error"] < 1e-5 for forward in result["forwards"])
    said = " ".join(err.split())
    assert re.search(
        r"no difference to the target was found; sampling off by 0\.\d\d in total variation", said
    )


def test_check_fails_with_code_1(
    capsys: pytest.CaptureFixture[str], pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fault: every proposal is accepted.
    accept_all_proposals(monkeypatch)
    code, out, err = run(
        capsys, "check", *pair.options, "--lengths", "60", "--new-tokens", "30", "--draws", "0", "--json"
    )
    assert code == 1
    assert last_object(out)["passed"] is False
    assert "FAILED" in err
