"""The options of calls over trees of texts, checked and prepared by transformers as for ``generate``."""

import copy
from collections.abc import Mapping
from typing import Any

from triforce_tree.models.supported import UnsupportedModelError
from triforce_tree.requests.loaded import LoadedEngine
from triforce_tree.requests.options import SEVERAL
from triforce_tree.requests.request import Arguments, Request, RunOptions
from triforce_tree.runtime import distributed

_PROMPTS = ("inputs", "input_ids", "attention_mask")
OF_ENGINE = (
    "seed",
    "grammar",
    "logprobs",
    "progress",
    "prefix_allowed_tokens_fn",
    "max_batch",
    "joining",
    "speculation",
)
"""Keywords of :meth:`Engine.generate` that are no options of transformers and not about one text."""


def check_engine(engine: LoadedEngine) -> None:
    """Raises an error if the engine's settings do not allow a tree."""
    target, config = engine.target, engine.config
    if target.states is not None:
        raise UnsupportedModelError(
            f"{target.name} has recurrent layers, whose states cannot be shared by the branches of a tree"
        )
    if target.indexed:
        raise UnsupportedModelError(
            f"{target.name} chooses what it attends to by an indexer, which knows no branches of a tree"
        )
    if config.kv_bits != 16:
        raise ValueError(f"kv_bits={config.kv_bits} is not supported by a tree; leave it out")
    if config.exact:
        raise ValueError("exact=True is not supported by a tree or beams; leave it out")
    if config.offloads is True or config.streams is True:
        raise ValueError("a tree keeps its keys and values on the device; leave out offload")
    if distributed.current() is not None:
        raise ValueError("a tree runs on one rank; start it without torchrun")


def prepared_request(engine: LoadedEngine, length: int, options: Mapping[str, Any]) -> Request:
    """Returns the request that transformers' ``generate`` prepares for a text of ``length`` tokens.

    Processors and criteria depend on the length of a text, not on its tokens, when they are made.

    Raises:
        ValueError: an option is not supported, as in :meth:`Engine.generate`.
    """
    arguments = Arguments.read(engine.target, engine.tokenizer, [0] * length, options)
    return arguments.prepared(engine.target, RunOptions())


def one_text_each(engine: LoadedEngine, kwargs: Mapping[str, Any]) -> tuple[Arguments, dict[str, Any]]:
    """Returns the arguments of a call with several texts per prompt as those for one text per prompt.

    Args:
        kwargs: arguments of :meth:`Engine.generate`.

    Returns:
        The checked arguments; and the given ones without prompts, streamer, ``pinned`` and the options in
        ``SEVERAL``.

    Raises:
        ValueError: as in :meth:`Engine.generate`.
    """
    left_out = (*_PROMPTS, "streamer", "pinned", *SEVERAL)
    options = {name: value for name, value in kwargs.items() if name not in left_out}
    config = options.get("generation_config")
    if isinstance(config, Mapping):
        config = {name: value for name, value in config.items() if name not in SEVERAL}
    elif config is not None:
        config = copy.deepcopy(config)
        for name in SEVERAL:
            setattr(config, name, None)
    # The values 1 take precedence over those of the checkpoint.
    options |= {"generation_config": config, "num_beams": 1, "num_return_sequences": 1}
    own = {name: value for name, value in options.items() if name not in OF_ENGINE}
    own |= {name: kwargs.get(name) for name in _PROMPTS[1:]}
    return Arguments.read(engine.target, engine.tokenizer, kwargs.get("inputs"), own), options
