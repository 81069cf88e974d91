"""One file of token ids for the distillation of a draft, from texts that are installed here.

    python -m scripts.train_pair.given.text --target TARGET --out data

Docstrings and sources of packages and of Python's own library, and system documentation, decontaminated
against the benchmarks' texts that are here or in ``--texts`` and deduplicated (``corpus``), in the target's
tokens. What is not installed is left out. Prose, verse and code of more languages come with ``--root``: the
folder where Debian's packages of ``scripts.train_pair.kinds.text --packages`` are unpacked.
"""

import argparse
import json
import pydoc_data.topics
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scripts.train_pair.corpus import LIBRARIES, PYTHON, gather
from scripts.train_pair.kinds.text import KIND_SOURCES, held_texts
from triforce_tree.bench.texts import dataset_texts
from triforce_tree.loading.checkpoints import load_tokenizer

TOKENS = "tokens.npy"
# Installed with Debian and its relatives, and with Python packages.
SYSTEM = ("/usr/share/doc", "/usr/share/perl", "/usr/lib/python3/dist-packages")
# Documents that are tokenised together.
_BATCH = 256


def default_sources(root: Path | None = None) -> list[str]:
    """Returns the sources for ``corpus.gather``; those of Debian's packages where they are unpacked below
    ``root``.
    """
    sources = [f"docstrings=docstrings:{name}" for name in (*LIBRARIES, *PYTHON)]
    sources += [f"code=code:{name}" for name in (*PYTHON, *LIBRARIES[:6])]
    sources += [f"docs=files:{folder}" for folder in SYSTEM]
    if root is not None:
        sources += [entry for source in KIND_SOURCES if source.of_debian for entry in source.entries(root)]
    return sources


def separator(tokenizer: Any) -> int:
    """Returns the id between documents: the end-of-text token where there is one, else that which ends a
    reply.
    """
    known = tokenizer.get_vocab()
    return int(known.get("<|endoftext|>", tokenizer.eos_token_id or 0))


def prepare(
    tokenizer: Any,
    out: Path,
    megabytes: float,
    cap: float,
    sources: Sequence[str],
    held: Sequence[str] = (),
    seed: int = 0,
) -> int:
    """Writes the token file, the tokenizer and the manifest; returns the number of tokens.

    Args:
        megabytes: of the file, at most; documents are taken in random order until it is full.
        cap: MB of text of each source, at most.
        held: texts to hold out beside Python's help topics.
    """
    out.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    most, end = int(megabytes * 1e6 / kind.itemsize), separator(tokenizer)
    with TemporaryDirectory() as folder:
        gather(list(sources), [Path(pydoc_data.topics.__file__)], Path(folder), cap, held)
        files = [file for file in sorted(Path(folder).glob("*.jsonl")) if file.stat().st_size]
        texts = [text for file in files for text in dataset_texts(str(file))]
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
    random.Random(seed).shuffle(texts)
    parts: list[Any] = []
    total = 0
    for start in range(0, len(texts), _BATCH):
        if total >= most:
            break
        for ids in tokenizer(texts[start : start + _BATCH], add_special_tokens=False).input_ids:
            parts.append(np.array([*ids, end], dtype=kind))
            total += len(parts[-1])
    if not parts:
        raise ValueError("no text was found; install packages, or name --source")
    tokens = np.concatenate(parts)[:most]
    np.save(out / TOKENS, tokens)
    tokenizer.save_pretrained(out)
    (out / "manifest.json").write_text(json.dumps({"tokens": len(tokens), **manifest}, indent=1))
    return len(tokens)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.given.text", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--target", required=True, help="folder, GGUF file or hub id that has the tokenizer")
    add("--out", type=Path, required=True, help="folder to write")
    add("--megabytes", type=float, default=39.0, help="of the token file")
    add("--cap", type=float, default=6.0, help="MB of text of each source")
    add("--root", type=Path, help="where Debian's packages are unpacked, for their texts too")
    add("--texts", type=Path, help="file of the benchmarks' texts, to hold out; by default what is installed")
    add("--source", nargs="+", metavar="GROUP=TEXTS", help="instead of the usual ones; see corpus.py")
    args = parser.parse_args(words)
    tokenizer = load_tokenizer(args.target)
    if tokenizer is None:
        parser.error(f"{args.target} has no tokenizer")
    sources = args.source or default_sources(args.root)
    held = held_texts(args.texts)
    count = prepare(tokenizer, args.out, args.megabytes, args.cap, sources, held)
    print(f"{count} tokens in {args.out / TOKENS}")


if __name__ == "__main__":
    main()
