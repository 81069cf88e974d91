"""vLLM in this process: plain decoding, its n-grams, suffixes, a draft model and an EAGLE-3 head."""

import os
from importlib.util import find_spec
from typing import Any

from scripts.benchmarks.peers.protocol import Answer, Clock, Load, Request, is_gguf, split_mode

# Tokens of a chunk of prefill.
_CHUNK = 16_384
_MEMORY = 0.9


def speculation(load: Load) -> dict[str, Any] | None:
    """Returns ``speculative_config`` of a mode.

    Raises:
        ValueError: the mode needs a package that is not installed.
    """
    name, size = split_mode(load.mode)
    if name == "ngram":
        return {
            "method": "ngram", "num_speculative_tokens": size, "prompt_lookup_max": 5, "prompt_lookup_min": 2
        }  # fmt: skip
    if name == "suffix":
        if find_spec("arctic_inference") is None:
            raise ValueError("suffix decoding needs the package arctic-inference, which is not installed")
        # Texts of earlier requests, which are the same ones here, must not be copied.
        return {
            "method": "suffix", "num_speculative_tokens": size, "suffix_decoding_max_cached_requests": 0
        }  # fmt: skip
    if name == "draft":
        return {"method": "draft_model", "model": load.draft, "num_speculative_tokens": size}
    if name == "eagle3":
        return {"method": "eagle3", "model": load.head, "num_speculative_tokens": size}
    return None


class Engine:
    packages = ("vllm", "torch")

    def modes(self, draft: bool, head: bool) -> list[str]:
        drafts = ["draft:3", "draft:6"] if draft else []
        heads = ["eagle3:3", "eagle3:5"] if head else []
        return ["plain", "ngram:3", "ngram:5", "suffix:16", *drafts, *heads]

    def takes(self, target: str) -> bool:
        return not is_gguf(target)

    def load(self, load: Load) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        self._llm = LLM(
            load.target,
            dtype=load.dtype,
            max_model_len=load.max_length,
            gpu_memory_utilization=_MEMORY,
            max_num_seqs=max(2, load.batch),
            max_num_batched_tokens=_CHUNK,
            enable_prefix_caching=False,
            speculative_config=speculation(load),
        )
        self._requests = 0

    def generate(self, request: Request) -> Answer:
        from vllm import SamplingParams

        count = request.new_tokens
        engine, clock, names = self._llm.llm_engine, Clock(len(request.prompts)), dict[str, int]()
        for sequence, prompt in enumerate(request.prompts):
            self._requests += 1
            how = SamplingParams(
                temperature=request.temperature, max_tokens=count, ignore_eos=True,
                detokenize=False, seed=request.seed + sequence if request.temperature > 0 else None,
            )  # fmt: skip
            names[str(self._requests)] = sequence
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, how)
        while engine.has_unfinished_requests():
            for out in engine.step():
                sequence = names[out.request_id]
                had = len(clock.answer.tokens[sequence])
                clock.came(sequence, list(out.outputs[0].token_ids)[had:])
        return clock.answer
