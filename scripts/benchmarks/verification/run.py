"""How many tokens traversal verification accepts beside verification node by node, on the embedded pair.

    python -m scripts.benchmarks verification [--tokens 128] [--prompts 24] [--context 4096]

The engine decodes with sampling. For every tree that a level verifies, the expected number of accepted tokens
is computed for both from the tree's tokens, p and q: acceptance itself is not sampled. Tokens a verification
include the one that it emits itself. Chains that level 2 verifies are those of level 1 with traversal
verification; it made them longer too. Writes docs/results/verification.json.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.common import results
from scripts.benchmarks.common.engine import drafter_of
from scripts.benchmarks.cpu.machine import processor
from scripts.benchmarks.verification import expected
from triforce_tree import load
from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.loop import Decoder
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.decoding.stages import ChainVerifyStage, RetrievalVerifyStage, TreeVerifyStage
from triforce_tree.decoding.stop_criteria import Ending
from triforce_tree.engine import Engine
from triforce_tree.eval.text import pydoc_text, token_ids
from triforce_tree.verify.noise import Noise
from triforce_tree.verify.sampling import ProbsFromLogits

OUT = results.RESULTS / "verification.json"
# Levels, tree, runner-ups, draft rounds a pass; the default trees of both kinds of device among them.
Setting = tuple[int, str, bool, int]
SETTINGS: tuple[Setting, ...] = (
    (2, "chain:4", False, 1),
    (2, "chain:8", False, 1),
    (2, "best-first:2,2,1", False, 1),
    (2, "best-first:4,4,4,3", False, 1),
    (2, "best-first:6,5,4", False, 1),
    (3, "chain:3", False, 4),
    (3, "chain:3", True, 4),
    (3, "best-first:6,5,4", False, 4),
)
# Levels -> stages that verify, and their names; both stages of level 1 have one verifier.
STAGES = {2: {"target": "target"}, 3: {"retrieval": "retrieval", "target": "target"}}


class Recording(Noise):
    """Noise that computes what each tree is expected to give before it is verified.

    Attributes:
        found: (by traversal, node by node) of each verification: expected tokens, the emitted one included.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: list[list[float]] = []

    def traverse_tree(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, q_rows: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tree = tokens, parents, p, q, q_rows
        if tokens.shape[1] > 1:
            both = expected.traversal(*tree, depth), expected.node_by_node(*tree, depth)
            self.found += (1 + torch.stack(both, 1)).tolist()
        return super().traverse_tree(*tree, depth)


Found = dict[str, list[list[float]]]


def measured(
    engine: Engine, prompts: Sequence[list[int]], setting: Setting, heats: Sequence[float], count: int
) -> dict[float, Found]:
    """``Recording.found`` by temperature and level, for ``count`` new tokens of each prompt."""
    levels, tree, runner_ups, rounds = setting
    assert engine.hierarchy.draft is not None
    config = HierarchyConfig.from_options(
        tree=tree, runner_ups=runner_ups, rounds=rounds, gamma=12, budget=512, recent=128
    )
    length = max(map(len, prompts)) + count
    drafter = drafter_of(engine.hierarchy.draft, config, levels)
    program = DecodingProgram(engine.hierarchy.target, drafter, config, 1, length, levels, noise=Recording)
    found: dict[float, Found] = {heat: {} for heat in heats}
    for seed, prompt in enumerate(prompts):
        program.prefill([prompt])
        for heat in heats:
            decoder = Decoder(program, ProbsFromLogits.at(heat), seed)
            decoder.controller.fixed = rounds
            program.rewind([prompt])
            noises = {level: _noise(program, stage) for stage, level in STAGES[levels].items()}
            for noise in noises.values():
                noise.found = []
            for _ in decoder.decode([prompt], [Ending(count)]):
                pass
            for level, noise in noises.items():
                found[heat].setdefault(level, []).extend(noise.found)
    return found


def _noise(program: DecodingProgram, stage: str) -> Recording:
    judged = program.stage(stage)
    assert isinstance(judged, RetrievalVerifyStage | ChainVerifyStage | TreeVerifyStage)
    noise = judged.verifier.noise
    assert isinstance(noise, Recording)
    return noise


def rows_of(setting: Setting, heat: float, found: Found) -> list[results.Record]:
    """A row for each level that verifies."""
    levels, tree, runner_ups, rounds = setting
    rows = []
    for level, trees in found.items():
        ours, other = (statistics.fmean(column) for column in zip(*trees, strict=True))
        # Both are expectations for the same trees, which were drawn.
        spread = statistics.stdev(one - another for one, another in trees) if len(trees) > 1 else 0.0
        rows.append(
            {
                "levels": levels,
                "tree": tree,
                "runner_ups": runner_ups,
                "rounds": rounds,
                "temperature": heat,
                "level": level,
                "verifications": len(trees),
                "tokens_traversal": results.rounded(ours),
                "tokens_node_by_node": results.rounded(other),
                "gain": results.rounded(ours / other - 1),
                "gain_standard_error": results.rounded(spread / len(trees) ** 0.5 / other),
            }
        )
    return rows


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.benchmarks verification", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=24, help="prompts")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6], help="of sampling")
    parser.add_argument("--out", type=Path, default=OUT, help="results file")
    options = parser.parse_args(words)
    engine = load(device="cpu", dtype=torch.float32)
    assert engine.tokenizer is not None
    text = token_ids(engine.tokenizer, pydoc_text())
    apart = (len(text) - options.context) // options.prompts
    prompts = [text[apart * i :][: options.context] for i in range(options.prompts)]
    content: results.Record = {
        **results.header(0),
        "processor": processor(),
        "text": "pydoc topics",
        "context": options.context,
        "prompts": options.prompts,
        "new_tokens": options.tokens,
        "rows": [],
    }
    for setting in SETTINGS:
        found = measured(engine, prompts, setting, options.temperatures, options.tokens)
        for heat in options.temperatures:
            for row in rows_of(setting, heat, found[heat]):
                print(row, flush=True)
                content["rows"].append(row)
        results.write(options.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
