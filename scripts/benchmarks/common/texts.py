"""Long real texts that are found on any machine with the usual packages.

None of them is in the corpus of the embedded pair (``triforce_tree/pair/README.md``): Python's help
topics, which were held out of it, and docstrings and source code of packages that are not in it. A source
that is not installed, or too short, is left out.
"""

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from triforce_tree.eval import text

# Shorter docstrings say little but their function's name.
_LEAST_DOC = 80
# More than the characters of a token, on average.
_CHARACTERS = 5
_SKIPPED = ("/tests/", "/test/", "/testing/", "/_vendor/", "/vendor/")


@dataclass(frozen=True)
class Source:
    """Where a text comes from: packages' docstrings, or with ``code`` their sources; none: pydoc."""

    name: str
    packages: tuple[str, ...] = ()
    code: bool = False


def _docs(*packages: str) -> Source:
    return Source("docstrings of " + ", ".join(packages), packages)


SOURCES = (
    Source("Python's help topics"),
    _docs("gpytorch", "linear_operator", "botorch"),
    _docs("torch_geometric"),
    _docs("hypothesis", "huggingface_hub", "fsspec", "seaborn", "joblib", "imageio", "rich", "tifffile"),
    Source("source code of torchvision, torchaudio", ("torchvision", "torchaudio"), code=True),
    _docs("numpyro", "optax", "orbax", "chex", "equinox", "diffrax", "optimistix"),
    _docs("timm", "sentence_transformers", "onnxscript", "onnx", "e3nn", "tensorboard"),
)


@dataclass(frozen=True)
class Prompt:
    """Token ids and where they come from."""

    name: str
    tokens: list[int]


class Library:
    """The sources that are on this machine.

    Args:
        tokenizer: of the models.
        context: tokens of the longest prompt.
        sources: what to look for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: int, sources: Sequence[Source] = SOURCES
    ) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._waiting = list(sources)
        self._texts: list[tuple[str, list[int]]] = []
        self.left_out: list[str] = []

    def prompt(self, number: int, context: int) -> Prompt:
        """Prompt ``number`` of ``context`` tokens: the sources in turn, then their next parts.

        Raises:
            ValueError: no source holds ``context`` tokens.
        """
        while self._waiting and len(self._texts) <= number:
            self._read(self._waiting.pop(0))
        if not self._texts:
            raise ValueError(f"no text of {self._context} tokens was found; give a shorter context")
        part, at = divmod(number, len(self._texts))
        name, ids = self._texts[at]
        return Prompt(f"{name}, part {part + 1}" if part else name, cut(ids, part * context, context))

    def _read(self, source: Source) -> None:
        found, size = [], 0
        for piece in pieces(source):
            found.append(piece)
            size += len(piece)
            if size > _CHARACTERS * self._context:
                break
        ids = text.token_ids(self._tokenizer, "\n\n".join(found))
        if len(ids) < self._context:
            self.left_out.append(f"{source.name}: {len(ids)} tokens")
        else:
            self._texts.append((source.name, ids))


def cut(ids: Sequence[int], start: int, length: int) -> list[int]:
    """``length`` tokens from ``start`` on, the text read as a ring."""
    start %= len(ids)
    return [*ids[start : start + length], *ids[: max(0, start + length - len(ids))]]


def pieces(source: Source) -> Iterator[str]:
    """A source's texts, one a file, in the order of their paths."""
    if not source.packages:
        yield text.pydoc_text()
        return
    for package in source.packages:
        spec = find_spec(package)
        for folder in spec.submodule_search_locations or [] if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                if any(part in path.as_posix() for part in _SKIPPED):
                    continue
                piece = path.read_text(encoding="utf-8", errors="replace")
                piece = piece if source.code else docstrings(piece)
                if piece.strip():
                    yield piece


def docstrings(code: str) -> str:
    """The docstrings of a module and all that it defines, each below its name and arguments."""
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
        is_class = isinstance(node, ast.ClassDef)
        head = f"class {node.name}" if is_class else f"{node.name}({ast.unparse(node.args)})"
        indented = "\n".join(f"   {line}".rstrip() for line in doc.splitlines())
        parts.append(f"{head}\n\n{indented}")
    return "\n\n".join(part for part in parts if part)
