"""Trains the pair's tokenizer: byte-level BPE, digits one by one, one special token.

``<|endoftext|>`` separates documents in training and is begin, end and padding at once; nothing is
added to a text by itself.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triforce_tree.eval.text import dataset_texts

END = "<|endoftext|>"


def sample(folder: Path, megabytes: float, seed: int) -> Iterator[str]:
    """Random documents of every group file, in proportion to its size."""
    files = sorted(folder.glob("*.jsonl"))
    share = megabytes * 1e6 / sum(f.stat().st_size for f in files)
    rng = random.Random(seed)
    for file in files:
        yield from (document for document in dataset_texts(str(file)) if rng.random() < share)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens")
    parser.add_argument("--sample-mb", type=float, default=60.0, help="text to train on")
    parser.add_argument("--positions", type=int, default=131072, help="model_max_length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocabulary, special_tokens=[END], max_token_length=24,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(sample(args.corpus, args.sample_mb, args.seed), trainer)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
        "model_max_length": args.positions, "clean_up_tokenization_spaces": False, "add_bos_token": False,
    }  # fmt: skip
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
