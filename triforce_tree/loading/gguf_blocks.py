"""Loads a GGUF file for the CPU with its weights in the blocks of the file, which is mapped into memory.

transformers' own functions map names and undo what llama.cpp's converters change. Of a packed matrix they are
given the numbers of its rows, which shows how they reorder them. Whatever is not a matrix in supported blocks
is unpacked.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from triforce_tree.kernels.cpu.fp32.library import library
from triforce_tree.kernels.cpu.fp32.linear import BLOCKS, Blocks
from triforce_tree.loading.gguf import parsed_once
from triforce_tree.loading.gguf_header import StoredTensor, stored_tensors, values_of
from triforce_tree.loading.model_files import auto_class
from triforce_tree.models.host.gguf_linears import GgufEmbedding, GgufLinear

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures of GGUF files for which every layer was tested with blocks."""


class _Part(NamedTuple):
    """A tensor of the file, and the parameter of the model that it is."""

    stored: StoredTensor
    parameter: str
    blocks: Blocks | None
    order: np.ndarray | None  # of the file's rows; None if the model has the same order, or without blocks


class GgufBlocks:
    """A GGUF file that can be loaded with its weights in blocks.

    Attributes:
        bytes: bytes of the weights in memory.
    """

    def __init__(self, path: Path, config: PreTrainedConfig, parts: list[_Part], processor: Any) -> None:
        self._path, self._config, self._parts, self._processor = path, config, parts, processor
        self.bytes = sum(part.stored.bytes if part.blocks else 4 * part.stored.elements for part in parts)

    @classmethod
    def find(cls, path: Path, config: PreTrainedConfig, skeleton: Any) -> "GgufBlocks | None":
        """Returns the blocks of a file, or None if its weights have to be unpacked.

        Args:
            config: the configuration in the file.
            skeleton: the model on the meta device.
        """
        import gguf as package

        head_counts = ("attention.head_count", "attention.head_count_kv")
        values = values_of(path, ("general.architecture", *head_counts))
        architecture = values.get("general.architecture")
        if library() is None or architecture not in _ARCHITECTURES or len(values) < 3:
            return None
        made: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        processor = made(config=config.to_dict())
        try:
            with parsed_once():
                names = get_gguf_hf_weights_map(skeleton, processor)
        except NotImplementedError:  # the package gguf has no names for this kind of model
            return None
        parameters = dict(skeleton.named_parameters())
        parts, packed = [], False
        for stored in stored_tensors(path, package.GGML_QUANT_SIZES):
            parameter = names.get(stored.name)
            if parameter is None:  # transformers leaves it out as well
                continue
            if parameter not in parameters or stored.shape != tuple(parameters[parameter].shape):
                return None
            owner = skeleton.get_submodule(parameter.rpartition(".")[0])
            kind = package.GGMLQuantizationType(stored.kind).name
            blocks = BLOCKS.get(kind) if type(owner) in (nn.Linear, nn.Embedding) else None
            order = None
            if blocks is not None and len(stored.shape) == 2 and blocks.fits(stored.shape[1]):
                packed = True
                numbers = np.arange(stored.shape[0])[:, None]
                reordered = processor.process(weights=numbers, name=stored.name).weights
                order = None if np.array_equal(reordered, numbers) else reordered[:, 0]
            else:
                blocks = None
            parts.append(_Part(stored, parameter, blocks, order))
        head: Any = skeleton.get_output_embeddings() if config.tie_word_embeddings else None
        found = {id(parameters[part.parameter]) for part in parts}
        found |= {id(weight) for weight in head.parameters()} if head is not None else set()
        complete = all(id(parameter) in found for parameter in parameters.values())
        return cls(path, config, parts, processor) if packed and complete else None

    def read(self) -> PreTrainedModel:
        """Makes the model. Its blocks are views of the mapped file, except matrices whose rows are reordered.

        Raises:
            ValueError: the file is shorter than its header says.
        """
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto_class(self._config).from_config(
                self._config, dtype=torch.float32, trust_remote_code=False
            )
        size = self._path.stat().st_size
        if any(part.stored.offset + part.stored.bytes > size for part in self._parts):
            raise ValueError(f"{str(self._path)!r} is cut off; copy or download it again")
        content = torch.from_file(str(self._path), shared=False, size=size, dtype=torch.uint8)
        for part in sorted(self._parts, key=lambda part: part.blocks is not None):  # biases before matrices
            own = content[part.stored.offset : part.stored.offset + part.stored.bytes]
            path, _, name = part.parameter.rpartition(".")
            module = model.get_submodule(path)
            if part.blocks is None:
                module._parameters[name] = _fixed(self._unpacked(part, own))
                continue
            rows = own.view(part.stored.shape[0], -1)
            weight = _fixed(rows if part.order is None else rows[torch.from_numpy(part.order)])
            model.set_submodule(path, _with_blocks(module, weight, part.blocks))
        _tie(model)
        model.eval()
        return model

    def _unpacked(self, part: _Part, content: Tensor) -> Tensor:
        import gguf as package

        rows = content.numpy().reshape(*part.stored.shape[:-1], -1)
        values = package.dequantize(rows, package.GGMLQuantizationType(part.stored.kind))
        values = self._processor.process(weights=values, name=part.stored.name).weights
        return torch.from_numpy(np.array(values, np.float32))


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _with_blocks(module: Any, weight: nn.Parameter, blocks: Blocks) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return GgufEmbedding(weight, blocks, module.padding_idx)
    return GgufLinear(weight, blocks, module.bias)


def _tie(model: PreTrainedModel) -> None:
    """Lets a head without weights use those of the embeddings."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight.device.type != "meta":
        return
    if isinstance(embedding, GgufEmbedding):
        model.set_output_embeddings(GgufLinear(cast(nn.Parameter, embedding.weight), embedding.blocks))
    else:
        model.tie_weights()
