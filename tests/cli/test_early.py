"""Commands are refused before torch is imported, within two seconds, in one line."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_pair import TinyPair

# A torch whose import fails, in the first place that Python looks at.
TORCH = "raise RuntimeError('torch was imported')\n"
# Runs each of the commands in argv[1] and writes what came of it.
PROGRAM = """
import contextlib, io, json, sys, time
from triforce_tree.cli.entry import main
found = {}
for name, (argv, stdin) in json.loads(sys.argv[1]).items():
    out, err, start = io.StringIO(), io.StringIO(), time.perf_counter()
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode("latin-1")), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code, _ = repr(error), None
    imported = sorted({"torch", "transformers"} & sys.modules.keys())
    found[name] = [code, out.getvalue(), err.getvalue(), time.perf_counter() - start, imported]
print(json.dumps(found))
"""
# Seconds: a CI machine may be busy.
MOST = 2.0 * 4
WEIGHTS = "model.safetensors"
LOST = b'{"peft_type": "LORA", "base_model_name_or_path": "./nowhere"}'

# Words with TARGET, DRAFT, TEXT and so on for the files below, and a part of the error.
CASES: dict[str, tuple[list[str], str]] = {
    "schema that cannot be enforced": (
        ["generate", "TEXT", "--target", "TARGET", "--json-schema", "SCHEMA"], "the schema has 'not', which",
    ),
    "schema that is no JSON": (
        ["generate", "TEXT", "--target", "TARGET", "--json-schema", "TEXT"], "is not JSON",
    ),
    "empty expression": (["generate", "TEXT", "--target", "TARGET", "--regex", ""], "expression is ''; give"),
    "new tokens for a gguf file": (
        ["generate", "TEXT", "--target", "UNREAD", "--max-new-tokens", "9999"], "4096 positions",
    ),
    "new tokens alone": (
        ["generate", "TEXT", "--target", "NAMELESS", "--max-new-tokens", "9999"], "4096 positions",
    ),
    "long demo": (["demo", "--target", "TARGET"], "12288 prompt tokens + 192 new ones"),
    "long check": (["check", "--lengths", "5", "5000", "--target", "TARGET"], "5000 prompt tokens"),
    "long bench": (["bench", "text", "--target", "TARGET"], "8192 prompt tokens"),
    "short text": (["bench", "text", "--file", "TEXT", "--context", "900"], "from a text of"),
    "port in use": (["serve", "--port", "PORT", "--target", "TARGET"], "PORT (Address already in use)"),
    "no such host": (["serve", "--host", "no-such-host.invalid"], "listen at no-such-host.invalid:8000"),
    "not our address": (["serve", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1:8000"),
    "no such port": (["serve", "--port", "99999"], "--port 99999 must be at most 65535"),
    "empty key": (["serve", "--api-key", " "], "--api-key is empty"),
    "body": (["serve", "--max-body", "much"], "much"),
    "no file": (["generate", "Once upon a time"], "echo 'some text' | triforce-tree generate -"),
    "no messages": (["generate", "--messages", "NOWHERE"], "No such file"),
    "messages of another form": (["generate", "--messages", "CONFIG"], "holds no list of messages"),
    "empty prompt": (["generate", "EMPTY"], "holds no text"),
    "only a mark": (["generate", "MARK"], "holds no text"),
    "binary prompt": (["generate", "BINARY"], "is not UTF-8"),
    "utf-16 without a mark": (["generate", "WIDE"], "is not UTF-8 text (many of its bytes are zero)"),
    "empty stdin": (["generate", "-"], "the prompt on stdin is empty"),
    "empty question": (["generate", "--chat", " "], "--chat is empty"),
    "system alone": (["generate", "TEXT", "--system", "be brief"], "--system belongs to --chat"),
    "temperature": (["generate", "TEXT", "--temperature", "-1"], "temperature=-1.0"),
    "top-p": (["chat", "--top-p", "2"], "top_p=2.0"),
    "min-p": (["generate", "TEXT", "--min-p", "7"], "min_p=7.0 must lie in [0, 1]"),
    "penalty": (["generate", "TEXT", "--repetition-penalty", "0"], "repetition_penalty=0.0"),
    "empty stop": (["generate", "TEXT", "--stop", ""], "--stop is empty"),
    "greedy check": (["check", "--temperature", "0"], "temperature=0.0 must be above 0"),
    "tree": (["generate", "TEXT", "--tree", "oak"], "tree='oak'"),
    "tree file": (["generate", "TEXT", "--tree", "/nowhere/tree.json"], "there is no such file"),
    "tree of nothing": (
        ["generate", "TEXT", "--target", "TARGET", "--drafter", "lookup", "--tree", "chain:3"],
        "suffix matching proposes chains",
    ),
    "budget": (["explain", "TEXT", "--budget", "10"], "use budget>=264"),
    "gpu memory": (["generate", "TEXT", "--gpu-memory", "lots"], "lots"),
    "both": (["generate", "TEXT", "--exact", "--kv-bits", "8"], "exact=True does not work with kv_bits=8"),
    "device": (["generate", "TEXT", "--device", "abacus"], "device='abacus' is unknown"),
    "dtype": (["generate", "TEXT", "--dtype", "fp8"], "invalid choice: 'fp8'"),
    "draft and lookup": (
        ["generate", "TEXT", "--draft", "DRAFT", "--target", "TARGET", "--drafter", "lookup"],
        "uses no draft model, and one was given",
    ),
    "drafter": (["generate", "TEXT", "--drafter", "modle"], "did you mean 'model'?"),
    "heads without files": (["generate", "TEXT", "--drafter", "FOLDER"], "holds no trained drafter"),
    "no folder": (["generate", "TEXT", "--target", "./nowhere"], "no such folder: './nowhere'"),
    "no draft": (["bench", "text", "--draft", "./nowhere"], "no such folder: './nowhere'"),
    "no tokenizer": (["generate", "TEXT", "--tokenizer", "./nowhere"], "no such folder: './nowhere'"),
    "mistyped folder": (["generate", "TEXT", "--target", "a/b/c"], "'a/b/c', nor is it a hub id"),
    "file for a folder": (["generate", "TEXT", "--target", "TEXT"], "is a file, not a folder"),
    "no configuration": (["generate", "TEXT", "--target", "FOLDER"], "has no config.json"),
    "no weights": (["generate", "TEXT", "--target", "BARE"], "holds no weights"),
    "missing shard": (["generate", "TEXT", "--target", "SHARDS"], "lacks model-2.safetensors"),
    "cut weights": (["generate", "TEXT", "--target", "CUT"], "corrupt (model.safetensors: it has"),
    "adapter without weights": (["generate", "TEXT", "--target", "ADAPTER"], "no adapter_model.safetensors"),
    "adapter without its base": (["serve", "--target", "LOST"], "the base model './nowhere' of the adapter"),
    "unknown kind": (["generate", "TEXT", "--target", "KIND"], "model_type='lama', which this release"),
    "encoder": (["generate", "TEXT", "--target", "ENCODER"], "is an encoder-decoder model (t5)"),
    "no gguf": (["generate", "TEXT", "--target", "nowhere.gguf"], "no such file: 'nowhere.gguf'"),
    "false gguf": (["generate", "TEXT", "--target", "GGUF"], "is no GGUF file"),
    "one gguf of a folder": (["generate", "TEXT", "--target", "ONE"], "model.gguf' is no GGUF file"),
    "several gguf": (["generate", "TEXT", "--target", "TWO"], "GGUF files (a.gguf, b.gguf); name one"),
    "gguf without a folder": (["generate", "TEXT", "--gguf-file", "m.gguf"], "needs a target"),
    "out": (["bench", "text", "--out", "/nowhere/x.jsonl"], "its folder is missing"),
    "out of a folder": (["bench", "needle", "--out", "FOLDER"], "is not an ordinary file"),
    "plot": (["bench", "needle", "--plot", "/nowhere/m.png"], "its folder is missing"),
    "no saved chat": (["chat", "--load", "/nowhere"], "no such folder: '/nowhere'"),
    "two beginnings": (["chat", "--load", "FOLDER", "--file", "TEXT"], "leave out --file and --system"),
    "data set": (["check", "--dataset", "/nowhere.jsonl"], "no such file: '/nowhere.jsonl'"),
    "mistyped option": (["generate", "TEXT", "--temprature", "1"], "did you mean --temperature?"),
    "mistyped choice": (["bench", "text", "--methods", "triforc"], "triforc"),
    "mistyped command": (["genrate", "TEXT"], "genrate"),
    "levels": (["generate", "TEXT", "--levels", "4"], "'4' is none of"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("early")
    target = Path(pair.target)
    text = Path(pair.text).read_text(encoding="utf-8")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    weights = (target / "model.safetensors").read_bytes()

    def model(name: str, change: dict[str, Any], content: Mapping[str, bytes] = {}) -> str:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
        for file, held in content.items():
            (folder / name / file).write_bytes(held)
        return str(folder / name)

    def file(name: str, content: bytes) -> str:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return str(folder / name)

    def gguf(name: str, **metadata: int) -> str:
        """Writes the header of a GGUF file that no machine has loaded, and returns its path."""
        content = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata))
        for key, value in metadata.items():
            named = key.replace("__", ".").encode()
            content += struct.pack("<Q", len(named)) + named + struct.pack("<II", 4, value)
        return file(name, content)

    shards = model("shards", {})
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    file("shards/model.safetensors.index.json", json.dumps(index).encode())
    file("shards/model-1.safetensors", weights)
    for name in ("empty/keep.txt", "one/model.gguf", "two/a.gguf", "two/b.gguf"):
        file(name, b"GGML")
    return {
        "TARGET": pair.target,
        "DRAFT": pair.draft,
        "TEXT": file("text.txt", text[:600].encode()),
        "SCHEMA": file("schema.json", b'{"type": "integer", "not": {"const": 3}}'),
        "CONFIG": str(target / "config.json"),
        "EMPTY": file("blank.txt", b" \n"),
        "MARK": file("mark.txt", b"\xef\xbb\xbf\n"),
        "BINARY": file("binary.bin", b"\xff\xfe\x00"),
        "WIDE": file("wide.txt", "some words".encode("utf-16-le")),
        "FOLDER": str(folder / "empty"),
        "BARE": model("bare", {}),
        "NAMELESS": model("nameless", {}, {WEIGHTS: weights}),
        "SHARDS": shards,
        "CUT": model("cut", {}, {WEIGHTS: weights[:-100]}),
        "ADAPTER": model("adapter", {}, {"adapter_config.json": b"{}", WEIGHTS: weights}),
        "LOST": model("lost", {}, {"adapter_config.json": LOST, "adapter_model.safetensors": weights}),
        "KIND": model("kind", {"model_type": "lama"}, {WEIGHTS: weights}),
        "ENCODER": model("encoder", {"model_type": "t5", "is_encoder_decoder": True}),
        "GGUF": str(folder / "one" / "model.gguf"),
        "ONE": str(folder / "one"),
        "TWO": str(folder / "two"),
        "UNREAD": gguf("unread.gguf", llama__context_length=4096),
        "NOWHERE": str(folder / "nowhere"),
    }


@pytest.fixture(scope="module")
def found(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Returns exit code, stdout, stderr, seconds and imported libraries of each case, all in one process."""
    first = tmp_path_factory.mktemp("first")
    (first / "torch").mkdir()
    (first / "torch" / "__init__.py").write_text(TORCH, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), root]), "HF_HUB_OFFLINE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        named = {**files, "PORT": str(taken.getsockname()[1])}
        commands = {name: ([named.get(w, w) for w in words], "") for name, (words, _) in CASES.items()}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(commands)],
            capture_output=True, text=True, env=env, cwd=first, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, list[Any]] = json.loads(done.stdout)
    result["PORT"] = [named["PORT"]]
    return result


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_torch_is_imported(found: dict[str, list[Any]], case: str) -> None:
    code, out, err, seconds, imported = found[case]
    assert (code, out) == (2, ""), err
    assert CASES[case][1].replace("PORT", found["PORT"][0]) in err
    assert len(err.strip().splitlines()) == 1
    assert imported == []
    assert seconds < MOST
