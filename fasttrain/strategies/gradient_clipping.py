"""gradient_clipping: bound the gradients of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import nn
from fasttrain.optim.norms import total_norm


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """`max_norm`: the largest norm of all gradients together; `norm_type`: 2, or `.inf` for the largest entry."""

    max_norm: float = 1.0
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(f"gradient_clipping.max_norm={self.max_norm} must be above 0; to clip nothing use null.")


def clip_by_norm(parameters: list[Any], max_norm: float, norm_type: float = 2.0) -> Any:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before (0-dim, on the device).

    Costs: one pass over the gradients for the norm and one for the scale; no host read.
    Source: Pascanu et al. 2013, arXiv:1211.5063.
    """
    norm = total_norm(parameters, norm_type)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@final
class Norm(Strategy):
    """Clip by the norm of all gradients of an optimizer together, after the loss scale was undone."""

    slot, name = "gradient_clipping", "norm"
    Config = NormConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self.norm: Any = None

    def gradients(self, model: Any, optimizer: Any) -> None:
        """Clip."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norm = clip_by_norm(parameters, self.config.max_norm, self.config.norm_type)

    def report(self) -> dict[str, Any]:
        """The norm before clipping."""
        return {} if self.norm is None else {"grad_norm": self.norm}
