"""Gathers, decontaminates and deduplicates texts to train drafters on.

A source is GROUP=TEXTS: a package's docstrings or sources as installed here, as in ``docstrings:asyncio`` and
``code:json``; the text files of a folder such as system documentation (files:/usr/share/doc) or those that a
pattern names (files:/usr/include/**/*.h); or a data set (on the Hugging Face hub, a folder, or a .jsonl,
.json, .parquet or .csv file with a column ``text``).

A paragraph that shares a shingle of ten words with a held-out text is dropped, as is a shorter one that is a
paragraph of it. A paragraph seen before (words equal, digits ignored) is dropped too, and a document that
loses most of its text that way goes whole. Output: a file ``GROUP.jsonl`` of each group, and
``manifest.json`` (source, group, documents, bytes).
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path

from scripts.benchmarks.sources.python_files import python_texts
from triforce_tree.bench.texts import dataset_texts

# Packages whose docstrings and sources are trained on. None of them is a source of the benchmarks' prompts.
LIBRARIES = (
    "scipy", "numpy", "sympy", "pandas", "torch", "matplotlib", "networkx", "transformers", "sklearn", "jax",
    "statsmodels", "astropy", "skimage", "django", "sqlalchemy", "xarray", "dask",
)  # fmt: skip
PYTHON = (
    "asyncio", "email", "http", "unittest", "logging", "multiprocessing", "concurrent", "importlib", "xml",
    "json", "urllib", "ctypes", "collections", "sqlite3", "tkinter", "wsgiref",
)  # fmt: skip

WORD = re.compile(r"[a-z0-9_]+")
SHINGLE = 10  # words
SHORTEST = 300  # characters of a document
# Suffixes of texts, without .gz; none is that of a README.
PROSE = ("", "txt", "md", "rst", "pod", "tex", "texi")
# Between the entries of a file of fortunes.
_FORTUNES = re.compile(r"^%$", re.MULTILINE)
_DULL = re.compile(r"copyright|licen[cs]e|copying|changelog|changes|authors|manifest|md5|index")


def topics_text(path: Path) -> list[str]:
    """Returns the topics of one ``pydoc_data/topics.py``."""
    scope: dict[str, dict[str, str]] = {}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
    return list(scope["topics"].values())


def documents(source: str) -> Iterator[str]:
    """Returns the texts of one source; see the module's docstring."""
    kind, _, package = source.partition(":")
    if kind in ("docstrings", "code") and package:
        return python_texts([package], kind == "code")
    if kind == "files" and "*" in package:
        return read_all(map(Path, sorted(glob(package, recursive=True))))
    if kind == "files":
        return file_texts(Path(package))
    return dataset_texts(source, split="train")


def file_texts(folder: Path) -> Iterator[str]:
    """Returns texts in the files below a folder, in the order of their paths, without licences and change
    logs.
    """

    def wanted(path: Path) -> bool:
        name = path.name.removesuffix(".gz").lower()
        kind = name.rpartition(".")[2] if "." in name else ""
        return kind in PROSE and not _DULL.search(name)

    return read_all(filter(wanted, sorted(folder.rglob("*"))))


def read_all(paths: Iterable[Path]) -> Iterator[str]:
    """Returns the texts of UTF-8 files, compressed or not; links are left out."""
    for path in paths:
        if not path.is_file() or path.is_symlink():
            continue
        try:
            data = path.read_bytes()
            # A dictionary's .dz is gzip with an index.
            text = (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            continue
        if "\0" not in text:
            yield _FORTUNES.sub("", text)


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def shingles(words: list[str]) -> Iterator[int]:
    """Returns 64-bit hashes of all runs of ``SHINGLE`` words."""
    return (hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1))


class Filter:
    """Decontamination against held-out texts and deduplication, with counts of dropped paragraphs."""

    def __init__(self, held_out: list[str]) -> None:
        self.held_out = {shingle for text in held_out for shingle in shingles(words_of(text))}
        self.short = {hash(tuple(words_of(p))) for text in held_out for p in text.split("\n\n")}
        self.seen: set[int] = set()
        self.contaminated = self.repeated = 0

    def holds(self, words: list[str]) -> bool:
        """Returns whether the held-out text has a shingle of these words, or all of them as a short
        paragraph.
        """
        if len(words) < SHINGLE:
            return len(words) > 3 and hash(tuple(words)) in self.short
        return not self.held_out.isdisjoint(shingles(words))

    def repeats(self, words: list[str]) -> bool:
        """Returns whether a paragraph of six words or more was seen before; numbers do not make one new."""
        if len(words) < 6:
            return False
        key = hash(tuple(w for w in words if not w[0].isdigit()))
        repeated = key in self.seen
        self.seen.add(key)
        return repeated

    def __call__(self, text: str) -> str:
        """Returns what is left of a document; empty if that is little."""
        paragraphs = [(p, words) for p in text.split("\n\n") if (words := words_of(p))]
        clean = [(p, words) for p, words in paragraphs if not self.holds(words)]
        kept = [p.rstrip() for p, words in clean if not self.repeats(words)]
        self.contaminated += len(paragraphs) - len(clean)
        self.repeated += len(clean) - len(kept)
        size = sum(map(len, kept))
        return "\n\n".join(kept) if size > max(SHORTEST, 0.35 * sum(len(p) for p, _ in paragraphs)) else ""


def english(text: str) -> bool:
    """Mostly ASCII, with blanks: no minified data, no translations."""
    sample = text[:4000]
    plain = sum(c < "\x7f" for c in sample)
    return plain > 0.93 * len(sample) and 0.08 < sample.count(" ") / max(1, len(sample)) < 0.7


def gather(
    sources: list[str], held_out: list[Path], out: Path, cap: float, held_texts: Sequence[str] = ()
) -> None:
    """Writes the groups' files and the manifest; of each source at most ``cap`` MB.

    Args:
        held_texts: held out too, beside the topics in the files ``held_out``.
    """
    keep = Filter([*(text for path in held_out for text in topics_text(path)), *held_texts])
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.jsonl"):
        old.unlink()
    manifest = []
    for entry in sources:
        group, _, source = entry.partition("=")
        size = count = 0
        with (out / f"{group}.jsonl").open("a", encoding="utf-8") as file:
            for document in documents(source):
                if len(document) < SHORTEST or not english(document) or not (text := keep(document)):
                    continue
                file.write(json.dumps({"text": text}) + "\n")
                size, count = size + len(text.encode()), count + 1
                if size > cap * 1e6:
                    break
        manifest.append({"source": source, "group": group, "documents": count, "bytes": size})
        print(f"{entry}: {count} documents, {size / 1e6:.2f} MB", flush=True)
    dropped = {"contaminated_paragraphs": keep.contaminated, "repeated_paragraphs": keep.repeated}
    report = {"sources": manifest, **dropped, "shingle_words": SHINGLE}
    (out / "manifest.json").write_text(json.dumps(report, indent=1))
