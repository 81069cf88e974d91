"""Write the texts of all kinds into one compressed file, for machines without their packages.

    python -m scripts.benchmarks texts                  # texts.json.xz; what is missing, and how to get it
    python -m scripts.benchmarks any_text --texts texts.json.xz

Of each text the file keeps what a prompt of 122,880 tokens needs. Their licences, which the file names, all
permit copies. git ignores the file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks.sources import packed
from scripts.benchmarks.sources.registry import SOURCES, MissingTextError, Texts
from triforce_tree.bench.texts import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer
from triforce_tree.runtime.files.writing import check_writable

FILE = "texts.json.xz"


def main(words: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m scripts.benchmarks texts", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument("--out", type=Path, default=Path(FILE), help="the file to write")
    made.add_argument("--tokens", type=int, default=packed.KEPT_TOKENS, help="most tokens of each text")
    args = made.parse_args(words)
    try:
        check_writable(args.out)
    except OSError as error:
        made.error(f"--out: {error}")
    tokenizer, here = load_tokenizer(PAIR / "target"), Texts()
    found: dict[str, str] = {}
    for source in (source for source in SOURCES if source.copies is None):
        try:
            found[source.name] = here.read(source)
        except MissingTextError as error:
            print(f"missing: {error}")
            continue
        kept = len(token_ids(tokenizer, packed.beginning(found[source.name], tokenizer, args.tokens)))
        print(f"{source.name:16} {source.kind:14} {kept:9,} tokens  {source.what} ({source.licence})")
    licences = {source.name: source.licence for source in SOURCES}
    size = packed.write(args.out, found, licences, tokenizer, args.tokens)
    print(f"{args.out}: {len(found)} texts, {size / 1e6:.2f} MB")
    return 0
