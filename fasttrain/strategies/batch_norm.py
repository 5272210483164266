"""batch_norm: over which samples batch statistics are taken.

| name | statistics of | what it saves | costs |
|---|---|---|---|
| sync | the microbatch on all ranks together | the mathematics: n ranks train as one does | two small sums a layer |
| frozen | none: the running statistics as they are | reading the activations twice; small microbatches do no harm | |

Left out, each rank takes statistics of its own share: faster, and other mathematics the smaller the share is.
Source: Peng et al. 2018 (MegDet), arXiv:1711.07240.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from fasttrain.core.strategy import NoConfig, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import dist
from fasttrain.nn.frozen import has_running_statistics, hold_in_evaluation

if TYPE_CHECKING:
    from torch import nn


def private_group(group: Any = None) -> Any:
    """A process group of the same ranks that nobody else uses; every rank of `group` calls this.

    Statistics are exchanged in the middle of forward and backward, where gradients travel too. On one group both would
    have to come in the same order on all ranks, which a branch unused on one rank upsets.
    """
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=group is not None)


@final
class Sync(Strategy):
    """Batch norms take their training statistics over all data ranks. Does nothing on one rank.

    Saves: nothing; keeps the loss curve of one process. Costs: an all-reduce a layer in forward and one in backward.
    Needs: a model with batch norms, and a forward on every rank. Statistics span ranks, not microbatches.
    Source: Peng et al. 2018 (MegDet), arXiv:1711.07240.
    """

    slot, name = "batch_norm", "sync"
    forwards_together = True
    Config = NoConfig

    def model(self, model: nn.Module) -> nn.Module:
        """Change the class of each batch norm, in place; names stay."""
        if self.context.data_ranks == 1:
            return model
        from fasttrain.nn.sync_batch_norm import synchronise_batch_norm

        if not synchronise_batch_norm(model, private_group(self.context.data_group)):
            raise ConfigError(
                f"batch_norm=sync: {type(model).__name__} has no batch norm whose statistics could be taken over "
                "ranks; use batch_norm=null."
            )
        return model


@dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """`affine`: scale and shift of the norms train on; otherwise they are fixed as well."""

    affine: bool = False


def freeze_batch_norms(model: nn.Module, affine: bool = False) -> int:
    """Let every norm with running statistics use them as they are, in training, too; in place. Returns their number.

    `affine`: weight and bias of the norms train on.
    """
    norms = [
        module for module in model.modules() if has_running_statistics(module) and "running_mean" in module._buffers
    ]
    for norm in norms:
        hold_in_evaluation(norm)
        for parameter in norm.parameters(recurse=False):
            parameter.requires_grad_(affine and parameter.requires_grad)
    return len(norms)


@final
class Frozen(Strategy):
    """Batch norms keep the running statistics they came with, and their scale and shift.

    Saves: a pass over the activations a layer, gradients of scale and shift. Makes samples independent of each other, so
    that microbatches and ranks change no number. Needs: a pretrained model; statistics of a new one mean nothing.
    Source: He et al. 2016 (detection with fixed batch norms), arXiv:1512.03385, appendix A.
    """

    slot, name = "batch_norm", "frozen"
    Config = FrozenConfig

    def model(self, model: nn.Module) -> nn.Module:
        """Hold each norm, in place; names stay."""
        if not freeze_batch_norms(model, self.config.affine):
            raise ConfigError(
                f"batch_norm=frozen: {type(model).__name__} has no norm with running statistics; use batch_norm=null."
            )
        return model
