"""Reads the weights of a checked model directly into the memory of a device.

transformers and accelerate copy one tensor after the other to the device, so that host memory never holds the
whole model. A model that does not fit is refused before anything is allocated.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from triforce_tree.kv.offload.pinned import HostMemoryError, available
from triforce_tree.loading import gguf_cache
from triforce_tree.loading.adapters import add_adapter
from triforce_tree.loading.gguf import gguf_arguments, gguf_configuration, parsed_once, unpacked_dtype
from triforce_tree.loading.gguf_blocks import GgufBlocks
from triforce_tree.loading.gguf_header import is_gguf, tensor_count
from triforce_tree.loading.model_files import Checkpoint, auto_class, checked, skeleton
from triforce_tree.loading.model_folder import (
    ADAPTER_WEIGHTS,
    base_and_adapter,
    downloaded,
    in_one_line,
)
from triforce_tree.models.host.widened import widens
from triforce_tree.models.model_copy import parameter_bytes, text_decoder
from triforce_tree.option_checks import DTYPE_NAMES
from triforce_tree.runtime import distributed
from triforce_tree.runtime.progress_log import logged

# Packages by quantisation method. transformers reports only the first one that is missing.
_PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel optimum",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}
_REMEDY = "free host memory, use a smaller model, or fewer bits (dtype, or a quantised checkpoint)"


@dataclass(frozen=True)
class ModelFiles:
    """The checked files of a model that is not loaded yet.

    Attributes:
        source: the folder, hub id or file that the user named, for messages.
        config: the model's configuration.
        dtype: the dtype of the weights after loading; "auto" or None for that of the checkpoint.
        bytes: bytes of the weights after loading; for quantised weights, bytes of the files.
        quantised: the quantisation method of weights that stay quantised; None for plain weights.
        adapter: the folder of an adapter of peft that is added to the model; None without one.
        blocks: a GGUF file whose weights stay in their blocks; None for other files.
    """

    source: str | Path
    config: PreTrainedConfig
    dtype: torch.dtype | str | None
    bytes: int
    quantised: str | None
    _checkpoint: Checkpoint | None
    _arguments: dict[str, Any]
    adapter: Path | None = None
    blocks: GgufBlocks | None = None

    @classmethod
    def find(
        cls,
        source: str | Path,
        device: torch.device,
        dtype: torch.dtype | str | None = None,
        blocks: bool = True,
    ) -> "ModelFiles":
        """Finds and checks the files of a folder, a hub id or a GGUF file.

        Args:
            device: the device that the model will run on, which decides the dtype if none is given.
            blocks: on the CPU, leave the fp32 weights of a GGUF file in their blocks if possible.

        Raises:
            OSError, ValueError: as in :func:`checked` and :func:`gguf_configuration`.
            ValueError: the dtype is unknown.
        """
        named: Any = dtype
        if isinstance(dtype, str) and dtype != "auto":
            named = getattr(torch, DTYPE_NAMES.get(dtype, dtype), dtype)
        if named not in (None, "auto") and not isinstance(named, torch.dtype):
            near = get_close_matches(str(dtype), ("float32", "bfloat16", "float16", "auto", *DTYPE_NAMES), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"dtype={dtype!r} is unknown{hint}; use float32, bfloat16, float16 or auto, or one of torch's"
            )
        dtype, adapter = named, None
        if is_gguf(source):
            dtype = unpacked_dtype(dtype, device)
            tensor_count(Path(source))
            if blocks and device.type == "cpu" and dtype is torch.float32:
                config = gguf_configuration(source)
                found = GgufBlocks.find(Path(source), config, skeleton(config, source))
                if found is not None:
                    return cls(source, config, dtype, found.bytes, None, None, {}, blocks=found)
            folder = gguf_cache.kept(Path(source), _kind(dtype))
            if folder is None:
                return cls._packed(Path(source), dtype)
            checkpoint = checked(folder)
        else:
            base, adapter = base_and_adapter(source)
            checkpoint = checked(base)
            if adapter is not None and adapter != Path(source):
                downloaded(str(source), [ADAPTER_WEIGHTS], adapter.name)
        config, model = checkpoint.config, checkpoint.model
        method = _method(config)
        if dtype is None:
            own = device.type != "cpu" or (method is None and widens(_in_dtype(model, config, None)))
            dtype = "auto" if own else torch.float32
        arguments = {
            "pretrained_model_name_or_path": checkpoint.folder,
            "config": config,
            "dtype": dtype,
            "use_safetensors": True,
        }
        size = checkpoint.stored if method is not None else parameter_bytes(_in_dtype(model, config, dtype))
        size += (adapter / ADAPTER_WEIGHTS).stat().st_size if adapter is not None else 0
        return cls(source, config, dtype, size, method, checkpoint, arguments, adapter)

    @classmethod
    def _packed(cls, path: Path, dtype: torch.dtype) -> "ModelFiles":
        """Returns the files for a GGUF file whose weights are not in the cache of unpacked weights."""
        config = gguf_configuration(path)
        arguments = {"pretrained_model_name_or_path": path.parent, **gguf_arguments(path, dtype)}
        size = parameter_bytes(_in_dtype(skeleton(config, path), config, dtype))
        return cls(path, config, dtype, size, None, None, arguments)

    def read(self, device: torch.device, merged: bool = False) -> PreTrainedModel:
        """Loads the model onto a device.

        Args:
            merged: add an adapter to the model's weights, instead of computing it beside them.

        Raises:
            OSError: weights are missing, or host memory is short (:class:`HostMemoryError`).
            ValueError: transformers or peft cannot load it.
            torch.OutOfMemoryError: device memory is short.
        """
        if device.type == "cpu":
            self._check_host()
        if self.blocks is not None:
            return self.blocks.read()
        # Without device_map, quantisation libraries would choose a GPU themselves.
        directly = device.type != "cpu" or self.quantised is not None
        place: dict[str, Any] = {"device_map": {"": device}} if directly else {}
        packed = self._checkpoint is None
        what = "unpacking" if packed else "reading"
        try:
            with (
                logged(f"{what} the weights of {self.source} ({self.bytes / 1e9:.1f} GB) to {device}"),
                parsed_once() if packed else nullcontext(),
            ):
                # from_pretrained is typed to return a model; with output_loading_info it returns a pair.
                loaded: Any = auto_class(self.config).from_pretrained(
                    **self._arguments, **place, output_loading_info=True, trust_remote_code=False
                )
        except torch.OutOfMemoryError:
            raise
        except ImportError as error:
            raise self._lacks_package(error) from error
        except Exception as error:  # third-party code may raise anything on files of unknown origin
            why, remedy = in_one_line(error), "copy or download it again"
            if self.quantised is not None:
                why = f"its weights are quantised, {self.quantised}: {why}"
                remedy = (
                    f"{remedy}, use a machine that its library supports, or give the checkpoint of 16 bits"
                )
            elif mismatch := self._checkpoint and self._checkpoint.mismatch():
                why = mismatch
            raise ValueError(
                f"the model in {str(self.source)!r} cannot be loaded ({why}); {remedy}"
            ) from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise OSError(
                f"the checkpoint in {str(self.source)!r} lacks {len(missing)} weights, such as {missing[0]}; "
                "copy or download it again"
            )
        method = getattr(model.config, "quantization_config", None)
        if method is not None and not getattr(model, "is_quantized", False):
            # transformers has read the packed weights as if they were plain ones.
            raise ValueError(
                f"{str(self.source)!r} uses a quantisation method that this release of transformers does not "
                f"support ({method}); give a checkpoint of 16 bits"
            )
        ready: PreTrainedModel = model.eval()
        if packed and distributed.is_first_rank():
            assert isinstance(self.dtype, torch.dtype)
            gguf_cache.keep(Path(self.source), _kind(self.dtype), self.bytes, ready.save_pretrained)
        _leave_out_encoders(ready)
        return add_adapter(ready, self.adapter, merged) if self.adapter is not None else ready

    def skeleton(self) -> PreTrainedModel:
        """Makes the model, not quantised, on the meta device, which takes no memory for weights."""
        model: PreTrainedModel = _in_dtype(skeleton(self.config, self.source), self.config, self.dtype)
        return model

    def _lacks_package(self, error: ImportError) -> ValueError:
        packages = _PACKAGES.get(self.quantised or "")
        if packages is None:
            return ValueError(
                f"the model in {str(self.source)!r} needs a package that is not installed "
                f"({in_one_line(error)}); install it, or give another model"
            )
        return ValueError(
            f"the weights of {str(self.source)!r} are quantised ({self.quantised}), and a package that reads "
            f"them is not installed ({in_one_line(error)}); pip install {packages}, or give the checkpoint "
            "of 16 bits"
        )

    def _check_host(self) -> None:
        # Files are memory-mapped. A model larger than the memory would be read from disk in every forward.
        left, what = available()
        if self.bytes > left:
            raise HostMemoryError(
                f"the model in {str(self.source)!r} needs {self.bytes / 2**30:.1f} GiB of host memory, and "
                f"{what} leaves {left / 2**30:.1f} GiB; {_REMEDY}"
            )


def _kind(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, which is the kind of a ``gguf_cache`` entry with weights."""
    return str(dtype).removeprefix("torch.")


def _in_dtype(model: Any, config: PreTrainedConfig, dtype: torch.dtype | str | None) -> Any:
    """Converts a model to a dtype, or to that of its configuration (fp32 if there is none). Returns it."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None)
    return model.to(kind if isinstance(kind, torch.dtype) else torch.float32)


def _method(config: PreTrainedConfig) -> str | None:
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    name = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(name, "value", name))


def _leave_out_encoders(model: PreTrainedModel) -> None:
    """Frees the weights of a multimodal model's image and audio encoders, which text does not need.

    The encoder modules stay, but empty, since transformers sets the attention of each part of a model.
    """
    decoder = text_decoder(model)
    for modality in ("image", "audio"):
        # A model without such an encoder returns itself, or None.
        encoder = model.get_encoder(modality=modality)
        if encoder is not None and all(module is not decoder for module in encoder.modules()):
            for contents in (encoder._modules, encoder._parameters, encoder._buffers):
                contents.clear()
