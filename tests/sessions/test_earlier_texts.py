"""``prefix_cache`` with a size: texts before the last one, kept in host memory, for every kind of cache."""

import logging
from typing import Any

import pytest
import torch

import triforce_tree
from tests.support.models.families import greedy, perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from tests.support.models.recurrent_families import Foreknowledge, recurrent
from triforce_tree import Engine
from triforce_tree.config import HierarchyConfig, load_arguments
from triforce_tree.kv import kept_prefixes
from triforce_tree.kv import store as store_module
from triforce_tree.kv.offload.pinned import HostMemory, HostMemoryError
from triforce_tree.policy.pass_policy import PassPolicy
from triforce_tree.policy.passes import PassKind

BOOK, OTHER, THIRD = prompt_of(150), [*reversed(prompt_of(140))], prompt_of(155)
HOW: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.8, "seed": 3}
NO_CACHE = {"prefix_cache": False}


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch, poisoned_empty: None) -> None:
    monkeypatch.setattr(store_module, "RING_PAGE", 8)


def engine(family: str = "llama-gqa", **options: Any) -> Engine:
    target = tiny(family)
    own = {**SMALL, "levels": 3, "window": 40, "prefix_cache": "1GiB", **options}
    return triforce_tree.load(target, perturbed(target, 0.05), **load_arguments(own))


def hybrid(family: str, levels: int, **options: Any) -> Engine:
    own = {"prefill_chunk": 16, "levels": levels, "rounds": 1, "prefix_cache": "1GiB", **options}
    return triforce_tree.load(recurrent(family), **load_arguments(own))


KINDS = {
    "plain": lambda: engine(levels=1),
    "three levels": lambda: engine(),
    "8 bits": lambda: engine(kv_bits=8),
    "windows": lambda: engine("gemma3"),
    "windows, two levels": lambda: engine("gemma2", levels=2),
    "windows in 8 bits": lambda: engine("gemma2", levels=2, kv_bits=8),
    "chunked windows": lambda: engine("llama4", levels=2),
    "windows and sinks": lambda: engine("gpt-oss"),
    "offloaded": lambda: engine(offload=True),
    "offloaded windows": lambda: engine("gemma3", offload=True),
    "gated delta rule": lambda: hybrid("qwen3.5", 1),
    "gated delta rule, two levels": lambda: hybrid("qwen3.5", 2),
    "gated delta rule, offloaded": lambda: hybrid("qwen3.5", 2, offload=True),
    "short convolutions": lambda: hybrid("lfm2", 2),
}


def ask(warm: Engine, prompt: list[int], kept: int, **how: Any) -> list[int]:
    """Returns the text after a prompt, of which so many tokens are kept; it is that of a cold engine."""
    out = warm.generate(prompt, **{**HOW, **how})
    assert out.reused_tokens == kept
    tokens: list[int] = out.sequences[0].tolist()
    return tokens


def cold(kind: str, prompt: list[int], **how: Any) -> list[int]:
    # Of its own models: host memory holds one offloaded cache of a model at a time.
    other = KINDS[kind]().with_options(advanced=NO_CACHE)
    out = other.generate(prompt, **{**HOW, **how})
    assert out.reused_tokens == 0
    tokens: list[int] = out.sequences[0].tolist()
    return tokens


@pytest.mark.parametrize("sampling", [HOW, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_take_turns(kind: str, sampling: dict[str, Any]) -> None:
    """Each turn computes its own tokens alone, from the end of the last reply on, as with one of them."""
    warm = KINDS[kind]()
    texts, held = [BOOK, OTHER], [0, 0]
    for turn in range(3):
        for n, text in enumerate(texts):
            expected = cold(kind, text, **sampling)
            tokens = ask(warm, text, held[n], **sampling)
            assert tokens == expected, (turn, n)
            # The last token of a reply is computed with the next prompt.
            held[n], texts[n] = len(tokens) - 1, [*tokens, *prompt_of(3 + 9 * turn + n)]


@pytest.mark.parametrize(
    "make", [lambda: recurrent("qwen3.5"), lambda: tiny("gemma2")], ids=["delta", "window"]
)
def test_a_pass_that_goes_beyond_the_end(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass commits seven tokens, of which the reply has five: all five are found, as without drafts."""
    options = load_arguments({"prefill_chunk": 16, "levels": 2, "rounds": 1, "prefix_cache": "1GiB"})
    reference = make()
    known = [*BOOK, *greedy(reference, BOOK, 30)]
    warm = triforce_tree.load(make(), drafter=Foreknowledge([known], [set()], 6), **options)
    monkeypatch.setattr(PassPolicy, "choose", lambda *_: PassKind(2, 1, 0))
    out = warm.generate(BOOK, **HOW)
    first = out.sequences[0].tolist()
    assert first == known[: len(first)]
    assert (out.levels[-1].forwards, out.levels[-1].accepted) == (1, 6)
    for between in (False, True):
        if between:
            assert warm.generate(OTHER, **HOW).reused_tokens == 0
        asked = [*first, 1 + between, 7]
        out = warm.generate(asked, **HOW)
        # The pass may have computed the last token of the reply, too.
        assert out.reused_tokens in (len(first) - 1, len(first))
        assert out.sequences[0, len(asked) :].tolist() == greedy(reference, asked, 5)


@pytest.mark.parametrize(
    "kind, kept",
    [("three levels", 140), ("windows", 139), ("gated delta rule, two levels", 139), ("offloaded", 140)],
)
def test_tokens_after_other_tokens_are_other_ones(kind: str, kept: int) -> None:
    """Texts have blocks and an end of the same tokens, after other tokens: each is found after its own."""
    warm = KINDS[kind]()
    end = prompt_of(60)[:44]
    texts = [[*BOOK[:96], *end], [*OTHER[:96], *end]]
    for text in (*texts, end, [*end[16:], *BOOK[:96]]):
        ask(warm, text, 0)
    for text in texts:
        asked = [*text, 5, 6]
        assert ask(warm, asked, kept) == cold(kind, asked)


@pytest.mark.parametrize("kind", ["windows", "gated delta rule, two levels", "offloaded windows", "8 bits"])
def test_replies_that_branch(kind: str) -> None:
    """A prompt is continued from its end, and from the end of either of two replies."""
    warm = KINDS[kind]()
    first = ask(warm, BOOK, 0)
    ask(warm, OTHER, 0)
    # The end of the prompt. Its last token is computed again.
    again = [*BOOK[:-1], (BOOK[-1] + 1) % 64, *prompt_of(5)]
    assert ask(warm, again, len(BOOK) - 1) == cold(kind, again)
    ask(warm, OTHER[:70], 0 if warm.target.states or "windows" in kind else 69)
    for number, token in enumerate((7, 8)):
        branch = [*first, token, 1, 2, 3]
        # The first branch has computed the last token of the reply, too.
        kept = len(first) - (kind != "8 bits" or not number)
        assert ask(warm, branch, kept) == cold(kind, branch)


@pytest.mark.parametrize("kind, anywhere", [("three levels", True), ("windows", False), ("offloaded", True)])
def test_a_conversation_edited_in_the_middle(kind: str, anywhere: bool) -> None:
    """Where layers need a copy, the third text that begins alike finds the one of the second."""
    warm = KINDS[kind]()
    ask(warm, BOOK, 0)
    ask(warm, OTHER, 0)
    edited = [*BOOK[:97], *prompt_of(30)]
    assert ask(warm, edited, 97 if anywhere else 0) == cold(kind, edited)
    # The buffers hold a part of a block of it.
    assert ask(warm, BOOK, len(BOOK) - 1) == cold(kind, BOOK)
    ask(warm, OTHER, len(OTHER) - 1)
    other = [*BOOK[:97], 9, *prompt_of(20)]
    assert ask(warm, other, 97) == cold(kind, other)


@pytest.mark.parametrize("kind", ["three levels", "windows", "gated delta rule, two levels", "offloaded"])
def test_a_reply_that_is_cancelled(kind: str) -> None:
    """What was decoded until then is kept; a prefill that is interrupted leaves what was kept before."""
    warm = KINDS[kind]()
    ask(warm, BOOK, 0)
    asked = [*BOOK, *prompt_of(20)]

    class Stop:
        seen = 0

        def put(self, value: Any) -> bool:
            self.seen += value.numel()
            return self.seen > len(asked)

        def end(self) -> None:
            pass

    out = warm.generate(asked, streamer=Stop(), max_new_tokens=40, do_sample=False)
    cut = out.sequences[0].tolist()
    assert len(asked) < len(cut) < len(asked) + 40
    ask(warm, OTHER, 0)
    assert ask(warm, [*cut, 5], len(cut) - 1) == cold(kind, [*cut, 5])

    def interrupt(tokens: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        warm.generate(THIRD, progress=interrupt, max_new_tokens=2)
    # The prompt before it ended here.
    assert ask(warm, [*cut, 6], len(cut)) == cold(kind, [*cut, 6])


@pytest.mark.parametrize("options", [{}, {"key_variance": True}, {"levels": 1}], ids=str)
def test_exact_engines_keep_whole_chunks(options: dict[str, Any]) -> None:
    """Each is prefilled once; the bits are those of a cold run."""
    warm = engine(exact=True, **options)

    def check(prompt: list[int], kept: int) -> None:
        how = {**HOW, "output_logits": True}
        other = warm.with_options(advanced=NO_CACHE)
        out, expected = warm.generate(prompt, **how), other.generate(prompt, **how)
        assert out.sequences.tolist() == expected.sequences.tolist()
        for ours, theirs in zip(out.logits, expected.logits, strict=True):
            assert torch.equal(ours, theirs)
        assert out.reused_tokens == kept
        other.release()

    check(BOOK, 0)
    check(OTHER, 0)
    check([*BOOK, 3, 4], 144)
    check([*OTHER[:100], *prompt_of(9)], 96)
    check([*BOOK[:64], *OTHER], 64)
    check([*OTHER, 1], 128)


def test_other_batches_and_sessions_find_them() -> None:
    warm = engine()
    before = warm.with_options(advanced=NO_CACHE)
    ask(warm, BOOK, 0)
    for prompts, kept in (([OTHER, BOOK[:61]], [0, 60]), ([[*BOOK, 1], [*OTHER, 2]], [150, 140])):
        out = warm.generate(prompts, **HOW)
        assert out.reused_tokens == kept
        assert out.sequences.tolist() == before.generate(prompts, **HOW).sequences.tolist()
    session = warm.session(OTHER)
    out = session.generate(prompt_of(7), **HOW)
    assert out.reused_tokens >= 140
    other = before.generate([*OTHER, *prompt_of(7)], **HOW)
    assert out.sequences.tolist() == other.sequences.tolist()


@pytest.mark.parametrize("kind", ["three levels", "windows"])
def test_the_size_is_a_limit(kind: str) -> None:
    """The text used longest ago is dropped from its end; what a prompt begins with stays for it."""
    warm = KINDS[kind]()
    first, other = ask(warm, BOOK, 0), ask(warm, OTHER, 0)
    prefixes = warm._hierarchy.prefixes
    both = prefixes.taken
    # Half of it: the second text stays.
    prefixes.bound(both // 2)
    assert both // 4 < prefixes.taken <= both // 2
    assert ask(warm, [*other, 3], len(other) - 1) == cold(kind, [*other, 3])
    assert prefixes.taken <= both // 2
    # The other text goes step by step, and is never found where it cannot be continued.
    out = warm.generate([*first, 3], **HOW)
    assert 0 <= out.reused_tokens < len(first) - 1
    assert out.sequences[0].tolist() == cold(kind, [*first, 3])
    assert prefixes.taken <= both // 2
    prefixes.bound(100)
    assert prefixes.taken == 0
    ask(warm, THIRD, 0)
    ask(warm, [*other, 3], 0)
    assert prefixes.taken == 0
    prefixes.bound(both)
    ask(warm, [*reversed(THIRD)], 0)
    assert prefixes.taken > 0
    warm.close()
    assert prefixes.taken == 0


def test_memory_that_is_short_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(self: HostMemory, size: int) -> None:
        raise HostMemoryError("none is left")

    warm = engine()
    monkeypatch.setattr(kept_prefixes.HostMemory, "check", short)
    with caplog.at_level(logging.WARNING):
        for prompt in (BOOK, OTHER, BOOK, OTHER):
            ask(warm, prompt, 0)
    assert [r.getMessage() for r in caplog.records] == [
        "prefix_cache: earlier texts are not kept any more: none is left"
    ]


@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_changed_weights_find_nothing(kind: str) -> None:
    warm = KINDS[kind]()
    ask(warm, BOOK, 0)
    ask(warm, OTHER, 0)
    with torch.no_grad():
        warm.target.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    ask(warm, BOOK, 0)


@pytest.mark.parametrize(
    "size, said", [(3, "write 3GiB"), ("much", "is no size of memory"), (0, "is no size")]
)
def test_a_size_is_checked(size: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"prefix_cache=.*{said}.*; or give True or False"):
        HierarchyConfig(prefix_cache=size)
