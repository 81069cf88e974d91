"""One file of token ids by kind of text, for the further distillation of the embedded draft.

    mkdir debs root; cd debs
    apt-get download PACKAGES; for d in *.deb; do dpkg -x $d ../root; done; cd ..
    python -m scripts.train_pair.kinds.text --packages                    # prints PACKAGES
    python -m scripts.train_pair.kinds.text --root root --texts texts.json.xz --out kinds.npz

Prose, verse, dialogue and code of packages under permissive licences or in the public domain, and
documentation as the pair was trained on. The texts of ``scripts.benchmarks.sources`` are held out, by file
and by shingles of ten words (``corpus``), as far as they are here or in ``--texts`` (``benchmarks texts``).
``--source manuals=FILE.jsonl`` adds pages of manuals as text. The file holds an array of uint16 for each
kind, documents with an end token between them; 15 million tokens have 12 MB.
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from scripts.benchmarks.sources.loaders import MissingTextError
from scripts.benchmarks.sources.python_files import package_folders
from scripts.benchmarks.sources.registry import CODE, DIALOGUE, DOCUMENTATION, PROSE, SOURCES, VERSE, Texts
from scripts.train_pair.corpus import PYTHON, gather
from triforce_tree.bench.texts import dataset_texts
from triforce_tree.loading.checkpoints import PAIR

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


def prepare(
    out: Path,
    root: Path,
    held: Sequence[str],
    cap: float,
    sources: Sequence[KindSource] = KIND_SOURCES,
    more: Sequence[str] = (),
) -> dict[str, int]:
    """Writes the file, and the manifest beside it; returns the tokens of each kind.

    Args:
        root: where Debian's packages are unpacked.
        held: texts to hold out beside Python's help topics.
        cap: MB of text of each source at most.
        more: further entries for ``corpus.gather``.

    Raises:
        ValueError: no text was found.
    """
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    end, arrays = tokenizer.token_to_id("<|endoftext|>"), dict[str, np.ndarray]()
    with TemporaryDirectory() as folder:
        entries = [entry for source in sources for entry in source.entries(root)] + [*more]
        gather(entries, [Path(pydoc_data.topics.__file__)], Path(folder), cap, held)
        for file in sorted(Path(folder).glob("*.jsonl")):
            if file.stat().st_size:
                encoded = tokenizer.encode_batch(list(dataset_texts(str(file))))
                arrays[file.stem] = np.concatenate(
                    [np.array([*e.ids, end], dtype=np.uint16) for e in encoded]
                )
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
    if not arrays:
        raise ValueError(f"no text was found below {root}; unpack the packages that --packages prints")
    np.savez_compressed(out, **arrays)
    counts = {kind: len(tokens) for kind, tokens in arrays.items()}
    out.with_suffix(".json").write_text(json.dumps({"tokens": counts, **manifest}, indent=1))
    return counts


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.kinds.text", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("kinds.npz"), help="the file to write; its manifest beside it")
    add("--root", type=Path, default=Path("/"), help="where Debian's packages are unpacked")
    add("--texts", type=Path, help="file of the benchmarks' texts, to hold out; by default what is installed")
    add("--cap", type=float, default=2.0, help="MB of text of each source")
    add("--source", nargs="+", default=[], metavar="KIND=TEXTS", help="further texts; see corpus.py")
    add("--packages", action="store_true", help="print Debian's packages and end")
    args = parser.parse_args(words)
    if args.packages:
        print(*dict.fromkeys(source.package for source in KIND_SOURCES if source.of_debian))
        return
    held = held_texts(args.texts)
    for kind, count in prepare(args.out, args.root, held, args.cap, more=args.source).items():
        print(f"{kind}: {count:,} tokens")


if __name__ == "__main__":
    main()
