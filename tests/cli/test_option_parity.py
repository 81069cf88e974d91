"""Every option exists in Python and on the command line, under one name and with one default."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import triforce_tree
from tests.support.models.tiny_pair import TinyPair
from triforce_tree.cli import arguments, groups, options
from triforce_tree.config import HierarchyConfig
from triforce_tree.generation import drafter_choice

# Functions.
PYTHON_ONLY = {"select_chunks", "pinned"}
# Of `generate` itself, and of the command line.
NOT_OF_LOAD = {
    "prompt", "chat", "messages", "system", "max_new_tokens", "compare", "temperature", "top_p", "top_k",
    "min_p", "repetition_penalty", "stop",
    "num_beams", "num_return_sequences", "length_penalty", "seed", "json", "traceback", "help",
}  # fmt: skip


def actions(*command: str) -> Iterator[argparse.Action]:
    """Of one command's parser."""
    parser: argparse.ArgumentParser = arguments.parser()
    for name in command:
        [subparsers] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        parser = subparsers.choices[name]
    return iter(parser._actions)


def python_options() -> dict[str, object]:
    """Options of ``load`` with their defaults."""
    own = inspect.signature(triforce_tree.load).parameters.values()
    named = {p.name: p.default for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert not named.keys() & HierarchyConfig().as_options().keys()
    return named | HierarchyConfig().as_options()


def test_generate_has_every_option_of_load() -> None:
    flags = {a.dest: a.option_strings for a in actions("generate") if a.dest not in NOT_OF_LOAD}
    assert flags.keys() == python_options().keys() - PYTHON_ONLY
    for name, strings in flags.items():
        flag = name.replace("_", "-")
        assert strings in ([f"--{flag}"], [f"--{flag}", f"--no-{flag}"])


def test_their_defaults_are_the_same() -> None:
    args, defaults = arguments.parser().parse_args(["generate"]), python_options()
    assert args.given == frozenset()
    for name in defaults.keys() - PYTHON_ONLY:
        own = getattr(args, name)
        # An option of memory that is not given is not handed to load.
        assert own == defaults[name] or (own is None and name in groups.MEMORY_OPTIONS), name


@pytest.mark.parametrize(
    "command",
    [
        ["generate"],
        ["chat"],
        ["explain"],
        *(["bench", kind] for kind in ("text", "needle", "ruler", "pg19", "longbench")),
        ["check"],
        ["demo"],
    ],
)
def test_every_command_has_the_options_of_the_hierarchy(command: list[str]) -> None:
    assert {a.dest for a in actions(*command)} >= set(groups.ENGINE_OPTIONS) | {
        "target",
        "draft",
        "tokenizer",
    }
    of_all = HierarchyConfig().as_options().keys() - PYTHON_ONLY
    assert set(groups.ENGINE_OPTIONS) | set(groups.MEMORY_OPTIONS) == of_all


def test_the_names_of_drafters_are_the_same() -> None:
    assert groups.DRAFTERS == drafter_choice.DRAFTERS


GIVEN = {
    "levels": ("2", 2), "gamma": ("5", 5), "tree": ("chain:3", "chain:3"),
    "other_trees": ("chain:2 best-first:2,2", ("chain:2", "best-first:2,2")),
    "rounds": ("2", 2), "runner_ups": (None, True), "budget": ("64", 64), "chunk": ("16", 16),
    "tail_tree": (None, True),
    "recent": ("32", 32), "refresh": ("0", 0), "retrieval_weight_bits": ("8", 8), "sinks": ("2", 2),
    "window": ("64", 64), "prefill_chunk": ("128", 128), "kv_bits": ("8", 8), "key_variance": (None, True),
    "prefix_cache": ("2GiB", "2GiB"),
}  # fmt: skip


def test_options_reach_the_engine(pair: TinyPair) -> None:
    words = ["generate", *pair.options, "--tokenizer", pair.draft]
    for name, (word, _) in GIVEN.items():
        words += [f"--{name.replace('_', '-')}"] + ([word] if word else [])
    engine = options.engine_of(arguments.parser().parse_args(words))
    # ``exact`` does not go with ``kv_bits``.
    assert GIVEN.keys() | {"lookup", "exact"} == set(groups.ENGINE_OPTIONS)
    found = engine.hierarchy.config.as_options()
    assert {name: found[name] for name in GIVEN} == {name: value for name, (_, value) in GIVEN.items()}
    assert engine.tokenizer is not None
    assert Path(engine.tokenizer.name_or_path) == Path(pair.draft)


def test_exact_reaches_the_engine(pair: TinyPair) -> None:
    words = ["generate", "--target", pair.target, "--device", "cpu", "--exact"]
    engine = options.engine_of(arguments.parser().parse_args(words))
    assert engine.hierarchy.config.exact is True


def test_bits_of_level_1_can_be_auto(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--target", pair.target, "--device", "cpu", "--retrieval-weight-bits"]
    engine = options.engine_of(arguments.parser().parse_args([*words, "auto"]))
    assert engine.hierarchy.config.retrieval_weight_bits == "auto"
    with pytest.raises(SystemExit):
        arguments.parser().parse_args([*words, "5"])
    assert "'5' is none of 16, 8, 4, auto" in capsys.readouterr().err


def test_lookup_reaches_an_engine_without_a_draft(pair: TinyPair) -> None:
    words = ["generate", "--target", pair.target, "--device", "cpu", "--lookup", "3"]
    engine = options.engine_of(arguments.parser().parse_args(words))
    assert engine.hierarchy.config.lookup == 3


@pytest.mark.parametrize(
    "name", ["offload", "offload_weights", "host_attention", "runner_ups", "tail_tree", "prefix_cache"]
)
def test_switches_can_be_turned_off(name: str) -> None:
    args = arguments.parser().parse_args(["generate", f"--no-{name.replace('_', '-')}"])
    assert getattr(args, name) is False
    assert args.given == {name}


def test_prefix_cache_is_a_switch_or_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = arguments.parser().parse_args(["generate", "--prefix-cache"])
    assert parsed.prefix_cache is True
    assert parsed.given == {"prefix_cache"}
    with pytest.raises(SystemExit):
        arguments.parser().parse_args(["generate", "--no-prefix-cache", "2GiB"])
    assert "--no-prefix-cache takes no size; leave 2GiB out" in capsys.readouterr().err
