"""The file of options that ``serve`` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from triforce_tree.cli.arguments import parser
from triforce_tree.cli.entry import main

VALUES: dict[str, Any] = {
    "port": 8123, "max_batch": 2, "model-name": "--name", "levels": 1, "exact": True, "offload": False,
    "json": False, "allowed-origins": ["http://a", "http://b"],
    "advanced": {"gamma": 4, "prefix_cache": "1GiB", "tail_tree": True},
}  # fmt: skip
WORDS = [
    "--port", "8123", "--max-batch", "2", "--model-name=--name", "--levels", "1", "--exact", "--no-offload",
    "--allowed-origins", "http://a", "http://b", "--advanced", "gamma=4", "--advanced", "prefix_cache=1GiB",
    "--advanced", "tail_tree=true",
]  # fmt: skip
TOML = """
port = 8123
max_batch = 2
model-name = "--name"
levels = 1
exact = true
offload = false
json = false
allowed-origins = ["http://a", "http://b"]
[advanced]
gamma = 4
prefix_cache = "1GiB"
tail_tree = true
"""


def parsed(*words: str) -> dict[str, Any]:
    found = vars(parser().parse_args(["serve", *words]))
    return {name: value for name, value in found.items() if name != "config"}


def written(folder: Path, text: str, name: str = "serve.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("serve.toml", TOML), ("serve.yaml", yaml.safe_dump(VALUES)), ("serve.yml", json.dumps(VALUES))],
)
def test_a_file_has_the_options_of_the_command_line(tmp_path: Path, name: str, text: str) -> None:
    assert parsed("--config", written(tmp_path, text, name)) == parsed(*WORDS)


def test_options_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, yaml.safe_dump(VALUES))
    more = ["--port", "9", "--no-exact", "--advanced", "gamma=5", "--allowed-origins", "http://c"]
    for words in ([*more, "--config", path], ["--config", path, *more], [f"--conf={path}", *more]):
        assert parsed(*words) == parsed(*WORDS, *more)


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    assert parsed("--config", written(tmp_path, "# nothing yet\n")) == parsed()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 3", "unknown option 'prot' (did you mean port?)"),
        ("config: a.yaml", "unknown option 'config'"),
        ("port: 0", "argument --port: 0 must be at least 1"),
        ("port: [1]", "port must be one text or number, not [1]"),
        ("port: true", "port must be one text or number, not True"),
        ("exact: 1", "exact must be true or false, not 1"),
        ("advanced: gamma=8", "advanced must have options by name, as in gamma: 8, not 'gamma=8'"),
        ("advanced: {gama: 8}", "unknown advanced option 'gama'; did you mean 'gamma'?"),
        ("max-batch: 1\nmax_batch: 2", "max-batch is given twice; leave one out"),
        ("- port", "has no options by name; write lines such as port: 8000"),
        ("port: [1", "is no YAML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--config", path])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert path in line
    assert said in line


@pytest.mark.parametrize(("name", "said"), [("none.yaml", "No such file"), ("serve.ini", "ends in none of")])
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(tmp_path / name)])
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
