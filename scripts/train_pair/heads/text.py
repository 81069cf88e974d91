"""Token files for the training of heads, from packages that are installed here.

    python -m scripts.train_pair.heads.text --out data

Docstrings of libraries and of Python's own, and some sources of the latter, decontaminated against Python's
help topics and deduplicated (``corpus``), in the embedded pair's tokens. Packages that are not installed are
left out.
"""

import argparse
import json
import pydoc_data.topics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from scripts.train_pair.corpus import gather
from triforce_tree.bench.texts import dataset_texts
from triforce_tree.loading.checkpoints import PAIR

# None of these is a source of the benchmarks' prompts.
LIBRARIES = (
    "scipy", "numpy", "sympy", "pandas", "torch", "matplotlib", "networkx", "transformers", "sklearn", "jax",
    "statsmodels", "astropy", "skimage", "django", "sqlalchemy", "xarray", "dask",
)  # fmt: skip
PYTHON = (
    "asyncio", "email", "http", "unittest", "logging", "multiprocessing", "concurrent", "importlib", "xml",
    "json", "urllib", "ctypes", "collections", "sqlite3", "tkinter", "wsgiref",
)  # fmt: skip
TOKENIZER = PAIR / "target" / "tokenizer.json"


def prepare(
    out: Path, cap: float, libraries: Sequence[str] = LIBRARIES, python: Sequence[str] = PYTHON
) -> int:
    """Write ``docstrings.npy``, ``python.npy`` and ``code.npy`` of uint16; returns the number of tokens.

    Args:
        cap: MB of text of each package at most.
    """
    sources = [f"docstrings=docstrings:{name}" for name in libraries]
    sources += [f"python=docstrings:{name}" for name in python] + [f"code=code:{name}" for name in python]
    tokenizer, total = Tokenizer.from_file(str(TOKENIZER)), 0
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        gather(sources, [Path(pydoc_data.topics.__file__)], Path(folder), cap)
        for file in sorted(Path(folder).glob("*.jsonl")):
            texts = (
                [f"{text}<|endoftext|>" for text in dataset_texts(str(file))] if file.stat().st_size else []
            )
            ids = [e.ids for e in tokenizer.encode_batch(texts)]
            tokens = np.array([token for row in ids for token in row], dtype=np.uint16)
            total += len(tokens)
            if len(tokens):
                np.save(out / f"{file.stem}.npy", tokens)
    (out / "manifest.json").write_text(json.dumps({"tokens": total, "sources": sources}))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the token files")
    parser.add_argument("--cap", type=float, default=4.0, help="MB of text of each package")
    args = parser.parse_args()
    print(f"{prepare(args.out, args.cap)} tokens in {args.out}")


if __name__ == "__main__":
    main()
