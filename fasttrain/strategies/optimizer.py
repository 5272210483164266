"""optimizer: the update rule. torch's own optimizers, fused where the device has it.

Fused ones also obey a refused step on the device, so that nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

from fasttrain.core.strategy import Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.optim.guarded import give_momentum_buffers

# Devices for which torch has fused SGD and AdamW kernels.
FUSED_ON = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, kw_only=True)
class SgdConfig:
    """Settings of torch.optim.SGD. `fused=None`: where the device has it."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    fused: bool | None = None


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Settings of torch.optim.AdamW. `fused=None`: where the device has it.

    `decay_norms=False` leaves parameters of one dimension (norms, biases) out of the weight decay.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_norms: bool = True
    fused: bool | None = None


def named_groups(model: Any, weight_decay: float, decay_norms: bool) -> list[dict[str, Any]]:
    """Parameter groups with names: what trains, apart by whether weight decay acts on it.

    Raises:
        ConfigError: nothing trains.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError(f"{type(model).__name__} has no parameter that trains; set requires_grad on some.")
    parts = {True: trained} if decay_norms else {True: [], False: []}
    if not decay_norms:
        for name, parameter in trained:
            parts[parameter.dim() > 1].append((name, parameter))
    return [
        {"params": [p for _, p in part], "param_names": [n for n, _ in part], "weight_decay": weight_decay * decays}
        for decays, part in parts.items()
        if part
    ]


def fused_here(asked: bool | None, model: Any, optimizer: str) -> bool:
    """Whether to take the fused kernel: as asked, or where every trained parameter has one.

    Raises:
        ConfigError: asked for, and not to be had.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    able = all(p.device.type in FUSED_ON and p.is_floating_point() for p in trained)
    if asked and not able:
        devices = sorted({parameter.device.type for parameter in trained})
        raise ConfigError(f"optimizer={optimizer} fused=true: no fused kernel for {', '.join(devices)}; leave it out.")
    return able if asked is None else asked


def sgd(model: Any, config: SgdConfig) -> Any:
    """torch.optim.SGD over what trains in a model."""
    fused = fused_here(config.fused, model, "sgd")
    optimizer = torch.optim.SGD(
        named_groups(model, config.weight_decay, decay_norms=True),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        fused=fused,
    )
    if fused:
        give_momentum_buffers(optimizer)
    return optimizer


def adamw(model: Any, config: AdamWConfig) -> Any:
    """torch.optim.AdamW over what trains in a model. Source: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    settings = asdict(config)
    fused, decay_norms = fused_here(settings.pop("fused"), model, "adamw"), settings.pop("decay_norms")
    weight_decay = settings.pop("weight_decay")
    return torch.optim.AdamW(named_groups(model, weight_decay, decay_norms), fused=fused, **settings)


Factory = Callable[[Any], Any]


@final
class Sgd(Strategy):
    """Stochastic gradient descent with momentum. Keeps one state a parameter."""

    slot, name = "optimizer", "sgd"
    Config = SgdConfig

    def optimizer(self, factory: Factory | None) -> Factory:
        """The factory."""
        return lambda model: sgd(model, self.config)


@final
class AdamW(Strategy):
    """Adam with decoupled weight decay. Keeps two states a parameter."""

    slot, name = "optimizer", "adamw"
    Config = AdamWConfig

    def optimizer(self, factory: Factory | None) -> Factory:
        """The factory."""
        return lambda model: adamw(model, self.config)
