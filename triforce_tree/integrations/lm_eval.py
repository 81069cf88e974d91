"""The engine as a model of lm-evaluation-harness (``pip install 'triforce-tree[lm-eval]'``).

    python -m triforce_tree.integrations.lm_eval --model triforce_tree \\
        --model_args pretrained=path/to/target,draft=path/to/draft --tasks longbench_qasper

The harness finds models in its registry alone, so this module registers the class and calls the harness's own
command line. A Python program only imports it, and names ``triforce_tree`` as the model.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from triforce_tree.api import load
from triforce_tree.check.own_forward import token_logprobs
from triforce_tree.config import load_arguments

NAME = "triforce_tree"
# The harness shows what its own loggers say.
_LOG = logging.getLogger("lm_eval.triforce_tree")
# Longest input of models whose configuration has no limit.
_POSITIONS = 2048


@register_model(NAME)
class TriforceTreeLM(TemplateLM):
    """Generates by all levels, and scores by the target's own forward over its full KV cache.

    Greedy texts and log-likelihoods are those of the target alone; sampled texts have its distribution.

    Args:
        pretrained, draft: target and draft, as in :func:`triforce_tree.load`; by default the embedded pair.
        batch_size: prompts that are generated together.
        max_batch_size: has no effect; the harness passes it to every model.
        max_length: most tokens of an input; by default the model's positions. Longer inputs lose their
            beginning, as with the harness's own models.
        max_gen_toks: most new tokens of tasks without a limit.
        options: further arguments of :func:`triforce_tree.load`, such as ``device``, ``dtype``, ``levels`` or
            ``gpu_memory``; advanced options stand beside them.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        draft: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        **options: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size!r} must be a number of prompts, 1 or more")
        self.engine = load(pretrained, draft, **load_arguments(options))
        if self.engine.tokenizer is None:
            raise ValueError(f"pretrained={pretrained!r} has no tokenizer; name one by tokenizer=FOLDER")
        self.tokenizer: Any = self.engine.tokenizer
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
        self.max_length = max_length or self.engine.target.max_positions or _POSITIONS

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or not string.startswith(bos)
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Returns for each continuation its log-probability, and whether greedy decoding writes it."""
        found = []
        for key, context, continuation in tqdm(requests, disable=disable_tqdm, desc="loglikelihood"):
            tokens = (context + continuation)[-self.max_length - 1 :]
            logprobs, greedy = token_logprobs(self.engine, tokens, len(tokens) - len(continuation))
            answer = float(logprobs.double().sum()), bool(greedy.all())
            found.append(answer)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, in windows of ``max_length`` tokens."""
        sums = []
        for request in tqdm(requests, disable=disable_tqdm, desc="loglikelihood_rolling"):
            (text,) = request.args
            windows = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
            total = sum(logprob for logprob, _ in self._loglikelihood_tokens(parts, disable_tqdm=True))
            sums.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the texts after the contexts, each up to its first stop string."""
        texts: dict[int, str] = {}
        tokens = passes = 0
        seconds = 0.0
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until")
        for numbers in self._batches(requests):
            given = requests[numbers[0]].args[1]
            options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until, new = [stop for stop in options.pop("until") if stop], options.pop("max_gen_toks")
            if not options["do_sample"]:
                options = {"do_sample": False}
            if new >= self.max_length:
                raise ValueError(
                    f"max_gen_toks={new} leaves no tokens for the prompt, as max_length={self.max_length}"
                )
            prompts = [self.tok_encode(requests[n].args[0])[-(self.max_length - new) :] for n in numbers]
            out = self.engine.generate(prompts, max_new_tokens=new, stop_strings=until or None, **options)
            # A beam search counts no passes.
            for level in out.levels or ():
                if level.name == "target":
                    tokens, passes = tokens + level.emitted, passes + level.forwards
                    seconds += out.decode_seconds or 0.0
            made = [out.text] if isinstance(out.text, str) else out.text or []
            for number, text in zip(numbers, made, strict=True):
                # The engine's texts contain the stop string that ended them.
                for stop in until:
                    text = text.split(stop)[0]
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
            bar.update(len(numbers))
        bar.close()
        if tokens:
            _LOG.info(
                f"{tokens:,} new tokens at {1e3 * seconds / tokens:.2f} ms each without the prompts, "
                f"{tokens / passes:.2f} in each pass of the target"
            )
        return [texts[number] for number in range(len(requests))]

    def _batches(self, requests: Sequence[Instance]) -> Iterator[list[int]]:
        """Yields the numbers of up to ``batch_size`` requests that have the same options."""

        def options(number: int) -> str:
            return json.dumps(requests[number].args[1], sort_keys=True, default=str)

        for _, group in groupby(sorted(range(len(requests)), key=options), key=options):
            numbers = list(group)
            for start in range(0, len(numbers), self.batch_size):
                yield numbers[start : start + self.batch_size]


def main() -> None:
    """Runs the harness's command line, to which the class is registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
