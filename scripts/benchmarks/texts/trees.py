"""Token trees beside chains of equal cost, by kind of text and temperature: docs/results/trees.json.

The acceptance of draft tokens by sibling rank is measured on the embedded pair along the text itself (teacher
forcing), under the retrieval level and under the target, and with it the expected tokens of every tree. The
costs of passes are those of two machines: an H200 (docs/results/on_chip_h200.json), where a pass over up to
64 tokens costs no more than one over a single token; and, for the target, two cores of a CPU
(docs/results/cpu_tree_forward.json), where every token of a pass costs time.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging

import triforce_tree
from scripts.benchmarks.common.command import parser
from scripts.benchmarks.common.results import RESULTS, Record, header, write
from scripts.benchmarks.on_chip.tables import FILE as ON_CHIP
from scripts.benchmarks.texts.command import chosen_sources
from scripts.benchmarks.texts.tables import TREES
from triforce_tree import Engine
from triforce_tree.decoding import forced_tokens
from triforce_tree.eval import overlap
from triforce_tree.eval.attention.timing import timed
from triforce_tree.eval.text import token_ids
from triforce_tree.eval.texts.registry import Texts, TextSource, prompts
from triforce_tree.trees.device_shapes import PassLimits
from triforce_tree.trees.sequoia import Acceptance, at_most_one
from triforce_tree.trees.shapes import chain_shape, expected_acceptances, sequoia
from triforce_tree.trees.sizes import Seconds, best_size, measured_seconds
from triforce_tree.verify.sampling import ProbsFromLogits

RANKS, DEPTHS = 8, 8
# One tile of the attention kernel holds this many tokens, the root included.
_TILE = 64
# Times are the fastest of this many: other work on the machine only adds to them.
_REPEATS = 12
H200, CPU = "H200, llama-2-7b inflated", "two CPU cores, embedded pair"
CPU_FORWARD = "cpu_tree_forward.json"


def h200_costs() -> dict[str, tuple[Seconds, int]]:
    """Seconds of a pass by link, and the most nodes, from the stage times of on_chip's part 7b."""
    rows = json.loads((RESULTS / ON_CHIP).read_text("utf-8"))["rows"]
    row = next(r for r in rows if r["part"] == "7b" and r["temperature"] == 0)
    stages, depth = row["stages"], 4  # the part's tree is best-first:10,9,7,5
    draft = stages["draft"]["ms"] / depth

    def of(name: str) -> Seconds:
        return lambda nodes, depth: (stages[name]["ms"] + depth * draft) / 1e3

    return {
        "draft -> retrieval": (of("retrieval_refresh"), _TILE - 1),
        "draft -> target": (of("target"), _TILE - 1),
    }


def cpu_ms(engine: Engine, prompt: list[int]) -> Record:
    """Milliseconds of a draft step and of a target pass over one token, in turns on this machine."""
    generator = torch.Generator().manual_seed(0)
    to_probs = ProbsFromLogits.at(1.0)
    with engine.with_options(levels=2).program([prompt], 1, to_probs) as program:
        program.prefill([prompt])
        forced_tokens.offer(program, prompt, [])
        depth = PassLimits.of(program.config, 2).depth
        times = [
            (
                timed(program.device, lambda: program.run("draft", generator))[1] / depth,
                timed(program.device, lambda: forced_tokens.target_logits(program, prompt[-1:]))[1],
            )
            for _ in range(_REPEATS)
        ]
    draft, target = (1e3 * min(taken) for taken in zip(*times, strict=True))
    return {"draft_step": draft, "target": target}


def cpu_costs(measured: Record) -> dict[str, tuple[Seconds, int]]:
    """Seconds of a pass of the embedded pair with two levels on two CPU cores, and the most nodes.

    Passes over several tokens are those of docs/results/cpu_tree_forward.json; a draft step is as much of a
    pass over one token as in ``measured``.
    """
    rows = json.loads((RESULTS / CPU_FORWARD).read_text("utf-8"))["rows"]
    points = [(row["t"], row["ms"] / 1e3) for row in rows]
    draft = points[0][1] * measured["draft_step"] / measured["target"]
    return {"draft -> target": (measured_seconds(points, [(1, draft)]), points[-1][0] - 1)}


def acceptances(
    engine: Engine, tokens: list[int], context: int, temperatures: Sequence[float]
) -> dict[tuple[str, float], torch.Tensor]:
    """``[T, ranks]`` by link and temperature, along the text after ``context`` tokens."""
    steps = list(overlap.teacher_forced(engine, tokens, context))
    levels = {
        name: torch.cat([getattr(step, name) for step in steps]) for name in ("draft", "retrieval", "target")
    }
    found = {}
    for temperature in temperatures:
        # Probabilities at T are those at 1 to the power 1 / T.
        scaled = {name: p.pow(1 / (temperature or 1)) for name, p in levels.items()}
        scaled = {name: p / p.sum(-1, keepdim=True) for name, p in scaled.items()}
        generator = torch.Generator().manual_seed(0)
        for level in ("retrieval", "target"):
            of = scaled[level], scaled["draft"], RANKS
            by_position = (
                overlap.sampling_by_position(*of, generator)
                if temperature
                else overlap.greedy_by_position(*of)
            )
            found[f"draft -> {level}", temperature] = by_position
    return found


def compared(acceptance: list[float], by_depth: list[list[float]], seconds: Seconds, most: int) -> Record:
    """The best tree beside the chain of equal cost and the best chain.

    Args:
        acceptance: by rank.
        by_depth: by depth and rank.
        seconds, most: of a pass, and the most nodes.
    """
    tree = best_size(acceptance, seconds, most, DEPTHS)
    shape = sequoia(acceptance, tree.size, tree.depth)
    lengths = range(1, min(most, 4 * DEPTHS) + 1)
    affordable = [n for n in lengths if seconds(n, n) <= tree.seconds * (1 + 1e-9)]
    equal = max(affordable, default=1)
    chain = max(lengths, key=lambda n: chain_tokens(acceptance, n) / seconds(n, n))
    # Under acceptance by depth: what trees chosen by rank alone, and by both, are expected to bring.
    deep = best_size(by_depth, seconds, most, DEPTHS)
    deep_chain = max(chain_tokens(by_depth, n) / seconds(n, n) for n in lengths)
    by_rank = (1 + expected_acceptances(shape, by_depth)) / tree.seconds
    return {
        "tree": {
            "name": f"{tree.size} tokens, depth {tree.depth}", "topology": shape.name, "tokens": tree.tokens,
            "ms": 1e3 * tree.seconds,
        },
        "chain": {
            "name": f"{equal}", "tokens": chain_tokens(acceptance, equal), "ms": 1e3 * seconds(equal, equal)
        },
        "best_chain": {
            "name": f"{chain}", "tokens": chain_tokens(acceptance, chain), "ms": 1e3 * seconds(chain, chain)
        },
        "gain": tree.tokens / chain_tokens(acceptance, equal),
        "speed_gain": tree.rate * seconds(chain, chain) / chain_tokens(acceptance, chain),
        "speed_gain_by_depth": deep.rate / deep_chain,
        "by_depth_to_by_rank": deep.rate / by_rank,
    }  # fmt: skip


def chain_tokens(acceptance: Acceptance, length: int) -> float:
    """Expected tokens of a pass with a chain, the one that the verification adds included."""
    return 1 + expected_acceptances(chain_shape(length), acceptance)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def acceptance_rows(source: TextSource, measured: dict[tuple[str, float], torch.Tensor]) -> list[Record]:
    """A row for each link and temperature: acceptance by rank, and by depth and rank."""
    return [
        {
            "text": source.name, "kind": source.kind, "link": link, "temperature": temperature,
            "positions": len(by_position), "acceptance": by_position.mean(0).tolist(),
            "by_depth": overlap.by_depth(by_position, DEPTHS),
        }
        for (link, temperature), by_position in measured.items()
    ]  # fmt: skip


def compared_rows(rows: Sequence[Record], costs: dict[str, Any]) -> list[Record]:
    """A row for each machine and acceptance: the best tree beside chains."""
    made = []
    for machine, of in costs.items():
        for row in (row for row in rows if row["link"] in of):
            seconds, most = of[row["link"]]
            by_rank, *by_depth = map(at_most_one, [row["acceptance"], *row["by_depth"]])
            made.append(rounded({"machine": machine, **row, **compared(by_rank, by_depth, seconds, most)}))
    return made


def main(words: Sequence[str] | None = None) -> int:
    made = parser("benchmarks trees", __doc__, tiny=False)
    add = made.add_argument
    add("--context", type=int, default=4096, help="prompt tokens")
    add("--positions", type=int, default=256, help="tokens of the text that are judged after the prompt")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0], help="0 is greedy")
    add("--kinds", nargs="+", help="kinds of text, or texts by name; by default all")
    add("--texts", help="file that `texts` wrote; by default what is installed")
    add("--again", action="store_true", help="measure nothing: compare what the file has at today's costs")
    args = made.parse_args(words)
    path = args.out or RESULTS / TREES
    if args.again:
        content = json.loads(path.read_text("utf-8"))
        write(path, {**content, "rows": compared_rows(content["accepted"], costs_of(content["cpu_ms"]))})
        return 0
    logging.set_verbosity_error()
    try:
        texts = Texts(args.texts)
        sources, missing = chosen_sources(texts, args.kinds, one_a_kind=True)
    except (ValueError, OSError) as error:
        made.error(str(error))
    engine = triforce_tree.load(device="cpu", dtype=torch.float32)
    content = {
        **header(args.seed),
        "context": args.context, "positions": args.positions, "missing": missing,
        "options": {k: str(v) for k, v in engine.hierarchy.config.as_options().items()}, "accepted": [],
    }  # fmt: skip
    for source in sources:
        ids = token_ids(engine.tokenizer, texts.read(source))
        [tokens] = prompts(source, ids, args.context + args.positions)
        if "cpu_ms" not in content:
            content["cpu_ms"] = rounded(cpu_ms(engine, tokens[: args.context]))
        measured = acceptances(engine, tokens, args.context, args.temperatures)
        content["accepted"] += rounded(acceptance_rows(source, measured))
        write(path, {**content, "rows": compared_rows(content["accepted"], costs_of(content["cpu_ms"]))})
        print(f"{source.name}: measured", flush=True)
    return 0


def costs_of(measured: Record) -> dict[str, Any]:
    """Costs by machine and link."""
    return {H200: h200_costs(), CPU: cpu_costs(measured)}
