"""Commands, code, links and the index of README.md, CONTRIBUTING.md and docs/ are true of this tree."""

import pkgutil
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import triforce_tree
from scripts.benchmarks.registry import BENCHMARKS
from scripts.checks.guides import BLOCK
from tests.support.processes.processes import environment
from triforce_tree.cli.arguments import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
INLINE = re.compile(r"`((?:triforce-tree|python -m) [^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(text: str) -> list[str]:
    """Lines of blocks without a language, and commands between backticks."""
    blocks = [block for language, block in BLOCK.findall(text) if language in ("", "sh", "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    outside = BLOCK.sub("", text)
    return [line.strip() for line in lines] + [found.replace("\n", " ") for found in INLINE.findall(outside)]


def check(command: str) -> bool:
    """Returns whether it is a command of this project; raises AssertionError if it would be refused."""
    if not re.match(r"(\w+=\S+ )*(\.venv/bin/)?(triforce-tree|python|make|torchrun)\b", command):
        return False
    words = shlex.split(command, comments=True)
    while "=" in words[0]:
        words.pop(0)
    # Under torchrun each process runs what follows its own options.
    if words[0] == "torchrun" and "-m" in words:
        words = ["python", *words[words.index("-m") :]]
    for end in ("|", ">", "&"):
        words = words[: words.index(end)] if end in words else words
    program, *given = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert {word for word in given if "=" not in word} <= set(targets), command
    elif program.endswith("triforce-tree") or given[:2] == ["-m", "triforce_tree"]:
        given = given[2:] if given[:1] == ["-m"] else given
        assert not _exit_code(given), f"{command}: refused"
    elif given[:1] == ["-m"]:
        assert find_spec(given[1]) is not None, f"{command}: no such module"
        if given[1] == "scripts.benchmarks" and len(given) > 2 and given[2] != "NAME":
            assert given[2] in BENCHMARKS, f"{command}: no such benchmark"
    elif given and not given[0].startswith("-"):
        assert (ROOT / given[0]).is_file(), f"{command}: no such file"
    return True


def _exit_code(words: list[str]) -> object:
    """Returns the exit code of the command line's parser, 0 for a command that it takes."""
    try:
        parser().parse_args(words)
    except SystemExit as end:  # of --help, too
        return end.code
    return 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse_and_code_compiles(page: Path) -> None:
    text = page.read_text("utf-8")
    checked = [command for command in commands(text) if check(command)]
    for language, block in BLOCK.findall(text):
        if language == "python":
            compile(block, str(page), "exec")
    assert checked or page.parent.name != "guides"


def test_a_wrong_command_is_noticed() -> None:
    for wrong in (
        "triforce-tree generate book.txt --speed 9",
        "triforce-tree dance",
        "make coffee",
        "python -m scripts.benchmarks nothing",
        "python -m scripts.nothing",
        "python examples/nothing.py",
    ):
        with pytest.raises((AssertionError, ModuleNotFoundError)):
            check(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text("utf-8"))
    here = [target for target in targets if "://" not in target]
    missing = [target for target in here if not (page.parent / target).exists()]
    assert not missing


WRITTEN = re.compile(r"(?:> |--out |--plot |\.save\(\")(?!docs/|texts\.json)([a-z][\w./-]*)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "log"], ids=lambda p: p.stem)
def test_files_that_pages_name_are_there(page: Path) -> None:
    named = re.findall(r"`((?:docs|examples|scripts|tests|triforce_tree)/[\w/.-]+)`", page.read_text("utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_what_commands_write_into_a_checkout_is_ignored_by_git() -> None:
    pages = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs/guides")]
    pages += [ROOT / "docs" / name for name in ("benchmarks.md", "python.md", "sessions.md")]
    texts = [page.read_text("utf-8") for page in pages]
    blocks = "\n".join(block for text in texts for _, block in BLOCK.findall(text))
    names = sorted(set(WRITTEN.findall(blocks)))
    assert {"book", "book.txt", "map.png", "mine.jsonl"} <= set(names)
    done = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", "--no-index", *names],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 128:
        pytest.skip("this is no checkout")
    assert sorted(done.stdout.split()) == names


@pytest.mark.slow
def test_the_readme_runs_as_written(tmp_path: Path) -> None:
    """The text is made first. The code needs nothing else, and the session of docs/python.md goes on with its
    engine.
    """
    blocks = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    others = BLOCK.findall((ROOT / "docs" / "python.md").read_text("utf-8"))
    [session] = [block for language, block in others if language == "python" and "engine.session(" in block]
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    [making] = [line for line in lines if line.endswith("> book.txt")]
    code = "\n".join(block for language, block in blocks if language == "python")
    (tmp_path / "readme.py").write_text(f"{code}\n{session}", encoding="utf-8")
    # A shorter text than there, whose prefill takes a minute of a busy machine.
    making = making.replace("50_000", "4_000")
    shell = f"{making.replace('python -c', sys.executable + ' -c')} && {sys.executable} readme.py"
    done = subprocess.run(
        shell, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "name='target'" in done.stdout
    assert (tmp_path / "book" / "session.json").is_file()


def test_the_api_reference_names_what_is_there() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE)
    found = {name: pkgutil.resolve_name(name) for name in named}
    assert {f"triforce_tree.{name}" for name in triforce_tree.__all__} <= found.keys()


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target).resolve() for target in LINK.findall(index.read_text("utf-8"))}
    pages = {page for page in PAGES if page.is_relative_to(index.parent)} - {index}
    # Notes and generated pages are listed by the README of their folder.
    pages = {page for page in pages if page.parent.name not in ("log", "results") or page.name == "README.md"}
    assert not pages - listed
    assert "docs/README.md" in (ROOT / "README.md").read_text("utf-8")
