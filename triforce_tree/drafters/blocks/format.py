"""The published layouts of block drafters, read into one form.

They differ in the names of tensors and fields, and in a few rules of the computation:

* github.com/z-lab/dflash (arXiv 2602.06036), also written by SpecForge: the fields of the layers stand in
  ``config.json``, those of the block in ``dflash_config``.
* github.com/hao-ai-lab/JetSpec (arXiv 2606.18394): the same with ``causal_head``.
* transformers' ``muse_glimmer_assistant``: ``encoder.fc`` and ``encoder.output_norm_enc``; all fields stand
  in ``config.json``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from triforce_tree.drafters.registry import CONFIG, MUSE, settings

# Fields that change nothing in the computation, or only repeat what other fields or the tensors say.
_WITHOUT_EFFECT = frozenset([
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "initializer_range", "mask_token", "max_window_layers", "model_type", "num_anchors",
    "pad_token_id", "pretraining_tp", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_cache", "vocab_size",
])  # fmt: skip
# Fields of the decoder layers that every layout must name.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps",
)  # fmt: skip
_LAYER = (
    *_SIZES,
    "attention_bias",
    "max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_READ = frozenset([
    *_LAYER, "block_size", "causal", "causal_head", "is_causal", "layer_types", "mask_token_id",
    "num_target_layers", "sliding_window", "swa_window_size", "target_hidden_size", "target_layer_ids",
    "use_sliding_window",
])  # fmt: skip
# Fields that may have some values only.
_FIXED: Mapping[str, Callable[[Any], bool]] = {
    "attention_mode": lambda value: value in ("gqa", "mha"),
    "hidden_act": lambda value: value in ("silu", "swish"),
    "is_neox_style": lambda value: value is True,
    "logit_scale": lambda value: value == 1,
    "partial_rotary_factor": lambda value: value == 1,
    "projector_type": lambda value: value == "dflash",
    "rope_is_neox_style": lambda value: value is True,
}
_SLIDING = "sliding_attention"
# Rotary embeddings whose frequencies do not depend on the length of the sequence.
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class BlockFormat:
    """The configuration of a block drafter.

    Attributes:
        layers: the decoder layers, as a configuration of transformers.
        inputs: the hidden states of the target that are fused, as in ``Drafter.features``.
        block: T, the slots of a block. Slot 0 holds the newest token, the others hold the mask token.
        mask_token: its id in the target's vocabulary.
        causal: for each layer, whether a slot attends only to itself and to earlier slots of the block.
        windows: for each layer, the most positions between a slot and a position that it attends to,
            plus 1; None for no limit.
        raw_embeddings: whether the block reads the target's embedding table without what the target's
            embedding module does after the lookup.
        target_size: the hidden size of the target; None if it is not named.
    """

    layers: Any
    inputs: tuple[int, ...]
    block: int
    mask_token: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    raw_embeddings: bool = False
    target_size: int | None = None

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the newest one; each further slot predicts one more."""
        return 1

    @property
    def depth(self) -> int:
        """The most tokens that a block predicts on one path."""
        return self.block - self.first_slot


def canonical(name: str) -> str:
    """Returns the name of a tensor of any layout as z-lab's layout has it."""
    name = name.removeprefix("model.")
    for other, own in (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")):
        name = name.replace(other, own)
    return name


def block_format(folder: Path) -> BlockFormat:
    """Reads ``config.json`` of a block drafter.

    Raises:
        ValueError: a field is missing, contradicts another, has a value that is not supported, or is unknown
            and may change what the drafter computes.
    """
    config = settings(folder)
    refuse_other_files(folder)
    fields = _flat(folder, config)
    for name, value in fields.items():
        _check_field(folder, name, value)
    muse = config.get("model_type") == MUSE
    layers = _layers(folder, fields, muse)
    sliding = _sliding(folder, fields, layers, muse)
    explicit = [bool(fields[name]) for name in ("is_causal", "causal", "causal_head") if name in fields]
    if len(set(explicit)) > 1:
        raise ValueError(f"is_causal, causal and causal_head in {str(folder)!r} contradict each other")
    # Engines and SpecForge agree that layers with a window are causal inside the block unless a field says
    # otherwise; transformers' class never is.
    causal = [explicit[0] if explicit else not muse and each is not None for each in sliding]
    # transformers counts the distance itself, the others count the slot too.
    windows = [None if each is None else each + int(muse) for each in sliding]
    source = layers.to_dict() if muse else fields
    block, mask = source.get("block_size"), source.get("mask_token_id")
    if not isinstance(block, int) or block < 2 or not isinstance(mask, int) or mask < 0:
        raise ValueError(
            f"block_size={block!r} and mask_token_id={mask!r} in {str(folder / CONFIG)!r} must be at least 2 "
            "and 0; give the whole folder of a block drafter"
        )
    return BlockFormat(
        layers, _inputs(folder, source, layers.num_hidden_layers), block, mask, tuple(causal), tuple(windows),
        muse, fields.get("target_hidden_size"),
    )  # fmt: skip


def refuse_other_files(folder: Path) -> None:
    """Raises ValueError if a file in the folder holds weights that would not be read."""
    if (folder / "mask_embedding.pt").is_file():
        raise ValueError(
            f"{str(folder)!r} has a mask_embedding.pt, which replaces the embedding of the mask token; this "
            "is not supported"
        )


def _flat(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``config.json`` and of its parts in one mapping, without empty ones."""
    parts = [config, *(config.get(name) or {} for name in ("dflash_config",))]
    flat: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if value is None or name == "dflash_config":
                continue
            if name not in _WITHOUT_EFFECT and flat.get(name, value) != value:
                raise ValueError(
                    f"{str(folder / CONFIG)!r} has {name}={flat[name]!r} and {name}={value!r}; which one "
                    "holds is not known"
                )
            flat[name] = value
    return flat


def _check_field(folder: Path, name: str, value: object) -> None:
    if name in _WITHOUT_EFFECT or name in _READ:
        return
    if (allowed := _FIXED.get(name)) is not None:
        if not allowed(value):
            raise ValueError(f"{name}={value!r} in {str(folder / CONFIG)!r} is not supported")
    elif value is not False:
        raise ValueError(
            f"{str(folder / CONFIG)!r} has the field {name}={value!r}, which is not known and may change "
            "what the drafter computes; remove the field if it has no effect"
        )


def _layers(folder: Path, fields: Mapping[str, Any], muse: bool) -> Any:
    missing = [name for name in _SIZES if name not in fields]
    if not {"rope_theta", "rope_parameters"} & fields.keys():
        missing.append("rope_theta")
    if missing and not muse:  # transformers' class has defaults
        raise ValueError(
            f"{str(folder / CONFIG)!r} lacks {', '.join(missing)}; give the whole folder of a block drafter"
        )
    kind = MUSE if muse else "qwen3"
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"the drafter in {str(folder)!r} needs a newer transformers, which has {kind}")
    given = fields if muse else {name: fields[name] for name in _LAYER if name in fields}
    try:
        layers: Any = CONFIG_MAPPING[kind](**given)
        rope = layers.rope_parameters["rope_type"]
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        why = " ".join(str(error).split())[:160]
        raise ValueError(f"config.json in {str(folder)!r} cannot be used ({why})") from error
    if rope not in _ROPES:
        raise ValueError(
            f"rope_type={rope!r} in {str(folder)!r} is not supported; known are {', '.join(_ROPES)}"
        )
    return layers


def _sliding(folder: Path, fields: Mapping[str, Any], layers: Any, muse: bool) -> list[int | None]:
    """Returns the window of each layer as the configuration names it; None for full attention."""
    count = layers.num_hidden_layers
    kinds = layers.layer_types if muse else fields.get("layer_types", ["full_attention"] * count)
    if len(kinds) != count or not {*kinds} <= {_SLIDING, "full_attention"}:
        raise ValueError(
            f"layer_types={list(kinds)} in {str(folder / CONFIG)!r} must name {count} layers of "
            f"full_attention or {_SLIDING}"
        )
    window = layers.sliding_window if muse else fields.get("swa_window_size", fields.get("sliding_window"))
    if _SLIDING in kinds and (
        fields.get("use_sliding_window") is False or not isinstance(window, int) or window < 1
    ):
        raise ValueError(
            f"layer_types in {str(folder / CONFIG)!r} names {_SLIDING}, but sliding_window={window!r} and "
            f"use_sliding_window={fields.get('use_sliding_window')!r} give no window"
        )
    return [window if kind == _SLIDING else None for kind in kinds]


def _inputs(folder: Path, fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose outputs are fused."""
    if (given := fields.get("target_layer_ids")) is not None:
        inputs = list(given)
    elif isinstance(deep := fields.get("num_target_layers"), int):
        # The rule of the published implementation.
        last = deep - 4
        inputs = [deep // 2] if layers == 1 else [round(1 + i * last / (layers - 1)) for i in range(layers)]
    else:
        raise ValueError(f"{str(folder / CONFIG)!r} lacks target_layer_ids; give the whole folder")
    if not inputs or not all(isinstance(i, int) and i >= 0 for i in inputs):
        raise ValueError(
            f"target_layer_ids={inputs} in {str(folder / CONFIG)!r} must be numbers of decoder layers of the "
            "target, counted from 0 (the embeddings, -1, are not supported)"
        )
    return tuple(inputs)
