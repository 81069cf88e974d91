"""A tiny random target, a perturbed copy as its draft, and a tokenizer, as model folders; changes to them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from triforce_tree import Engine, load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.config import load_arguments

VOCABULARY = 384
# Settings for prompts of a few hundred tokens.
SMALL: dict[str, Any] = {
    "budget": 64, "recent": 32, "chunk": 8, "gamma": 4, "tree": "best-first:3,2", "window": 64,
}  # fmt: skip

Change = Callable[[Path], object]


@dataclass(frozen=True)
class TinyPair:
    target: str
    draft: str
    text: str

    @property
    def options(self) -> list[str]:
        """Returns the options for the command line."""
        return ["--target", self.target, "--draft", self.draft, "--device", "cpu"]

    def load(self, **options: object) -> Engine:
        return load(self.target, self.draft, device="cpu", **load_arguments(options))


def make(folder: Path) -> TinyPair:
    text = pydoc_text()[:60_000]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=VOCABULARY, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    draft = LlamaForCausalLM(target.config)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * torch.randn_like(weight)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return TinyPair(str(folder / "target"), str(folder / "draft"), str(folder / "text.txt"))


def prompt(engine: Engine, length: int) -> list[int]:
    """Returns the first tokens of the text that the tokenizer was trained on."""
    assert engine.tokenizer is not None
    return token_ids(engine.tokenizer, pydoc_text()[:4000])[:length]


def settings(**changes: Any) -> Change:
    """Other values in a folder's config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change
