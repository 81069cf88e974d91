"""Drafts with the target's tokenizer, and the shared tokens of drafts with another tokenizer."""

import logging
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import triforce_tree
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.processes.messages import says
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.config import load_arguments
from triforce_tree.loading.vocabularies import LEAST_SHARED, token_map


def tokenizer(tokens: list[str], **special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with this vocabulary; a token's id is its index."""
    words = models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    made = Tokenizer(words)
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


LETTERS = [chr(ord("a") + n) for n in range(26)]
OF_LETTERS = tokenizer(LETTERS)


@pytest.mark.parametrize(
    ("target", "draft"),
    # Qwen2.5 7B and 0.5B, either way; Pythia 12B and 160M; Gemma 3 4B and 1B.
    [(152_064, 151_936), (151_936, 152_064), (50_688, 50_304), (262_208, 262_144)],
)
def test_paddings_of_one_vocabulary(target: int, draft: int) -> None:
    for known in (None, OF_LETTERS):
        ids = token_map(target, draft, known, None)
        assert ids is not None
        both = min(target, draft)
        assert ids.inputs.shape == ids.proposals.shape == (target,)
        assert torch.equal(ids.proposals[:both], torch.arange(both))
        assert ids.proposals[both:].eq(-1).all()
        assert torch.equal(ids.inputs[:both], torch.arange(both))
        assert ids.inputs.max() < draft


@pytest.mark.parametrize(
    ("target", "draft"),
    # Llama 2 and 3; Mistral v0.1 and v0.3; GPT-2 and Pythia; Llama 2 and Llama 2 with one more token.
    [(128_256, 32_000), (32_000, 32_768), (50_257, 50_304), (32_000, 32_001)],
)
def test_sizes_that_padding_does_not_explain_are_refused(target: int, draft: int) -> None:
    for pair in ((target, draft), (draft, target)):
        with pytest.raises(ValueError, match=says(*pair[::-1], "draft_tokenizer=", "choose another draft")):
            token_map(*pair, None, None)


def test_padding_does_not_explain_tokens_that_one_lacks() -> None:
    known = tokenizer([*LETTERS, *(f"{a}{b}" for a in LETTERS for b in LETTERS)])
    assert token_map(64 * 110, 64 * 111, known, None) is not None
    with pytest.raises(ValueError, match="not paddings"):
        token_map(640, 640 + 64, known, None)


def test_one_tokenizer_may_be_padded_to_any_size() -> None:
    again = tokenizer(LETTERS)
    assert token_map(30, 30, OF_LETTERS, again) is None
    ids = token_map(40, 27, OF_LETTERS, again)
    assert ids is not None
    assert ids.proposals.tolist() == [*range(27), *[-1] * 13]


def test_equal_sizes_without_both_tokenizers_are_one_tokenizer() -> None:
    assert token_map(50, 50, OF_LETTERS, None) is None
    assert token_map(50, 50, None, None) is None


def test_different_tokenizers_of_equal_size_are_refused() -> None:
    other = tokenizer([f"{letter}-" for letter in LETTERS])
    with pytest.raises(ValueError, match=says("0 of the target's 26 tokens", "0.0%", "at least 5%")):
        token_map(26, 26, OF_LETTERS, other)


@pytest.mark.parametrize("more", [0, 1])
def test_the_least_share(more: int) -> None:
    target, count = tokenizer([f"{n}:" for n in range(200)]), round(200 * LEAST_SHARED) - 1 + more
    draft = tokenizer([*[f"{n}:" for n in range(count)], *LETTERS])
    if more:
        assert token_map(200, 64, target, draft) is not None
    else:
        with pytest.raises(ValueError, match=f"{count} of the target's 200 tokens"):
            token_map(200, 64, target, draft)


def test_tokens_of_equal_text_are_shared(caplog: pytest.LogCaptureFixture) -> None:
    """The vocabularies write spaces and bytes differently; of a missing token the longest suffix is read."""
    byte_level = ["a", "Ġ", "Ġa", "Ã", "¤", "Ã¤", "Ċ", "ĠabĠa", "<end>", "xy", "Ġthe"]
    pieces = ["<unk>", "</s>", "▁a", "a", "ä", "<0x0A>", "▁", "<0xC3>", "b▁a", "▁▁"]
    target, draft = tokenizer(byte_level, eos_token="<end>"), tokenizer(pieces, eos_token="</s>")
    draft.unk_token = "<unk>"
    with caplog.at_level(logging.WARNING):
        ids = token_map(12, 10, target, draft)
    assert ids is not None
    assert "64 %" in caplog.text
    expected = [3, 6, 2, 7, -1, 4, 5, -1, 1, -1, -1, -1]
    assert ids.proposals.tolist() == expected
    # " ab a" is read as "b a"; the byte A4, "xy" and " the" are unknown.
    assert ids.inputs.tolist() == [3, 6, 2, 7, 0, 4, 5, 8, 1, 0, 0, 0]
    back = token_map(10, 12, draft, target)
    assert back is not None
    assert back.proposals.tolist() == [-1, 8, 2, 0, 5, 6, 1, 3, -1, -1]
    assert back.inputs.tolist()[8:] == [2, 1], "'b a' as ' a', two spaces as one"


def test_of_tokens_with_one_text_one_is_proposed() -> None:
    target, draft = tokenizer(["▁x", "<0x41>", "A"]), tokenizer(["▁x", "A"])
    ids = token_map(3, 2, target, draft)
    assert ids is not None
    assert ids.inputs.tolist() == [0, 1, 1]
    assert ids.proposals.tolist() == [0, -1, 1]


def test_a_draft_that_mostly_has_other_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """The draft is refused even if it has all tokens of the target, if most of its own are others."""

    def pair(count: int) -> tuple[PreTrainedTokenizerFast, int]:
        words = [*LETTERS, *(f"{a}{b}" for a in LETTERS for b in LETTERS)][:count]
        return tokenizer(words), count

    large, size = pair(100)
    with caplog.at_level(logging.WARNING):
        assert token_map(26, size, OF_LETTERS, large) is not None
    assert "100 % of the target's tokens, which are 26 % of its own" in caplog.text
    large, size = pair(700)
    with pytest.raises(ValueError, match=says("26 of the 700 tokens", "at least 5%", "choose another draft")):
        token_map(26, size, OF_LETTERS, large)


def test_added_tokens_do_not_make_another_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """A model and its chat version share nearly all tokens."""
    ids = token_map(64, 64, tokenizer([*LETTERS, "<call>"]), tokenizer([*LETTERS, "<tool>"]))
    assert ids is not None
    assert ids.proposals.tolist()[:27] == [*range(26), -1]
    assert not caplog.records


def test_load_compares_the_tokenizers_of_the_folders(tmp_path: Path) -> None:
    target = tiny("llama-gqa")
    draft = perturbed(target, 0.05)
    words = [f"w{n}" for n in range(64)]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        for weight in (draft.model.embed_tokens.weight, draft.lm_head.weight):
            weight.copy_(weight[order])
    target.save_pretrained(tmp_path / "target")
    tokenizer(words).save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    tokenizer([words[n] for n in order]).save_pretrained(tmp_path / "draft")
    tokenizer(words).save_pretrained(tmp_path / "wrong")
    small = {"budget": 24, "chunk": 4, "recent": 8, "window": 32, "rounds": 1}
    call = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    prompt = prompt_of(60)
    rates = []
    for given in (None, tmp_path / "wrong"):
        engine = triforce_tree.load(
            tmp_path / "target", tmp_path / "draft", draft_tokenizer=given, **load_arguments(small)
        )
        out = engine.generate(prompt, **call)
        expected = target.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 60), **call)
        assert torch.equal(out.sequences, expected)
        rates.append(out.levels[-1].acceptance_rate)
        out = engine.with_options(levels=3, offload=True).generate(prompt, **call)
        assert torch.equal(out.sequences, expected)
    assert rates[0] > rates[1]
    tokenizer([f"v{n}" for n in range(64)]).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="0 of the target's 64 tokens"):
        triforce_tree.load(tmp_path / "target", tmp_path / "draft")


def test_a_draft_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    target = tiny("llama-gqa")
    with pytest.raises(TypeError, match="the draft_tokenizer is of type int"):
        triforce_tree.load(target, target, draft_tokenizer=3)
    target.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"load\(..., draft_tokenizer=...\)"):
        triforce_tree.load(target, tmp_path)


@pytest.fixture(scope="module")
def trained() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Trains a byte-level and a SentencePiece-like tokenizer with byte fallback on one text."""
    text = pydoc_text()[:40_000] + "äöü 漢字 \n\t" * 50
    by_bytes = ByteLevelBPETokenizer()
    by_bytes.train_from_iterator([text], vocab_size=600, special_tokens=["<|end|>"])
    pieces = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    pieces.train_from_iterator([text], trainer)
    return (
        PreTrainedTokenizerFast(tokenizer_object=by_bytes._tokenizer, eos_token="<|end|>"),
        PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", unk_token="<unk>"),
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_shared_tokens_of_trained_tokenizers_decode_alike(
    trained: tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast], swapped: bool
) -> None:
    target, draft = trained[::-1] if swapped else trained
    ids = token_map(len(target), len(draft), target, draft)
    assert ids is not None
    shared = [
        (token, counterpart)
        for token, counterpart in enumerate(ids.proposals.tolist())
        if counterpart >= 0 and token != target.eos_token_id
    ]
    words = 0
    for token, counterpart in shared:
        # A single byte that is no text decodes to a replacement character.
        texts = [each.decode([id], clean_up_tokenization_spaces=False) for each, id in
                 ((target, token), (draft, counterpart))]  # fmt: skip
        assert texts[0] == texts[1]
        words += len(texts[0]) > 2
    assert words > 100
    assert ids.proposals[target.eos_token_id] == draft.eos_token_id
    assert len({counterpart for _, counterpart in shared}) == len(shared)
