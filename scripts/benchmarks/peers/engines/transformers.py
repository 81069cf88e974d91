"""transformers: its caches, assisted decoding with a draft model, and prompt lookup."""

from typing import Any

from scripts.benchmarks.peers.protocol import Answer, Clock, Load, Request, is_gguf, split_mode


class Streamer:
    """Gives the tokens of a batch to a clock. The first call has the prompts."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._begun = clock, False

    def put(self, value: Any) -> None:
        if self._begun:
            for sequence, tokens in enumerate(value.view(len(self._clock.answer.tokens), -1).tolist()):
                self._clock.came(sequence, tokens)
        self._begun = True

    def end(self) -> None:
        """Nothing is held back."""


class Engine:
    packages = ("transformers", "torch")

    def modes(self, draft: bool, head: bool) -> list[str]:
        assisted = ["assisted:4", "assisted:8"] if draft else []
        return ["static", "dynamic", "prompt-lookup:4", "prompt-lookup:10", *assisted]

    def takes(self, target: str) -> bool:
        return not is_gguf(target)

    def load(self, load: Load) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(load.threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        def read(folder: str) -> Any:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=load.dtype)
            # A text ends by its length alone.
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            return model.to(self._device).eval()

        self._model = read(load.target)
        name, size = split_mode(load.mode)
        self._options: dict[str, Any] = {}
        if name == "static":
            # On a GPU `generate` compiles the decoding of a static cache.
            self._options["cache_implementation"] = "static"
        elif name == "prompt-lookup":
            self._options["prompt_lookup_num_tokens"] = size
        elif name == "assisted":
            assert load.draft is not None, "the mode is offered with a draft alone"
            draft = read(load.draft)
            draft.generation_config.num_assistant_tokens = size
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._options["assistant_model"] = draft

    def generate(self, request: Request) -> Answer:
        import torch

        ids = torch.tensor(request.prompts, device=self._device)
        torch.manual_seed(request.seed)
        drawn = {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        clock = Clock(len(request.prompts))
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.new_tokens,
            do_sample=request.temperature > 0,
            streamer=Streamer(clock),
            **(drawn if request.temperature > 0 else {}),
            **self._options,
        )
        return clock.answer
