"""``load`` and ``generate`` refuse options and prompts before weights are read."""

import json
import re
import shutil
from pathlib import Path

import pytest

import triforce_tree
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.config import load_arguments


@pytest.fixture(scope="module")
def weightless(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model folder with unreadable weights, so that reading them would raise another error."""
    folder = tmp_path_factory.mktemp("weightless")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(pair.target) / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": 5}, "unknown option 'budgets'; did you mean 'budget'?"),
        ({"device_map": "auto"}, "unknown option 'device_map'; give device='cuda'"),
        ({"load_in_4bit": True}, "retrieval_weight_bits=4"),
        ({"torch_dtype": "bfloat16"}, "its name is dtype here"),
        ({"trust_remote_code": True}, "load the model yourself and give the object"),
        ({"revision": "main"}, "snapshot_download"),
        ({"temperature": 1}, "give it to generate(...)"),
        ({"tokeniser": "x"}, "did you mean 'tokenizer'?"),
        ({"levels": "atuo"}, "did you mean 'auto'?"),
        ({"levels": "3"}, "did you mean 3?"),
        ({"tree": "cahin:3"}, "did you mean 'chain'?"),
        ({"dtype": "bf17"}, "did you mean 'bf16'?"),
        ({"draft": "./nowhere"}, "no such folder: './nowhere'"),
    ],
)
def test_load_refuses_before_it_reads_weights(
    options: dict[str, object], words: str, weightless: Path
) -> None:
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        triforce_tree.load(weightless, **load_arguments(options))


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ("hello " * 5000, {}, "4096 positions"),
        ([{"role": "user", "content": "hello " * 5000}], {}, "4096 positions"),
        (["hi", "hello " * 5000], {}, "4096 positions"),
        ("hello", {"max_new_tokens": 5000}, "5000 new ones"),
        ("hello", {"budgets": 5}, "did you mean 'budget'?"),
        ("hello", {"max_tokens": 5}, "its name is max_new_tokens here"),
        ("hello", {"temprature": 1}, "did you mean temperature?"),
        ("hello", {"top_p": 5}, "top_p=5 must lie"),
        ("hello", {"min_p": 5}, "min_p=5 must lie"),
        ("hello", {"repetition_penalty": 0}, "repetition_penalty=0"),
        ("hello", {"stop_strings": [""]}, "at least one character"),
        ("hello", {"seed": "a"}, "seed='a'"),
    ],
)
def test_generate_refuses_before_it_reads_weights(
    inputs: object, options: dict[str, object], words: str, weightless: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        triforce_tree.generate(inputs, weightless, **options)
