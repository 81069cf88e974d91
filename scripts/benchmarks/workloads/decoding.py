"""Decoding texts that branch: the engine's tree beside a batch that stores each text for itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from scripts.benchmarks.common.timing import timed
from scripts.benchmarks.workloads.shapes import Workload
from triforce_tree.bench.results import Record
from triforce_tree.bench.speed import WARM_UP_PROMPT
from triforce_tree.branching.node import Node
from triforce_tree.branching.pages import slot_bytes
from triforce_tree.engine import Engine
from triforce_tree.planning.batch_size import free_bytes

TREE, BATCH = "engine.tree", "a batch of the texts"
WAYS = (TREE, BATCH)
_WARM_UP = 3
# Of the memory that is free; forwards need some beside the cache.
_SHARE = 0.85


def options(stop: StoppingCriteria | None = None) -> dict[str, Any]:
    """Returns options for greedy decoding that no token ends."""
    return {
        "do_sample": False,
        "eos_token_id": [],
        "stopping_criteria": StoppingCriteriaList([stop] if stop else []),
    }


def by_tree(
    engine: Engine, workload: Workload, tokens: Sequence[int], new: int, stop: StoppingCriteria | None
) -> Record:
    """Returns the seconds that ``new`` tokens of each leaf take ``engine.tree``."""
    target, how = engine.target, options(stop)
    # Every leaf starts a page of its own, which may not become full.
    slots = workload.stored + workload.queries * (new + _WARM_UP + 128)
    texts = texts_of(workload, tokens)

    def grown() -> tuple[Any, list[Node]]:
        tree = engine.tree(list(texts[0]), max_bytes=slots * slot_bytes(target))
        made = [tree.root]
        for parent, text in zip(workload.parents[1:], texts[1:], strict=True):
            made.append(tree.extend(tree.fork(made[parent], 1)[0], list(text)))
        asking = [node for node, asks in zip(made, workload.asks, strict=True) if asks]
        # Stores the branches, and captures the forward on a GPU.
        tree.generate(asking, max_new_tokens=_WARM_UP, **how)
        return tree, asking

    (tree, leaves), prefill = timed(target.device, grown)
    with target.active():
        branches = tree.generate(leaves, max_new_tokens=new, **how)
    return {
        # As for a batch, without the preparation before the first forward.
        "seconds": tree.decode_seconds,
        "new_tokens": sum(len(branch.tokens) for branch in branches),
        "prefill_seconds": prefill,
        "kv_bytes": tree.used_bytes,
    }


def by_batch(
    engine: Engine, workload: Workload, tokens: Sequence[int], new: int, stop: StoppingCriteria | None
) -> Record:
    """Returns the same for plain decoding of a batch, which stores and reads every text for itself."""
    target = engine.target
    texts = texts_of(workload, tokens)
    prompts = [[token for node in path for token in texts[node]] for path in workload.paths]
    size = (sum(map(len, prompts)) + len(prompts) * new) * slot_bytes(target)
    free = free_bytes(target.device)
    if size > free * _SHARE:
        return {"reason": f"its keys and values take {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"}
    plain = engine.with_options(levels=1, advanced={"prefix_cache": False})
    # Captures the pass, which is not part of the measurement.
    plain.generate([prompt[:WARM_UP_PROMPT] for prompt in prompts], max_new_tokens=_WARM_UP, **options(stop))
    out = plain.generate(prompts, max_new_tokens=new, **options(stop))
    return {
        "seconds": out.decode_seconds, "new_tokens": _counted(out), "prefill_seconds": out.prefill_seconds,
        "kv_bytes": size,
    }  # fmt: skip


def texts_of(workload: Workload, tokens: Sequence[int]) -> list[Sequence[int]]:
    """Returns the token ids of each node. A root has the beginning of the text, and the nodes below have
    consecutive pieces of it.
    """
    found: list[Sequence[int]] = []
    start = 0
    for parent, length in zip(workload.parents, workload.lengths, strict=True):
        first = 0 if parent < 0 else start % max(1, len(tokens) - length)
        found.append(tokens[first : first + length])
        start = first + length
    return found


RUN: dict[str, Callable[..., Record]] = {TREE: by_tree, BATCH: by_batch}


def measure(
    engine: Engine,
    workload: Workload,
    way: str,
    tokens: Sequence[int],
    new: int,
    stop: StoppingCriteria | None = None,
) -> Record:
    """Returns the seconds and tokens of all texts together, or the reason why they were not decoded.

    Args:
        tokens: a text that prompts and branches are cut from, at least as long as the longest node.
        new: new tokens of each text.
        stop: ends the texts early. The measurement must then be discarded.

    Raises:
        ValueError: the texts exceed the model's positions.
    """
    engine.target.check_length(max(map(sum, _path_lengths(workload))), new + _WARM_UP)
    try:
        return RUN[way](engine, workload, tokens, new, stop)
    except torch.cuda.OutOfMemoryError as error:
        return {"reason": f"out of memory: {str(error).partition('.')[0]}"}
    finally:
        engine.release()


def _path_lengths(workload: Workload) -> list[list[int]]:
    return [[workload.lengths[node] for node in path] for path in workload.paths]


def _counted(out: Any) -> int:
    """Returns the number of new tokens of all sequences."""
    return sum(out.new_tokens) if isinstance(out.new_tokens, list) else int(out.new_tokens)
