"""The interface of an engine that sessions, trees and explanations use, so that they do not import the
engine.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from triforce_tree.config import HierarchyConfig
from triforce_tree.decoding.program import DecodingProgram
from triforce_tree.models.hf_model import HFModel
from triforce_tree.requests.inputs import Inputs
from triforce_tree.requests.output import GenerateOutput
from triforce_tree.verify.sampling import ProbsFromLogits


class LoadedEngine(Protocol):
    """The attributes of :class:`~triforce_tree.engine.Engine` that are used by code which receives an
    engine.
    """

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
