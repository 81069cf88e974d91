"""The bytes of fused experts, and of the experts that a forward reads or copies to the device."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from triforce_tree.models.experts.few_row import LowBitExperts
from triforce_tree.models.experts.modules import distinct, expert_modules, experts_per_token, fused_weights


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of a model.

    Attributes:
        layers: number of layers with experts.
        count: experts of a layer; a token is routed to ``per_token`` of them.
        bytes: bytes of one expert of one layer.
        width: elements of one token's activations in one expert.
    """

    layers: int
    count: int
    per_token: int
    bytes: int
    width: int = 0

    @classmethod
    def of(cls, model: nn.Module, text_config: Any) -> "ExpertSizes | None":
        """Returns the expert sizes of a model, or None without fused experts, in 16 bits or fewer. All layers
        are assumed to be alike.
        """
        low_bit = [module for module in model.modules() if isinstance(module, LowBitExperts)]
        modules = expert_modules(model) or low_bit
        if not modules:
            return None
        stored = list(low_bit[0].buffers()) if low_bit else fused_weights(modules[0])
        count = stored[0].shape[0]
        per_token = min(count, experts_per_token(text_config) or count)
        # The last product has a row of the hidden size for each inner element.
        last = low_bit[0].inner if low_bit else stored[-1][0].numel() // text_config.hidden_size
        width = text_config.hidden_size + last
        size = sum(weight.numel() * weight.element_size() for weight in stored)
        return cls(len(modules), count, per_token, size // count, width)

    @property
    def layer_bytes(self) -> int:
        return self.count * self.bytes

    @property
    def total(self) -> int:
        return self.layers * self.layer_bytes

    def routed_bytes(self, tokens: int, resident: int = 0) -> int:
        """Returns the expected bytes of the experts that ``tokens`` tokens are routed to, if routing is
        uniform.

        Args:
            resident: layers that are left out.
        """
        layers = max(0, self.layers - resident)
        return int(layers * self.bytes * distinct(self.count, self.per_token, tokens))
