"""Finds the files of a model and checks them before anything is loaded, as their origin is unknown.

Nothing in the files is executed: weights are read from safetensors only. Python code in the model's folder
(``auto_map``), or on the hub and named by its configuration (attention kernels), is not run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
)

from triforce_tree.loading.model_folder import (
    check_kind,
    downloaded,
    in_one_line,
    json_object,
    lacks,
    settings_of,
    unknown_kind,
    weight_names,
)
from triforce_tree.models.supported import attention_of

# Upper limits of a model's sizes. Some configuration classes loop over sizes in their constructor.
_MOST = dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings"), 2**31 - 1)
_MOST |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2**16)
# The most weights per element of a checkpoint, reached by 2-bit weights packed into int32.
_PACKED = 16


@dataclass(frozen=True)
class Checkpoint:
    """The files of a causal LM after their check.

    Attributes:
        folder: the folder of the files.
        config: the model's configuration.
        model: the model on the meta device.
        shapes: the shape of every tensor, from the headers of the weight files.
        stored: total bytes of the weight files.
    """

    folder: Path
    config: PreTrainedConfig
    model: torch.nn.Module
    shapes: dict[str, list[int]]
    stored: int

    def mismatch(self) -> str:
        """Describes the first weight whose shape differs from the one by ``config``, or returns ""."""
        for name, weight in self.model.state_dict().items():
            stored, expected = self.shapes.get(name), list(weight.shape)
            if stored not in (None, expected):
                return f"{name} is {stored} in the checkpoint and {expected} by config.json"
        return ""


def configuration(source: str | Path) -> tuple[Path, PreTrainedConfig]:
    """Returns a model's folder and its configuration.

    Raises:
        OSError: there is no configuration.
        ValueError: the configuration cannot be used, or the model needs Python code of its own.
    """
    folder, content = settings_of(source)
    check_kind(content, source)
    if content["model_type"] not in CONFIG_MAPPING:
        raise unknown_kind(content, source)
    check_sizes(content, source)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        raise _unusable(source, error) from error
    # transformers never writes these settings to a file, and a value like owner/kernel loads code from the
    # hub.
    config._attn_implementation, config._experts_implementation = attention_of(config), None
    return folder, config


def checked(source: str | Path) -> Checkpoint:
    """Checks the files of a causal LM. No weights are loaded.

    Raises:
        OSError: files are missing, corrupt, or hold a pickle instead of safetensors.
        ValueError: the configuration cannot be used, is not of a causal LM, or needs Python code of its own.
    """
    folder, config = configuration(source)
    if auto_class(config) is None:
        raise ValueError(
            f"{str(source)!r} is a {config.model_type} model, which transformers does not load as a causal "
            "language model (AutoModelForCausalLM, AutoModelForImageTextToText); give a decoder-only model, "
            "or load it yourself and give the object"
        )
    _check_generation(folder)
    names = weight_names(folder, getattr(config, "transformers_weights", None))
    if folder != Path(source):
        # The folder of a hub snapshot is named after its commit: weights come from the checked revision.
        downloaded(str(source), names, folder.name)
    shapes = _shapes(folder, names)
    model = _plausible_model(config, shapes, source)
    return Checkpoint(folder, config, model, shapes, sum((folder / name).stat().st_size for name in names))


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns transformers' auto class for a causal LM or an image-and-text model; None for other models."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


def check_sizes(content: dict[str, Any], source: str | Path) -> None:
    """Raises ValueError if a configuration has implausible sizes."""
    known = CONFIG_MAPPING[content["model_type"]].attribute_map
    # The configuration and its sub-configurations.
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        for size, most in _MOST.items():
            for name in sorted({size, known.get(size, size)}):
                _check_size(name, part.get(name), most, source)


def _check_size(name: str, given: Any, most: int, source: str | Path) -> None:
    # Some families have one value per layer.
    for value in given if isinstance(given, list) else [given]:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_integer and 1 <= value <= most):
            raise ValueError(
                f"{name}={value!r} in config.json of {str(source)!r} must be an integer from 1 to "
                f"{most}; copy or download the file again"
            )


def _check_generation(folder: Path) -> None:
    """Raises ValueError if generation_config.json cannot be used; transformers would silently ignore it."""
    path = folder / "generation_config.json"
    if path.exists():
        content = json_object(path)
        try:
            GenerationConfig.from_dict(content)
        except Exception as error:  # third-party code may raise anything on values of unknown origin
            raise ValueError(
                f"{str(path)!r} cannot be used ({in_one_line(error)}); repair or delete it"
            ) from error


def _shapes(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Returns the shape of every tensor in the weight files, read from their headers."""
    shapes: dict[str, list[int]] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} {lacks(folder, name)}")
        # Without this, safetensors would report a file without read permission as missing.
        path.open("rb").close()
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise OSError(
                f"the checkpoint in {str(folder)!r} is corrupt ({name}: {in_one_line(error)}); copy or "
                "download it again"
            ) from error
    return shapes


def skeleton(config: PreTrainedConfig, source: str | Path) -> torch.nn.Module:
    """Makes the model on the meta device, which takes no memory for weights.

    Raises:
        ValueError: the model's class cannot be constructed from ``config``.
    """
    try:
        with torch.device("meta"):
            model: torch.nn.Module = auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # third-party code may raise anything on values of unknown origin
        raise _unusable(source, error) from error
    return model


def _plausible_model(
    config: PreTrainedConfig, shapes: dict[str, list[int]], source: str | Path
) -> torch.nn.Module:
    """Makes the model on the meta device.

    Raises:
        ValueError: as for :func:`skeleton`, or ``config`` has far more layers or weights than the checkpoint.
    """
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    stored = sum(torch.Size(shape).numel() for shape in shapes.values())
    again = "copy or download both again"
    if layers > len(shapes):
        raise ValueError(
            f"config.json of {str(source)!r} describes {layers} layers, its checkpoint holds {len(shapes)} "
            f"tensors; {again}"
        )
    model = skeleton(config, source)
    described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if described > _PACKED * stored:
        raise ValueError(
            f"config.json of {str(source)!r} describes {described} weights, its checkpoint holds {stored}; "
            f"{again}"
        )
    return model


def _unusable(source: str | Path, error: Exception) -> ValueError:
    return ValueError(
        f"config.json of {str(source)!r} cannot be used ({in_one_line(error)}); copy or download it again"
    )
