"""Small tokenizers of the kinds that models have, trained here."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = [
    "Once upon a time there was a house, and it wasn't small . It's where they're living !",
    "def f(x):\n    if x:\n        return 'y' + x\n\n\nclass A:\n\tpass\n",
    '{"a":1,"b":[2,3],"url":"https://x.org/?q=a%20b"}',
    "naïve café 你好，世界。 こんにちは、東京です ภาษาไทย русский",
    "😀🎉👩‍👩‍👧 flags 🇩🇪",
    "I 'm here , do n't you ? They 've said ' yes ' . We 're n ' t",
]
# Other characters are spelled by bytes.
KNOWN = "".join(CORPUS[:3])
SPECIAL, ORDINARY = ["<s>", "</s>", "<unk>", "<|user|>"], ["<|tool|>", "<|im_end|>"]


def _finished(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in ORDINARY])
    tokenizer.add_special_tokens(SPECIAL)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options)


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:4], trainer)
    return _finished(tokenizer, **options)


def llama() -> PreTrainedTokenizerFast:
    """Returns one as Llama 2 and Mistral 7B have: byte tokens, and a decoder that strips the first space."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, max_token_length=8)
    words = f"▁{KNOWN}".replace(" ", " ▁").replace("\n", " ").split(" ")
    trained.train_from_iterator(words, trainer)
    found = json.loads(trained.to_str())["model"]
    spelled = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate([*spelled, *found["vocab"]])}
    merges = [(left, right) for left, right in found["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def unigram(**options: Any) -> PreTrainedTokenizerFast:
    """Returns one as T5 has."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer, **options)


def word_piece(cleanup: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer, **options)


def suffixed() -> PreTrainedTokenizerFast:
    """Returns one as the first GPT has: the end of a word is marked, and the last space is not shown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer)


class SlowBytes(PreTrainedTokenizer):
    """A user's own in Python, whose tokens are parts of characters that it knows by their numbers."""

    def __init__(self, **options: Any) -> None:
        self._pairs = [bytes([a]) for a in range(256)] + [b"th", b" a", b"\xe4\xbd", b"\n   "]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._pairs)

    def get_vocab(self) -> dict[str, int]:
        return {f"t{n}": n for n in range(len(self._pairs))} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [f"t{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:]) if token[:1] == "t" and token[1:].isdigit() else 0

    def _convert_id_to_token(self, index: int) -> str:
        return f"t{index}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        known = (self._pairs[int(t[1:])] if t[:1] == "t" and t[1:].isdigit() else t.encode() for t in tokens)
        return b"".join(known).decode("utf-8", "replace")


def slow_bytes() -> SlowBytes:
    made = SlowBytes()
    made.add_tokens([AddedToken(each, special=False) for each in ORDINARY])
    made.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    return made


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": byte_level,
    "byte-level, cleaned up": lambda: byte_level(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "Llama 2": llama,
    "Unigram": unigram,
    "Unigram, cleaned up": lambda: unigram(clean_up_tokenization_spaces=True),
    "WordPiece": word_piece,
    "WordPiece, cleaned up": lambda: word_piece(clean_up_tokenization_spaces=True),
    "WordPiece, cleaned up once": lambda: word_piece(cleanup=False, clean_up_tokenization_spaces=True),
    "suffixes": suffixed,
    "slow": slow_bytes,
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """Tests must not change it."""
    return KINDS[kind]()
