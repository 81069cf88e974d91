"""A target with its draft or trained drafters, as they are or widened to a larger shape."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

import triforce_tree
from scripts.benchmarks.common.results import Record
from scripts.benchmarks.common.rope import use_yarn
from scripts.inflate.drafter import inflate_drafter, mtp_layer
from scripts.inflate.pair import inflate
from scripts.inflate.shapes import Shape
from scripts.train_drafters.mtp import FILE as MTP
from triforce_tree import Engine
from triforce_tree.config import load_arguments
from triforce_tree.loading.checkpoints import load_model, load_tokenizer
from triforce_tree.loading.gguf import gguf_configuration
from triforce_tree.loading.gguf_header import is_gguf


def configuration(target: str) -> LlamaConfig:
    """Returns a target's configuration; no weights are read."""
    config = gguf_configuration(target) if is_gguf(target) else AutoConfig.from_pretrained(target)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{target} is a {config.model_type} model; give a Llama")
    return config


def digest_of(folder: str | Path) -> str:
    """Returns a digest of a drafter's weights, by which results of different ones are kept apart."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"no safetensors in {str(folder)!r}; make a draft or a drafter by scripts.train_drafters"
        )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@dataclass
class Models:
    """A target of one shape, which all drafters share.

    Attributes:
        target, draft: folders or GGUF files; ``draft`` None where there is none.
        shape, draft_shape: what they are widened to; None: as they are.
        device: bf16 is used on a GPU, else fp32.
        seed: of the weights without effect.
        yarn: to how many positions YaRN extends the target, and its own; None: as it is.
        positions: that texts need; beyond the target's own its rotary embedding is used as it is.
    """

    target: str
    draft: str | None
    shape: str | None
    draft_shape: str
    device: torch.device
    seed: int
    yarn: tuple[int, int] | None = None
    positions: int = 0
    _model: PreTrainedModel | None = field(default=None, repr=False)

    def vocabulary(self) -> int:
        """Returns the number of entries of the target's vocabulary."""
        if self.shape is not None and (entries := Shape.parse(self.shape).vocabulary) is not None:
            return entries
        return int(configuration(self.target).vocab_size)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _small(self, source: str) -> PreTrainedModel:
        # Blocks of a GGUF file cannot be widened.
        return load_model(source, self.device, self._dtype, blocks=self.shape is None)

    def engine(self, drafter: Path | None, options: Record) -> Engine:
        """Returns an engine with the drafter in a folder; None: with the draft, if there is one."""
        if self._model is None:
            small = self._small(self.target)
            small.config.max_position_embeddings = max(self.positions, small.config.max_position_embeddings)
            if self.yarn is not None:
                # A frequency then depends on its place relative to the dimensions of a head alone, so that
                # the model can have larger heads.
                use_yarn(small, self.yarn[0] / self.yarn[1], self.yarn[1], truncate=False)
            self._model = small if self.shape is None else inflate(small, self.shape, seed=self.seed)
        arguments = {**load_arguments(options), "tokenizer": load_tokenizer(self.target)}
        if drafter is None:
            draft = self._small(self.draft) if self.draft is not None else None
            if draft is not None and self.shape is not None:
                vocabulary = self._model.config.vocab_size
                wide = replace(Shape.parse(self.draft_shape), vocabulary=vocabulary)
                draft = inflate(draft, wide, seed=self.seed)
            return triforce_tree.load(self._model, draft, **arguments)
        mtp = (drafter / MTP).is_file()
        # The weights are read before the folder is removed.
        with TemporaryDirectory() as folder:
            if self.shape is not None:
                inflate_drafter(drafter, self._small(self.target), self.shape, Path(folder), self.seed)
                drafter = Path(folder)
            if not mtp:
                return triforce_tree.load(self._model, drafter=drafter, **arguments)
            with mtp_layer(self._model, drafter):
                return triforce_tree.load(self._model, drafter="mtp", **arguments)
