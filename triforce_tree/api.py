"""``load``, ``generate`` and the hook for transformers' own ``generate``."""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from triforce_tree.config import ADVANCED, SHOWN, HierarchyConfig, Options, flat_options
from triforce_tree.drafters.base import Drafter, UnusableDrafterError
from triforce_tree.engine import Engine
from triforce_tree.loading.checkpoints import (
    PAIR,
    load_model,
    load_target,
    settings_of,
    tokenizer_of,
    unwrapped,
    with_text_ranks,
)
from triforce_tree.loading.drafter_choice import (
    check_drafter_options,
    mtp_drafter,
    own_drafter,
    with_assistant,
)
from triforce_tree.loading.gguf_header import gguf_path, is_gguf
from triforce_tree.loading.placement import on_one_device
from triforce_tree.loading.reading import ModelFiles
from triforce_tree.requests.endings import StopStrings
from triforce_tree.requests.inputs import Inputs, check_lengths, texts_of
from triforce_tree.requests.option_values import checked
from triforce_tree.requests.options import check_keywords, refuse_dropped
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.requests.request import Prepared, Request, RunOptions
from triforce_tree.requests.streamers import Streamers
from triforce_tree.runtime import distributed
from triforce_tree.runtime.devices import device_of

_LOG = logging.getLogger(__name__)
Model = PreTrainedModel | str | Path
Tokenizer = PreTrainedTokenizerBase | str | Path


def load(
    target: Model | None = None,
    draft: Model | None = None,
    *,
    drafter: Drafter | str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    draft_tokenizer: Tokenizer | None = None,
    gguf_file: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    pinned: Callable[[int], None] | None = None,
    **options: Unpack[Options],
) -> Engine:
    """Makes an engine.

    Under torchrun the processes share the target: each takes the GPU of its ``LOCAL_RANK`` and a share of
    the heads or positions, and of the neurons. All of them must call the engine with the same arguments, and
    get the same output.

    Args:
        target: a transformers model (a compiled model runs uncompiled), a model of peft, a hub id, a folder
            of a model or an adapter, or a path that ends in .gguf; by default the embedded pair's target. A
            model that accelerate has spread over several places is gathered on its first GPU, where it fits.
            A model is not changed, but for ``offload_weights=True``, which moves its layers' weights to
            page-locked host memory and all else to ``device``, and torchrun, under which it is sharded in
            place.
        draft: likewise; by default the embedded draft for the embedded target, and none for any other.
        drafter: the proposer of token trees: ``"model"``, the draft; ``"lookup"``, suffix matching;
            ``"mtp"``, the MTP layers in the target's checkpoint; a folder or hub id with Medusa heads, an
            EAGLE-3 head or a DFlash block for the target, recognised from its files; or an object:
            :class:`Medusa`, :class:`Eagle3`, or one of your own
            (:class:`~triforce_tree.drafters.base.Drafter`). The draft model, MTP layers and folders take
            ``tree``. By default the draft where there is one, else MTP layers where there are some, and else
            suffix matching.
        tokenizer: an object, a hub id or a folder; by default the one in the target's folder.
        draft_tokenizer: likewise, by default the one in the draft's folder. A draft of another tokenizer
            proposes the tokens that both vocabularies have.
        gguf_file: name of a GGUF file in the target's folder or hub repository, with the target and its
            tokenizer. Its weights are unpacked, but for float32 on a CPU, where most types stay packed.
        device: for models named by id or folder; by default CUDA where there is one.
        dtype: likewise, of the weights; by default the checkpoint's own, for GGUF bfloat16 on CUDA. A CPU
            computes in float32 whatever it is, except with experts or quantised weights, whose default there
            is float32.
        pinned: called while offloaded weights allocate host memory, with the number of bytes.
        levels: 3 for the whole hierarchy, 2 for the draft under the target, 1 for autoregressive decoding;
            by default 2 or 3, by the length of the prompt.
        tree: the shape of the draft model's token trees, such as ``"chain:4"`` or ``"best-first:4,4,4,3"``.
        budget: tokens in the retrieval cache; by default 1024 to 32,768, by prompt, model and device.
        kv_bits: 8 stores the target's keys and values in 8 bits; 16, the default, in its own dtype.
        retrieval_weight_bits: 16, 8 or 4 bits for the weights of level 1, which changes no distribution; by
            default 8 where it is faster and memory is to spare.
        offload: True keeps keys and values in host memory as far as the GPU does not hold them, "auto" only
            where they do not fit.
        gpu_memory, host_memory: the most memory of each kind that is used, such as ``"24GiB"``.
        exact: True makes greedy text equal to plain decoding bit by bit, also in 16 bits.
        advanced: further options by name, which docs/advanced.md lists: ``advanced={"rounds": 2}``.

    Raises:
        ValueError: an option or a pair of models cannot work;
            :class:`UnsupportedModelError` is raised for a model family that cannot.
        TypeError: a model or a tokenizer is neither an object of transformers nor a path.
        OSError: a model folder lacks files or is not in safetensors; or there is too little host memory.
    """
    given = flat_options(options)
    config = HierarchyConfig.from_options(**given)
    drafter, draft = with_assistant(drafter, draft)
    own = own_drafter(drafter, draft, given)
    if target is None and gguf_file is not None:
        raise ValueError(f"gguf_file={gguf_file!r} needs a target: the folder or hub id that holds it")
    if target is None:
        target = PAIR / "target"
        if draft is None and drafter in (None, "model"):
            draft = PAIR / "draft"
    check_drafter_options(drafter, draft, given)
    target = unwrapped(target, "target")
    target = gguf_path(target, gguf_file)
    packed = is_gguf(target)
    if drafter == "mtp" and packed:
        raise ValueError(
            f"drafter='mtp' reads MTP layers from safetensors, and those of the GGUF file {str(target)!r} "
            "(blk.*.nextn.*) are not read; give the folder of the model, or drafter='lookup'"
        )
    draft = None if draft is None else gguf_path(unwrapped(draft, "draft"))
    tokenizer = tokenizer_of(tokenizer, target)
    if isinstance(target, PreTrainedModel):
        target = on_one_device(target)
    if isinstance(target, PreTrainedModel) and config.streams is not True:
        # A given model is not moved, so the draft goes to its device.
        device = device_of(target.device) if target.device.type == "cuda" else target.device
    group = distributed.join(device)
    with distributed.together():
        alike = config, dtype, str(drafter), draft is None, config.streams or packed
        distributed.check_equal({"options of load": alike})
        config = with_text_ranks(config, target, dtype)
        grid = distributed.arrange(config.text_ranks)
        own_tokenizer = tokenizer_of(draft_tokenizer, draft, "draft_tokenizer")
        if group is not None:
            device = group.device
        if isinstance(draft, str | Path):
            # Unusable arguments are refused before the target's weights are read.
            ModelFiles.find(draft, device_of(device), dtype)
        loaded, streamed = load_target(target, config, device, dtype, grid, pinned)
        small = None
        if draft is not None:
            small = on_one_device(load_model(draft, loaded.device, dtype), loaded.device)
        distributed.check_equal({"drafts": None if small is None else settings_of(small.config)})

        def engine(layers: Drafter | None) -> Engine:
            return Engine(loaded, own or layers or small, tokenizer, config, given, streamed, own_tokenizer)

        free = drafter is None and draft is None and config.levels != 1
        may = free and not (packed or streamed or group)
        return _with_mtp(loaded, given, drafter == "mtp", may, engine)


def _with_mtp(
    target: PreTrainedModel,
    given: Mapping[str, Any],
    named: bool,
    may: bool,
    engine: Callable[[Drafter | None], Engine],
) -> Engine:
    """Returns an engine that drafts with the MTP layers in the target's checkpoint, if the user asked for
    them, or if it may draft with them and there are some.

    Args:
        named: whether the user asked for them. Otherwise layers that cannot be used are left out, and the
            reason is logged.
        engine: makes the engine, from the layers or None.
    """
    layers = mtp_drafter(target, given, named) if named or may else None
    try:
        return engine(layers)
    except UnusableDrafterError as error:
        if named:
            raise
        _LOG.warning("%s; matches of earlier text draft instead", error)
        return engine(None)


def generate(
    inputs: Inputs | None = None, target: Model | None = None, draft: Model | None = None, **kwargs: Any
) -> GenerateOutput:
    """Loads models and generates in one call. Each keyword is passed to :func:`load` or to
    :meth:`Engine.generate`.

    Raises:
        ValueError, OSError: raised by these two.
    """
    names = {"drafter", "tokenizer", "draft_tokenizer", "gguf_file", "device", "dtype"}
    names |= {*SHOWN, *ADVANCED, "advanced"}
    loading = {k: kwargs.pop(k) for k in list(kwargs) if k in names}
    given = check_keywords(kwargs, inspect.signature(Engine.generate).parameters, names)
    if isinstance(target, str | Path) or target is None:
        source = gguf_path(PAIR / "target" if target is None else target, loading.get("gguf_file"))
        loading["tokenizer"] = tokenizer_of(loading.get("tokenizer"), source)
        prompts, new_tokens = texts_of(inputs) or (), given.get("max_new_tokens")
        check_lengths(source, loading["tokenizer"], prompts, 1 if new_tokens is None else new_tokens)
    return load(target, draft, **loading).generate(inputs, **kwargs)


def custom_generate(
    draft: Model | None = None,
    *,
    drafter: Drafter | str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    draft_tokenizer: Tokenizer | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    seed: int | None = None,
    **options: Unpack[Options],
) -> Callable[..., Any]:
    """Returns a value for transformers' ``model.generate(input_ids, custom_generate=...)``.

    ``streamer``, ``tokenizer`` and ``stop_strings`` are given here, because transformers does not pass
    them on to a callable. ``drafter``, ``draft_tokenizer`` and ``options`` are those of :func:`load`.

    Raises:
        ValueError: an option, a tokenizer or a draft cannot be used.
    """
    engines: dict[int, Engine] = {}
    making = threading.Lock()
    given = flat_options(options)
    config = HierarchyConfig.from_options(**given)
    drafter, draft = with_assistant(drafter, draft)
    own = own_drafter(drafter, draft, given)
    check_drafter_options(drafter, draft, given)
    source = None if draft is None else unwrapped(draft, "draft")
    others = tokenizer_of(draft_tokenizer, source, "draft_tokenizer")
    own_tokenizer, strings = tokenizer_of(tokenizer), checked("stop_strings", stop_strings or None)
    how = RunOptions(Streamers(streamer, 1), seed=checked("seed", seed))
    if strings and own_tokenizer is None:
        raise ValueError("stop_strings needs custom_generate(..., tokenizer=...)")

    def run(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[0] != 1:
            raise ValueError(
                f"custom_generate takes one sequence, not {input_ids.shape[0]} rows (num_beams and "
                "num_return_sequences expand them); use triforce_tree.load(model).generate for batches"
            )
        refuse_dropped(sys._getframe(1))
        with making:
            if id(model) not in engines:
                small = None
                if source is not None:
                    small = on_one_device(load_model(source, model.device, model.dtype), model.device)

                def engine(layers: Drafter | None) -> Engine:
                    drafts = own or layers or small
                    return Engine(model, drafts, own_tokenizer, config, given, draft_tokenizer=others)

                may = drafter is None and draft is None and config.levels != 1
                engines[id(model)] = _with_mtp(model, given, drafter == "mtp", may, engine)
        used = engines[id(model)]
        processors, criteria, options = (
            kwargs.pop(name) for name in ("logits_processor", "stopping_criteria", "generation_config")
        )
        if strings and own_tokenizer is not None:
            criteria = StoppingCriteriaList([*criteria, StopStrings(own_tokenizer, strings)])
        prepared = Prepared(processors, criteria, options, kwargs)
        request = Request.from_transformers(used.target, input_ids, prepared, how)
        out = used.decode(request)
        assert out is not None, "a single sequence is decoded"
        return out if options.return_dict_in_generate else out.sequences

    return run
