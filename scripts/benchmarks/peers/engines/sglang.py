"""SGLang in this process: plain decoding, its n-grams, a draft model and an EAGLE-3 head."""

import asyncio
from typing import Any

from scripts.benchmarks.peers.protocol import Answer, Clock, Load, Request, is_gguf, split_mode


def speculation(load: Load) -> dict[str, Any]:
    """Returns the options of ``sglang.Engine`` for a mode."""
    name, size = split_mode(load.mode)
    chain = {"speculative_num_steps": size, "speculative_eagle_topk": 1}
    tokens = {"speculative_num_draft_tokens": size + 1}
    if name == "ngram":
        return {"speculative_algorithm": "NGRAM", **tokens}
    if name == "draft":
        return (
            {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": load.draft}
            | chain
            | tokens
        )
    if name == "eagle3":
        return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": load.head} | chain | tokens
    return {}


class Engine:
    packages = ("sglang", "torch")

    def modes(self, draft: bool, head: bool) -> list[str]:
        drafts = ["draft:3", "draft:6"] if draft else []
        heads = ["eagle3:3", "eagle3:5"] if head else []
        return ["plain", "ngram:5", "ngram:11", *drafts, *heads]

    def takes(self, target: str) -> bool:
        return not is_gguf(target)

    def load(self, load: Load) -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=load.target,
            dtype=load.dtype,
            context_length=load.max_length,
            max_running_requests=max(2, load.batch),
            disable_radix_cache=True,
            skip_tokenizer_init=True,
            log_level="error",
            **speculation(load),
        )

    def generate(self, request: Request) -> Answer:
        clock = Clock(len(request.prompts))
        how = {"temperature": request.temperature, "max_new_tokens": request.new_tokens, "ignore_eos": True}
        if request.temperature > 0:
            how |= {"top_p": 1.0, "top_k": -1, "sampling_seed": request.seed}

        async def follow(sequence: int, prompt: list[int]) -> None:
            stream = await self._engine.async_generate(input_ids=prompt, sampling_params=how, stream=True)
            async for out in stream:
                # By its options a chunk has all tokens so far, or the new ones.
                new = out["meta_info"]["completion_tokens"] - len(clock.answer.tokens[sequence])
                clock.came(sequence, list(out["output_ids"])[-new:] if new else [])

        async def all_of_them() -> None:
            await asyncio.gather(*(follow(*each) for each in enumerate(request.prompts)))

        asyncio.get_event_loop().run_until_complete(all_of_them())
        return clock.answer
