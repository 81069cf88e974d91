"""Texts of installed packages: the source code of their Python files, or their docstrings alone."""

import ast
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

# Shorter docstrings say little but their function's name.
_LEAST_DOC = 80
_SKIPPED = ("/tests/", "/test/", "/testing/", "/_vendor/", "/vendor/")


def package_folders(package: str) -> list[Path]:
    """Returns the folders of a top-level package without importing it; none if it is not installed."""
    spec = find_spec(package)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def python_paths(package: str) -> list[Path]:
    """Returns the Python files of a top-level package without its tests, in the order of their paths."""
    return [
        path
        for folder in package_folders(package)
        for path in sorted(folder.rglob("*.py"))
        if not any(part in path.as_posix() for part in _SKIPPED)
    ]


def python_texts(packages: Sequence[str], code: bool) -> Iterator[str]:
    """Returns one text for each Python file, in the order of their paths; packages that are missing are left
    out.

    Args:
        packages: top-level names.
        code: the whole source; else its docstrings with names and arguments.
    """
    for package in packages:
        for path in python_paths(package):
            text = path.read_text(encoding="utf-8", errors="replace")
            text = text if code else docstrings(text)
            if text.strip():
                yield text


def docstrings(code: str) -> str:
    """Returns the docstrings of a module and all that it defines, each below its name and arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError:
        return ""
    parts = [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        doc = ast.get_docstring(node)
        if doc is None or len(doc) < _LEAST_DOC:
            continue
        if isinstance(node, ast.ClassDef):
            head = f"class {node.name}"
        else:
            head = f"{node.name}({ast.unparse(node.args)})"
        indented = "\n".join(f"   {line}".rstrip() for line in doc.splitlines())
        parts.append(f"{head}\n\n{indented}")
    return "\n\n".join(part for part in parts if part)
