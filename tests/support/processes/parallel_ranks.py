"""What each of several processes does in the tests of several ranks: one JSON file of findings a rank.

    WORLD_SIZE=2 RANK=0 ... python tests/support/processes/parallel_ranks.py JOB FOLDER

Without WORLD_SIZE the same jobs run in one process, for comparison.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from families import perturbed, prompt_of, tiny
from program_cases import SMALL
from torch import fx
from transformers import PreTrainedModel, StoppingCriteria

from triforce_tree import Engine, load
from triforce_tree.eval.text import pydoc_text
from triforce_tree.kv.offload import layout
from triforce_tree.loading.inflate import inflate_pair
from triforce_tree.models import tensor_parallel
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import machine, memory_plan
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed, stage_clock

RANK = int(os.environ.get("RANK", "0"))
CUT = ("llama", "llama-gqa", "qwen2", "qwen3", "gemma2", "granite", "smollm3", "gpt-neox")
PROMPT, NEW = prompt_of(150), 24
PIECE = 32 * 64
# name -> options of the engine
WAYS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "offloaded": {"offload": True},
    "offloaded alone": {"offload": True, "levels": 1},
    "weights too": {"offload_weights": True, "retrieval_weight_bits": 8},
}


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama-gqa")
    return target, perturbed(target, 0.05)


def engine(**options: Any) -> Engine:
    return load(*models(), device="cpu", profile=False, **{**SMALL, "runner_ups": True, **options})


def keep_little_on_the_device() -> None:
    """Small pieces, of which few stay: what a pass streams is streamed here too."""
    decide = memory_plan.plan

    def plan(*args: Any) -> MemoryPlan:
        made = decide(*args)
        if made.offload is None:
            return made
        assert made.offload is not None
        return made.with_resident(0) if made.levels == 1 else _small(made)

    memory_plan.plan = plan
    layout.EVICTED_TOGETHER = 16


def _small(made: MemoryPlan) -> MemoryPlan:
    assert made.offload is not None
    split = replace(made.offload, resident_bytes=3 * PIECE, piece_bytes=PIECE, buffers=3)
    return replace(made, offload=split, host={"full rows": 1})


def written(own: Engine, **more: Any) -> list[int]:
    out = own.generate(PROMPT, **{"max_new_tokens": NEW, "do_sample": False, **more})
    return out.sequences[0, len(PROMPT) :].tolist()


def texts() -> dict[str, Any]:
    """Greedy and sampled text of every way of decoding."""
    found: dict[str, Any] = {}
    for name, options in WAYS.items():
        own = engine(**options)
        found[name] = written(own)
        if name not in ("offloaded alone", "weights too"):
            found[f"{name}, sampled"] = written(own, do_sample=True, top_k=0, seed=7)
    return found


def logits() -> dict[str, Any]:
    """How far each family's logits are off the whole model's, and the heads that are left."""
    found: dict[str, Any] = {}
    group = distributed.join("cpu")
    assert group is not None
    ids = torch.tensor([prompt_of(30)])
    for family in CUT:
        model = tiny(family)
        with torch.no_grad():
            whole = model(ids).logits
            tensor_parallel.shard(model, group)
            tensor_parallel.shard(model, group)
            off = float((model(ids).logits - whole).abs().max() / whole.std())
        found[family] = [off, *astuple(HFModel(model).heads)]
    return found


def words() -> dict[str, Any]:
    """What ranks tell each other."""
    distributed.join("cpu")
    try:
        distributed.check_alike("numbers", RANK)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    distributed.check_alike("numbers", 5)
    return {
        "told": distributed.broadcast_object({"rank": RANK}),
        "agreed": distributed.all_true(RANK == 0),
        "gathered": distributed.all_gather_object(RANK),
        "least": distributed.all_reduce_min([RANK, -RANK, 2.0**50 + RANK]),
        "same": distributed.broadcast_tensor(torch.full((2, 3), float(RANK), dtype=torch.bfloat16)).tolist(),
        "sum": tensor_parallel.all_reduce(torch.full((2,), RANK + 1.0)).tolist(),
        "refusal": refusal,
    }


def decisions() -> dict[str, Any]:
    """Ranks that would decide otherwise, each in its own way."""
    found: dict[str, Any] = {}
    own = engine()
    torch.manual_seed(RANK)
    found["no seed"] = written(own, do_sample=True, top_k=0)

    class OfThisRank(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            ended = RANK == 0 and input_ids.shape[1] >= len(PROMPT) + 5
            return torch.full((1,), ended)

    found["stopped"] = len(written(own, stopping_criteria=[OfThisRank()]))
    try:
        own.generate(prompt_of(150 + RANK), max_new_tokens=4)
    except ValueError as error:
        found["other prompts"] = str(error)

    # A clock that finds rounds dear on one rank and cheap on the other.
    names = {
        "draft": 1e-3 if RANK else 1.0,
        "retrieval_refresh": 1e-3 if RANK else 1.0,
        "retrieval": 0.0,
        "target": 0.1,
    }
    stage_clock.StageClock.seconds = lambda self: {**names, "plain": 0.1}
    paced = engine(rounds=None)
    out = paced.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    found["passes"] = [level.forwards for level in out.levels or []]

    available = machine.available
    machine.available = lambda: (available()[0] >> RANK, "a test")
    plan = engine(offload=True, host_attention=True).memory_plan(len(PROMPT), NEW)
    assert plan is not None
    found["plan"] = plan.as_dict()
    return found


def graph() -> dict[str, Any]:
    """A compiled layer holds the sum as one operator, and computes the same."""
    group = distributed.join("cpu")
    assert group is not None
    model = tiny("llama-gqa")
    tensor_parallel.shard(model, group)
    mlp = model.model.layers[0].mlp
    seen: list[str] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        off = float((torch.compile(mlp, backend=backend, fullgraph=True)(x) - mlp(x)).abs().max())
    return {"sums": sum("all_reduce" in name for name in seen), "off": off}


def pair() -> dict[str, list[int]]:
    """Greedy text of the embedded pair in a shape that two can share; on GPUs where there are two of them."""
    kind = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    group = distributed.join(kind)
    device = group.device if group is not None else torch.device(kind)
    target, draft, tokenizer = inflate_pair("512x6x4/4x128x1152", device, torch.float32, "256x2x4/4x64x512")
    prompt = tokenizer(pydoc_text()[:4000])["input_ids"]
    found = {}
    for name in ("on the device", "offloaded"):
        options = {**WAYS[name], "levels": 3, "budget": 512, "gamma": 8, "tree": "best-first:4,3"}
        own = load(target, draft, tokenizer=tokenizer, profile=False, **options)
        out = own.generate(prompt, max_new_tokens=NEW, do_sample=False)
        found[name] = out.sequences[0, len(prompt) :].tolist()
    return found


def fault() -> dict[str, Any]:
    """Rank 1 fails in the middle of a text."""

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if RANK == 1 and input_ids.shape[1] >= len(PROMPT) + 5:
                raise RuntimeError("this rank is broken")
            return torch.full((1,), False)

    return {"text": written(engine(), stopping_criteria=[Broken()])}


def checks() -> dict[str, Any]:
    """All that can share two processes."""
    own = {job.__name__: job() for job in (words, logits, texts, graph)}
    # Last, since it changes what modules hold.
    return {**own, "decisions": decisions()}


if __name__ == "__main__":
    keep_little_on_the_device()
    result = globals()[sys.argv[1]]()
    distributed.leave()
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(result))
