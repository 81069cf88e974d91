"""Check the decoding program where it runs: greedy tokens, distributions, seeds, and memory over many passes.

    python -m scripts.checks.check_cycle --device cuda
    python -m scripts.checks.check_cycle --device cpu --batch 64 --repeats 8 --tokens 400

Uses the embedded pair. Distributions are tested by a batch of equal prompts, each with its own draws:
chi-square of the first new token, and of the second one after the likeliest first ones. Exit code 1 where
anything fails; the last line is JSON.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common.engine import drafter_of
from scripts.checks.report import Report, parser
from triforce_tree import load
from triforce_tree.bench.texts import pydoc_text, token_ids
from triforce_tree.check.goodness_of_fit import chi_square, chi_square_p
from triforce_tree.check.losslessness import uncertain_contexts
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits

# Smallest p-value that passes; about twenty tests are made.
_LEAST_P = 1e-4


class Checks:
    """Models, and what has been found about them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        engine = load(device=device, dtype=dtype)
        self.engine = engine
        assert engine.hierarchy.draft is not None
        assert engine.tokenizer is not None
        self.target: HFModel = engine.hierarchy.target
        self.draft: HFModel = engine.hierarchy.draft
        self.text = token_ids(engine.tokenizer, pydoc_text())
        self.report = Report()
        self.add = self.report.add

    def program(self, levels: int, batch: int, max_seq_len: int, **options: Any) -> DecodingProgram:
        settings: dict[str, Any] = {"gamma": 8, "tree": "best-first:6,4,3", "budget": 512, "recent": 128}
        config = HierarchyConfig.from_options(**{**settings, "rounds": 2, **options})
        drafter = drafter_of(self.draft, config, levels)
        return DecodingProgram(self.target, drafter, config, batch, max_seq_len, levels)

    def greedy(self, lengths: list[int], new_tokens: int, **options: Any) -> None:
        """Three and two levels against one, in one batch of ragged prompts."""
        prompts = [self.text[1000 * i : 1000 * i + n] for i, n in enumerate(lengths)]
        to_probs = ProbsFromLogits(greedy=True)
        expected = None
        for levels in (1, 2, 3):
            program = self.program(levels, len(prompts), max(lengths) + new_tokens, **options)
            decoder = Decoder(program, to_probs, 0)
            decoder.prefill(prompts)
            tokens = decoded(decoder, prompts, new_tokens)
            expected = expected or tokens
            differing = sum(a != b for a, b in zip(tokens, expected, strict=True))
            name = f"greedy, {levels} levels {options or ''}"
            self.add(name, differing == 0, sequences=len(prompts), differing=differing)
            plain = Decoder(program, to_probs, 0)
            plain.controller.fixed = 0
            program.rewind(prompts)
            same = decoded(plain, prompts, new_tokens) == expected
            self.add(f"greedy, plain decoding by a program of {levels} levels {options or ''}", same)

    def probs(self, length: int, batch: int, repeats: int, temperature: float) -> None:
        """First and second new tokens of many equal prompts."""
        [prompt] = uncertain_contexts(self.engine, self.text[:length], 1)
        to_probs = ProbsFromLogits.at(temperature)
        first_probs = self._probs_of(prompt, to_probs)
        for levels, options in (
            (1, {}),
            (2, {}),
            (3, {}),
            (3, {"tail_tree": True}),
            (3, {"runner_ups": False, "retrieval_weight_bits": 8}),
        ):
            if options.get("retrieval_weight_bits") and self.target.dtype == torch.float32:
                continue
            program = self.program(levels, batch, length + 64, **options)
            prompts = [prompt] * batch
            pairs: list[tuple[int, int]] = []
            for repeat in range(repeats):
                decoder = Decoder(program, to_probs, repeat)
                if repeat:
                    program.rewind(prompts)
                else:
                    decoder.prefill(prompts)
                pairs += [(row[0], row[1]) for row in decoded(decoder, prompts, 2)]
            name = f"distribution, {levels} levels {options or ''}, temperature {temperature}"
            self._judge(f"{name}, first token", Counter(a for a, _ in pairs), first_probs)
            for token in first_probs.topk(2).indices.tolist():
                after = Counter(b for a, b in pairs if a == token)
                self._judge(f"{name}, after {token}", after, self._probs_of([*prompt, token], to_probs))

    def endurance(self, length: int, new_tokens: int) -> None:
        """Memory and repeatability over many tokens."""
        program = self.program(3, 1, length + new_tokens)
        prompt = self.text[:length]
        to_probs = ProbsFromLogits.at(1.0)
        sequences, memory, passes = [], [], 0
        for _ in range(2):
            decoder = Decoder(program, to_probs, 7)
            decoder.prefill([prompt])
            tokens: list[int] = []
            for fresh in decoder.decode([prompt], [Ending(new_tokens)]):
                tokens += fresh[0]
                passes += 1
                if passes % 100 == 0 and torch.cuda.is_available():
                    memory.append(torch.cuda.memory_allocated())
            sequences.append(tokens)
        self.add("same seed, same tokens", sequences[0] == sequences[1], tokens=len(sequences[0]))
        growth = max(memory) - memory[0] if memory else 0
        self.add("memory stays", growth < 1 << 20, passes=passes, bytes=growth)

    def _probs_of(self, prompt: list[int], to_probs: ProbsFromLogits) -> Tensor:
        with torch.no_grad():
            ids = torch.tensor([prompt], device=self.target.device)
            logits = self.target.model(ids, logits_to_keep=1).logits[0]
        return to_probs(logits, list)[0]

    def _judge(self, name: str, counts: Counter[int], probs: Tensor) -> None:
        statistic, freedom = chi_square(counts, probs)
        p = chi_square_p(statistic, freedom)
        self.add(name, p > _LEAST_P, draws=sum(counts.values()), bins=freedom + 1, p=round(p, 5))


def decoded(decoder: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]
    for fresh in decoder.decode(prompts, [Ending(new_tokens)] * len(prompts)):
        for sequence, tokens in zip(made, fresh, strict=True):
            sequence += tokens
    return made


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    made.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of models"
    )
    made.add_argument("--batch", type=int, default=256, help="equal prompts that draw at once")
    made.add_argument("--repeats", type=int, default=8, help="times that batch")
    made.add_argument("--tokens", type=int, default=20_000, help="of the endurance test")
    args = made.parse_args()
    checks = Checks(args.device, getattr(torch, args.dtype))
    checks.greedy([700, 1500, 3001], 200)
    checks.greedy([700, 1500, 3001], 200, kv_bits=8)
    checks.greedy([700, 1500, 3001], 200, tail_tree=True)
    for temperature in (0.7, 1.0):
        checks.probs(900, args.batch, args.repeats, temperature)
    checks.endurance(4000, args.tokens)
    return checks.report.finish(device=args.device, dtype=args.dtype, rows=checks.report.rows)


if __name__ == "__main__":
    sys.exit(main())
