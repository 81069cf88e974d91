"""llama.cpp through llama-cpp-python: plain decoding, and its prompt lookup."""

from typing import Any

from scripts.benchmarks.peers.protocol import Answer, Clock, Load, Request, is_gguf, split_mode


class Engine:
    packages = ("llama-cpp-python",)

    def modes(self, draft: bool, head: bool) -> list[str]:
        return ["plain", "plain flash", "prompt-lookup:4", "prompt-lookup:10"]

    def takes(self, target: str) -> bool:
        return is_gguf(target)

    def load(self, load: Load) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if load.batch > 1:
            raise ValueError("llama-cpp-python decodes one text at a time")
        name, size = split_mode(load.mode)
        self._passes = 0
        counted = self

        class Lookup(LlamaPromptLookupDecoding):
            """Counts the passes, before each of which it proposes tokens."""

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                counted._passes += 1
                return super().__call__(*args, **kwargs)

        self._llama = llama_cpp.Llama(
            model_path=load.target,
            n_ctx=load.max_length,
            n_threads=load.threads,
            n_threads_batch=load.threads,
            n_gpu_layers=-1,
            flash_attn=load.mode == "plain flash",
            # It keeps the logits of all positions for a draft, and has no room for them otherwise.
            logits_all=name == "prompt-lookup",
            draft_model=Lookup(num_pred_tokens=size) if name == "prompt-lookup" else None,
            verbose=False,
        )
        self._counts = name == "prompt-lookup"

    def generate(self, request: Request) -> Answer:
        [prompt] = request.prompts
        self._llama.reset()
        self._llama.set_seed(request.seed)
        self._passes = 0
        clock = Clock(1)
        drawn = self._llama.generate(
            prompt, temp=request.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        )
        for token in drawn:
            clock.came(0, [token])
            if len(clock.answer.tokens[0]) == request.new_tokens:
                break
        if self._counts:
            clock.answer.passes = self._passes
        return clock.answer
