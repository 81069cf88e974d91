"""A conversation that grows by a question and a reply at each turn, alone and beside another one.

    python -m scripts.benchmarks conversation                # on a CPU: the embedded pair and random models
    python -m scripts.benchmarks conversation --shapes llama-3.1-8b --context 100000 --texts texts.json.xz
    python -m scripts.benchmarks conversation --trace synthetic                 # turns of a coding agent
    python -m scripts.benchmarks conversation --trace nebius/SWE-rebench-openhands-trajectories --target MODEL

Each turn calls ``engine.generate`` with all tokens so far, as a server does. Alone, the buffers still hold
the conversation; beside another one, which takes a turn in between, it comes back from host memory.

Questions are of equal length, cut from a text, and follow the engine's own replies. The seconds of a turn's
prefill stand beside those of the target's own forwards over the same new tokens, after the same cached
tokens. They are measured in the same program right before, and undone. In a trace (``turns.py``) the prompt
of each turn is what was recorded up to a reply of the assistant, and never what the engine generated.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers as hf

import triforce_tree
from scripts.benchmarks.common.command import (
    TINY_OPTIONS,
    device_of,
    machine_of,
    parser,
    results_folder,
)
from scripts.benchmarks.common.results import Record, content_at, header, write
from scripts.benchmarks.common.timing import synchronize
from scripts.benchmarks.requests.run import PAIR, FirstToken, inflated
from scripts.benchmarks.requests.tables import ALONE, BESIDE, OF_RANDOM, QUESTIONS
from scripts.benchmarks.requests.turns import PACKAGES, SYNTHETIC, trajectories, turn_prompts
from scripts.benchmarks.sources.registry import Texts, named, prompts
from triforce_tree import Engine
from triforce_tree.bench.results import repeated_share
from triforce_tree.bench.texts import token_ids
from triforce_tree.config import load_arguments
from triforce_tree.kv.backend import PromptRun
from triforce_tree.kv.cached_tokens import common_prefix
from triforce_tree.loading.checkpoints import PAIR as PAIR_FILES
from triforce_tree.loading.checkpoints import load_tokenizer
from triforce_tree.runtime.executor import free_memory

CASES = (ALONE, BESIDE)
THIRDS = ("early", "middle", "late")
_MEDIANS = (
    "first_token_seconds", "prefill_seconds", "own_prefill_seconds", "of_own", "decode_seconds",
    "ms_per_token", "plain_ms_per_token", "speedup", "tokens_per_pass", "repeated_8grams",
)  # fmt: skip
Turns = Sequence[list[int]]
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


def turn(
    engine: Engine, tokens: list[int], before: list[int], reply: int, own: bool
) -> tuple[Record, list[int]]:
    """Returns what one turn took, and the tokens after it.

    Args:
        before: the tokens after the conversation's last turn.
        own: whether the buffers hold exactly ``before``, which ``tokens`` continues, so that the forwards
            over the new tokens can be timed where the buffers have room for them.
    """
    # The last token of a prompt or a reply is not computed before a pass.
    held = common_prefix(tokens[:-1], before[:-1])
    row: Record = {"prompt_tokens": len(tokens), "new_tokens": len(tokens) - 1 - held}
    program = engine.last_program
    if own and held and program is not None and program.cache.fits(len(tokens)):
        row["own_prefill_seconds"] = own_prefill_seconds(engine, tokens, held)
    streamer, how = FirstToken(), {"do_sample": False, "max_new_tokens": reply, "eos_token_id": []}
    synchronize(engine.target.device)
    start = time.perf_counter()
    out = engine.generate(np.array(tokens), streamer=streamer, **how)
    levels = {level.name: level for level in out.levels or ()}
    after = out.sequences[0].tolist()
    row |= {
        "reused_tokens": out.reused_tokens, "first_token_seconds": streamer.stamps[1] - start,
        "prefill_seconds": out.prefill_seconds, "decode_seconds": out.decode_seconds,
        "ms_per_token": 1e3 * out.decode_seconds / reply,
        "tokens_per_pass": levels["target"].mean_accepted_length,
        "repeated_8grams": repeated_share(after[len(tokens) :]),
    }  # fmt: skip
    return row, after


def conversation(
    engine: Engine, firsts: tuple[int, int], turns: Turns, other: Turns, reply: int, recorded: bool
) -> Iterator[Record]:
    """Yields a row for each turn.

    Args:
        firsts: a token that both conversations begin with, and one of the text that buffers are made by.
        turns: tokens of each turn: with ``recorded`` the whole prompt, else what is added to the text so far.
        other: turns of another conversation, which has one after each of these; may be empty.
    """
    first, unlike = firsts
    text = max(turns, key=len) if recorded else [token for added in turns for token in added]
    length = len(text) + (0 if recorded else len(turns) * reply)
    # Buffers for the whole conversation are made by a text that begins unlike it.
    engine.generate(
        np.array([unlike, *text, *text][: length + 1]), max_new_tokens=reply, do_sample=False, eos_token_id=[]
    )
    texts = [list[int](), list[int]()]
    for number, mine in enumerate(turns):
        row: Record = {}
        for which, given in enumerate([mine, *other[number : number + 1]]):
            before = texts[which]
            tokens = [*(before if before and not recorded else [first]), *given]
            made, texts[which] = turn(engine, tokens, before, reply, not (recorded or other))
            row = row or {"turn": number + 1, **made}
        yield row
    engine.release()


def measured(
    engine: Engine, cases: Sequence[str], turns: Turns, other: Turns, reply: int, recorded: bool
) -> Iterator[list[Record]]:
    """Yields the rows of the conversation in each case, each row with what plain decoding took.

    Args:
        cases: ``ALONE`` and ``BESIDE``; the forwards over the new tokens are timed alone.
        turns, other, recorded: see :func:`conversation`.
    """
    plain, firsts = engine.with_options(levels=1), itertools.count(1)
    own_seconds = dict[int, float | None]()
    for case in cases:
        beside, rows = other if case == BESIDE else [], list[Record]()
        both = [
            conversation(own, (next(firsts), next(firsts)), turns, beside, reply, recorded)
            for own in (engine, plain)
        ]
        # On a CPU their turns alternate, as other load then slows both alike. A GPU may lack the memory, and
        # host memory holds one offloaded cache at a time.
        alternate = engine.target.device.type == "cpu" and not engine.config.offloads
        pairs = zip(*(both if alternate else map(list, both)), strict=True)
        for row, slow in pairs:
            seconds = own_seconds.setdefault(row["turn"], row.get("own_prefill_seconds"))
            rows.append({
                "case": case, **row, "own_prefill_seconds": seconds,
                "of_own": row["prefill_seconds"] / seconds if seconds else None,
                "plain_reused_tokens": slow["reused_tokens"], "plain_ms_per_token": slow["ms_per_token"],
                "speedup": slow["ms_per_token"] / row["ms_per_token"],
            })  # fmt: skip
        yield rows


def summary(rows: list[Record]) -> list[Record]:
    """Returns a row for each third of the turns of each case: medians over its turns, and sums of tokens."""
    found = []
    for case in CASES:
        own = [row for row in rows if row["case"] == case]
        for number, third in enumerate(THIRDS):
            cut = own[number * len(own) // 3 : (number + 1) * len(own) // 3]
            if not cut:
                continue
            known = {name: [row[name] for row in cut if row[name] is not None] for name in _MEDIANS}
            found.append({
                "case": case, "third": third, "turns": len(cut), "tokens": cut[-1]["prompt_tokens"],
                **{name: statistics.median(values) if values else None for name, values in known.items()},
                "computed": sum(row["prompt_tokens"] - 1 - row["reused_tokens"] for row in cut),
                "new": sum(row["new_tokens"] for row in cut),
                "same_hits": sum(row["reused_tokens"] == row["plain_reused_tokens"] for row in cut),
            })  # fmt: skip
    return found


def random_engine(kind: str, options: Record) -> Engine:
    """Returns an engine of a random model, which drafts by suffix matching."""
    model, config, own, how = RANDOM[kind]
    torch.manual_seed(0)
    made = getattr(hf, model)(getattr(hf, config)(**{**_SMALL, **own})).eval()
    return triforce_tree.load(made, **load_arguments({**how, **options}))


def main(words: Sequence[str]) -> int:
    made = parser("benchmarks conversation", __doc__)
    models = made.add_mutually_exclusive_group()
    models.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help="inflated pairs")
    models.add_argument("--target", help="a model with a tokenizer, folder or hub id, in place of these")
    made.add_argument("--draft", help="its draft; by default suffix matching")
    made.add_argument("--kinds", nargs="+", choices=[PAIR, *RANDOM], help="on a CPU; by default all")
    made.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="the other one keeps its rows")
    made.add_argument("--context", type=int, help="tokens after the last turn; 16,384 on a CPU, else 100,000")
    made.add_argument("--turns", type=int, help="the most; by default 60, of a trace all")
    made.add_argument("--reply", type=int, default=64, help="tokens of a reply")
    made.add_argument("--text", default="python-topics", help="what questions are cut from, by name")
    made.add_argument("--texts", help="file that `texts` wrote; by default what is installed")
    made.add_argument(
        "--trace",
        help=f"turns of a coding agent in place of questions: {SYNTHETIC}; a data set on the hub, as "
        "nebius/SWE-rebench-openhands-trajectories; or a folder, .parquet or .jsonl file of its form",
    )
    args = made.parse_args(words)
    on_cpu = args.tiny or not (args.shapes or (args.target and torch.cuda.is_available()))
    device = device_of(made, on_cpu)
    turns, reply = (4, 8) if args.tiny else (args.turns, args.reply)
    tiny = 2048 if args.trace else 400
    context = tiny if args.tiny else args.context or (16_384 if on_cpu else 100_000)
    options: Record = {"prefix_cache": "2GiB" if on_cpu else "64GiB"}
    if args.tiny:
        options |= {"prefill_chunk": 128}
    path = results_folder(args.out, args.tiny) / f"conversation_{machine_of(device)}.jsonl"
    tuned = {**options, **(TINY_OPTIONS if args.tiny else {})}
    kinds: dict[str, Callable[[], Engine]] = {}
    for shape in args.shapes:
        kinds[shape] = lambda shape=shape: inflated(shape, device, args.tiny, tuned, args.seed)
    if args.target:
        more = load_arguments(options)
        kinds[Path(args.target).name] = lambda: triforce_tree.load(
            args.target, args.draft, device=device, **more
        )
    if not kinds:
        kinds[PAIR] = lambda: triforce_tree.load(device=device, dtype=torch.float32, **load_arguments(tuned))
        for kind in RANDOM:
            kinds[kind] = lambda kind=kind: random_engine(kind, options)
        kinds = {kind: make for kind, make in kinds.items() if kind in (args.kinds or kinds)}
    head = header(args.seed) | {"reply": reply, "dtype": "fp32" if on_cpu else "bf16"}
    if (tokenizer := load_tokenizer(args.target or PAIR_FILES / "target")) is None:
        made.error(f"--target {args.target} has no tokenizer; give a folder that has one")
    if args.trace is None:
        part = QUESTIONS
        [source] = named(args.text)
        head["text"] = source.name
        [text] = prompts(source, token_ids(tokenizer, Texts(args.texts).read(source)), 2 * context)
        count = turns or 60
        size = max(2, context // count - reply)
        cut = [text[place : place + size] for place in range(0, 2 * count * size, size)]
        both = cut[:count], cut[count:]
    else:
        part = Path(args.trace).name if Path(args.trace).exists() else args.trace
        if part == SYNTHETIC:
            head["versions"] |= {name: version(name) for name in PACKAGES}
        traces = trajectories(args.trace, args.seed, 2)
        both = tuple(turn_prompts(tokenizer, trace, context, turns) for trace in traces)
    kept = content_at(path)
    part_of = {kind: OF_RANDOM if kind in RANDOM and part == QUESTIONS else part for kind in kinds}
    parts = {**kept["parts"], **dict.fromkeys(part_of.values(), head)}
    rows, every = (
        [
            row
            for row in kept.get(name, [])
            if row["part"] not in part_of.values() or row["case"] not in args.cases
        ]
        for name in ("rows", "turns")
    )
    for kind, make in kinds.items():
        engine, part = make(), part_of[kind]
        for found in measured(engine, args.cases, *both, reply, args.trace is not None):
            thirds = summary(found)
            rows += [{"part": part, "kind": kind, **row} for row in thirds]
            every += [{"part": part, "kind": kind, **row} for row in found]
            print(*thirds, sep="\n", flush=True)
            write(path, {"parts": parts, "rows": rows, "turns": every})
        engine.close()
        del engine
        free_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
