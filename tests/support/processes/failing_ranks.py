"""The jobs of ranks of which one fails, is slow, or is called with other arguments than the rest.

    WORLD_SIZE=2 RANK=0 ... python tests/support/processes/failing_ranks.py JOB FOLDER POSITIONS FAILS SEED

A text is split by position over POSITIONS ranks. Rank FAILS fails. Each rank writes what it has seen as one
JSON file.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from tests.support.models import tiny_pair
from tests.support.models.families import perturbed, prompt_of, tiny
from tests.support.models.program_cases import SMALL
from triforce_tree import Engine, load
from triforce_tree.cli.entry import main
from triforce_tree.config import load_arguments
from triforce_tree.kv.offload import pinned
from triforce_tree.planning import batch_size
from triforce_tree.runtime import distributed, rank_watch

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = "cuda" if torch.cuda.device_count() >= SIZE > 1 else "cpu"
PROMPT, NEW = prompt_of(150), 40


def engine(**options: Any) -> Engine:
    target = tiny("llama-gqa")
    positions = {"context_parallel": int(sys.argv[3])} if SIZE > 1 else {}
    return load(
        target, perturbed(target, 0.05), device=DEVICE,
        **load_arguments({**SMALL, "levels": 3, **positions, **options}),
    )  # fmt: skip


def generated(made: Engine, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    out = made.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, **more})
    return out.sequences[0, len(prompt) :].tolist()


def failing() -> bool:
    return int(sys.argv[4]) == RANK


def error_of(call: Callable[[], object]) -> str:
    """Returns the error that a call raises, as text."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class After(StoppingCriteria):
    """Calls a function of the failing rank after 5 new tokens, and another function of the others."""

    keeps_state = False

    def __init__(self, act: Callable[[], object], others: Callable[[], object] = int) -> None:
        self._act = act if failing() else others

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] >= len(PROMPT) + 5:
            self._act()
        return torch.full((1,), False)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_decoding() -> Any:
    made = engine()
    first = generated(made)
    return [first, error_of(lambda: generated(made, stopping_criteria=[After(die)])), error_of(engine)]


def stuck() -> Any:
    """The rank is killed while the others wait in something that never returns, as a kernel may."""
    rank_watch.GRACE = 1.0
    return generated(engine(), stopping_criteria=[After(die, lambda: time.sleep(600))])


def in_prefill() -> Any:
    made = engine()
    return error_of(lambda: generated(made, progress=die if failing() else None))


def in_load() -> Any:
    """The rank is killed at a random time after it has joined the others."""
    # On a busy machine the others take seconds until they wait for the rank.
    rank_watch.GRACE = 60.0
    distributed.join(DEVICE)
    if failing():
        signal.setitimer(signal.ITIMER_REAL, random.Random(sys.argv[5]).uniform(1e-3, 0.2))
        engine()
        time.sleep(60)
    return error_of(lambda: generated(engine()))


def raises() -> Any:
    """The rank runs out of memory, and its program catches the error and calls the engine again."""
    rank_watch.GRACE = 1.0

    def run_out() -> None:
        raise torch.OutOfMemoryError("this rank has too little memory")

    made = engine()
    first = error_of(lambda: generated(made, stopping_criteria=[After(run_out)]))
    return [first, error_of(lambda: generated(made))]


def ends() -> Any:
    """A rank leaves its program in the middle of a call, with a message."""
    raises_once = After(lambda: sys.exit("this rank has too little memory"))
    return error_of(lambda: generated(engine(), stopping_criteria=[raises_once]))


def alike() -> Any:
    """All ranks raise an error in the same call, and go on."""

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            time.sleep(2.0 * failing())
            raise RuntimeError("the criterion is broken")

    made = engine()
    return [error_of(lambda: generated(made, stopping_criteria=[Broken()])), generated(made)]


def delayed() -> Any:
    """The rank is stopped for seconds at random times, as from outside."""
    chosen, rank = random.Random(sys.argv[5]), os.getpid()
    made = engine()
    generated(made)
    stopper = os.fork() if failing() else 0
    if failing() and not stopper:
        for _ in range(3):
            time.sleep(chosen.uniform(0.01, 0.3))
            os.kill(rank, signal.SIGSTOP)
            time.sleep(chosen.uniform(0.5, 1.0))
            os.kill(rank, signal.SIGCONT)
        os._exit(0)
    started, tokens = time.monotonic(), []
    while time.monotonic() - started < 4:
        tokens.append(generated(made))
        if distributed.broadcast_object(time.monotonic() - started >= 4):
            break
    if stopper:
        os.waitpid(stopper, 0)
    return tokens


def leaves() -> Any:
    """The rank makes one call fewer than the others."""
    made = engine()
    calls = [generated(made)]
    if failing():
        distributed.leave()
        time.sleep(1)
        return calls
    return [*calls, error_of(lambda: generated(made))]


def arguments() -> Any:
    """Arguments of the ranks differ; after the refusals the ranks decode together."""
    made, own = engine(), int(failing())
    different: dict[str, Callable[[], object]] = {
        "prompts": lambda: generated(made, prompt_of(150 + own)),
        "seeds": lambda: generated(made, do_sample=True, seed=own),
        "lengths": lambda: generated(made, prompt_of(150), max_new_tokens=10 + 10**6 * own),
        "temperatures": lambda: generated(made, do_sample=True, temperature=0.5 + own, seed=1),
        "criteria": lambda: generated(made, stopping_criteria=[After(int)] * own),
        "settings": lambda: generated(made.with_options(**load_arguments({"gamma": 2 + own}))),
        "options of load": lambda: engine(gamma=2 + own),
        "splits": lambda: engine(context_parallel=SIZE if own else 1),
        "targets": lambda: load(tiny("llama-gqa", num_hidden_layers=2 + own), device=DEVICE),
        "drafts": lambda: load(
            tiny("llama-gqa"), tiny("llama-gqa", num_hidden_layers=1 + own), device=DEVICE
        ),
        "calls": lambda: generated(made) if own else engine(),
    }
    return {name: error_of(call) for name, call in different.items()} | {"tokens": generated(made)}


def memory() -> Any:
    """The ranks have different amounts of memory: of the host for a plan, of the device for a cache."""
    measured, gib = pinned.available, 1 << 30
    found: dict[str, Any] = {}
    for name, host in (("enough", 64 * gib), ("little", pinned.SPARE + (1 << 20))):
        pinned.available = lambda host=host: (host if failing() else 128 * gib, "the container")
        plan = engine(offload=True, context_parallel=1).memory_plan
        found[name] = error_of(lambda plan=plan: found.update(plan=plan(len(PROMPT), 10**6).as_dict()))
    pinned.available = measured
    batch_size.free_bytes = lambda device: 1000 if failing() else gib
    made = engine()
    found["device"] = error_of(lambda: generated(made))
    batch_size.free_bytes = lambda device: gib
    return found | {"tokens": generated(made)}


def command() -> Any:
    """The rank of the command line is killed while it decodes."""

    def kill_later() -> None:
        while distributed.current() is None:
            time.sleep(0.05)
        time.sleep(3)
        die()

    pair = tiny_pair.make(Path(sys.argv[2]) / str(RANK))
    for settings in Path(pair.target).glob("*config.json"):
        settings.write_text(settings.read_text().replace('"eos_token_id": 0', '"eos_token_id": null'))
    prompt = Path(sys.argv[2]) / str(RANK) / "prompt.txt"
    prompt.write_text(Path(pair.text).read_text(encoding="utf-8")[:1500], encoding="utf-8")
    if failing():
        threading.Thread(target=kill_later).start()
    small = ["--budget", "128", "--advanced", "chunk=8", "--advanced", "recent=32", "--advanced", "window=32"]
    sys.exit(main(["generate", str(prompt), *pair.options, *small, "--max-new-tokens", "2000"]))


if __name__ == "__main__":
    result = globals()[sys.argv[1]]()
    distributed.leave()
    (Path(sys.argv[2]) / f"{RANK}.json").write_text(json.dumps(result))
