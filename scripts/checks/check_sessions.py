"""Check kept and common prefixes and sessions where they run: bits of a cold prefill, texts, files, times.

    python -m scripts.checks.check_sessions --prompt 60000
    python -m scripts.checks.check_sessions --dtype float32 --prompt 20000
    python -m scripts.checks.check_sessions --device cpu --dtype float32 --prompt 6000 --new 12

Uses the embedded pair, with a cache on the device in 16 and 8 bits, and offloaded. Sessions must give the
text of a cold engine; in 16 bits they may part at a tie (``eval.ties``), and ties are counted. Exit code 1
where anything fails; the last line is JSON.
"""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from scripts.checks.report import Report, parser
from triforce_tree import Engine, load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.check.ties import first_difference
from triforce_tree.config import load_arguments

CACHES: dict[str, dict[str, Any]] = {
    "device": {},
    "8 bits": {"kv_bits": 8},
    "offloaded": {"offload": True},
}


class Texts:
    """Greedy texts beside those of a cold engine: how many are equal, and part at a tie or elsewhere.

    Args:
        cold: whose texts are expected.
        how: options of each call.
    """

    def __init__(self, cold: Engine, how: dict[str, Any]) -> None:
        self._cold, self._how = cold, how
        self.equal, self.gaps, self.failed = 0, list[float](), list[str]()

    def compare(self, asked: list[int], found: list[int]) -> None:
        """Compare what follows a prompt."""
        expected = self._cold.generate(asked, **self._how).sequences[0].tolist()[len(asked) :]
        difference = first_difference(self._cold, asked, found, expected)
        if difference is None:
            self.equal += 1
        elif difference.tie:
            self.gaps.append(difference.gap)
        else:
            self.failed.append(f"scores {difference.gap:g} apart, noise {difference.noise:g}")

    def told(self) -> dict[str, Any]:
        """For the report: counts, and how far apart the scores of tokens that tie were."""
        counts = {"texts_equal": self.equal, "ties": len(self.gaps), "other_differences": self.failed}
        return counts | {"gaps_of_ties": self.gaps}


def whole_chunks(engine: Engine, cold: Engine, text: list[int], prompt: int, new: int) -> dict[str, Any]:
    """``generate`` keeps whole chunks, and the logits of a cold prefill."""
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "seed": 0}
    engine.generate(text[:prompt], **how)
    question = [*text[: prompt - 300], *text[prompt + 500 : prompt + 700]]
    warm, other = engine.generate(question, **how), cold.generate(question, **how)
    same = all(torch.equal(a, b) for a, b in zip(warm.logits, other.logits, strict=False))
    tokens = warm.sequences.tolist() == other.sequences.tolist()
    kept = int(warm.reused_tokens or 0)  # type: ignore[arg-type]
    return {
        "passed": tokens and same and kept > 0,
        "kept": kept,
        "tokens_equal": tokens,
        "bits_equal": same,
        "prefill_seconds": warm.prefill_seconds,
        "cold_prefill_seconds": other.prefill_seconds,
    }


def session_text(engine: Engine, cold: Engine, text: list[int], prompt: int, new: int) -> dict[str, Any]:
    """Three calls, a fork and a saved session, each against a cold engine."""
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "seed": 0}
    session = engine.session(text[:prompt])
    session.generate(**how)
    seconds, texts = [], Texts(cold, how)
    with tempfile.TemporaryDirectory() as folder:
        session.save(folder)
        fork = session.fork()
        for each, at in ((session, 0), (fork, 300), (session, 600)):
            asked = [*each.tokens, *text[prompt + at : prompt + at + 200]]
            out = each.generate(asked[len(each.tokens) :], **how)
            seconds.append(out.prefill_seconds)
            texts.compare(asked, each.tokens[len(asked) :])
        loaded = engine.load_session(folder)
        asked = [*loaded.tokens, *text[prompt : prompt + 200]]
        out = loaded.generate(text[prompt : prompt + 200], **how)
        texts.compare(asked, loaded.tokens[len(asked) :])
        kept = int(out.reused_tokens or 0)  # type: ignore[arg-type]
    return {
        "passed": kept >= prompt and not texts.failed,
        **texts.told(),
        "prefill_seconds": seconds,
        "kept_after_load": kept,
    }


def questions_together(
    engine: Engine, cold: Engine, text: list[int], prompt: int, new: int
) -> dict[str, Any]:
    """Questions about one document, then about its first half, in batches of three rows; each is as alone.

    Where the cache is on the device, the document is stored once, and the second batch runs the same stages.
    """
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "seed": 0}
    texts, prefixes, programs = Texts(cold, how), [], []
    for common in (prompt, prompt // 2):
        asked = [[*text[:common], *text[prompt + at : prompt + 2 * at + 150]] for at in (0, 200, 500, 30)]
        out = engine.generate(asked, max_batch=3, **how)
        program = engine.hierarchy.last_program
        assert program is not None
        prefixes.append(program.cache.prefix.size.slots)
        programs.append(program)
        for row, question in zip(out.sequences.tolist(), asked, strict=True):
            texts.compare(question, row[-new:])
    on_device = not engine.hierarchy.offloads
    stored = prefixes[0] > prefixes[1] > 0 and programs[0] is programs[1] if on_device else not any(prefixes)
    return {
        "passed": stored and not texts.failed,
        **texts.told(),
        "stored_once": prefixes,
    }


def main(words: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    made.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of models")
    made.add_argument("--prompt", type=int, default=60_000, help="tokens of the document")
    made.add_argument("--new", type=int, default=64, help="tokens of an answer")
    args = made.parse_args(words)
    report = Report()
    dtype = getattr(torch, args.dtype)
    # Two copies of the models: host memory holds one offloaded cache of a model at a time.
    warm, cold = (load(device=args.device, dtype=dtype, levels=3) for _ in range(2))
    assert warm.tokenizer is not None
    text = token_ids(warm.tokenizer, pydoc_text())
    for name, options in CACHES.items():
        cold_engine = cold.with_options(**load_arguments({**options, "prefix_cache": False}))
        for check in (whole_chunks, session_text, questions_together):
            engine = warm.with_options(**load_arguments(options))
            report.attempt(
                f"{check.__name__}, {name}",
                lambda check=check, engine=engine, cold=cold_engine: check(  # type: ignore[misc]
                    engine, cold, text, args.prompt, args.new
                ),
            )
            engine.close()
        cold_engine.close()
    return report.finish(device=args.device, dtype=args.dtype, rows=report.rows)


if __name__ == "__main__":
    sys.exit(main())
