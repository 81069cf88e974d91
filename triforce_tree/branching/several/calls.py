"""The features of this folder that ``Engine`` uses: ``tree``, and several texts per prompt in
``generate``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from triforce_tree.branching.options import OF_ENGINE, given_prompts, leaf_options
from triforce_tree.branching.several.beam_search import beam_search
from triforce_tree.branching.tree import TextTree
from triforce_tree.requests.inputs import Inputs
from triforce_tree.requests.keywords import checked_seed, number_asked
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.runtime.stats import Progress
from triforce_tree.verify.draws import sequence_seed

Generate = TypeVar("Generate", bound=Callable[..., GenerateOutput])


def with_several(generate: Generate) -> Generate:
    """Returns ``Engine.generate`` with support for ``num_beams`` and ``num_return_sequences``.

    Beams are those of transformers' ``generate``, scores included, decoded plainly over one tree. Samples are
    independent sequences of one batch.
    """

    @wraps(generate)
    def run(engine: LoadedEngine, *args: Any, **kwargs: Any) -> GenerateOutput:
        beams, count = (number_asked(name, kwargs) for name in ("num_beams", "num_return_sequences"))
        if beams == count == 1:
            return generate(engine, *args, **kwargs)
        inputs, others = args[0] if args else kwargs.get("inputs"), {**kwargs, "inputs": None}
        if beams == 1:
            return _samples(engine, generate, inputs, count, others)
        if kwargs.get("streamer") is not None:
            asked = f"num_beams={beams}"
            raise ValueError(f"a streamer takes one text as it is made, not those of {asked}; leave out one")
        if count > beams:
            raise ValueError(f"num_return_sequences={count} exceeds num_beams={beams}; ask for as many beams")
        return beam_search(engine, inputs, beams, count, others)

    return cast(Generate, run)


def tree_of(
    engine: LoadedEngine, prompt: Inputs, *, max_bytes: int | None = None, progress: Progress | None = None
) -> TextTree:
    """Returns a tree of texts whose prompt is prefilled now; see :class:`TextTree`."""
    return TextTree(engine, prompt, max_bytes, progress)


def _samples(
    engine: LoadedEngine,
    generate: Callable[..., GenerateOutput],
    inputs: Any,
    count: int,
    kwargs: dict[str, Any],
) -> GenerateOutput:
    """Returns ``count`` texts of each prompt, drawn independently as sequences of one batch, with drafts.

    With one seed, the text of sample i depends only on the prompt, its index, the seed and i.

    Args:
        generate: generates one text per prompt; the other arguments are those of :meth:`Engine.generate`.
    """
    prompts, options = given_prompts(engine, inputs, kwargs)
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    _check_sampled(engine, prompts.ids.shape[1], count, options)
    seed = options.pop("seed", None)
    if seed is not None and not isinstance(seed, Sequence):
        chosen = checked_seed(seed)
        assert chosen is not None
        own = (sequence_seed(chosen, number) for number in range(len(prompts.rows)))
        seed = [sequence_seed(each, number) for each in own for number in range(count)]
    ids, mask = (each.repeat_interleave(count, 0) for each in (prompts.ids, prompts.mask))
    out = generate(
        engine, input_ids=ids, attention_mask=mask,
        prefix_allowed_tokens_fn=allowed and (lambda n, sent: allowed(n // count, sent)),
        streamer=kwargs.get("streamer"), pinned=kwargs.get("pinned"), seed=seed, **options,
    )  # fmt: skip
    if out.logprobs is not None:
        out.sequences_scores = out.logprobs.sum(1)
    return out


def _check_sampled(engine: LoadedEngine, width: int, count: int, options: Mapping[str, Any]) -> None:
    """Raise ValueError if ``count`` texts of a prompt of ``width`` tokens would be equal."""
    left_out = (*OF_ENGINE, "output_scores", "output_logits")
    own = {name: value for name, value in options.items() if name not in left_out}
    if leaf_options(engine, width, own).job.to_probs.greedy:
        raise ValueError(
            f"num_return_sequences={count} of greedy decoding are {count} equal texts; "
            "set do_sample=True with a temperature above 0, or num_beams"
        )
