"""Every option exists in Python and on the command line, under one name and with one default."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import triforce_tree
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.cli import arguments, groups, options
from triforce_tree.config import ADVANCED, SHOWN, HierarchyConfig
from triforce_tree.loading import drafter_choice

# Functions.
PYTHON_ONLY = {"select_chunks", "pinned"}
# Of `generate` itself, and of the command line.
NOT_OF_LOAD = {
    "prompt", "chat", "messages", "system", "max_new_tokens", "compare", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "stop", "json_schema", "regex",
    "num_beams", "num_return_sequences", "length_penalty", "seed", "json", "traceback", "help",
}  # fmt: skip


def actions(*command: str) -> Iterator[argparse.Action]:
    """Returns the actions of one command's parser."""
    parser: argparse.ArgumentParser = arguments.parser()
    for name in command:
        [subparsers] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = subparsers.choices[name]
    return iter(parser._actions)


def python_options() -> dict[str, object]:
    """Arguments of ``load`` with their defaults, the options of the settings among them."""
    own = inspect.signature(triforce_tree.load).parameters.values()
    named = {p.name: p.default for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD}
    defaults = HierarchyConfig().as_options()
    assert not named.keys() & defaults.keys()
    return {**named, **{name: defaults[name] for name in SHOWN}, "advanced": {}}


def test_generate_has_every_option_of_load() -> None:
    flags = {a.dest: a.option_strings for a in actions("generate") if a.dest not in NOT_OF_LOAD}
    assert flags.keys() == python_options().keys() - PYTHON_ONLY
    for name, strings in flags.items():
        flag = name.replace("_", "-")
        assert strings in ([f"--{flag}"], [f"--{flag}", f"--no-{flag}"])


def test_their_defaults_are_the_same() -> None:
    args, defaults = arguments.parser().parse_args(["generate"]), python_options()
    assert args.given == frozenset()
    assert {name: getattr(args, name) for name in defaults.keys() - PYTHON_ONLY} == {
        name: value for name, value in defaults.items() if name not in PYTHON_ONLY
    }


@pytest.mark.parametrize(
    "command",
    [
        ["generate"],
        ["chat"],
        ["explain"],
        *(["bench", kind] for kind in ("text", "needle", "pg19")),
        ["check"],
        ["demo"],
    ],
)
def test_every_command_has_the_options_of_the_hierarchy(command: list[str]) -> None:
    wanted = {*SHOWN, "advanced", "target", "draft", "tokenizer"}
    assert {a.dest for a in actions(*command)} >= wanted


def test_the_names_of_drafters_are_the_same() -> None:
    assert groups.DRAFTERS == drafter_choice.DRAFTERS


GIVEN = {
    "levels": ("2", 2), "tree": ("chain:3", "chain:3"), "budget": ("64", 64), "kv_bits": ("8", 8),
    "retrieval_weight_bits": ("8", 8),
}  # fmt: skip
GIVEN_ADVANCED = {
    "attention_backend": ("cpu", "cpu"),
    "gamma": ("5", 5), "other_trees": ("chain:2 best-first:2,2", ("chain:2", "best-first:2,2")),
    "rounds": ("2", 2), "runner_ups": ("true", True), "chunk": ("16", 16), "tail_tree": ("true", True),
    "recent": ("32", 32), "refresh": ("0", 0), "sinks": ("2", 2), "window": ("64", 64),
    "prefill_chunk": ("128", 128), "key_variance": ("true", True), "prefix_cache": ("2GiB", "2GiB"),
    "context_parallel": ("1", 1), "host_attention": ("false", False),
    "offload_weights": ("false", False),
}  # fmt: skip


def test_options_reach_the_engine(pair: TinyPair) -> None:
    words = ["generate", *pair.options, "--tokenizer", pair.draft]
    for name, (word, _) in GIVEN.items():
        words += [f"--{name.replace('_', '-')}", word]
    for name, (word, _) in GIVEN_ADVANCED.items():
        words += ["--advanced", f"{name}={word}"]
    engine = options.engine_of(arguments.parser().parse_args(words))
    # ``exact`` and a cache in host memory do not go with ``kv_bits``.
    assert GIVEN.keys() | {"offload", "gpu_memory", "host_memory", "exact"} == set(SHOWN)
    assert GIVEN_ADVANCED.keys() | PYTHON_ONLY - {"pinned"} == set(ADVANCED)
    found, given = engine.config.as_options(), GIVEN | GIVEN_ADVANCED
    assert {name: found[name] for name in given} == {name: value for name, (_, value) in given.items()}
    assert engine.tokenizer is not None
    assert Path(engine.tokenizer.name_or_path) == Path(pair.draft)


def test_exact_reaches_the_engine(pair: TinyPair) -> None:
    words = ["generate", "--target", pair.target, "--device", "cpu", "--exact"]
    engine = options.engine_of(arguments.parser().parse_args(words))
    assert engine.config.exact is True


def test_bits_of_level_1_can_be_auto(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--target", pair.target, "--device", "cpu", "--retrieval-weight-bits"]
    engine = options.engine_of(arguments.parser().parse_args([*words, "auto"]))
    assert engine.config.retrieval_weight_bits == "auto"
    with pytest.raises(SystemExit):
        arguments.parser().parse_args([*words, "5"])
    assert "'5' is none of 16, 8, 4, auto" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["offload", "exact"])
def test_switches_can_be_turned_off(name: str) -> None:
    args = arguments.parser().parse_args(["generate", f"--no-{name}"])
    assert getattr(args, name) is False
    assert args.given == {name}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "2"], "(write --advanced rounds=VALUE)"),
        (["--no-prefix-cache"], "(write --advanced prefix_cache=false)"),
        (["--advanced", "rouns=2"], "unknown advanced option 'rouns'; did you mean 'rounds'?"),
        (["--advanced", "rounds"], "'rounds' has no value; write NAME=VALUE"),
        (["--advanced", "budget=64"], "'budget' is no advanced option; give budget='64' beside advanced"),
        (["--advanced", "select_chunks=x"], "select_chunks is a function"),
    ],
)
def test_options_in_the_wrong_place_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments.parser().parse_args(["generate", *words])
    assert said in capsys.readouterr().err


def test_load_says_where_an_option_belongs() -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"rounds": 2}, r"'rounds' is an advanced option; give advanced=\{'rounds': 2\}"),
        ({"advanced": {"levels": 2}}, "'levels' is no advanced option; give levels=2 beside advanced"),
        ({"advanced": {"gama": 2}}, "unknown advanced option 'gama'; did you mean 'gamma'?"),
        ({"advanced": 2}, "advanced=2 must be a dict"),
        ({"advanced": {"gamma": "x"}}, "gamma='x' must be an integer"),
    ]
    for given, said in wrong:
        for call in (triforce_tree.load, triforce_tree.custom_generate):
            with pytest.raises(ValueError, match=said):
                call(**given)


DOCUMENTED = {"options.md": SHOWN, "advanced.md": ADVANCED}


@pytest.mark.parametrize("page", DOCUMENTED)
def test_each_option_has_its_line_in_the_documents(page: str) -> None:
    lines = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8").splitlines()
    names = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert names == list(DOCUMENTED[page])
