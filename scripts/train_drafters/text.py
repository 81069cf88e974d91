"""Tokens by kind of text for the training of a target's drafters.

    python -m scripts.train_pair.kinds.text ... --out kinds.npz            # see there
    python -m scripts.train_drafters.text --data kinds.npz --target TARGET --most 2.5 --out tokens.npz

``kinds.npz`` has tokens of the embedded pair, and the texts of the benchmarks are held out of it. The output
has the same texts in the tokens of TARGET, an end token after each document, in uint16, or uint32 for
vocabularies of more than 65,536 entries. ``--most`` bounds the size: evenly spaced parts of each kind are
taken.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from triforce_tree.bench.texts import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

# The end token of the embedded pair, and the tokens of a part where not all of a kind is taken.
_END, _PART = 0, 1 << 16


def parts(tokens: np.ndarray, most: int) -> np.ndarray:
    """Returns at most ``most`` tokens: all of them, or evenly spaced parts."""
    if len(tokens) <= most:
        return tokens
    count = max(1, most // _PART)
    size = most // count
    starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
    return np.concatenate([tokens[start : start + size] for start in starts])


def converted(
    tokens: np.ndarray, own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    """Yields the documents in ``tokens`` of the embedded pair in tokens of another tokenizer.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    if (end := other.eos_token_id) is None:
        raise ValueError("the target's tokenizer has no end token to separate documents; give another target")
    for document in np.split(tokens, np.flatnonzero(tokens == _END) + 1):
        if len(text := document[document != _END]):
            yield [*token_ids(other, own.decode(text.tolist())), int(end)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_drafters.text", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="file of scripts.train_pair.kinds.text")
    add("--target", default="pair", help="folder, GGUF file or hub id; pair: the embedded target")
    add("--most", type=float, help="million tokens of each kind, in tokens of the embedded pair")
    add("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args(words)
    own = load_tokenizer(PAIR / "target")
    other = own if args.target == "pair" else load_tokenizer(args.target)
    assert own is not None
    if other is None:
        parser.error(f"--target {args.target} has no tokenizer; give a folder or file with one")
    arrays = dict[str, np.ndarray]()
    with np.load(args.data) as file:
        for kind in file:
            taken = file[kind] if args.most is None else parts(file[kind], int(1e6 * args.most))
            if args.target != "pair":
                ids = [token for document in converted(taken, own, other) for token in document]
                taken = np.array(ids, dtype=np.uint16 if len(other) <= 1 << 16 else np.uint32)
            arrays[kind] = taken
            print(f"{kind}: {len(taken):,} tokens")
    np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
