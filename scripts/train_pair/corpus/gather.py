"""Gathers, decontaminates and deduplicates the corpus of the embedded pair.

Held out: Python's ``pydoc_data.topics`` (every version found). A paragraph that shares a shingle of
ten words with it is dropped, as is a shorter one that is a paragraph of it. A paragraph seen before
(words equal, digits ignored) is dropped too, and a document that loses most of its text that way
goes whole. Output: one text file per group, documents separated by a form feed, plus
``manifest.json`` (source, licence, group, documents, bytes).
"""

import argparse
import glob
import json
import random
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.train_pair.corpus.layout import SEPARATOR
from scripts.train_pair.corpus.readers import READERS

# What files belong to the corpus, and how they are read.
LIST = tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8"))
WORD = re.compile(r"[a-z0-9_]+")
SHINGLE = 10  # words
ROOTS = ("docs", "wheels", "rust", "stdlib", "site")


def topics_text(path: Path) -> list[str]:
    """The topics of one ``pydoc_data/topics.py``."""
    scope: dict[str, dict[str, str]] = {}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), scope)
    return list(scope["topics"].values())


@dataclass(frozen=True)
class Source:
    """One source: ``reader`` names an entry of ``readers.READERS``; ``cap`` is in MB of text."""

    name: str
    licence: str
    group: str  # python, docs, docstrings, api, code
    reader: str
    pattern: str
    cap: float
    excluded: tuple[str, ...] = ()

    def paths(self, roots: dict[str, str], seed: int) -> list[Path]:
        """Files in folder order; folders shuffled so that a cap takes a fair sample."""
        banned, folders = (*LIST["excluded"], *self.excluded), {}
        for file in sorted(set(glob.glob(self.pattern.format(**roots), recursive=True))):
            if not any(part in file for part in banned):
                folders.setdefault(str(Path(file).parent), []).append(Path(file))
        names = sorted(folders)
        random.Random(seed).shuffle(names)
        return [file for name in names for file in folders[name]]


def sources() -> Iterator[Source]:
    """Those of ``sources.toml``, an entry with several names as one for each."""
    for entry in LIST["sources"]:
        common = {key: value for key, value in entry.items() if key not in ("names", "title")}
        common["excluded"] = tuple(entry.get("excluded", ()))
        for named in entry.get("names", [""]):
            name, _, cap = named.partition(":")
            own = {"name": entry["title"], "pattern": entry["pattern"]}
            own = {key: text.replace("{name}", name) for key, text in own.items()}
            yield Source(**common | own | ({"cap": float(cap)} if cap else {}))


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def shingles(words: list[str]) -> Iterator[int]:
    """64-bit hashes of all runs of ``SHINGLE`` words."""
    return (hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1))


class Filter:
    """Decontamination against held-out texts and deduplication; keeps counts for the model card."""

    def __init__(self, held_out: list[str]) -> None:
        self.held_out = {shingle for text in held_out for shingle in shingles(words_of(text))}
        self.short = {hash(tuple(words_of(p))) for text in held_out for p in text.split("\n\n")}
        self.seen: set[int] = set()
        self.contaminated = self.repeated = 0

    def holds(self, words: list[str]) -> bool:
        """Whether the held-out text has a shingle of these words, or all of them as a short paragraph."""
        if len(words) < SHINGLE:
            return len(words) > 3 and hash(tuple(words)) in self.short
        return not self.held_out.isdisjoint(shingles(words))

    def __call__(self, text: str) -> str:
        kept: list[str] = []
        before = after = 0
        for paragraph in text.replace(SEPARATOR, "\n").split("\n\n"):
            words = words_of(paragraph)
            if not words:
                continue
            before += len(paragraph)
            if self.holds(words):
                self.contaminated += 1
                continue
            if len(words) >= 6:
                # Numbers do not make a paragraph new.
                key = hash(tuple(w for w in words if not w[0].isdigit()))
                if key in self.seen:
                    self.repeated += 1
                    continue
                self.seen.add(key)
            after += len(paragraph)
            kept.append(paragraph.rstrip())
        return "\n\n".join(kept) if after > 0.35 * before and after > 300 else ""


def english(text: str) -> bool:
    """Mostly ASCII, with blanks: no minified data, no translations."""
    sample = text[:4000]
    plain = sum(c < "\x7f" for c in sample)
    return plain > 0.93 * len(sample) and 0.08 < sample.count(" ") / max(1, len(sample)) < 0.7


def gather(args: argparse.Namespace) -> None:
    roots = {name: getattr(args, name) for name in ROOTS}
    keep = Filter([text for path in args.held_out for text in topics_text(path)])
    args.out.mkdir(parents=True, exist_ok=True)
    manifest, listed = [], list(sources())
    with ExitStack() as files:
        handles = {
            group: files.enter_context(open(args.out / f"{group}.txt", "w", encoding="utf-8"))
            for group in sorted({s.group for s in listed})
        }
        for source in listed:
            size = documents = 0
            for path in source.paths(roots, args.seed):
                try:
                    text = READERS[source.reader](path)
                except (OSError, RecursionError, ValueError) as error:
                    print(f"skipped {path}: {error}")
                    continue
                if len(text) < 300 or not english(text):
                    continue
                text = keep(text)
                if text:
                    handles[source.group].write(text + "\n" + SEPARATOR)
                    size, documents = size + len(text.encode()), documents + 1
                if size > source.cap * 1e6:
                    break
            if documents:
                entry = {"name": source.name, "licence": source.licence, "group": source.group}
                manifest.append({**entry, "documents": documents, "bytes": size})
            print(f"{source.name}: {documents} documents, {size / 1e6:.2f} MB", flush=True)
    report = {
        "sources": manifest,
        "contaminated_paragraphs": keep.contaminated,
        "repeated_paragraphs": keep.repeated,
        "shingle_words": SHINGLE,
    }
    (args.out / "manifest.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for root in ROOTS:
        parser.add_argument(f"--{root}", default="/nonexistent", help=f"what {{{root}}} stands for")
    parser.add_argument(
        "--held-out", type=Path, nargs="+", required=True, help="pydoc_data/topics.py of every Python at hand"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    gather(parser.parse_args())


if __name__ == "__main__":
    main()
