"""Digests of the package's code by area, by which a results file tells whether its figures are still current.

An area is all that some modules import of the package, directly or not. Its digest covers the syntax trees of
these files without docstrings and comments: another wording changes nothing, other code does. C files count
without their comments. Nothing of the package is imported, git is not asked, and all Pythons agree.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGE = "triforce_tree"
# Where code lies in the package, and what no import statement names: C files, and the modules of kernels that
# operators load at their first call on a GPU.
_C_FILES = ("kernels/cpu/**/*.c", "kernels/cpu/**/*.h")
_KERNELS = ("kernels/**/*.py",)
# Kernels that attend over trees of texts alone, which "branching" has.
_BRANCHING = ("kernels/attention/blocks/*.py",)
# Attention of ``exact=True`` alone, which "api" has.
_EXACT = ("kernels/attention/exact/*.py",)
# What runs on a CPU alone, but for attention to what is offloaded; what is for offloading alone; and what
# runs on a GPU alone: Triton's kernels, and choices of their tiles.
_CPU = ("kernels/cpu/**/*.py", *_C_FILES, "models/host/*.py")
_OFFLOAD = ("kv/offload/**/*.py",)
_TILES = ("kernels/linear/*.py", "kernels/attention/configs.py", "kernels/attention/tiles.py")
_TRITON = "import triton"


def _without(*patterns: str) -> list[str]:
    return [f"!{pattern}" for pattern in patterns]


# All that decodes, in a model of any shape, on any device.
_ENGINE = ("decoding/loop.py", "loading/inflate.py", *_KERNELS, *_C_FILES, *_without(*_BRANCHING, *_EXACT))
_API = ("engine.py", *_KERNELS, *_C_FILES)
# Area -> patterns of the files in the package that it begins with, and after "!" of those that are left out;
# "!import triton": those that import it.
AREAS: dict[str, tuple[str, ...]] = {
    "attention": ("kernels/attention/launch.py",),
    "linear": ("kernels/linear/launch.py",),
    "cpu attention": ("kernels/cpu/cpu_attention.py", *_C_FILES),
    "kernels": _KERNELS,
    # With the cache on a GPU, on a CPU, and in host memory.
    "engine": (*_ENGINE, *_without(*_CPU, *_OFFLOAD)),
    "engine on a CPU": (*_ENGINE, *_without(_TRITON, *_TILES, *_OFFLOAD)),
    "engine, offloaded": _ENGINE,
    # Chunks of a prompt on a GPU: linears of many rows are torch's.
    "prefill": (
        *("models/prefill/*.py", "kv/prefill.py", "kernels/norm/*.py", "kernels/pointwise/*.py"),
        *("kernels/attention/prefill.py", "kernels/attention/merge.py"),
        *_without(*_CPU, "kernels/linear/*.py", "models/exact/*.py", "models/experts/*.py"),
    ),
    "blocks": _BRANCHING,
    "branching": ("branching/tree.py", *_BRANCHING),
    "api": (*_API, *_without(*_BRANCHING)),
    "api on a CPU": (*_API, *_without(_TRITON, *_TILES)),
    # What reads texts and the embedded pair, where other code than the package's computes.
    "texts": ("eval/texts/registry.py", "eval/text.py", "loading/checkpoints.py"),
    "heads": ("drafters/heads/eagle.py", "drafters/heads/medusa.py"),
}
# Digests of earlier code whose figures still hold, and that of the code which has replaced it: the same, but
# for what is said here. It holds for this replacement alone; any further change counts.
SAME_FIGURES = {
    # Graphs are captured without garbage collections, and keep their workspace, which is held inside the same
    # guard. What is captured is the same, and so is what a CPU does.
    # After that changed what no measurement runs: logits processors of derived classes, NaN that is removed,
    # limits of nested control groups, tables of later releases, a comparison at load that exceeds its limit,
    # texts of a server that are decoded one by one, a warning; and saved sessions, which were measured again.
    "da25c24c7f387d26": "34828ff687a616cb",  # engine
    "80f9744e678c3b44": "34828ff687a616cb",
    "3f7df63985e43176": "a473127b468eddaf",  # engine on a CPU
    "410f34942582a9b1": "a473127b468eddaf",
    "fe1a5c167ae611c2": "2064b999e9e32e62",  # engine, offloaded
    "94f85e569b648fde": "2064b999e9e32e62",
    "bb4990c99809e60d": "2064b999e9e32e62",
    "6b9dcd2d5163c05f": "a8c998ef100a86c8",  # prefill
    "602e4dd2ad000dd9": "e5d06b66a86c1fea",  # branching
    "f7ff237beca81192": "7088033e540b313b",  # api
    "7fd516392ee735d4": "7088033e540b313b",
    "9439eabe5f37070e": "7088033e540b313b",
    "db356c494d318ee8": "f64bbeba6e8c5e62",  # api on a CPU
    "9a45ff3eb0d141aa": "f64bbeba6e8c5e62",
}
_C_COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)


@cache
def digest(area: str) -> str:
    """Of an area's code as it is in this tree.

    Raises:
        ValueError: there is no such area, or a pattern of it matches no file any more.
    """
    if area not in AREAS:
        raise ValueError(f"area {area!r} is unknown; use one of {', '.join(AREAS)}, or add it to AREAS")
    begin, without = set[Path](), set[Path]()
    for pattern in AREAS[area]:
        if not (matching := _matching(pattern.removeprefix("!"))):
            raise ValueError(
                f"area {area!r}: no file matches {pattern!r}; mend AREAS in {Path(__file__).name}"
            )
        (without if pattern.startswith("!") else begin).update(matching)
    parts = sorted(_file_digest(path) for path in _reached(begin, without))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _matching(pattern: str) -> set[Path]:
    if pattern == _TRITON:
        return {path for path in (ROOT / PACKAGE).glob("**/*.py") if b"import triton\n" in path.read_bytes()}
    return set((ROOT / PACKAGE).glob(pattern))


def digests(areas: Iterable[str]) -> dict[str, str]:
    """What a results file keeps as ``code``."""
    return {area: digest(area) for area in areas}


def state(code: Mapping[str, str] | None) -> str | None:
    """What a caption says of figures measured on this code, digests by area; None where it is today's."""
    if not code:
        return "no digest of the code under it was kept"
    # An area that is no longer known has changed as well.
    changed = any(
        area not in AREAS or digest(area) not in (known, SAME_FIGURES.get(known))
        for area, known in code.items()
    )
    return "code under it has changed since" if changed else None


def mark(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """`` (measured at commit X; code under it has changed since)`` for the end of a caption, or nothing.

    Args:
        runs: headers with ``commit`` and ``code``, by the name of the part; "" where there is one run.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, run in runs.items():
        if (what := state(run["code"])) is not None:
            found.setdefault(what, {}).setdefault(run["commit"], []).append(name)
    said = []
    for what, commits in found.items():
        one = len(commits) == len(found) == 1
        places = [commit if one else f"{commit} ({', '.join(names)})" for commit, names in commits.items()]
        said.append(f"measured at commit{'s' * (len(places) > 1)} {', '.join(places)}; {what}")
    return f" ({'; '.join(said)})" if said else ""


def _reached(begin: set[Path], without: set[Path]) -> set[Path]:
    """The files, and all of the package that they import, but those ``without``."""
    found: set[Path] = set()
    waiting = list(begin)
    while waiting:
        if (path := waiting.pop()) not in found | without:
            found.add(path)
            waiting += _imports(path)
    return found


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    """What a Python file imports of the package."""
    found: list[Path] = []
    for node in ast.walk(ast.parse(path.read_bytes())) if path.suffix == ".py" else ():
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from a package may be a module of it.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        # The package itself gathers names for users; no module of it depends on them.
        for name in (name for name in names if name.startswith(f"{PACKAGE}.")):
            place = ROOT.joinpath(*name.split("."))
            found += [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]
    return tuple(found)


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(code_alone(path.name, path.read_bytes())).hexdigest()


def code_alone(name: str, source: bytes) -> bytes:
    """A file's code without comments, docstrings and layout."""
    if not name.endswith(".py"):
        return b" ".join(_C_COMMENT.sub(b" ", source).split())
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # A string alone is a docstring, or describes the attribute before it.
            node.body = [part for part in node.body if not _is_string(part)]
    return _written(tree).encode()


def _is_string(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _written(node: object) -> str:
    """A syntax tree as text. Unlike ``ast.dump`` it leaves out what is empty, which Pythons differ about."""
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])
        )
        return f"{type(node).__name__}({','.join(fields)})"
    return f"[{','.join(map(_written, node))}]" if isinstance(node, list) else repr(node)
