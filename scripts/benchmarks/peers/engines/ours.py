"""This project: default settings, with a head where there is also a draft model, and plain decoding."""

from typing import Any

from scripts.benchmarks.peers.protocol import Answer, Clock, Load, Request


class Streamer:
    """Gives the tokens of one sequence to a clock. The first tokens that it receives are the prompt."""

    def __init__(self, clock: Clock, sequence: int) -> None:
        self._clock, self._sequence, self._begun = clock, sequence, False

    def put(self, value: Any) -> None:
        if self._begun:
            self._clock.came(self._sequence, value.flatten().tolist())
        self._begun = True

    def end(self) -> None:
        """Nothing is held back."""


class Engine:
    packages = ("torch", "transformers")

    def modes(self, draft: bool, head: bool) -> list[str]:
        return ["default", "plain", *(["eagle3"] if draft and head else [])]

    def takes(self, target: str) -> bool:
        return True

    def load(self, load: Load) -> None:
        import torch

        import triforce_tree
        from triforce_tree.config import load_arguments

        torch.set_num_threads(load.threads)
        options = {"prefix_cache": False} | ({"levels": 1} if load.mode == "plain" else {})
        draft = load.draft if load.mode == "default" else None
        head = load.head if load.mode == "eagle3" or (load.mode == "default" and draft is None) else None
        self._engine = triforce_tree.load(
            load.target, draft, drafter=head, dtype=load.dtype, **load_arguments(options)
        )
        self._captured: float | None = None

    def generate(self, request: Request) -> Answer:
        drawn = {"temperature": request.temperature, "top_k": 0, "top_p": 1.0, "seed": request.seed}
        clock = Clock(len(request.prompts))
        out = self._engine.generate(
            request.prompts,
            max_new_tokens=request.new_tokens,
            eos_token_id=[],
            do_sample=request.temperature > 0,
            streamer=[Streamer(clock, number) for number in range(len(request.prompts))],
            **(drawn if request.temperature > 0 else {}),
        )
        clock.answer.prepared = out.capture_seconds != self._captured
        self._captured = out.capture_seconds
        return clock.answer
