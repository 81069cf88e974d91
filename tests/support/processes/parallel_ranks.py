"""The jobs of each process in the tests of tensor parallelism; each rank writes its results as one JSON file.

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
from torch import fx
from transformers import PreTrainedModel, StoppingCriteria

from scripts.inflate.pair import inflate_pair
from tests.support.models.api_cases import characters
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree import Engine, load
from triforce_tree.bench.texts import pydoc_text
from triforce_tree.config import load_arguments
from triforce_tree.kv.offload import host_store
from triforce_tree.models import tensor_parallel
from triforce_tree.models.hf_model import HFModel
from triforce_tree.planning import batch_size, device_defaults, machine, memory_plan
from triforce_tree.planning.memory_plan import MemoryPlan
from triforce_tree.runtime import distributed, stage_clock

RANK = int(os.environ.get("RANK", "0"))
SHARDED = ("llama", "llama-gqa", "qwen2", "qwen3", "gemma2", "granite", "smollm3", "gpt-neox")
PROMPT, NEW = prompt_of(150), 16
PIECE = 32 * 64
# name -> options of the engine
SETUPS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "8-bit keys and values": {"kv_bits": 8},
    "offloaded": {"offload": True},
    "offloaded, one level": {"offload": True, "levels": 1},
    "offloaded weights": {"offload_weights": True, "retrieval_weight_bits": 8},
    "a narrower draft": {"tokenizer": characters(), "draft_tokenizer": characters()},
}


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny("llama-gqa")
    return target, perturbed(target, 0.05)


def engine(**options: Any) -> Engine:
    target, draft = models()
    if "draft_tokenizer" in options:
        draft = tiny("llama-gqa", seed=1, vocab_size=40)
    return load(
        target,
        draft,
        device="cpu",
        **load_arguments({**SMALL, "runner_ups": True, "tail_tree": True, **options}),
    )


def keep_little_on_the_device() -> None:
    """Plans small pieces and keeps few of them on the device, so that short sequences are streamed, too."""
    decide = memory_plan.plan

    def plan(*args: Any) -> MemoryPlan:
        decided = decide(*args)
        if decided.offload is None:
            return decided
        return decided.with_resident(0) if decided.levels == 1 else _small(decided)

    memory_plan.plan = plan
    host_store.EVICTED_TOGETHER = 16


def _small(decided: MemoryPlan) -> MemoryPlan:
    assert decided.offload is not None
    split = replace(decided.offload, resident_bytes=3 * PIECE, piece_bytes=PIECE, buffers=3)
    return replace(decided, offload=split, host={"KV": 1})


def generated(parallel: Engine, **more: Any) -> list[int]:
    """Returns the new tokens of one generation."""
    out = parallel.generate(PROMPT, **{"max_new_tokens": NEW, "do_sample": False, **more})
    return out.sequences[0, len(PROMPT) :].tolist()


def generations() -> dict[str, Any]:
    """Returns greedy and sampled tokens of every setup."""
    result: dict[str, Any] = {}
    for name, options in SETUPS.items():
        parallel = engine(**options)
        result[name] = generated(parallel)
        if name in ("on the device", "offloaded", "a narrower draft"):
            result[f"{name}, sampled"] = generated(parallel, do_sample=True, top_k=0, seed=7)
    session = engine().session(PROMPT)
    session.generate(max_new_tokens=NEW, do_sample=False)
    out = session.generate([1, 2, 3], max_new_tokens=8, do_sample=False)
    result["session"] = [session.tokens, out.reused_tokens]
    return result


def logits() -> dict[str, Any]:
    """Returns by family the relative error of the sharded model's logits, and the heads of one shard."""
    result: dict[str, Any] = {}
    group = distributed.join("cpu")
    assert group is not None
    ids = torch.tensor([prompt_of(30)])
    for family in SHARDED:
        model = tiny(family)
        with torch.no_grad():
            expected = model(ids).logits
            # The second call must change nothing.
            tensor_parallel.shard(model, group)
            tensor_parallel.shard(model, group)
            error = float((model(ids).logits - expected).abs().max() / expected.std())
        result[family] = [error, *astuple(HFModel(model).heads)]
    return result


def communication() -> dict[str, Any]:
    """Returns the results of the collective operations."""
    distributed.join("cpu")
    try:
        distributed.check_equal({"numbers": RANK})
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    distributed.check_equal({"numbers": 5})
    return {
        "object": distributed.broadcast_object({"rank": RANK}),
        "flag": distributed.broadcast_flag(RANK == 0),
        "gathered": distributed.all_gather_object(RANK),
        "minima": distributed.all_reduce_min([RANK, -RANK, 2.0**50 + RANK]),
        "tensor": distributed.broadcast_tensor(
            torch.full((2, 3), float(RANK), dtype=torch.bfloat16)
        ).tolist(),
        "sum": tensor_parallel.all_reduce(torch.full((2,), RANK + 1.0)).tolist(),
        "agreed": distributed.agreed([5, RANK]),
        "refusal": refusal,
    }


def decisions() -> dict[str, Any]:
    """Decisions for which the ranks have different inputs: seeds, criteria, times, memory."""
    result: dict[str, Any] = {}
    parallel = engine()
    torch.manual_seed(RANK)
    result["no seed"] = generated(parallel, do_sample=True, top_k=0)

    class OfThisRank(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            ended = RANK == 0 and input_ids.shape[1] >= len(PROMPT) + 5
            return torch.full((1,), ended)

    result["stopped"] = len(generated(parallel, stopping_criteria=[OfThisRank()]))
    try:
        parallel.generate(prompt_of(150 + RANK), max_new_tokens=4)
    except ValueError as error:
        result["different prompts"] = str(error)

    # A clock by which draft rounds are slow on one rank and fast on the other.
    slow = 1e-3 if RANK else 1.0
    names = {"prepare": 1e-4, "draft": slow, "retrieval": slow, "target": 0.1, "run": 0.1}
    stage_clock.StageClock.seconds = lambda self: dict(names)
    adaptive = engine(rounds=None)
    out = adaptive.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    result["passes"] = [level.forwards for level in out.levels or []]

    available = machine.available
    machine.available = lambda: (available()[0] >> RANK, "a test")
    plan = engine(offload=True, host_attention=True).memory_plan(len(PROMPT), NEW)
    assert plan is not None
    result["plan"] = plan.as_dict()

    # Level 1's bits by "auto": every rank has room for a copy, then only rank 0.
    device_defaults.gains_from_few_bits = lambda target: True
    batch_size.total_bytes = lambda device: 0
    for name, room in (("room", 1 << 50), ("room on rank 0", 1 << 20 if RANK else 1 << 50)):
        batch_size.free_bytes = lambda device, room=room: room
        chooses = engine(retrieval_weight_bits="auto")
        tokens, program = generated(chooses), chooses.last_program
        assert program is not None
        result[name] = [program.config.retrieval_weight_bits, tokens]
    return result


def graph() -> dict[str, Any]:
    """Returns the all-reduce operators in the graph of a compiled layer, and the error of its output."""
    group = distributed.join("cpu")
    assert group is not None
    model = tiny("llama-gqa")
    tensor_parallel.shard(model, group)
    mlp = model.model.layers[0].mlp
    operators: list[str] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        operators.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = float((torch.compile(mlp, backend=backend, fullgraph=True)(x) - mlp(x)).abs().max())
    return {"all_reduces": sum("all_reduce" in name for name in operators), "error": error}


def pair() -> dict[str, list[int]]:
    """Returns greedy tokens of the embedded pair, inflated to a shape that two ranks can share; on GPUs if
    two.
    """
    kind = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    group = distributed.join(kind)
    device = group.device if group is not None else torch.device(kind)
    target, draft, tokenizer = inflate_pair("512x6x4/4x128x1152", device, torch.float32, "256x2x4/4x64x512")
    prompt = tokenizer(pydoc_text()[:4000])["input_ids"]
    result = {}
    for name in ("on the device", "offloaded"):
        options = {**SETUPS[name], "levels": 3, "budget": 512, "gamma": 8, "tree": "best-first:4,3"}
        parallel = load(target, draft, tokenizer=tokenizer, **load_arguments(options))
        out = parallel.generate(prompt, max_new_tokens=NEW, do_sample=False)
        result[name] = out.sequences[0, len(prompt) :].tolist()
    return result


def checks() -> dict[str, Any]:
    """Runs all jobs that can share two processes."""
    results = {job.__name__: job() for job in (communication, logits, generations, graph)}
    # Last, since it patches modules.
    return {**results, "decisions": decisions()}


if __name__ == "__main__":
    keep_little_on_the_device()
    result = globals()[sys.argv[1]]()
    distributed.leave()
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(result))
