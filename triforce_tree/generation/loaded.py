"""What sessions, trees and explanations need of an engine, so that they do not import it."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.generation.inputs import Inputs
from triforce_tree.generation.output import GenerateOutput
from triforce_tree.models.hf_model import HFModel
from triforce_tree.verify.sampling import ProbsFromLogits


class LoadedEngine(Protocol):
    """The part of :class:`~triforce_tree.engine.Engine` that is called on an engine that was given."""

    tokenizer: PreTrainedTokenizerBase | None

    @property
    def target(self) -> HFModel: ...

    @property
    def config(self) -> HierarchyConfig: ...

    def generation(self) -> AbstractContextManager[None]: ...

    def in_session(self, tokens: int) -> "LoadedEngine": ...

    def generate(self, inputs: Inputs | None = None, **kwargs: Any) -> GenerateOutput: ...

    def program(
        self, prompts: list[list[int]], new_tokens: int, to_probs: ProbsFromLogits | None
    ) -> AbstractContextManager[DecodingProgram]: ...
