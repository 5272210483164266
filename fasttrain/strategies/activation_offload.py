"""activation_offload: keep what autograd saves for backward in the memory of the host."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Strategy
from fasttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    """`min_bytes`: smaller tensors stay. `in_flight`: so many are on their way at once. `pin`: page-locked host memory."""

    min_bytes: int = 2**20
    in_flight: int = 4
    pin: bool = True

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise ConfigError(f"activation_offload.min_bytes={self.min_bytes} must be 0 or more; 0 moves every tensor.")
        if self.in_flight < 1:
            raise ConfigError(f"activation_offload.in_flight={self.in_flight} must be 1 or more; usually 4.")


@final
class Cpu(Strategy):
    """Move saved tensors to the host in forward, and back ahead of their use in backward.

    Saves: what autograd keeps on the device, but for a few tensors on their way. Costs: every byte of it over the bus twice.
    Source: Rhu et al. 2016 (vDNN), arXiv:1602.08124; `OffloadActivations` of torchtune.
    """

    slot, name = "activation_offload", "cpu"
    Config = CpuConfig

    def __init__(self, config: Any = None, context: Any = None) -> None:
        super().__init__(config, context)
        self._offloader: Any = None

    @property
    def offloader(self) -> Any:
        """What does the work, and counts it (`sent`, `fetched`: bytes)."""
        if self._offloader is None:
            from fasttrain.nn.offload import Offloader

            config = self.config
            self._offloader = Offloader(
                self.context.device, min_bytes=config.min_bytes, in_flight=config.in_flight, pin=config.pin
            )
        return self._offloader

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Note which tensors are there anyway; they are in their final place now."""
        self.offloader.leave([*model.parameters(), *model.buffers()])

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward of a microbatch."""
        return self.offloader.hooks
