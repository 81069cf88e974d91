"""The jobs of each process in the tests of context parallelism; each rank writes one JSON file of results.

WORLD_SIZE=3 RANK=0 ... python tests/support/processes/context_ranks.py JOB FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree import Engine, load
from triforce_tree.config import load_arguments
from triforce_tree.models.tensor_parallel import mlp_shards_of, shards_of
from triforce_tree.runtime import distributed

RANK = int(os.environ.get("RANK", "0"))
PROMPT, NEW = prompt_of(150), 12
# name -> family, options of the engine
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "three levels": ("llama-gqa", {"levels": 3}),
    "two levels": ("llama-gqa", {"levels": 2}),
    "one level": ("llama-gqa", {"levels": 1}),
    "one KV head": ("llama-mqa", {"levels": 2, "prefill_chunk": 37}),
    "windows": ("mistral-window", {"levels": 2}),
    "windows and capped scores": ("gemma2", {"levels": 3}),
    "auto": ("llama-gqa", {"levels": "auto", "rounds": None, "tree": "chain:3", "other_trees": "chain:1"}),
}
WINDOWS = ("windows", "windows and capped scores")
# Setups whose proposals do not depend on what the retrieval level selects.
SAMPLED = ("two levels", "one level", "one KV head", "windows")


def engine(family: str, **options: Any) -> Engine:
    target = tiny(family)
    draft = perturbed(target, 0.05)
    return load(
        target,
        draft,
        device="cpu",
        **load_arguments({**SMALL, "runner_ups": True, "tail_tree": True, **options}),
    )


def generated(made: Engine, **more: Any) -> list[int]:
    """Returns the new tokens of one generation."""
    out = made.generate(PROMPT, **{"max_new_tokens": NEW, "do_sample": False, **more})
    return out.sequences[0, len(PROMPT) :].tolist()


def generations(context: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns greedy and sampled tokens of some setups."""
    result: dict[str, Any] = {}
    for name in names:
        family, options = SETUPS[name]
        made = engine(family, context_parallel=context, **options)
        result[name] = generated(made)
        result[f"{name}, sampled"] = generated(made, do_sample=True, top_k=0, seed=7)
    return result


def two() -> dict[str, Any]:
    """Runs two ranks: every setup, what a pass communicates, a batch, a session, and a short prompt."""
    result = generations(2, tuple(SETUPS))
    made = engine("llama-gqa", context_parallel=2, levels=2)
    batch = made.generate([PROMPT, PROMPT[:61], PROMPT[:3]], max_new_tokens=NEW, do_sample=False)
    result["batch"] = batch.sequences.tolist()
    session = made.session(PROMPT)
    session.generate(max_new_tokens=NEW, do_sample=False)
    out = session.generate([1, 2, 3], max_new_tokens=8, do_sample=False)
    result["session"] = [session.tokens, out.reused_tokens]
    with made.program([PROMPT], NEW, None) as program:
        split, most = program.cache.backend.slots, program.max_seq_len
        result["slots"] = [split.part.slots, most, split.whole.groups == []]
    with torch.no_grad(), made.program([PROMPT], NEW, None) as program:
        program.prefill([PROMPT])
        view = program.full_view(3, None, [0, 1, 2])
        view.begin(torch.tensor([len(PROMPT) - 1]))
        distributed.traffic.clear()
        program.full(torch.tensor([[1, 2, 3]]), torch.arange(3)[None] + len(PROMPT) - 1, view)
        model = program.target.model
        neurons = model.get_submodule("model.layers.0.mlp.up_proj").out_features
        result["shards"] = [shards_of(model), mlp_shards_of(model), neurons]
        result["traffic"] = [dict(distributed.traffic.calls), dict(distributed.traffic.bytes)]
    refused = []
    for options in ({"context_parallel": 1}, {"context_parallel": 4}):
        try:
            generated(
                engine("llama-gqa", context_parallel=2).with_options(**load_arguments(options)),
                max_new_tokens=2,
            )
            refused.append("")
        except ValueError as error:
            refused.append(str(error))
    try:
        engine("llama-gqa", context_parallel=3)
    except ValueError as error:
        refused.append(str(error))
    result["refused"] = refused
    return result


def three() -> dict[str, Any]:
    """Runs three ranks: uneven parts, more ranks than KV heads, and layers with windows, which each has
    whole.
    """
    return generations(3, ("three levels", "one KV head", *WINDOWS))


def four() -> dict[str, Any]:
    """Runs four ranks: two parts of the text by two of the heads, windows in four parts of the text."""
    return generations(2, ("three levels", "two levels")) | generations(4, WINDOWS)


# Family and options where the split is left open; of two KV heads, one, and three. The last one's head is
# tied, and its vocabulary prime.
OPEN: dict[str, tuple[str, dict[str, Any]]] = {
    "two KV heads": ("llama-gqa", {"levels": 3}),
    "one KV head": ("llama-mqa", {"levels": 2}),
    "three KV heads": ("llama", {"levels": 2}),
}
THREE = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "hidden_size": 24,
    "intermediate_size": 60,
    "vocab_size": 67,
    "tie_word_embeddings": True,
}


def open_split() -> dict[str, Any]:
    """Runs ranks that are not told how to share a text; returns the ranks and greedy tokens."""
    result: dict[str, Any] = {}
    for name, (family, options) in OPEN.items():
        made = load_open(family, options)
        out = made.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
        result[name] = [out.ranks, out.sequences[0, len(PROMPT) :].tolist()]
    kept = made.with_options(levels=1, advanced={"context_parallel": "auto"})
    result["kept"] = [kept.config.context_parallel, generated(kept)]
    try:
        result["refused"] = load_open("llama-gqa", {"kv_bits": 8}).config.context_parallel
    except ValueError as error:
        result["refused"] = str(error)
    return result


def load_open(family: str, options: dict[str, Any]) -> Engine:
    target = tiny(family, **(THREE if family == "llama" else {}))
    return load(target, perturbed(target, 0.05), device="cpu", **load_arguments({**SMALL, **options}))


if __name__ == "__main__":
    result = globals()[sys.argv[1]]()
    distributed.leave()
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(result))
