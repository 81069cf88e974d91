"""Long real texts that are found on any machine with the usual packages.

None of them is in the corpus of the embedded pair (``triforce_tree/pair/README.md``): Python's help
topics, which were held out of it, and docstrings and source code of packages that are not in it. A source
that is not installed, or too short, is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from scripts.benchmarks.sources.python_files import python_texts
from triforce_tree.bench import texts as text

# More than the characters of a token, on average.
_CHARACTERS = 5


@dataclass(frozen=True)
class Source:
    """Names the packages whose docstrings, or with ``code`` sources, are a text; none: pydoc's topics."""

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
        """Returns prompt ``number`` of ``context`` tokens: the sources in turn, then their next parts.

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
    """Returns a source's texts, one a file, in the order of their paths."""
    if source.packages:
        yield from python_texts(source.packages, source.code)
    else:
        yield text.pydoc_text()
