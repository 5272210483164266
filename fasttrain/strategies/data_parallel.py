"""data_parallel: every rank computes on its share of the batch.

| name | what it spreads | what it saves | costs |
|---|---|---|---|
| ddp | the batch | time: n ranks do n times the samples | one sum of all gradients a step |

Source: Li et al. 2020, arXiv:2006.15704.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from fasttrain.core.strategy import NO_CONTEXT, Context, Strategy
from fasttrain.distributed.communication_hooks import make_hook
from fasttrain.distributed.gradient_buckets import GradientAverager
from fasttrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PowerSgd:
    """Settings of hook=powersgd. `rank`: of the factors that travel; `start_step`: full sums before that step."""

    rank: int = 1
    start_step: int = 1000

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"powersgd.rank={self.rank} is no rank of a matrix; give 1 or more, often 1 to 4.")
        if self.start_step < 2:
            raise ConfigError(
                f"powersgd.start_step={self.start_step}: error feedback needs two full steps first; give 2 or more, "
                "about a tenth of all steps."
            )


@dataclass(frozen=True, kw_only=True)
class DdpConfig:
    """Settings of ddp.

    `bucket_mb`: MiB of gradients that travel together. `bucket_view`: gradients are views of the buckets, so they are
    in memory once. `static_graph`: every step leaves the same parameters without a gradient. `hook`: what travels in
    the place of the gradients.
    """

    bucket_mb: float = 25.0
    bucket_view: bool = True
    static_graph: bool = False
    hook: Literal["bf16", "fp16", "powersgd"] | None = None
    powersgd: PowerSgd = field(default_factory=PowerSgd)

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ConfigError(f"bucket_mb={self.bucket_mb} holds no gradient; give more than 0, usually 25.")


class EqualBuffers:
    """On entering: every rank gets rank 0's buffers, so that all evaluate, and save, one and the same model."""

    __slots__ = ("averager", "model")

    def __init__(self, averager: GradientAverager, model: nn.Module) -> None:
        self.averager, self.model = averager, model

    def __enter__(self) -> None:
        self.averager.equalise_buffers(self.model)

    def __exit__(self, *error: object) -> None:
        pass


@final
class Ddp(Strategy):
    """Each rank has the whole model and a share of the batch; gradients are averaged in place while backward runs.

    Saves: time. Costs: a sum of all gradients a step, most of it hidden behind backward, and one bucket of memory.
    Needs: the same model on every rank, which is checked. Does nothing on one rank.
    Source: Li et al. 2020, arXiv:2006.15704; docs/decisions/0002-ddp-by-own-buckets.md.
    """

    slot, name = "data_parallel", "ddp"
    Config = DdpConfig

    def __init__(self, config: DdpConfig | None = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._averager: GradientAverager | None = None

    @property
    def averager(self) -> GradientAverager | None:
        """What does the work, and counts it (`averager.traffic`); `None` on one rank."""
        if self._averager is None and self.context.data_ranks > 1:
            config, context = self.config, self.context
            hook = None
            if config.hook is not None:
                sizes = {"rank": config.powersgd.rank, "start_step": config.powersgd.start_step}
                hook = make_hook(config.hook, context.data_group, **sizes)
            self._averager = GradientAverager(
                context.data_group,
                host_group=context.host_group,
                bucket_mb=config.bucket_mb,
                bucket_view=config.bucket_view,
                static_graph=config.static_graph,
                hook=hook,
                reduce_dtype=context.dtypes.reduce,
            )
        return self._averager

    def model(self, model: nn.Module) -> nn.Module:
        """Make the model equal on all ranks and put a hook on each parameter. May be called for several models."""
        if self.averager is not None:
            self.averager.add(model)
        return model

    def microbatch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients travel in the last microbatch alone, those of earlier ones with them."""
        if not is_last or self._averager is None:
            return NO_CONTEXT
        return self._averager.last()

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """All ranks evaluate with the buffers (running statistics) of rank 0."""
        return NO_CONTEXT if self._averager is None else EqualBuffers(self._averager, model)

    def saving(self, model: nn.Module) -> AbstractContextManager[Any]:
        """All ranks save the buffers of rank 0: each writes a share of what is the same everywhere."""
        return self.evaluating(model)

    def state_dict(self) -> dict[str, Any]:
        """What powersgd remembers; of this rank, nothing else."""
        return {} if self._averager is None else self._averager.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank; after the models are there."""
        if self._averager is not None:
            self._averager.load_state_dict(state)
