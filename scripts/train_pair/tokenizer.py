"""Trains the pair's tokenizer on a corpus, and tokenises the corpus with it.

    python -m scripts.train_pair.tokenizer --corpus corpus --out data

Byte-level BPE, digits one by one, one special token: ``<|endoftext|>`` (id 0) separates documents in training
and is begin, end and padding at once; nothing is added to a text by itself. Writes the tokenizer's files, and
one ``.npy`` file of uint16 per group of the corpus.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triforce_tree.bench.texts import dataset_texts

END = "<|endoftext|>"
FILES = ("tokenizer.json", "tokenizer_config.json")


def sample(files: list[Path], megabytes: float, seed: int) -> Iterator[str]:
    """Returns random documents of every group file, in proportion to its size."""
    share = megabytes * 1e6 / sum(f.stat().st_size for f in files)
    rng = random.Random(seed)
    for file in files:
        yield from (document for document in dataset_texts(str(file)) if rng.random() < share)


def trained(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], max_token_length=24,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenise(tokenizer: Tokenizer, file: Path, out: Path) -> None:
    """A group's documents as one array, each with the end token after it."""
    end, documents, parts = tokenizer.token_to_id(END), dataset_texts(str(file)), []
    while some := list(islice(documents, 1000)):
        parts += [np.asarray([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch(some)]
    np.save(out, np.concatenate(parts))
    print(f"{file.stem}: {sum(map(len, parts)) / 1e6:.2f} M tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer and token files")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens")
    parser.add_argument("--sample-mb", type=float, default=60.0, help="text to train the tokenizer on")
    parser.add_argument("--positions", type=int, default=131072, help="model_max_length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = [file for file in sorted(args.corpus.glob("*.jsonl")) if file.stat().st_size]
    tokenizer = trained(sample(files, args.sample_mb, args.seed), args.vocabulary)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / FILES[0]))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
        "model_max_length": args.positions, "clean_up_tokenization_spaces": False, "add_bos_token": False,
    }  # fmt: skip
    (args.out / FILES[1]).write_text(json.dumps(config, indent=1) + "\n")
    for file in files:
        tokenise(tokenizer, file, args.out / f"{file.stem}.npy")


if __name__ == "__main__":
    main()
