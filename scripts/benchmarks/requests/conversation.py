"""A conversation that grows by a question and a reply at each turn, alone and beside another one.

    python -m scripts.benchmarks conversation                # on a CPU: the embedded pair and random models
    python -m scripts.benchmarks conversation --shapes llama-3.1-8b --context 100000 --texts texts.json.xz

Each turn calls ``engine.generate`` with all tokens so far, as a server does. Alone, the buffers still hold
the conversation; beside another one, which takes a turn in between, it comes back from host memory. The
seconds of a turn's prefill stand beside those of the target's own forwards over the same new tokens, after
the same cached tokens. They are measured in the same program right before, and undone.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers as hf

import triforce_tree
from scripts.benchmarks.common.command import (
    TINY_DRAFT,
    TINY_OPTIONS,
    TINY_SHAPES,
    device_of,
    machine_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import Record, header, write
from scripts.benchmarks.common.timing import synchronize
from scripts.benchmarks.requests.run import PAIR, FirstToken
from scripts.benchmarks.sources.registry import Texts, named, prompts
from scripts.inflate.pair import inflate_pair
from triforce_tree import Engine
from triforce_tree.bench.texts import token_ids
from triforce_tree.config import load_arguments
from triforce_tree.kv.backend import PromptRun
from triforce_tree.runtime.executor import free_memory

ALONE, BESIDE = "alone", "beside another"
_VOCABULARY = 4096
_SMALL: Record = {
    "vocab_size": _VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6, "max_position_embeddings": 131_072,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_LAYERS = [f"{kind}_attention" for kind in ("sliding", "sliding", "full") * 2]
# Random models on a CPU: class of the model, its configuration, options of the engine.
RANDOM: dict[str, tuple[str, str, Record, Record]] = {
    "windows (Gemma 3)": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 512, "layer_types": _LAYERS}, {},
    ),
    "windows and sinks (gpt-oss)": (
        "GptOssForCausalLM", "GptOssConfig",
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _LAYERS}, {},
    ),
    "recurrent (Qwen3.5)": (
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig",
        {
            "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        },
        {"levels": 2},
    ),
    "offloaded (Llama)": ("LlamaForCausalLM", "LlamaConfig", {}, {"offload": True, "levels": 2}),
}  # fmt: skip


def own_prefill_seconds(engine: Engine, tokens: Sequence[int], start: int) -> float:
    """Returns the seconds of the target's forwards over the tokens from position ``start`` on, without the
    last one. The buffers hold those before it, and are left as they are.
    """
    program = engine.last_program
    assert program is not None
    cache = program.cache
    with torch.no_grad(), engine.generation(), engine.target.active():
        if cache.marks is not None:
            cache.marks.add(0, start)
        synchronize(engine.target.device)
        begin = time.perf_counter()
        cache.backend.prefill([tokens], 0, [start], PromptRun(None, cache.states))
        synchronize(engine.target.device)
        seconds = time.perf_counter() - begin
        cache.cached.keep(0, start)
        if cache.marks is not None:
            cache.marks.restore(0, start)
        cache.backend.begin([start])
        cache.means.lost(0, start)
    return seconds


def turn(engine: Engine, tokens: list[int], held: int, reply: int, own: bool) -> tuple[Record, list[int]]:
    """Returns what one turn took, and the tokens after it.

    Args:
        held: tokens that were computed in the turn before.
        own: whether the buffers hold them, so that the forwards over the new tokens can be timed.
    """
    row: Record = {"prompt_tokens": len(tokens), "new_tokens": len(tokens) - 1 - held}
    if own and held:
        row["own_prefill_seconds"] = own_prefill_seconds(engine, tokens, held)
    streamer, how = FirstToken(), {"do_sample": False, "max_new_tokens": reply, "eos_token_id": []}
    synchronize(engine.target.device)
    start = time.perf_counter()
    out = engine.generate(np.array(tokens), streamer=streamer, **how)
    levels = {level.name: level for level in out.levels or ()}
    row |= {
        "reused_tokens": out.reused_tokens, "first_token_seconds": streamer.stamps[1] - start,
        "prefill_seconds": out.prefill_seconds, "decode_seconds": out.decode_seconds,
        "tokens_per_pass": levels["target"].mean_accepted_length,
    }  # fmt: skip
    return row, out.sequences[0].tolist()


def conversation(
    engine: Engine, text: list[int], questions: list[int], reply: int, beside: bool
) -> list[Record]:
    """Returns a row for each turn.

    Args:
        text: where questions come from.
        questions: tokens of each.
        beside: whether another conversation has a turn after each one.
    """
    rows, texts, held = [], [list[int](), list[int]()], 0
    place = 0
    for number, count in enumerate(questions):
        for which in range(1 + beside):
            tokens = [*texts[which], *text[place : place + count]]
            place += count
            row, texts[which] = turn(engine, tokens, 0 if which else held, reply, not (which or beside))
            if not which:
                held = len(texts[0]) - 1
                rows.append({"turn": number + 1, **row})
    return rows


def measured(engine: Engine, text: list[int], turns: int, context: int, reply: int) -> list[Record]:
    """Returns the rows of a conversation alone and beside another one, with ``plain`` hits beside them."""
    question = max(2, context // turns - reply)
    plain = engine.with_options(levels=1)
    found: dict[tuple[str, bool], list[Record]] = {}
    begins = iter(range(1, 6))
    for which, own in ((False, engine), (True, plain)):
        # Buffers for the whole conversation are made by another text: nothing below begins alike.
        own.generate(np.array([5, *text[:context]]), max_new_tokens=reply, do_sample=False, eos_token_id=[])
        for name, beside in ((ALONE, False), (BESIDE, True)):
            distinct = [next(begins), *text]
            found[name, which] = conversation(own, distinct, [question] * turns, reply, beside)
        own.release()
    own_seconds = {row["turn"]: row.get("own_prefill_seconds") for row in found[ALONE, False]}
    return [
        {
            "case": name, **row, "own_prefill_seconds": own_seconds[row["turn"]],
            "plain_reused_tokens": other["reused_tokens"],
        }
        for name in (ALONE, BESIDE)
        for row, other in zip(found[name, False], found[name, True], strict=True)
    ]  # fmt: skip


def summary(kind: str, rows: list[Record]) -> list[Record]:
    """Returns a row for each case: medians over the last third of the turns, and the hits of all."""
    found = []
    for case in (ALONE, BESIDE):
        own = [row for row in rows if row["case"] == case]
        early, late = own[: len(own) // 3], own[-(len(own) // 3) :]
        medians = {
            name: statistics.median(row[name] for row in late)
            for name in ("first_token_seconds", "prefill_seconds", "own_prefill_seconds", "tokens_per_pass")
        }
        computed = sum(row["prompt_tokens"] - 1 - row["reused_tokens"] for row in own)
        found.append({
            "kind": kind, "case": case, "turns": len(own), "tokens": own[-1]["prompt_tokens"], **medians,
            "of_own": statistics.median(row["prefill_seconds"] / row["own_prefill_seconds"] for row in late),
            "computed": computed, "new": sum(row["new_tokens"] for row in own),
            "early_tokens_per_pass": statistics.median(row["tokens_per_pass"] for row in early),
            "same_hits": sum(row["reused_tokens"] == row["plain_reused_tokens"] for row in own),
        })  # fmt: skip
    return found


def random_engine(kind: str, context: int, options: Record) -> Engine:
    """Returns an engine of a random model, which drafts by suffix matching."""
    model, config, own, how = RANDOM[kind]
    torch.manual_seed(0)
    made = getattr(hf, model)(getattr(hf, config)(**{**_SMALL, **own})).eval()
    return triforce_tree.load(made, **load_arguments({**how, **options}))


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks conversation", __doc__)
    made.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help="inflated pairs")
    made.add_argument("--kinds", nargs="+", choices=[PAIR, *RANDOM], help="on a CPU; by default all")
    made.add_argument("--context", type=int, help="tokens after the last turn; 16,384 on a CPU, else 100,000")
    made.add_argument("--turns", type=int, default=60)
    made.add_argument("--reply", type=int, default=64, help="tokens of a reply")
    made.add_argument("--text", default="python-topics", help="what questions are cut from, by name")
    made.add_argument("--texts", help="file that `texts` wrote; by default what is installed")
    args = made.parse_args(words)
    on_cpu = args.tiny or not args.shapes
    device = device_of(made, on_cpu)
    turns, reply = (4, 8) if args.tiny else (args.turns, args.reply)
    context = 400 if args.tiny else args.context or (16_384 if on_cpu else 100_000)
    options: Record = {"prefix_cache": "2GiB" if on_cpu else "64GiB"}
    if args.tiny:
        options |= {"prefill_chunk": 128}
    [source] = named(args.text)
    text = Texts(args.texts).read(source)
    path = results_folder(args.out, args.tiny) / f"conversation_{machine_of(device)}.jsonl"
    kinds: dict[str, Callable[[], Engine]] = {}
    for shape in args.shapes:
        kinds[shape] = lambda shape=shape: _inflated(shape, device, args.tiny, options, args.seed)
    if not args.shapes:
        pair = {**options, **({} if not args.tiny else TINY_OPTIONS)}
        kinds[PAIR] = lambda: triforce_tree.load(device=device, dtype=torch.float32, **load_arguments(pair))
        for kind in RANDOM:
            kinds[kind] = lambda kind=kind: random_engine(kind, context, options)
        kinds = {kind: make for kind, make in kinds.items() if kind in (args.kinds or kinds)}
    rows: list[Record] = []
    every: list[Record] = []
    head = header(args.seed) | {"text": source.name, "reply": reply, "dtype": "fp32" if on_cpu else "bf16"}
    ids: list[int] | None = None
    for kind, make in kinds.items():
        engine = make()
        if ids is None:
            tokenizer = engine.tokenizer or triforce_tree.load(device="cpu").tokenizer
            [ids] = prompts(source, token_ids(tokenizer, text), 2 * context)
        found = measured(engine, ids, turns, context, reply)
        rows += summary(kind, found)
        every += [{"kind": kind, **row} for row in found]
        print(*rows[-2:], sep="\n", flush=True)
        write(path, head | {"rows": rows, "turns": every})
        engine.close()
        del engine
        free_memory()
    return 0


def _inflated(shape: str, device: torch.device, tiny: bool, options: Record, seed: int) -> Engine:
    sizes = (TINY_SHAPES[shape], TINY_DRAFT) if tiny else (shape, "llama-68m")
    dtype: Any = torch.float32 if tiny else torch.bfloat16
    target, draft, tokenizer = inflate_pair(sizes[0], device, dtype, sizes[1], seed)
    more = TINY_OPTIONS if tiny else {}
    return triforce_tree.load(target, draft, tokenizer=tokenizer, **load_arguments({**options, **more}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
