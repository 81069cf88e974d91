"""The published layouts of EAGLE-3 heads, read into one form.

Three layouts differ in the names of tensors and fields, and in where the layer is normalised:

* github.com/SafeAILab/EAGLE and SpecForge: ``midlayer.*``; the fields of the layer stand in ``config.json``.
* EAGLE-3.1 (arXiv 2605.09992): also ``fc_norm.N.weight``, and the fields ``fc_norm`` and ``norm_output``.
* github.com/vllm-project/speculators: ``layers.0.*``; the fields of the layer stand in
  ``transformer_layer_config``; ``norm_before_residual``, ``norm_before_fc`` and ``target_hidden_size``.

P-EAGLE heads (arXiv 2602.01469) add ``mask_hidden`` and the id of a mask token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triforce_tree.drafters.heads.published import check_fields, flat, layers_of
from triforce_tree.drafters.registry import CONFIG, MASK_TOKENS, settings

# Families whose decoder layer is computed: RMS norms, rotary embeddings, and a gated MLP with SiLU. Fields
# that a configuration leaves out have the family's defaults.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_READ = frozenset([
    "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "target_hidden_size",
    "use_sliding_window",
    # The tensors say which biases there are. No frequency depends on the length that was trained.
    "attention_bias", "max_position_embeddings", "speculators_model_type",
    # These describe layers and heads that a head of one layer and one step does not have.
    "next_layer_regular", "parallel_draft_heads_num_layers",
])  # fmt: skip
# Names of the number of depths of P-EAGLE heads, and fields of theirs that only training reads.
_DEPTHS = ("para_num", "para_depths", "num_depths")
_TRAINING = (
    "down_sample_ratio",
    "down_sample_ratio_min",
    "loss_type",
    "max_seq_len",
    "prediction_loss_weight",
)
# Fields that may have one value only.
_FIXED: Mapping[str, Callable[[Any], bool]] = {
    "eagle_aux_hidden_state_layer_ids": lambda value: isinstance(value, list),
    "layer_types": lambda value: (
        isinstance(value, list) and all(kind in ("full_attention", "sliding_attention") for kind in value)
    ),
    "num_hidden_layers": lambda value: value == 1,
    "sliding_window": lambda value: value is False or type(value) is int,
    **dict.fromkeys(_SWITCHES, lambda value: isinstance(value, bool)),
    # Model Optimizer writes these to eagle_config.
    "parallel_draft_step": lambda value: value == 1,
    "use_aux_hidden_state": lambda value: value is True,
    "use_input_layernorm_in_first_layer": lambda value: value is True,
    "use_last_layernorm": lambda value: value is True,
}


@dataclass(frozen=True)
class EagleFormat:
    """The configuration of an EAGLE-3 head.

    Attributes:
        layer: the decoder layer, as a configuration of transformers.
        inputs: the layers of the target whose inputs the head reads, counted from 0; None if none are named.
        target_size: the hidden size of the target; None if it is not named.
        sliding_window: the number of newest pairs that the layer attends to; None for all.
        norm_before_residual: the residual of the layer is the normalised hidden state.
        norm_before_fc: the concatenated hidden states are normalised together.
        fc_norm: each of the hidden states is normalised.
        norm_output: the hidden state that is fed back is normalised.
        mask_token: the token of the pairs whose tokens are not known (P-EAGLE); None for other heads.
        depths: how many depths a P-EAGLE head was trained for; None if that is not named.
        layers: the number of layers; only P-EAGLE heads have several.
    """

    layer: Any
    inputs: tuple[int, ...] | None
    target_size: int | None
    sliding_window: int | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None
    depths: int | None = None
    layers: int = 1


def canonical(name: str) -> str:
    """Returns the name of a tensor of any layout as in the layout of SafeAILab/EAGLE."""
    name = name.removeprefix("model.")
    for other, own in (("layers.0.", "midlayer."), ("fc_norms.", "fc_norm.")):
        if name.startswith(other):
            return own + name.removeprefix(other)
    return name


def eagle_format(folder: Path) -> EagleFormat:
    """Reads ``config.json`` of an EAGLE-3 head.

    Raises:
        ValueError: there is no such file, a field has a value that is not supported, or a field is unknown
            and may change what the head computes.
    """
    config = settings(folder)
    fields = flat(folder, config)
    if "hidden_size" not in fields:
        raise ValueError(f"{str(folder)!r} has no {CONFIG} with a hidden_size; give the whole folder")
    kind = fields.get("speculators_model_type", "eagle3")
    if kind not in ("eagle3", "peagle"):
        raise ValueError(
            f"{str(folder)!r} holds a head of the kind {kind!r}; supported are 'eagle3' and 'peagle'"
        )
    masked = {name: fields[name] for name in MASK_TOKENS if name in fields}
    if kind == "peagle" and not masked:
        raise ValueError(
            f"{str(folder)!r} has no mask token ({' or '.join(MASK_TOKENS)} in {CONFIG}), and holds no "
            "P-EAGLE head"
        )
    if fields.get("use_aux_hidden_state") is False:
        raise ValueError(
            f"the head in {str(folder)!r} reads no hidden states of inner layers (use_aux_hidden_state is "
            "false), and is no EAGLE-3 head"
        )
    own = (*MASK_TOKENS, *_DEPTHS, *_TRAINING, "num_hidden_layers") if masked else ()
    fixed = {**_FIXED, "parallel_drafting": lambda value: value is True} if masked else _FIXED
    check_fields(folder, fields, _READ | {*own}, fixed)
    switches = {name: fields.get(name, False) for name in _SWITCHES}
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise ValueError(
            f"norm_before_fc and fc_norm in {str(folder)!r} exclude each other; one must be false"
        )
    layer, inputs = _layer(folder, fields), fields.get("eagle_aux_hidden_state_layer_ids")
    return EagleFormat(
        layer, tuple(inputs) if inputs else None, fields.get("target_hidden_size"),
        _sliding_window(layer, fields), **switches,
        mask_token=_number(folder, masked, 0),
        depths=_number(folder, {name: fields[name] for name in _DEPTHS if name in fields}, 1),
        layers=fields.get("num_hidden_layers", 1),
    )  # fmt: skip


def _number(folder: Path, found: Mapping[str, Any], least: int) -> int | None:
    """Returns the value of fields that must all have the same; None if there are none."""
    if not found:
        return None
    first, *others = found.values()
    if type(first) is not int or first < least or any(value != first for value in others):
        shown = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ValueError(f"{shown} in {str(folder / CONFIG)!r} must be one integer of at least {least}")
    return first


def _layer(folder: Path, fields: Mapping[str, Any]) -> Any:
    family = fields.get("model_type", "llama")
    if family not in _FAMILIES:
        raise ValueError(
            f"the layer of the head in {str(folder)!r} is of the family {family!r}; supported are layers of "
            f"{', '.join(_FAMILIES)}"
        )
    return layers_of(folder, family, {**fields, "num_hidden_layers": 1, "layer_types": None})


def _sliding_window(layer: Any, fields: Mapping[str, Any]) -> int | None:
    window: int | None = fields.get("sliding_window")
    if kinds := fields.get("layer_types"):
        return window if "sliding_attention" in kinds else None
    # The families of Qwen have a switch, which sets the window to None; Llama has none.
    return getattr(layer, "sliding_window", None) if layer.model_type != "llama" else None
