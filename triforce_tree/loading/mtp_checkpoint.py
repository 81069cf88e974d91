"""Finds and reads the MTP layers of a target's checkpoint, which transformers leaves out of the model.

They are read by ``transformers.modeling_layers.MtpModel``: families whose configuration has
``num_mtp_layers`` as they are, and families whose layers have the same form by a copy of the configuration
with this field.
"""

import copy
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.loading_report import LoadStateDictInfo

from triforce_tree.drafters.heads.mtp import MtpNetwork
from triforce_tree.drafters.heads.pairs import PairDrafter
from triforce_tree.drafters.heads.published import ROPES
from triforce_tree.drafters.registry import PAIRED, options_of
from triforce_tree.loading.gguf_header import is_gguf
from triforce_tree.loading.model_folder import downloaded, in_one_line, weight_names
from triforce_tree.models.model_copy import text_decoder
from triforce_tree.planning.machine import available_device_bytes
from triforce_tree.planning.memory_map import weights_fit

# Families of Qwen: one layer with full attention, below ``mtp.`` (vllm's qwen3_next_mtp and qwen3_5_mtp).
_QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Fields of configurations about MTP that are read here or by transformers, or concern training alone.
_READ = {
    "num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_layer_types",
    "mtp_mlp_layer_types", "mtp_per_layer_config", "mtp_loss_scaling_factor",
}  # fmt: skip
_BELOW = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"
_NUMBERED = re.compile(rf"{_BELOW}layers\.(\d+)\.")
_NAMED = re.compile(rf"{_BELOW}mtp\.")
# Copies of the target's own tables.
_TABLES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "embed_tokens.weight": lambda model: model.get_input_embeddings(),
    "shared_head.head.weight": lambda model: model.get_output_embeddings(),
}
_SCALE = "_scale_inv"
_MOST_NAMED = 4
_LOG = logging.getLogger(__name__)
_REMEDY = "use drafter='lookup', or give a draft model"


def mtp_drafter(target: PreTrainedModel, options: Mapping[str, Any], named: bool) -> PairDrafter | None:
    """Returns a drafter with the MTP layers of a target's checkpoint, see ``drafter_choice.mtp_drafter``.

    Of the options it takes ``tree``, ``other_trees``, ``sinks`` and ``window``.
    """
    try:
        tensors = mtp_tensors(target.config, download=named)
        if not tensors:
            if not named:
                return None
            raise ValueError(
                f"drafter='mtp', but the checkpoint of {type(target).__name__} "
                f"({str(target.config.name_or_path)!r}) has no MTP layers; {_REMEDY}"
            )
        layers = read_mtp_layers(target, tensors)
    except (OSError, ValueError) as error:
        if named:
            raise
        _LOG.warning("%s; matches of earlier text draft instead", error)
        return None
    source = repr(str(target.config.name_or_path))
    return PairDrafter("mtp", lambda model: MtpNetwork(layers, model, source), **options_of(PAIRED, options))


def mtp_tensors(config: PreTrainedConfig, download: bool = False) -> dict[str, Path]:
    """Returns the files of the tensors of a checkpoint's MTP layers, by the tensors' names; empty without
    any.

    Args:
        config: the configuration of the target, which names the checkpoint.
        download: whether files of a checkpoint on the hub may be downloaded; otherwise a model that was
            loaded by a hub id has none.
    """
    source = config.name_or_path
    if not source or is_gguf(source):
        return {}
    folder = Path(source)
    if not folder.is_dir():
        if not download:
            return {}
        folder = downloaded(source, ("*.json", "*.safetensors"), getattr(config, "_commit_hash", None))
    layers: int = config.get_text_config(decoder=True).num_hidden_layers

    def belongs(name: str) -> bool:
        numbered = _NUMBERED.match(name)
        return bool(_NAMED.match(name)) or (numbered is not None and int(numbered[1]) >= layers)

    found = {}
    for file_name in weight_names(folder, getattr(config, "transformers_weights", None)):
        with _opened(folder / file_name) as file:
            found.update(dict.fromkeys(filter(belongs, file.keys()), folder / file_name))
    return found


def empty_mtp_layers(target: PreTrainedModel, config: PreTrainedConfig) -> MtpModel:
    """Returns MTP layers in the dtype of a target, without its embeddings, head and rotary embedding.

    Args:
        target: the target, which is not changed.
        config: its configuration, with the fields that ``MtpModel`` reads.
    """
    decoder: Any = text_decoder(target)
    # ``MtpModel`` initialises and moves all modules that it holds, and none of the target's may change.
    parts = SimpleNamespace(layers=decoder.layers, rotary_emb=copy.deepcopy(decoder.rotary_emb))
    blank = nn.Module()
    main: Any = SimpleNamespace(
        config=config, lm_head=blank, get_input_embeddings=lambda: blank, get_decoder=lambda: parts
    )
    made: Any = MtpModel(main, config.get_text_config(decoder=True).num_mtp_layers)
    model: MtpModel = made.eval().to(target.dtype)
    return model


def read_mtp_layers(target: PreTrainedModel, tensors: dict[str, Path]) -> MtpModel:
    """Reads the MTP layers of a checkpoint onto the target's device, in its dtype.

    Args:
        target: the loaded target.
        tensors: what :func:`mtp_tensors` has found.

    Raises:
        OSError: a file cannot be read.
        ValueError: the family or the layout is not supported, a tensor lacks or would not be used, or device
            memory is short.
    """
    source = repr(str(target.config.name_or_path))
    config = _with_mtp(target.config, tensors, source)
    try:
        with torch.device("meta"):
            model = empty_mtp_layers(target, config)
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        raise ValueError(
            f"the MTP layers of {source} cannot be made ({in_one_line(error)}); {_REMEDY}"
        ) from error
    device = next(target.get_input_embeddings().parameters()).device
    free, size = available_device_bytes(device, None), sum(p.nbytes for p in model.parameters())
    if free is not None and not weights_fit(size, free):
        raise ValueError(
            f"the MTP layers of {source} take {size / 2**30:.1f} GiB, and {device} has "
            f"{free / 2**30:.1f} GiB left; free device memory, or {_REMEDY}"
        )
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_opened(path)) for path in sorted({*tensors.values()})}
        for name in filter(_table, tensors):
            _check_table(target, name, opened[tensors[name]].get_tensor(name), source)
        weights = {name: opened[path].get_slice(name) for name, path in tensors.items() if not _table(name)}
        try:
            _unscale(weights, target)
            report = _load(model, weights, target, config, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # third-party code may raise anything on files of unknown origin
            raise ValueError(
                f"the MTP layers of {source} cannot be read ({in_one_line(error)}); {_REMEDY}"
            ) from error
    for what, names in (
        ("lack", report.missing_keys),
        ("have tensors that would not be used:", report.unexpected_keys),
        ("have tensors of other shapes:", {key for key, *_ in report.mismatched_keys}),
        ("have tensors that cannot be converted:", {*report.conversion_errors, *report.error_msgs}),
    ):
        if names:
            shown = ", ".join(sorted(map(str, names))[:_MOST_NAMED])
            raise ValueError(
                f"the MTP layers of {source} {what} {shown}{', ...' * (len(names) > _MOST_NAMED)}, and would "
                f"compute something else than they were trained for; {_REMEDY}"
            )
    return model


def _unscale(weights: dict[str, Any], target: PreTrainedModel) -> None:
    """Replaces weights of 8 bits by their products with the scales of their blocks (``X.weight_scale_inv`` of
    DeepSeek-V3's format), in the target's dtype.

    Args:
        weights: slices of safetensors files by name.
    """
    settings: Any = getattr(target.config, "quantization_config", None) or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    if (block := settings.get("weight_block_size")) is None:
        return
    for name in [name for name in weights if f"{name}{_SCALE}" in weights]:
        weight, scales = weights[name][:].float(), weights.pop(f"{name}{_SCALE}")[:].float()
        for dim in (0, 1):
            scales = scales.repeat_interleave(block[dim], dim).narrow(dim, 0, weight.shape[dim])
        weights[name] = (weight * scales).to(target.dtype)


def _load(
    model: MtpModel, weights: dict[str, Any], target: PreTrainedModel, config: PreTrainedConfig,
    device: torch.device,
) -> LoadStateDictInfo:  # fmt: skip
    """Loads tensors by their names in the checkpoint, and returns what was not loaded."""
    # The conversions with which the target was loaded cannot be used, because quantisation adds others to
    # them.
    conversions = get_model_conversion_mapping(target)
    named: Any = SimpleNamespace(config=config, _weight_conversions=conversions)
    mapping: Any = model.get_weight_conversions(named)
    report: LoadStateDictInfo
    report, _ = convert_and_load_state_dict_in_model(
        model, weights,
        LoadStateDictConfig(
            weight_mapping=mapping, device_map={"": device}, dtype=target.dtype,
            dtype_plan=target._get_dtype_plan(target.dtype),
        ),
    )  # fmt: skip
    return report


def _with_mtp(config: PreTrainedConfig, tensors: dict[str, Path], source: str) -> PreTrainedConfig:
    """Returns the target's configuration, or a copy, with the fields that ``MtpModel`` reads.

    Raises:
        ValueError: the family is not supported, or a field would not be used.
    """
    config = copy.deepcopy(config)
    text: Any = config.get_text_config(decoder=True)
    family = text.model_type
    unknown = {
        name: value
        for name, value in vars(text).items()
        if ("mtp" in name or "nextn" in name) and name not in _READ and value not in (None, False)
    }
    if unknown:
        raise ValueError(
            f"config.json of {source} has fields of its MTP layers that are not supported ({unknown}); "
            f"{_REMEDY}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for part in filter(lambda part: isinstance(part, dict), (rope, *rope.values())):
        if (kind := part.get("rope_type", "default")) not in ROPES:
            raise ValueError(
                f"the MTP layers of {source} rotate by rope_type={kind!r}, which may depend on the length of "
                f"the text and is not supported; {_REMEDY}"
            )
    numbers = {int(found[1]) for name in tensors if (found := re.search(r"mtp\.layers\.(\d+)\.", name))}
    if family in _QWEN:
        text.num_mtp_layers, text.mtp_layer_types = len(numbers), ["full_attention"] * len(numbers)
        named = getattr(text, "mtp_num_hidden_layers", None)
        if len(numbers) != 1 or named not in (None, 1):
            raise ValueError(
                f"{source} has {len(numbers)} MTP layers and mtp_num_hidden_layers={named}; for "
                f"{family} exactly one is supported; {_REMEDY}"
            )
    elif family == "glm4_moe_lite":
        text.num_mtp_layers = getattr(text, "num_nextn_predict_layers", 1)
        text.mtp_mlp_layer_types = ["sparse"] * text.num_mtp_layers
    elif not getattr(text, "num_mtp_layers", None):
        raise ValueError(
            f"{source} has MTP layers, but transformers has no class for those of {family}; {_REMEDY}"
        )
    return config


def _table(name: str) -> bool:
    return any(name.endswith(f".{table}") for table in _TABLES)


def _check_table(target: PreTrainedModel, name: str, table: Tensor, source: str) -> None:
    """Raises ValueError unless the embeddings or the head of an MTP layer are a copy of the target's."""
    module = next(of for end, of in _TABLES.items() if name.endswith(f".{end}"))(target)
    own: Any = getattr(module, "weight", None)
    if own is None or own.shape != table.shape or not torch.equal(own, table.to(own.device, own.dtype)):
        raise ValueError(
            f"{name} of {source} is no copy of the target's own table, which is used in its place; {_REMEDY}"
        )


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        why = in_one_line(error)
        raise ValueError(f"{path} cannot be read ({why}); copy or download it again") from error
