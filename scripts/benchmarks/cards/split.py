"""Seconds of each stage of decoding on several cards: a text split by position, by heads, and on one card.

    python -m scripts.benchmarks split                                      # one card, where the cache fits
    torchrun --nproc-per-node 2 -m scripts.benchmarks split                 # two, by position and by heads
    torchrun --nproc-per-node 4 -m scripts.benchmarks split                 # four: also by both
    torchrun --nproc-per-node 2 -m scripts.benchmarks split --texts         # and decoding of a real text
    torchrun --nproc-per-node 2 -m scripts.benchmarks split --texts --tiny  # the same code, on a CPU

Models are the embedded pair in real shapes. For stages KV slots hold random numbers, and nothing is
prefilled: they take the same time whatever the numbers are. Rows of other cards, shapes and contexts in the
file are kept, each of a part whose header says what measured it. A row's collectives are those of one pass of
plain decoding and of level 2 (calls, and bytes that a rank hands over, without those of the logits). `each`
has every kind of collective alone, its time in one pass, and its time by the communication model of Tree
Attention (`kv/parallel/choice.py`); `ring` is the time of passing all keys and values on to the next rank, as
Ring Attention does. `figures` has a record of machine, ranks, split, shape, context and time for each of
these. With `--texts` a text is prefilled and decoded by default settings with
three levels, then plainly; beyond the pair's positions by YaRN. Where the cache does not fit on one card,
`--texts` keeps a part of it in host memory.
"""

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from scripts.benchmarks.cards.tables import FILE, OFFLOADED, ONE, POSITION, figures, file_of
from scripts.benchmarks.common.command import (
    TINY_OPTIONS,
    device_of,
    machine_of,
    pair_shapes,
    parser,
    results_folder,
)
from scripts.benchmarks.common.long_texts import long_prompts
from scripts.benchmarks.common.results import Record, content_at, header, write
from scripts.benchmarks.common.rope import TRAINED, factor_for, use_yarn
from scripts.benchmarks.common.timing import timed
from scripts.benchmarks.sources.registry import DOCUMENTATION, Texts
from scripts.benchmarks.texts.grid import continued
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine, load
from triforce_tree.config import load_arguments
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.kernels.ranks import all_reduce, merged_bytes, merged_over_ranks
from triforce_tree.kv.backend import PromptRun
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.kv.offload.bandwidth import read_bandwidth
from triforce_tree.kv.parallel.backend import SplitBackend
from triforce_tree.kv.parallel.choice import Ranks, all_reduced, pass_seconds
from triforce_tree.models.tensor_parallel import (
    VocabularyParallel,
    layers_to_shard,
    mlp_shards_of,
    shards_of,
)
from triforce_tree.runtime import distributed
from triforce_tree.runtime.distributed import all_gather_tensor
from triforce_tree.runtime.executor import Step, executor, free_memory
from triforce_tree.verify.sampling import ProbsFromLogits

Pair = tuple[PreTrainedModel, PreTrainedModel]
HEADS = "by heads"
OPTIONS: Record = {"levels": 3, "gamma": 15, "tree": "best-first:4,4,4,3", "budget": 4096, "chunk": 32}
# Device memory that is left to activations, graphs and NCCL.
_SPARE = 12 << 30
# Tokens that are decoded before anything is timed: kernels are compiled, and graphs captured.
_WARM_UP = 8
# Tokens of a prefill that is timed.
_CHUNK = 4096


def fits(target: PreTrainedModel, context: int, cards: int, way: str, device: torch.device) -> bool:
    """Returns whether weights and cache are expected to fit. All ranks decide alike, before any allocates."""
    if device.type != "cuda":
        return True
    config = target.config
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    weights = sum(w.nbytes for w in target.parameters())
    return (
        weights + context * slot // (1 if way == ONE else cards) + _SPARE < torch.cuda.mem_get_info(device)[1]
    )


def fill(program: DecodingProgram) -> None:
    """Fills all slots of this rank with random keys and values."""
    backend = program.cache.backend
    split = backend.slots if isinstance(backend, SplitBackend) else None
    for store in [program.store] if split is None else [split.part, split.whole]:
        for group in store.groups:
            for slots in (group.k, group.v):
                slots.normal_()


def stages(program: DecodingProgram, context: int, runs: int) -> Record:
    """Returns median milliseconds of each stage after ``context`` tokens, and what one run communicates."""
    generator = torch.Generator(program.device).manual_seed(0)
    found: Record = {"ms": {}, "collectives": {}}
    with program.trial(context) as begin:
        for name in program.stage_names:

            def run(name: str = name) -> None:
                program.run(name, generator)

            seconds = []
            for _ in range(runs + 1):
                begin(name != "draft")
                seconds.append(timed(program.device, run)[1])
            found["ms"][name] = 1e3 * statistics.median(seconds[1:])
    return found


def prefill_ms(program: DecodingProgram, context: int, runs: int) -> float:
    """Returns milliseconds of the prefill of the last tokens of a text, as many as a chunk of the default
    size.
    """
    backend, start = program.cache.backend, max(0, context - _CHUNK)

    def run() -> None:
        with program.target.active():
            backend.prefill([[0] * context], 0, [start], PromptRun())

    return _median_ms(program.device, run, runs)


def collectives(program: DecodingProgram, queries: int, runs: int, ranks: Ranks) -> Record:
    """Returns the collectives of one forward over so many tokens by name: their calls, the bytes that a rank
    hands over in each call, milliseconds of all calls, and milliseconds by the communication model.
    """
    target, heads, found = program.target, program.target.heads, {}
    model, backend, layers = target.model, program.cache.backend, target.layers
    kind: Record = {"device": target.device, "dtype": target.dtype}
    hidden = torch.randn(queries, model.config.hidden_size, **kind)

    def add(name: str, calls: int, size: int, seconds: float, call: Callable[[], object]) -> None:
        def run_all() -> None:
            for _ in range(calls):
                call()

        run = executor([Step(run_all)], target.device)
        ms = _median_ms(target.device, run, runs)
        found[name] = {"calls": calls, "bytes": size, "ms": ms, "predicted_ms": 1e3 * calls * seconds}

    if isinstance(backend, SplitBackend):
        group = backend.slots.split.group
        out = torch.randn(queries, heads.query, heads.value_dim, **kind)
        lse = torch.randn(queries, heads.query, device=target.device)
        size = merged_bytes(queries, heads.query, heads.value_dim, target.dtype.itemsize)
        seconds = ranks.link(ranks.size).seconds(group.size, (group.size - 1) * size)
        add("merge", layers, size, seconds, lambda: merged_over_ranks(out, lse, group))
    for name, shards in (("heads", shards_of(model)), ("neurons", mlp_shards_of(model))):
        if shards > 1:
            seconds = ranks.link(shards).seconds(shards, all_reduced(shards, hidden.nbytes))
            add(f"sum of {name}", layers, hidden.nbytes, seconds, lambda n=shards: all_reduce(hidden, n))
    every, head = distributed.current(), model.get_output_embeddings()
    if every is not None and isinstance(head, VocabularyParallel):
        logits = torch.randn(queries, head.linear.out_features, **kind)
        seconds = ranks.link(ranks.size).seconds(every.size, (every.size - 1) * logits.nbytes)
        add("logits", 1, logits.nbytes, seconds, lambda: all_gather_tensor(logits, every))
    return found


def _median_ms(device: torch.device, work: Callable[[], object], runs: int) -> float:
    return 1e3 * statistics.median([timed(device, work)[1] for _ in range(runs + 1)][1:])


def predicted_ms(
    target: PreTrainedModel, context: int, parallel: int, ranks: Ranks, queries: Record
) -> dict[str, float]:
    """Returns the estimated milliseconds of each stage with so many tokens (`kv/parallel/choice.py`)."""
    config = copy.deepcopy(target.config)
    config.max_position_embeddings = context
    with torch.device("meta"):
        whole = type(target)(config).to(target.dtype)
    return {name: 1e3 * pass_seconds(whole, parallel, ranks, n) for name, n in queries.items()}


def splits_of(target: PreTrainedModel, cards: int) -> dict[str, int]:
    """Returns the possible splits by name: over how many of the ranks the text is split."""
    if cards == 1:
        return {ONE: 1}
    found = {}
    for parallel in (n for n in range(cards, 0, -1) if cards % n == 0):
        name = {1: HEADS, cards: POSITION}.get(
            parallel, f"heads over {cards // parallel}, text over {parallel}"
        )
        try:
            layers_to_shard(target, cards // parallel, None)
        except ValueError:  # the heads are no multiple of the ranks
            continue
        found[name] = parallel
    return found


def passed_on(program: DecodingProgram, runs: int) -> Record:
    """Returns milliseconds in which all ranks pass the slots of their positions on once, layer by layer.

    A token over W ranks takes W - 1 times as many (arXiv 2310.01889). The slots' own memory is sent.

    Args:
        program: whose text is split by position over all ranks.
    """
    backend = program.cache.backend
    assert isinstance(backend, SplitBackend)
    split = backend.slots
    layers = [split.part.layers[index].kv for index in range(program.target.layers) if split.splits(index)]
    received = [torch.empty_like(part) for part in layers[0]]
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size

    def pass_on() -> None:
        for parts in layers:
            for part, room in zip(parts, received, strict=True):
                exchange = [dist.P2POp(dist.isend, part, following), dist.P2POp(dist.irecv, room, before)]
                for request in dist.batch_isend_irecv(exchange):
                    request.wait()

    seconds = [timed(program.device, pass_on)[1] for _ in range(runs + 1)][1:]
    size_of_layer = sum(part.nbytes for part in layers[0])
    return {"ms": 1e3 * statistics.median(seconds), "layers": len(layers), "layer_bytes": size_of_layer}


def measure(
    models: Pair,
    context: int,
    parallel: int,
    ranks: Ranks,
    runs: int,
    options: Record,
) -> Record:
    """Returns one row's measurements of stages; the text is split over ``parallel`` ranks."""
    engine = load(*models, **load_arguments({**options, "prefix_cache": False, "context_parallel": parallel}))
    try:
        with torch.no_grad(), engine.program([[0] * context], 64, ProbsFromLogits.at(0.0)) as program:
            fill(program)
            found = stages(program, context, runs)
            found["kv_bytes"] = program.cache.backend.bytes
            stage = program.stage("target")
            queries = {"plain": 1, "target": stage.tree.nodes}  # type: ignore[attr-defined]
            found["predicted_ms"] = predicted_ms(models[0], context, parallel, ranks, queries)
            if ranks.size > 1:
                found["each"] = {name: collectives(program, n, runs, ranks) for name, n in queries.items()}
            for name, each in found.get("each", {}).items():
                layered = [one for kind, one in each.items() if kind != "logits"]
                found["collectives"][name] = {
                    "calls": sum(one["calls"] for one in layered),
                    "bytes": sum(one["calls"] * one["bytes"] for one in layered),
                }
                if parallel > 1:
                    found.setdefault("merge_ms", {})[name] = each["merge"]["ms"]
            if 1 < parallel == ranks.size:
                found["ring"] = passed_on(program, max(1, runs // 4))
            # Last, since it overwrites keys and values.
            found["ms"]["prefill"] = prefill_ms(program, context, max(1, runs // 10))
    finally:
        engine.close()
    return found


def measure_texts(
    models: Pair,
    context: int,
    parallel: int,
    prompts: Mapping[str, list[int]],
    args: argparse.Namespace,
    offloaded: bool = False,
) -> list[Record]:
    """Decodes after the beginnings of real texts, by default settings except the number of levels."""
    # Without training, larger scores cost the pair more than they bring (`rope`).
    factor = factor_for(context + args.new_tokens, TRAINED)
    use_yarn(models[0], factor, TRAINED, attention_factor=1.0)
    options: Record = dict(TINY_OPTIONS) if args.tiny else {}
    options |= {"offload": True} if offloaded else {"context_parallel": parallel}
    engine = load(*models, levels=3, **load_arguments({**options, "prefix_cache": False}))
    try:
        return [
            decoded(engine, name, prompt, args.new_tokens, args.plain_tokens)
            for name, prompt in prompts.items()
        ]
    finally:
        engine.close()


def decoded(engine: Engine, name: str, prompt: Sequence[int], new_tokens: int, plain_tokens: int) -> Record:
    """Decodes greedily after a prefilled prompt, by the engine's settings and then plainly."""
    greedy, ids = ProbsFromLogits.at(0.0), list(prompt)
    with torch.no_grad(), engine.program([ids], new_tokens, greedy) as program:
        _, prefill = timed(program.device, lambda: program.prefill([ids]))
        for rounds in (None, 0):
            continued(program, ids, 0.0, 0, _WARM_UP, rounds)
        ours, loop = continued(program, ids, 0.0, 0, new_tokens, None)
        plain, alone = continued(program, ids, 0.0, 0, plain_tokens, 0)
    distributed.check_equal({"tokens": ours})
    ms, plain_ms = (1e3 * d.decode_seconds / len(tokens) for d, tokens in ((loop, ours), (alone, plain)))
    return {
        "text": name,
        "new_tokens": len(ours),
        "ms_per_token": ms,
        "plain_ms_per_token": plain_ms,
        "speedup": plain_ms / ms,
        "tokens_per_pass": len(ours) / max(1, loop.passes.total()),
        "acceptance": {v.name: v.acceptance_rate for v in loop.levels if v.acceptance_rate is not None},
        "passes": {str(kind): made for kind, made in loop.passes.most_common()},
        "equal_tokens": [common_prefix(ours, plain), len(plain)],
        "prefill_seconds": prefill,
    }


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks split", __doc__)
    made.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "llama-2-7b"], metavar="SHAPE")
    made.add_argument("--contexts", nargs="+", type=int, default=[122_880, 524_288, 1_048_576], metavar="N")
    made.add_argument("--runs", type=int, default=20, help="timed runs of a stage after the first one")
    made.add_argument(
        "--texts", nargs="?", const="", metavar="FILE",
        help="decode real texts too, of a file that `texts` wrote, or as installed",
    )  # fmt: skip
    made.add_argument(
        "--kinds", nargs="+", default=[DOCUMENTATION], help="with --texts: texts by kind or name"
    )
    made.add_argument("--new-tokens", type=int, default=256, help="with --texts: of each")
    made.add_argument("--plain-tokens", type=int, default=64, help="with --texts: of plain decoding")
    args = made.parse_args(words)
    device = device_of(made, args.tiny)
    contexts, runs = ([1024], 2) if args.tiny else (args.contexts, args.runs)
    prompts: dict[int, dict[str, list[int]]] = {}
    if args.texts is not None:
        # Before the stages, which take minutes.
        try:
            prompts = long_prompts(Texts(args.texts or None), args.kinds, contexts)
        except (ValueError, OSError) as error:
            made.error(str(error))
    group = distributed.join(device.type)
    cards, device = (group.size, group.device) if group is not None else (1, device)
    shapes = ["llama-2-13b"] if args.tiny else args.shapes
    options = TINY_OPTIONS | {"levels": 3} if args.tiny else OPTIONS
    dtype = torch.float32 if args.tiny else torch.bfloat16
    ranks = Ranks.joined(group) if group is not None else Ranks(1, 1, read_bandwidth(device))
    path = results_folder(args.out, args.tiny) / file_of(cards)
    known = content_at(path)
    rows, parts, mine = known["rows"], known["parts"], header(args.seed)
    machine = machine_of(device)
    for shape in shapes:
        big, draft = pair_shapes(shape, args.tiny)
        models: Pair | None = inflate_pair(big, device, dtype, draft)[:2]
        assert models is not None
        for way, parallel in splits_of(models[0], cards).items():
            # The ranks share the weights of a model in place, each split otherwise.
            models = models or inflate_pair(big, device, dtype, draft)[:2]
            target = models[0]
            for context in contexts:
                # Positions do not change the time.
                for model in models:
                    model.config.max_position_embeddings = 1 << 21
                fitting = fits(target, context, cards, way, device)
                offloaded = not fitting and context in prompts and cards == 1
                named = OFFLOADED if offloaded else way
                row: Record = {"shape": shape, "context": context, "way": named, "cards": cards}
                part = f"{shape}, {context:,} tokens, {cards} card{'s' * (cards > 1)}"
                rows = [r for r in rows if any(r[name] != row[name] for name in row)]
                row |= {"part": part, "machine": machine, "vocabulary": target.config.vocab_size}
                if fitting:
                    row |= measure(models, context, parallel, ranks, runs, options)
                elif not offloaded:
                    row["fits"] = False
                if context in prompts and (fitting or offloaded):
                    row["texts"] = measure_texts(models, context, parallel, prompts[context], args, offloaded)
                rows.append(row)
                parts[part] = mine
                free_memory()
                if distributed.is_first_rank():
                    print(json.dumps(row), flush=True)
                    used = {name: parts[name] for name in dict.fromkeys(r["part"] for r in rows)}
                    alone = rows if cards <= 2 else content_at(path.with_name(FILE))["rows"]
                    write(
                        path,
                        {"options": options, "parts": used, "rows": rows, "figures": figures(rows, alone)},
                    )
            models = target = None
            free_memory()
    distributed.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
