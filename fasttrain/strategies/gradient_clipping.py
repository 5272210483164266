"""gradient_clipping: bound the gradients of a step, after the loss scale was undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import nn, torch
from fasttrain.optim.norms import total_norm


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """`max_norm`: the largest norm of all gradients together; `norm_type`: 2, or `.inf` for the largest entry."""

    max_norm: float = 1.0
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(f"gradient_clipping.max_norm={self.max_norm} must be above 0; to clip nothing use null.")
        if not self.norm_type > 0:
            raise ConfigError(
                f"gradient_clipping.norm_type={self.norm_type} is no norm; give 2, or .inf for the largest entry."
            )


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
        self.norm = clip_by_norm(_with_gradients(optimizer), self.config.max_norm, self.config.norm_type)

    def report(self) -> dict[str, Any]:
        """The norm before clipping."""
        return {} if self.norm is None else {"grad_norm": self.norm}


@dataclass(frozen=True, kw_only=True)
class ValueConfig:
    """`max_value`: the largest magnitude of any entry of a gradient."""

    max_value: float = 1.0

    def __post_init__(self) -> None:
        if not self.max_value > 0:
            raise ConfigError(
                f"gradient_clipping.max_value={self.max_value} must be above 0; to clip nothing use null."
            )


def clip_by_value(parameters: list[Any], max_value: float) -> None:
    """Cut each entry of each gradient to [−max_value, max_value]; a gradient that is not a number stays so.

    Costs: one pass over the gradients; no host read. torch's `clip_grad_value_`.
    """
    if parameters:
        nn.utils.clip_grad_value_(parameters, max_value)


@final
class Value(Strategy):
    """Clip each entry of the gradients by itself, after the loss scale was undone."""

    slot, name = "gradient_clipping", "value"
    Config = ValueConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self.norm: Any = None

    def gradients(self, model: Any, optimizer: Any) -> None:
        """Clip. Where a log point or `nonfinite` asks for it, the norm before is taken too."""
        parameters = _with_gradients(optimizer)
        verdict_follows = self.lines is not None and "nonfinite" in self.lines.strategies
        self.norm = total_norm(parameters) if verdict_follows or _is_watched(self) else None
        clip_by_value(parameters, self.config.max_value)
        if verdict_follows and parameters:
            # An infinite entry was cut to a harmless one, and the verdict is still to come. Times 1, which leaves the bits,
            # or, where the norm is not finite, times what is no number.
            torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0 + self.norm * 0.0)

    def report(self) -> dict[str, Any]:
        """The norm before clipping."""
        return {} if self.norm is None else {"grad_norm": self.norm}


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """`clipping`: the largest norm of a unit's gradient, as a share of the norm of its weights.

    `eps`: what the norm of weights is at least taken for, so that weights of zero can move. `last_linear`: clip the last
    linear layer, too.
    """

    clipping: float = 0.01
    eps: float = 1e-3
    last_linear: bool = False

    def __post_init__(self) -> None:
        for key in ("clipping", "eps"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"gradient_clipping.{key}={getattr(self, key)} must be above 0.")


def unit_norms(tensor: Any) -> Any:
    """Norms of the units of a weight: each row along dim 0 of a matrix or kernel (`[n, 1, ...]`), a vector as a whole."""
    dims = tuple(range(1, tensor.dim())) or None
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=tensor.dim() > 1, dtype=dtype)


def clip_adaptively(parameters: list[Any], clipping: float = 0.01, eps: float = 1e-3) -> None:
    """Scale the gradient of each unit so that its norm is at most `clipping` times that of its weights.

    A unit is what one output is made of: a row of a linear layer, a filter of a convolution, a bias or gain as a whole.
    Gradients below their bound keep their bits. Costs: two norms a weight and one pass to scale; no host read.
    Source: Brock et al. 2021, arXiv:2102.06171.
    """
    with torch.no_grad():
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters]
        bounds = [unit_norms(parameter) for parameter in parameters]
        torch._foreach_clamp_min_(bounds, eps)
        torch._foreach_mul_(bounds, clipping)
        norms = [unit_norms(gradient) for gradient in gradients]
        torch._foreach_clamp_min_(norms, 1e-6)
        torch._foreach_div_(bounds, norms)
        torch._foreach_clamp_max_(bounds, 1.0)
        torch._foreach_mul_(gradients, bounds)


@final
class Adaptive(Strategy):
    """Clip the gradient of each unit by the norm of its weights, after the loss scale was undone."""

    slot, name = "gradient_clipping", "adaptive"
    Config = AdaptiveConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._clipped: dict[int, list[Any]] = {}
        self.norm: Any = None

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Choose what is clipped: all that this optimizer trains, but its last linear layer."""
        trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if not self.config.last_linear:
            linears = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in trained]
            for parameter in linears[-1].parameters(recurse=False) if linears else ():
                trained.pop(id(parameter), None)
        if not trained:
            raise ConfigError(
                "gradient_clipping=adaptive leaves the last linear layer alone, and an optimizer here trains nothing else; "
                "set gradient_clipping.last_linear=true, or use gradient_clipping=norm."
            )
        self._clipped[id(optimizer)] = list(trained.values())

    def gradients(self, model: Any, optimizer: Any) -> None:
        """Clip."""
        self.norm = total_norm(_with_gradients(optimizer)) if _is_watched(self) else None
        clip_adaptively(self._clipped[id(optimizer)], self.config.clipping, self.config.eps)

    def report(self) -> dict[str, Any]:
        """The norm before clipping."""
        return {} if self.norm is None else {"grad_norm": self.norm}


def _is_watched(strategy: Strategy) -> bool:
    """Whether the norm of this step is logged."""
    return strategy.lines is not None and strategy.lines.watch_norm


def _with_gradients(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
