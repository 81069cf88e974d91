"""The published layouts of block drafters, read into one form.

They differ in the names of tensors and fields, and in a few rules of the computation:

* github.com/z-lab/dflash (arXiv 2602.06036), also written by SpecForge: the fields of the layers stand in
  ``config.json``, those of the block in ``dflash_config``. DFlash2 adds convolutions and a selector.
* github.com/hao-ai-lab/JetSpec (arXiv 2606.18394): the same with ``causal_head``.
* github.com/deepseek-ai/DeepSpec (DSpark, arXiv 2607.05147): all fields stand in ``config.json``; a slot
  predicts the token after its position; a Markov head.
* github.com/vllm-project/speculators: DFlash and DSpark; the fields of the layers stand in
  ``transformer_layer_config``.
* transformers' ``muse_glimmer_assistant``: ``encoder.fc`` and ``encoder.output_norm_enc``; all fields stand
  in ``config.json``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from triforce_tree.drafters.heads.published import check_fields, flat, layers_of
from triforce_tree.drafters.registry import CONFIG, MASK_EMBEDDING, MUSE, settings

# The confidence head says how many tokens are worth verifying, which decoding decides by measured acceptance.
_WITHOUT_EFFECT = (
    "confidence_head_alpha", "confidence_head_with_markov", "enable_confidence_head", "mask_token",
    "num_anchors",
)  # fmt: skip
# Fields of the decoder layers that z-lab's and DeepSpec's layouts must name.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps",
)  # fmt: skip
_LAYER = (
    *_SIZES, "attention_bias", "layer_types", "max_position_embeddings", "max_window_layers",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
)  # fmt: skip
_READ = frozenset([
    *_LAYER, "block_size", "markov_head_type", "mask_token_id", "num_target_layers",
    "speculators_model_type", "swa_window_size", "target_hidden_size",
])  # fmt: skip
_OF_DFLASH2 = (
    "conv_group_size", "conv_kernel_size", "final_logit_softcapping", "input_embedding_scale",
    "output_multiplier", "selector_rank", "selector_top_k",
)  # fmt: skip
# Fields that may have some values only.
_FIXED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("causal", "causal_head", "is_causal", "sample_from_anchor", "sliding_window_non_causal"),
        lambda value: isinstance(value, bool),
    ),
    **dict.fromkeys(
        ("aux_hidden_state_layer_ids", "target_layer_ids"), lambda value: isinstance(value, list)
    ),
    "attention_mode": lambda value: value in ("gqa", "mha"),
    "markov_rank": lambda value: type(value) is int and 0 <= value <= 2**16,
    "is_neox_style": lambda value: value is True,
    "projector_type": lambda value: value in ("dflash", "dspark"),
    "rope_is_neox_style": lambda value: value is True,
}
_MOST = 1024  # slots of a block
_SLIDING = "sliding_attention"
_DSPARK = ("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator")
_DFLASH2 = "DFlash2DraftModel"
_KNOWN = ("DFlashDraftModel", _DFLASH2, *_DSPARK, "DFlashSpeculator", "MuseGlimmerAssistantModel")


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
        anchored: whether ``windows`` are counted from slot 0, and do not limit the attention inside a block.
        first_slot: the slot that predicts the token after the newest one; each further slot predicts one
            more.
        raw_embeddings: whether the block reads the target's embedding table without what the target's
            embedding module does after the lookup.
        embedding_scale: a factor of the embeddings.
        target_size: the hidden size of the target; None if it is not named.
        markov: the kind of Markov head (``blocks/conditioned.py``) and its rank; None without one.
        convolution: the taps and the channels per group of the convolutions; None without.
        selector: rank and number of candidates of the selector; None without one.
        logit_scale, softcap: what the selector does to the logits of candidates; 0 for no softcap.
    """

    layers: Any
    inputs: tuple[int, ...]
    block: int
    mask_token: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    anchored: bool = False
    first_slot: int = 1
    raw_embeddings: bool = False
    embedding_scale: float = 1.0
    target_size: int | None = None
    markov: tuple[str, int] | None = None
    convolution: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    logit_scale: float = 1.0
    softcap: float = 0.0

    @property
    def depth(self) -> int:
        """The most tokens that a block predicts on one path."""
        return self.block - self.first_slot


def canonical(name: str) -> str:
    """Returns the name of a tensor of any layout as z-lab's layout has it."""
    name = name.removeprefix("model.").removeprefix("logit_head.")
    for other, own in (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")):
        name = name.replace(other, own)
    return name


def block_format(folder: Path) -> BlockFormat:
    """Reads ``config.json`` of a block drafter.

    Raises:
        ValueError: a field is missing, contradicts another, has a value that is not supported, or is unknown
            and may change what the drafter computes.
    """
    return _Reader(folder).format()


class _Reader:
    """Reads one ``config.json``.

    Args:
        folder: the folder of the drafter, which messages name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = str(folder), str(folder / CONFIG)
        self.config = settings(folder)
        if (folder / MASK_EMBEDDING).is_file():
            raise ValueError(
                f"{self.folder!r} has a {MASK_EMBEDDING}, which replaces the embedding of the mask token; "
                "this is not supported"
            )
        names = self.config.get("architectures") or []
        if unknown := [name for name in names if name not in _KNOWN]:
            raise ValueError(
                f"{self.folder!r} holds a block drafter of the kind {unknown[0]}; supported are "
                f"{', '.join(_KNOWN)}"
            )
        self.speculators = self.config.get("speculators_model_type")
        if self.speculators not in (None, "dflash", "dspark"):
            raise ValueError(
                f"{self.folder!r} holds a block drafter of the kind {self.speculators!r}; supported are "
                "'dflash' and 'dspark'"
            )
        self.muse = self.config.get("model_type") == MUSE
        self.second = _DFLASH2 in names
        self.fields = flat(folder, self.config)
        self.spark = any(name in _DSPARK for name in names) or self.fields.get("projector_type") == "dspark"
        read = _READ.union(_WITHOUT_EFFECT, _OF_DFLASH2 if self.second else ())
        check_fields(folder, self.fields, read, _FIXED)
        self.layers = self._layers()
        if self.muse:
            self.fields = self.layers.to_dict()

    def format(self) -> BlockFormat:
        fields = self.fields
        block, mask = fields.get("block_size"), fields.get("mask_token_id")
        if type(block) is not int or not 2 <= block <= _MOST or type(mask) is not int or mask < 0:
            raise ValueError(
                f"block_size={block!r} and mask_token_id={mask!r} in {self.path!r} must be 2 to {_MOST} and "
                "at least 0; give the whole folder of a block drafter"
            )
        sliding = self._sliding()
        # transformers counts the distance itself, as speculators do from slot 0; the others count the slot.
        counted = int(self.muse or self.speculators is not None)
        shifted = bool(fields.get("sample_from_anchor", self.spark))
        return BlockFormat(
            self.layers, self._inputs(), block, mask, self._causal(sliding),
            tuple(None if window is None else window + counted for window in sliding),
            anchored=self.speculators is not None,
            first_slot=0 if shifted else 1,
            raw_embeddings=self.muse or self.second,
            target_size=fields.get("target_hidden_size"),
            markov=self._markov(),
            **self._dflash2(),
        )  # fmt: skip

    def _layers(self) -> Any:
        fields = self.fields
        given = fields if self.muse else {name: fields[name] for name in _LAYER if name in fields}
        # transformers' class and speculators leave out what equals the defaults.
        if not self.muse and self.speculators is None:
            missing = [name for name in _SIZES if name not in fields]
            if not {"rope_theta", "rope_parameters"} & fields.keys():
                missing.append("rope_theta")
            if missing:
                raise ValueError(
                    f"{self.path!r} lacks {', '.join(missing)}; give the whole folder of a block drafter"
                )
        nested = self.config.get("transformer_layer_config") or {}
        kind = MUSE if self.muse else "qwen3"
        if self.speculators is not None and nested.get("model_type", kind) != kind:
            raise ValueError(
                f"the layers of the drafter in {self.folder!r} are of the family {nested['model_type']!r}; "
                f"supported is {kind!r}"
            )
        if kind not in CONFIG_MAPPING:
            raise ValueError(f"the drafter in {self.folder!r} needs a newer transformers, which has {kind}")
        return layers_of(Path(self.folder), kind, given)

    def _sliding(self) -> list[int | None]:
        """Returns the window of each layer as the configuration names it; None for full attention."""
        kinds = self.layers.layer_types
        if not {*kinds} <= {_SLIDING, "full_attention"}:
            raise ValueError(
                f"layer_types={list(kinds)} in {self.path!r} must name layers of full_attention or {_SLIDING}"
            )
        window = self.fields.get("sliding_window", self.layers.sliding_window)
        window, switch = self.fields.get("swa_window_size", window), self.fields.get("use_sliding_window")
        if _SLIDING in kinds and (switch is False or not isinstance(window, int) or window < 1):
            raise ValueError(
                f"layer_types in {self.path!r} names {_SLIDING}, but sliding_window={window!r} and "
                f"use_sliding_window={switch!r} give no window"
            )
        return [window if kind == _SLIDING else None for kind in kinds]

    def _causal(self, sliding: list[int | None]) -> tuple[bool, ...]:
        """Returns for each layer whether its slots attend to earlier ones only.

        Layers with a window do so unless a field says otherwise: vLLM, SGLang, SpecForge and speculators
        agree. transformers' class never does.
        """
        explicit = [
            bool(self.fields[name]) for name in ("is_causal", "causal", "causal_head") if name in self.fields
        ]
        if self.fields.get("sliding_window_non_causal"):
            explicit.append(False)
        if len(set(explicit)) > 1:
            raise ValueError(
                f"is_causal, causal, causal_head and sliding_window_non_causal in {self.folder!r} contradict "
                "each other"
            )
        if explicit:
            return (explicit[0],) * len(sliding)
        return tuple(window is not None and not self.muse for window in sliding)

    def _inputs(self) -> tuple[int, ...]:
        """Returns the layers of the target whose outputs are fused."""
        fields, layers = self.fields, self.layers.num_hidden_layers
        name = "target_layer_ids" if self.speculators is None else "aux_hidden_state_layer_ids"
        if (given := fields.get(name)) is not None:
            # speculators name layers whose inputs are read.
            shift = 0 if self.speculators is None else 1
            inputs = [i - shift if isinstance(i, int) else -1 for i in given]
        elif isinstance(deep := fields.get("num_target_layers"), int):
            # The rule of z-lab's implementation.
            steps = max(layers - 1, 1)
            inputs = (
                [deep // 2] if layers == 1 else [round(1 + i * (deep - 4) / steps) for i in range(layers)]
            )
        else:
            raise ValueError(f"{self.path!r} lacks {name}; give the whole folder of a block drafter")
        if not inputs or min(inputs) < 0:
            raise ValueError(
                f"{name}={given} in {self.path!r} must name decoder layers of the target (its embeddings are "
                "not supported)"
            )
        return tuple(inputs)

    def _markov(self) -> tuple[str, int] | None:
        rank, kind = self.fields.get("markov_rank", 0), self.fields.get("markov_head_type", "vanilla")
        if not rank:
            return None
        if not self.spark or kind not in ("vanilla", "gated", "rnn"):
            raise ValueError(
                f"markov_rank={rank} and markov_head_type={kind!r} in {self.path!r} are not supported; known "
                "are the kinds 'vanilla', 'gated' and 'rnn' of DSpark"
            )
        return kind, int(rank)

    def _dflash2(self) -> dict[str, Any]:
        """Returns the fields of DFlash2."""
        if not self.second:
            return {}
        fields = self.fields
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        taps, group, rank, candidates = (fields.get(name) for name in names)
        sizes = [taps, group, rank, candidates]
        if not all(type(size) is int and size > 0 for size in sizes) or self.layers.hidden_size % group:
            given = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
            raise ValueError(
                f"{given} in {self.path!r} must be positive, and conv_group_size must divide hidden_size="
                f"{self.layers.hidden_size}"
            )
        return {
            "convolution": (taps, group),
            "selector": (rank, candidates),
            "embedding_scale": float(fields.get("input_embedding_scale", 1)),
            "logit_scale": float(fields.get("output_multiplier", 1)),
            "softcap": max(0.0, float(fields.get("final_logit_softcapping", 0))),
        }
